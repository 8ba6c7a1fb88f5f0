"""Images per second of pre-training: block-wise masked FINOLA beside MAE, in turns, in one run on one device.

    python benchmarks/pretraining.py [--device cuda] [--batch-size 8] [--rounds 3] [--out results/pretraining_cpu.json]

Each at its own setting: masked FINOLA at 256 px with a visible block of 128 px, MAE at 224 px with a quarter of the
patches visible; the whole step in bf16 with AdamW, data aside. A step of masked FINOLA costs more with the block in a
corner than in the middle, so a round takes one step for each place on the diagonal of the places, whose mean is that of
all. `of_mae_vit_base` is the rate over that of MAE on ViT-base. A model that cannot be built, since a package is
missing, is left out and named. The file is written after each model's turn.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from finola.errors import FinolaError
from finola.evaluation.complexity import Row, row
from finola.factory import create_model
from finola.files import write_json
from finola.provenance import record

PEER = "mae_vit_base"
MODELS = ("masked_finola_b_mfw720", "masked_finola_b_mfw1440", "masked_finola_b_mfw2880", "mae_vit_tiny",
          "mae_vit_small", PEER)


class Pretraining:
    """One model with its optimiser and a batch of noise, which costs as much as images."""

    def __init__(self, name: str, batch_size: int, device: torch.device):
        torch.manual_seed(0)
        self.device, self.seconds, self.images, self.rounds = device, 0.0, 0, 0
        self.model = create_model(name).to(device, memory_format=torch.channels_last).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        config = self.model.config
        self.x = torch.rand(batch_size, 3, config.image_size, config.image_size, device=device)
        places = range(config.grid_size - config.block_size + 1) if config.kind == "masked" else range(1)
        self.arguments: list[tuple] = [((place, place),) for place in places] if config.kind == "masked" else [()]

    def round(self, timed: bool = True) -> None:
        """One step for each place of the block; one for MAE."""
        start = time.perf_counter()
        for arguments in self.arguments if timed else self.arguments[:1]:
            self._step(self.model, *arguments)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if timed:
            self.seconds += time.perf_counter() - start
            self.images += len(self.x) * len(self.arguments)
            self.rounds += 1

    def _step(self, model: nn.Module, *arguments) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            patches, mask = model(self.x, *arguments)
        model.loss(self.x, patches, mask).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(names: list[str], batch_size: int, device: torch.device) -> tuple[dict[str, Pretraining], dict[str, str]]:
    """The models that can be built, and why the others cannot."""
    runs, left_out = {}, {}
    for name in names:
        try:
            runs[name] = Pretraining(name, batch_size, device)
        except (ImportError, FinolaError) as error:
            left_out[name] = str(error)
            print(f"left out: {name}: {error}", file=sys.stderr, flush=True)
    return runs, left_out


def rows(runs: dict[str, Pretraining], counts: dict[str, Row]) -> list[dict]:
    """What is known so far; ratios are to the peer's rate, None without it."""
    rates = {name: run.images / run.seconds for name, run in runs.items() if run.images}
    peer = rates.get(PEER)
    return [{"model": name, "images_per_second": round(rate, 3),
             "of_mae_vit_base": round(rate / peer, 3) if peer else None,
             "input": counts[name].input, "params": counts[name].params, "forward_macs": counts[name].macs}
            for name, rate in rates.items()]


def write(path: Path | None, result: dict) -> None:
    if path:
        write_json(path, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_flush_denormal(True)
    runs, left_out = build(args.models, args.batch_size, device)
    if not runs:
        sys.exit("pretraining.py: none of the models can be built")
    counts = {name: row(name) for name in runs}
    for number in range(args.rounds + 1):
        for run in runs.values():
            run.round(timed=number > 0)
            if number > 0:
                done = min(run.rounds for run in runs.values())
                result = record(device, {"batch_size": args.batch_size, "rounds": done, "left_out": left_out,
                                         "results": rows(runs, counts)})
                write(args.out, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
