"""The operator's bars, as ratios measured in one run: rates over the plain matrix product, memory in maps.

    python benchmarks/operator_bars.py [--device cuda] [--out results/operator_cpu.json]

Exits with 1 if a bar is missed. On a CPU: C = 1024, batch 8, 16x16. On a GPU: C = 3072, batch 128, 16x16, bf16, and
C = 3072 on 256x256 at batch 1.
"""

import argparse
import sys
from pathlib import Path

import torch

from finola.evaluation.speed import OperatorResult, bench_operator
from finola.files import write_json
from finola.provenance import record

# (batch, channels, size, dtype) -> least rate of the forward pass, of forward + backward, most maps of memory
CPU_BARS = {(8, 1024, 16, "fp32"): (0.85, 0.83, 4.6), (8, 1024, 16, "bf16"): (0.7, 0.7, 4.0)}
GPU_BARS = {(128, 3072, 16, "bf16"): (0.85, 0.75, None), (1, 3072, 256, "bf16"): (None, None, None)}


def verdicts(result: OperatorResult, bars: tuple) -> list[dict]:
    forward, both, maps = bars
    checks = [("forward of product", result.forward_of_product, forward, True),
              ("forward+backward of product", result.forward_backward_of_product, both, True),
              ("peak maps", result.peak_maps, maps, False)]
    return [{"what": what, "got": round(got, 3), "bar": bar, "holds": got >= bar if at_least else got <= bar}
            for what, got, bar, at_least in checks if bar is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    gpu = torch.device(args.device).type == "cuda"
    rows = []
    for case, bars in (GPU_BARS if gpu else CPU_BARS).items():
        result = bench_operator(*case, device=args.device, compare=not gpu)
        rows.append(result.as_dict() | {"bars": verdicts(result, bars)})
        print(*case, "timed by", *result.timed_by)
        for check in rows[-1]["bars"]:
            print(*case, check["what"], check["got"], "bar", check["bar"], "holds" if check["holds"] else "MISSED",
                  flush=True)
        if args.out:
            write_json(args.out, record(torch.device(args.device), {"results": rows}))
    return 0 if all(check["holds"] for row in rows for check in row["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
