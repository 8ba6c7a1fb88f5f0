"""`finola decompress`: the photograph of a .fnl file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from finola.cli.compress import add_codec, open_codec
from finola.cli.options import Subparsers
from finola.errors import BitstreamError, RecipeError

EXAMPLE = """example:
  finola decompress photo.fnl photo.png

The weights must be those the file was written with; its header says which. The image's format is that of the
name: .png keeps it as decoded."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "decompress",
        help="turn a .fnl file back into an image",
        description="Decompress a .fnl file of finola compress to an image of its exact size.",
        epilog=EXAMPLE,
    )
    parser.add_argument("stream", metavar="IN.fnl", help="a file of finola compress")
    parser.add_argument("out", metavar="PHOTO.png", help="the image to write")
    add_codec(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from PIL import Image

    from finola.files import atomic_write

    if Path(args.out).suffix.lower() not in Image.registered_extensions():
        raise RecipeError(f"{args.out}: no image format of that name; take .png, which keeps the image as decoded")
    data = read_stream(args.stream)
    image = open_codec(args).decompress(data, progress=sys.stderr.isatty() and not args.json)
    with atomic_write(args.out) as temporary:
        image.save(temporary)
    report = {"file": args.out, "width": image.width, "height": image.height}
    print(json.dumps(report) if args.json else f"{args.out}: {image.width}x{image.height} pixels")


def read_stream(path: str | Path) -> bytes:
    """The bytes of a .fnl file; BitstreamError where there is none or it is longer than any of ours."""
    from finola.codec.container import MAX_BYTES

    path = Path(path)
    if not path.is_file():
        raise BitstreamError(f"{path}: no such file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise BitstreamError(f"{path}: got {size:,} bytes, expected at most {MAX_BYTES:,}; this is no .fnl file")
    return path.read_bytes()
