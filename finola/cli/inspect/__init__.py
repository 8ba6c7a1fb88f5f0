"""`finola inspect`: analyses that look inside a model, one for each module of this package."""

from __future__ import annotations

import argparse
from importlib import import_module

from finola.cli.options import Subparsers

ANALYSES = ("embedding", "curvature", "growth", "equations", "law")

EXAMPLE = """examples:
  finola inspect embedding --images photos --data imagenette/val --out inspected/embedding
  finola inspect curvature --data imagenette/val --out inspected/curvature
  finola inspect growth photo.jpg --out growth.gif
  finola inspect equations --data photos --out inspected/equations
  finola inspect law --data imagenette/train --val imagenette/val --out inspected/law

Each analysis writes images (PNG) and a JSON file of numbers into the folder --out; growth writes one GIF.
`finola inspect ANALYSIS --help` lists its options."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "inspect",
        help="look inside a model: its embedding space, the maps it grows",
        description="Look inside a model, by images and by numbers.",
        epilog=EXAMPLE,
    )
    analyses = parser.add_subparsers(dest="analysis", metavar="ANALYSIS", required=True)
    for name in ANALYSES:
        analysis = import_module(f"finola.cli.inspect.{name}")
        sub: argparse.ArgumentParser = analysis.add_parser(analyses)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        # SUPPRESS, since a default here would undo a --debug that stands before the analysis's name
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(run_analysis=analysis.run)
    return parser


def run(args: argparse.Namespace) -> None:
    args.run_analysis(args)
