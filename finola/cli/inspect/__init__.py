"""`finola inspect`: instruments that look inside a model, one for each module of this package."""

from __future__ import annotations

import argparse
from importlib import import_module

INSTRUMENTS = ("embedding", "curvature", "growth", "equations")

EXAMPLE = """examples:
  finola inspect embedding --images photos --data imagenette/val --out inspected/embedding
  finola inspect curvature --data imagenette/val --out inspected/curvature
  finola inspect growth photo.jpg --out growth.gif
  finola inspect equations --data photos --out inspected/equations

The instruments write pictures (PNG) and a JSON file of numbers into the folder --out; growth writes one GIF.
`finola inspect INSTRUMENT --help` lists its options."""


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "inspect",
        help="look inside a model: its embedding space, the maps it grows",
        description="Look inside a model, by pictures and by numbers.",
        epilog=EXAMPLE,
    )
    instruments = parser.add_subparsers(dest="instrument", metavar="INSTRUMENT", required=True)
    for name in INSTRUMENTS:
        instrument = import_module(f"finola.cli.inspect.{name}")
        sub = instrument.add_parser(instruments)
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        # SUPPRESS, since a default here would undo a --debug that stands before the instrument's name
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(instrument_run=instrument.run)
    return parser


def run(args: argparse.Namespace) -> int | None:
    return args.instrument_run(args)
