"""`finola decompress`: the photographs of .fnl files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finola.cli.compress import add_codec, one_pair, open_codec, say
from finola.cli.images import find_files, go_through, name_results, raise_worst
from finola.cli.options import Subparsers
from finola.errors import BitstreamError, RecipeError

if TYPE_CHECKING:
    from finola.codec import Codec

USAGE = """finola decompress [options] IN.fnl PHOTO.png
       finola decompress [options] STREAMS ... --out DIR"""

EXAMPLE = """examples:
  finola decompress photo.fnl photo.png
  finola decompress a.fnl compressed --out restored

The weights must be those the file was written with; its header says which. The image's format is that of the
name: .png keeps it as decoded.

With --out any number of files, folders and patterns become PNG files: compressed/day1/a.fnl of the folder compressed
becomes DIR/day1/a.png. Subfolders stay; two files that would become one are refused before anything is written. A file
that cannot be decoded is reported and left out; the exit code is then that of the worst."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "decompress",
        help="turn .fnl files back into images",
        description="Decompress .fnl files of finola compress to images of their exact size.",
        usage=USAGE,
        epilog=EXAMPLE,
    )
    parser.add_argument("paths", nargs="+", metavar="IN.fnl", help="a file of finola compress, and the image to write;"
                        " with --out files, folders and patterns")
    parser.add_argument("--out", metavar="DIR", help="folder for many PNG files, made if need be")
    add_codec(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from PIL import Image

    show = sys.stderr.isatty() and not args.json
    if args.out is None:
        stream, out = one_pair(args.paths, "IN.fnl PHOTO.png")
        if out.suffix.lower() not in Image.registered_extensions():
            raise RecipeError(f"{out}: no image format of that name; take .png, which keeps the image as decoded")
        data = read_stream(stream)
        report = _decompress(open_codec(args), data, out, show)
        print(json.dumps(report) if args.json else _line(report))
        return
    found, faults = find_files(args.paths, (".fnl",), ".fnl file")
    results = name_results(found, Path(args.out), ".png")
    codec = open_codec(args)

    def work(stream: Path, out: Path) -> dict[str, Any]:
        report = _decompress(codec, read_stream(stream), out, show)
        say(args, _line(report))
        return {"stream": str(stream), **report}

    reports, errors = go_through(results, work, faults, show)
    if args.json:
        print(json.dumps({"images": len(reports), "files": reports, "failed": [str(error) for error in errors]}))
    elif reports:
        print(f"{len(reports)} images in {args.out}")
    if errors:
        raise_worst(errors, len(reports))


def _decompress(codec: Codec, data: bytes, out: Path, show: bool) -> dict[str, Any]:
    """Write one image, and report on it."""
    from finola.files import atomic_write

    image = codec.decompress(data, progress=show)
    with atomic_write(out) as temporary:
        image.save(temporary)
    return {"file": str(out), "width": image.width, "height": image.height}


def _line(report: dict[str, Any]) -> str:
    return f"{report['file']}: {report['width']}x{report['height']} pixels"


def read_stream(path: str | Path) -> bytes:
    """The bytes of a .fnl file; BitstreamError where there is none or it is longer than any of ours."""
    from finola.codec.container import MAX_BYTES

    path = Path(path)
    if not path.is_file():
        raise BitstreamError(f"{path}: no such file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise BitstreamError(f"{path}: got {size:,} bytes, expected at most {MAX_BYTES:,}; this is no .fnl file")
    return path.read_bytes()
