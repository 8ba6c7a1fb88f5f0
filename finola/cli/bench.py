"""`finola bench`: speed and memory, as ratios measured in the same run."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from finola.cli.options import Subparsers

if TYPE_CHECKING:
    from finola.evaluation.speed import OperatorResult

EXAMPLE = """example:
  finola bench operator
  finola bench operator --channels 3072 --batch 128 --size 16 --dtype bf16 --device cuda --json
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("bench", help="speed and memory of the operator", epilog=EXAMPLE,
                                   description="Time the operator against a plain matrix product of the same shape "
                                               "(the limit) and against the literal loop over positions.")
    parser.add_argument("what", choices=["operator"])
    parser.add_argument("--channels", type=int, nargs="+", default=[256, 1024], help="C (default: 256 1024)")
    parser.add_argument("--size", type=int, nargs="+", default=[16], help="map side (default: 16)")
    parser.add_argument("--batch", type=int, default=8, help="images (default: 8)")
    parser.add_argument("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--fast-only", action="store_true", help="leave out plain autograd and the literal loop")
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    return parser


def run(args: argparse.Namespace) -> None:
    import torch
    from tqdm import tqdm

    from finola.errors import FinolaError
    from finola.evaluation.speed import bench_operator

    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise FinolaError("--device cuda: this machine has no CUDA device, or torch was installed without CUDA")
    if min([args.batch, *args.channels, *args.size]) < 1:
        raise FinolaError("--batch, --channels and --size: expected numbers of at least 1")
    cases = [(c, s, d) for c in args.channels for s in args.size for d in args.dtype]
    results = [bench_operator(args.batch, channels, size, dtype, args.device, compare=not args.fast_only)
               for channels, size, dtype in tqdm(cases, disable=not sys.stderr.isatty())]
    if args.json:
        print(json.dumps([r.as_dict() for r in results], indent=1))
    else:
        _print_table(results)


def _print_table(results: list[OperatorResult]) -> None:
    methods = ", ".join(sorted({method for r in results for method in r.timed_by}))
    print(f"{results[0].device}; batch {results[0].batch}; timed by {methods}; peak memory of forward and "
          "backward in fp32 maps, matrices and their gradients aside")
    print(f"{'C':>5} {'map':>8} {'dtype':>5} {'forward':>9} {'fwd+bwd':>9} {'GMAC/s':>8} {'of product':>10} "
          f"{'fwd+bwd':>8} {'peak':>5} {'(plain)':>7} {'literal loop':>12}")
    for r in results:
        plain = "-" if r.plain_peak_maps is None else f"{r.plain_peak_maps:.1f}"
        literal = "-" if r.speedup_over_literal is None else f"{r.speedup_over_literal:.1f}x slower"
        print(f"{r.channels:5} {f'{r.size}x{r.size}':>8} {r.dtype:>5} {r.forward * 1e3:6.1f} ms "
              f"{r.forward_backward * 1e3:6.1f} ms {r.macs_per_second / 1e9:8.1f} {r.forward_of_product:10.2f} "
              f"{r.forward_backward_of_product:8.2f} {r.peak_maps:5.1f} {plain:>7} {literal:>12}")
