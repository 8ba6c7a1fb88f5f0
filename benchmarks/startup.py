"""How long a command takes to its first forward pass, over the time that `import torch` takes in the same process.

    python benchmarks/startup.py photo.jpg --out results/startup_cpu.json

The bar is 1.7. `finola compress` and `finola reconstruct` are run as they are, and stopped at the first forward of a
module.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from finola.files import write_json
from finola.provenance import environment

BAR = 1.7
PROGRAM = """
import os, sys, time
start = time.perf_counter()
import torch
imported = time.perf_counter()
from finola.cli.main import main

def stop(module, arguments):
    print((time.perf_counter() - start) / (imported - start))
    sys.stdout.flush()
    os._exit(0)

torch.nn.modules.module.register_module_forward_pre_hook(stop)
sys.exit(main(sys.argv[1:]) or 1)
"""


def ratio(words: list[str]) -> float:
    """Time to the first forward pass over the time to import torch, of one run of `finola WORDS`."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photo", help="an image of any size")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each command, in turn (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commands = {"compress": ["compress", args.photo, f"{folder}/photo.fnl"],
                    "reconstruct": ["reconstruct", args.photo, "--out", f"{folder}/panels"]}
        for words in commands.values():
            ratio(words)  # files into the system's cache
        runs = [{name: ratio(words) for name, words in commands.items()} for _ in range(args.repeats)]
    medians = {name: statistics.median(run[name] for run in runs) for name in commands}
    result = {"bar": BAR, "medians": medians, "runs": runs, **environment(torch.device("cpu"))}
    for name, median in medians.items():
        print(f"finola {name}: {median:.2f} times import torch to the first forward pass (bar {BAR})")
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
