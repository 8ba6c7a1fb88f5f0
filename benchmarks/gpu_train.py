"""Train the shipped model further, for as many epochs as fit into the given minutes.

    python benchmarks/gpu_train.py --data packed --out runs/gpu_train --minutes 16 [--device cuda]

A first run is stopped once it has shown how long an epoch takes; the second begins again at the shipped weights, and
its cosine ends within the minutes. DATA/train and DATA/val are shards of `finola pack`. Leaves OUT/run, the run's
folder, and OUT/weights.safetensors, its weights in fp16. `benchmarks/gpu_train.sh` starts it in the background.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from finola.registry import pretrained_path
from finola.weights import load_weights, save_weights

RECIPE = "pretrained/finola_mfw720_c768_r8"
VALIDATIONS = 6
WARMUP = 0.02  # of all epochs
MEASURED = 0.03  # of the minutes, after the first epoch
RESERVE = 20.0  # seconds at the end, for results and weights
SLACK = 0.93  # of the time for epochs: the rest goes to validations and checkpoints


def epoch_ends(lines: Iterable[str], least: float, now: Callable[[], float] = time.monotonic) -> list[float]:
    """When the epochs of a run ended, by the lines it prints: two at least, and `least` seconds from first to last."""
    ends: list[float] = []
    for line in lines:
        print(line, end="", flush=True)
        if line.startswith("epoch "):
            ends.append(now())
            if len(ends) > 1 and ends[-1] - ends[0] >= least:
                return ends
    raise SystemExit("the run ended before its rate was known; its last lines say why")


def epochs_that_fit(seconds: float, startup: float, per_epoch: float) -> int:
    """A multiple of the validations where there are as many."""
    epochs = int(SLACK * (seconds - startup) / per_epoch)
    if epochs < 1:
        raise SystemExit(f"{seconds:.0f} s are left: a start of {startup:.0f} s and an epoch of {per_epoch:.0f} s do"
                         " not fit; give it more minutes or fewer images")
    return epochs // VALIDATIONS * VALIDATIONS or epochs


def command(args: argparse.Namespace, out: Path, epochs: int, *more: str) -> list[str]:
    packed = json.loads((args.data / "train" / "index.json").read_text())
    options = {
        "data.resident": "true", "data.resident_size": packed["encoding"]["size"],
        "optim.batch_size": args.batch_size, "optim.base_lr": args.base_lr, "optim.epochs": epochs,
        "optim.warmup_epochs": WARMUP * epochs,
        "trainer.accelerator": "cpu" if args.device == "cpu" else "gpu", "trainer.devices": 1,
        "trainer.ema_decay": 0.9995, "trainer.val_every": max(1, epochs // VALIDATIONS),
    }
    words = [sys.executable, "-m", "finola.cli", "train", RECIPE, "--data", str(args.data / "train"), "--out", str(out),
             "--weights", str(pretrained_path("finola_mfw720_c768_r8"))]
    return words + [str(word) for key, value in options.items() for word in (f"--{key}", value)] + list(more)


def measure(args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a run's start and of an epoch."""
    started, folder = time.monotonic(), args.out / "rate"
    process = subprocess.Popen(command(args, folder, 100_000), stdout=subprocess.PIPE, text=True)
    try:
        ends = epoch_ends(process.stdout, MEASURED * 60 * args.minutes)
    finally:
        process.terminate()
        process.communicate()
    shutil.rmtree(folder)
    per_epoch = (ends[-1] - ends[0]) / (len(ends) - 1)
    return max(0.0, ends[0] - started - per_epoch), per_epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with train/ and val/, both packed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--base-lr", type=float, default=1.5e-3)
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes - RESERVE
    startup, per_epoch = measure(args)
    seconds = deadline - time.monotonic()
    epochs = epochs_that_fit(seconds, startup, per_epoch)
    print(f"start {startup:.1f} s, an epoch {per_epoch:.2f} s: {epochs} epochs in {seconds:.0f} s", flush=True)
    subprocess.run(command(args, args.out / "run", epochs, "--val", str(args.data / "val"),
                           "--max-time", f"{(seconds - startup) / 60:.3f}"), check=True)
    model = load_weights(args.out / "run" / "weights.safetensors")
    save_weights(model, args.out / "weights.safetensors", dtype=torch.float16)
    print(f"done {deadline + RESERVE - time.monotonic():.0f} s before the end", flush=True)


if __name__ == "__main__":
    main()
