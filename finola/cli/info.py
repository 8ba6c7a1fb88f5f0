"""`finola info`: parameters and multiply-adds beside the paper's figures."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from finola.cli.options import Subparsers

if TYPE_CHECKING:
    from finola.evaluation.complexity import Row

EPILOG = """examples:
  finola info
  finola info finola_mfw2880_c3072_r16
  finola info --json > info.json

The multiply-adds (MACs) are those of one input of the shape shown (channels x height x width): one for each
product of a convolution, a linear layer or an attention, and one for each output of a BatchNorm. The
operator's are 2 (H W - 1) C²: each position but the origin takes one step on each of the two paths.

Decoders are counted for 3072 channels and 256-px images, as printed in the paper's table (decoder_s16) and
in the reading that meets its parameter counts (decoder_s16_published: decoder_reduce "published"). A model's
name stands for its encoder, the length of q and the side of its map."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "info", help="parameters and multiply-adds of every encoder, decoder and model",
        description="Parameters and multiply-adds, beside the paper's figures.", epilog=EPILOG,
    )
    parser.add_argument("name", nargs="?", metavar="MODEL", help="one model in parts, or one row")
    parser.add_argument("--json", action="store_true", help="print a list of objects for machines")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.evaluation.complexity import all_rows, countable_models, model_parts, row
    from finola.registry import MODELS, model_config

    rows = all_rows(sys.stderr.isatty() and not args.json) if args.name is None else [row(args.name)]
    config = model_config(args.name) if args.name in MODELS else None
    parts = model_parts(args.name) if config else []
    if args.json:
        objects = [r._asdict() for r in rows]
        if config:
            objects[0] |= {"parts": [part._asdict() for part in parts], "config": config.to_dict()}
        print(json.dumps(objects, indent=1))
        return
    print(_table(parts + rows))
    print("\nMACs: multiply-adds of one input; off: from the paper's rounded figure (finola info --help says more)")
    if args.name is None and len(countable_models()) < len(MODELS):
        print("MAE, SimMIM and MoCo are left out: they need lightly (pip install 'finola[ssl]')")
    if config:
        print("\n" + "\n".join(f"{key:16} {_plain(value)}" for key, value in config.to_dict().items()))


def _table(rows: list[Row]) -> str:
    """Aligned columns; the deviation from the paper's (rounded) figure in %."""
    head = ("name", "input", "params M", "paper", "off", "MACs G", "paper", "off")
    lines = [head] + [
        (r.name, r.input, *_figures(r.params, r.paper_params, 1e6), *_figures(r.macs, r.paper_macs, 1e9))
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    layout = "  ".join(f"{{:{'<' if i < 2 else '>'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(layout.format(*line).rstrip() for line in lines)


def _figures(value: int, paper: int | None, unit: float) -> tuple[str, str, str]:
    ours = f"{value / unit:.3f}"
    return (ours, "", "") if paper is None else (ours, f"{paper / unit:g}", f"{value / paper - 1:+.1%}")


def _plain(value: object) -> str:
    return "-" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
