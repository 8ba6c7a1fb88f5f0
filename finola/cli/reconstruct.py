"""`finola reconstruct`: photographs through the model, as panels of original | reconstruction."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.images import find_images, go_through, name_panels, raise_worst
from finola.cli.options import Subparsers, add_device, add_model, open_model, positive

if TYPE_CHECKING:
    from finola.models.autoencoder import FinolaAutoencoder

EXAMPLE = """examples:
  finola reconstruct photo.jpg --out panels
  finola reconstruct holidays "scans/*.tif" --out panels --tile

Fitted, each image becomes one square of the model's size and one vector q. With --tile the whole image is
kept and each square of it is one q. The panels are PNG files named after the images. An image that cannot
be decoded is reported and left out; the exit code is then 3."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "reconstruct",
        help="reconstruct photographs from their vectors",
        description="Reconstruct photographs of any size from one vector, or from one for each tile.\n"
        "Writes panels of original | reconstruction and prints the PSNR.",
        epilog=EXAMPLE,
    )
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders or patterns")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the panels, made if need be")
    parser.add_argument("--tile", action="store_true", help="the whole image at its own size, in overlapping squares")
    add_model(parser)
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="squares at once (%(default)s)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print a report for machines, no progress bar")
    return parser


def run(args: argparse.Namespace) -> None:
    paths, faults = find_images(args.images)
    panels = name_panels(paths, Path(args.out))
    model = open_model(args)
    show = sys.stderr.isatty() and not args.json
    results, errors = go_through(
        panels, lambda path, target: _reconstruct_one(args, model, path, target, show), faults, show)
    mean = sum(result["psnr"] for result in results) / len(results) if results else None
    if args.json:
        print(json.dumps({"images": results, "mean_psnr": mean, "failed": [str(error) for error in errors]}))
    elif results:
        side = model.config.image_size
        print(f"mean of {len(results)}: {mean:.2f} dB; panels in {args.out}")
        if not args.tile:
            print(f"each is the centre square, at {side}x{side} pixels; --tile rebuilds the whole image")
    if errors:
        raise_worst(errors, len(results))


def _reconstruct_one(
    args: argparse.Namespace, model: FinolaAutoencoder, path: Path, target: Path, progress: bool
) -> dict:
    from tqdm import tqdm

    from finola.files import atomic_write
    from finola.inference.reconstruct import reconstruct

    result = reconstruct(model, path, args.tile, batch_size=args.batch_size, progress=progress)
    with atomic_write(target) as temporary:
        result.panel().save(temporary)
    rows, columns = result.tiles
    width, height, numbers = *result.original.size, rows * columns * model.config.embed_dim
    if not args.json:
        tqdm.write(f"{path}: {result.psnr:.2f} dB, {width}x{height} pixels, {columns}x{rows} q, {numbers} numbers; "
                   f"{target}")
    return {
        "file": str(path),
        "panel": str(target),
        "psnr": result.psnr,
        "width": width,
        "height": height,
        "tiles": [rows, columns],
        "numbers": numbers,
    }
