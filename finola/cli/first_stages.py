"""`finola eval --first-stage`: first stages of latent diffusion, and an autoencoder of ours, on the same images."""

from __future__ import annotations

import argparse
from statistics import median
from typing import TYPE_CHECKING, Any

from finola.cli.measures import Measured, reconstruction_panel, result_of, squares_of
from finola.cli.options import open_limited, require_autoencoder, weights_identity
from finola.errors import RecipeError

if TYPE_CHECKING:
    import torch

    from finola.evaluation.first_stages import Cost, FirstStage, Latency
    from finola.evaluation.reconstruction import Scores

DEFAULT_SIZE = 256  # pixels, where there is no model whose size it could be
TURNS = 5  # of one image, for the latencies
MEBIBYTE = 2**20


def first_stages(args: argparse.Namespace, device: torch.device, progress: bool) -> tuple[dict[str, Any], Measured]:
    """What `finola eval` writes and prints of them."""
    from finola.evaluation.first_stages import cost
    from finola.evaluation.reconstruction import evaluate

    for option in ("baselines", "knn"):
        if getattr(args, option):
            raise RecipeError(f"--{option}: does not go together with --first-stage; leave it out")
    stages, size, identity = _open(args, device)
    costs = {name: cost(stage, size) for name, stage in stages.items()}
    dataset = open_limited(args.data, args.limit)
    batches = squares_of(args, dataset, size, device)
    scores, examples = evaluate(stages, batches, len(dataset), progress)
    times, memory = _speed(stages, size, device, progress)
    rows = [_row(name, scores[name], costs[name], times[name], memory[name]) for name in stages]
    note = ("PSNR in dB; a number of the code that is not an index counts as 16 bits; milliseconds of one image, "
            f"medians of {TURNS} turns; memory in MiB, weights and tensors at most alive")
    measured = Measured({"first_stages": rows, "turns": TURNS}, _table(rows), note,
                        lambda: reconstruction_panel(examples))
    return result_of(args, device, identity, size, len(dataset), measured.fields), measured


def _open(args: argparse.Namespace, device: torch.device) -> tuple[dict[str, FirstStage], int, dict[str, Any]]:
    """The stages by their names, ours first; the size of the squares; and what the result says of our weights."""
    from finola.evaluation.first_stages import FinolaStage, open_first_stage
    from finola.weights import find_weights, load_weights

    stages: list[FirstStage] = []
    identity: dict[str, Any] = {"weights": None}
    if args.model:
        path = find_weights(args.model)
        model = load_weights(path).to(device).eval()
        stages.append(FinolaStage(require_autoencoder(model, args.model), path.name.removesuffix(".safetensors")))
        identity = weights_identity(path, model.config)
    size = args.size or (stages[0].factor if stages else DEFAULT_SIZE)
    stages += [open_first_stage(folder).to(device) for folder in args.first_stage]
    named: dict[str, FirstStage] = {}
    for stage in stages:
        stage.check_size(size)
        if stage.name in named:
            raise RecipeError(f"--first-stage: two are called {stage.name}; rename a folder")
        named[stage.name] = stage
    return named, size, identity


def _speed(stages: dict[str, FirstStage], size: int, device: torch.device,
           progress: bool) -> tuple[dict[str, list[Latency]], dict[str, int]]:
    """Latencies of one image, and bytes of weights and tensors."""
    import torch
    from tqdm import tqdm

    from finola.evaluation.first_stages import latencies
    from finola.evaluation.speed import peak_memory

    x = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    with tqdm(total=len(stages) * (TURNS + 2), desc="speed", unit="run", disable=not progress) as bar:
        times, memory = latencies(stages, x, TURNS, bar.update), {}
        for name, stage in stages.items():
            weights = sum(tensor.nbytes for tensor in (*stage.parameters(), *stage.buffers()))
            with torch.no_grad():
                memory[name] = weights + peak_memory(lambda stage=stage: stage(x), str(device))
            bar.update()
    return times, memory


def _row(name: str, scores: Scores, cost: Cost, times: list[Latency], memory: int) -> dict[str, Any]:
    return {
        "name": name, **scores.means(), **cost._asdict(),
        "encode_ms": 1000 * median(time.encode for time in times),
        "decode_ms": 1000 * median(time.decode for time in times),
        "memory_mib": memory / MEBIBYTE,
    }


def _table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"{'first stage':25}{'PSNR':>8}{'SSIM':>8}{'numbers':>9}{'bits':>9}{'params, M':>11}{'GMACs':>16}{'ms':>16}"
        f"{'memory':>9}",
        *map(_line, rows),
    ]


def _line(row: dict[str, Any]) -> str:
    macs = f"{row['encode_macs'] / 1e9:8.2f} +{row['decode_macs'] / 1e9:6.2f}"
    return (f"{row['name']:25}{row['psnr']:8.3f}{row['ssim']:8.4f}{row['numbers']:9}{row['bits']:9}"
            f"{row['params'] / 1e6:11.2f}{macs}{row['encode_ms']:8.0f} +{row['decode_ms']:6.0f}"
            f"{row['memory_mib']:9.0f}")
