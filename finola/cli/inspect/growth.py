"""`finola inspect growth`: the map and the image growing out of one vector, as an animated GIF."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from finola.cli.options import Subparsers, add_device, add_model, open_model
from finola.errors import RecipeError

EXAMPLE = """example:
  finola inspect growth photo.jpg --out growth.gif

A frame for each step of the law away from the origin. Left the map, its first three principal components as
colours; right what the decoder makes of it. The photograph is resized to the model's size and cropped to its
centre square."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "growth",
        help="the map and the image growing out of one vector, as an animated GIF",
        description="An animated GIF of a photograph's map and image growing out of its one vector.",
        epilog=EXAMPLE,
    )
    parser.add_argument("photo", metavar="PHOTO", help="an image of any size")
    parser.add_argument("--out", required=True, metavar="FILE", help="the GIF, .gif")
    add_model(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print a report for machines")
    return parser


def run(args: argparse.Namespace) -> None:
    import torch

    from finola.analysis.growth import growth_frames, write_gif
    from finola.data.images import load_square
    from finola.pde import law_of

    if Path(args.out).suffix.lower() != ".gif":
        raise RecipeError(f"--out: got {args.out}, expected a file ending in .gif")
    model = open_model(args)
    law_of(model)  # before anything is read
    x = load_square(args.photo, model.config.image_size).to(model.mean.device)
    with torch.no_grad():
        q = model.encode(x[None])[0]
    frames = growth_frames(model, q)
    write_gif(frames, args.out)
    size = Path(args.out).stat().st_size
    if args.json:
        print(json.dumps({"file": args.photo, "gif": args.out, "frames": len(frames), "bytes": size}))
    else:
        print(f"{args.photo}: {len(frames)} frames, {size:,} bytes; {args.out}")
