"""`finola compress`: photographs as .fnl files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finola.cli.images import find_files, go_through, name_results, raise_worst
from finola.cli.options import (
    Subparsers,
    above_zero,
    add_device,
    add_model,
    natural,
    open_model,
    positive,
    weights_path,
)
from finola.errors import RecipeError

if TYPE_CHECKING:
    from PIL import Image

    from finola.codec import Codec

USAGE = """finola compress [options] PHOTO OUT.fnl
       finola compress [options] IMAGES ... --out DIR"""

EXAMPLE = """examples:
  finola compress photo.jpg photo.fnl
  finola compress photo.jpg photo.fnl --quality 70 --refine 20
  finola compress photo.jpg photo.fnl --target-size 8000
  finola compress photo.jpg photo.fnl --bits 4 --no-entropy      the paper's mode
  finola compress a.jpg b.png holidays --out compressed

Images of any size and mode, made RGB; the exact size is restored by finola decompress. With --bits every number of
every vector takes so many bits; with --quality channels get unequal bits and tiles a fitting size, which is better
at every file size. Entropy coding needs pip install 'finola[codec]'.

With --out any number of files, folders and patterns: holidays/day1/a.jpg of the folder holidays becomes DIR/day1/a.fnl.
Subfolders stay; two images that would become one file are refused before anything is written. An image that cannot be
compressed is reported and left out; the exit code is then that of the worst."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "compress",
        help="compress photographs to .fnl files",
        description="Compress photographs: one vector for each tile, quantised and entropy coded.",
        usage=USAGE,
        epilog=EXAMPLE,
    )
    parser.add_argument("paths", nargs="+", metavar="PHOTO", help="an image of any size and mode, and the file to"
                        " write; with --out images, folders and patterns")
    parser.add_argument("--out", metavar="DIR", help="folder for many .fnl files, made if need be")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--quality", type=positive, metavar="N", help="1 to 100 (default: 50)")
    rate.add_argument("--target-bpp", type=above_zero, metavar="R",
                      help="the highest quality of at most so many bits per pixel; compresses some seven times")
    rate.add_argument("--target-size", type=positive, metavar="BYTES", help="the same, of at most so many bytes")
    rate.add_argument("--bits", type=positive, metavar="N", help="1 to 8 for each number, as in the paper")
    parser.add_argument("--no-entropy", action="store_true", help="with --bits: fixed length, as in the paper")
    parser.add_argument("--refine", type=natural, metavar="N", help="steps of gradient descent on the vectors against"
                        " this image, each some five times as slow as encoding (default: 1; with --bits none)")
    parser.add_argument("--psnr", action="store_true", help="decompress again, and say how near the image comes back")
    parser.add_argument("--side", type=positive, metavar="N", help="pixels of a tile (default: by the quality)")
    parser.add_argument("--overlap", type=natural, default=0, metavar="N", help="pixels that tiles share (%(default)s)")
    add_codec(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.data.images import SUFFIXES

    _check_rate(args)
    show = sys.stderr.isatty() and not args.json
    if args.out is None:
        photo, out = one_pair(args.paths, "PHOTO OUT.fnl")
        if out.resolve() == photo.resolve():
            raise RecipeError(f"{out}: is the photograph itself; choose another name")
        if out.suffix.lower() in SUFFIXES:
            raise RecipeError(f"{out}: ends like an image, which it is not; choose a name in .fnl, or --out DIR")
        report = _compress(args, open_codec(args), photo, out, show)
        print(json.dumps(report) if args.json else _line(report, photo))
        return
    found, faults = find_files(args.paths, SUFFIXES, "image")
    results = name_results(found, Path(args.out), ".fnl")
    codec = open_codec(args)

    def work(photo: Path, out: Path) -> dict[str, Any]:
        report = _compress(args, codec, photo, out, show)
        say(args, _line(report, photo))
        return {"image": str(photo), **report}

    reports, errors = go_through(results, work, faults, show)
    total = {"images": len(reports), "bytes": sum(report["bytes"] for report in reports)}
    if args.json:
        print(json.dumps({**total, "files": reports, "failed": [str(error) for error in errors]}))
    elif reports:
        print(f"{total['images']} images in {total['bytes']:,} bytes; in {args.out}")
    if errors:
        raise_worst(errors, len(reports))


def one_pair(paths: list[str], names: str) -> tuple[Path, Path]:
    """What is read and what is written where --out is not given."""
    if len(paths) != 2:
        raise RecipeError(f"got {len(paths)} name{'s' * (len(paths) != 1)}, expected {names}; or --out DIR for any "
                          "number of files and folders")
    return Path(paths[0]), Path(paths[1])


def say(args: argparse.Namespace, line: str) -> None:
    """A line about one of many files, above the progress bar; none with --json."""
    from tqdm import tqdm

    if not args.json:
        tqdm.write(line)


def _check_rate(args: argparse.Namespace) -> None:
    """Before anything is read: RecipeError where the options do not go together or are out of range."""
    from finola.codec.codec import choose_mode

    if args.target_bpp is None and args.target_size is None:
        choose_mode(args.bits, args.quality, not args.no_entropy)
    elif args.no_entropy:
        raise RecipeError("--no-entropy: goes with --bits alone; leave it out")


def _compress(args: argparse.Namespace, codec: Codec, photo: Path, out: Path, show: bool) -> dict[str, Any]:
    """Write one file, and report on it."""
    from finola.data.images import lost, upright_rgb
    from finola.evaluation.metrics import image_psnr
    from finola.files import atomic_write

    image = upright_rgb(photo)
    data, quality = _compressed(args, codec, image, show)
    with atomic_write(out) as temporary:
        temporary.write_bytes(data)
    report = {"file": str(out), "width": image.width, "height": image.height, "bytes": len(data),
              "bpp": 8 * len(data) / (image.width * image.height), "original_bytes": photo.stat().st_size}
    if quality is not None:
        report["quality"] = quality
    report["lost"] = lost(photo)
    if args.psnr:
        report["psnr"] = image_psnr(codec.decompress(data, progress=show), image)
    return report


def _line(report: dict[str, Any], photo: Path) -> str:
    """A report for people."""
    line = (f"{report['file']}: {report['width']}x{report['height']} pixels in {report['bytes']:,} bytes "
            f"(before {report['original_bytes']:,}), {report['bpp']:.4f} bit per pixel"
            + (f", quality {report['quality']}" if "quality" in report else "")
            + (f", {report['psnr']:.2f} dB" if "psnr" in report else ""))
    return line + (f"\nof {photo}: {', '.join(report['lost'])}" if report["lost"] else "")


def _compressed(args: argparse.Namespace, codec: Codec, image: Image.Image, show: bool) -> tuple[bytes, int | None]:
    """The stream, and the quality that was found for a target."""
    options: dict[str, Any] = {"refine": args.refine, "side": args.side, "overlap": args.overlap, "progress": show}
    most = args.target_size
    if args.target_bpp is not None:
        most = int(args.target_bpp * image.width * image.height / 8)
    if most is None:
        entropy = not args.no_entropy
        return codec.compress(image, bits=args.bits, quality=args.quality, entropy=entropy, **options), None
    return codec.compress_to(image, most, **options)


def add_codec(parser: argparse.ArgumentParser) -> None:
    """Options of every command that opens a codec."""
    add_model(parser)
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="tiles at once (%(default)s)")
    parser.add_argument("--fast", action="store_true", help="the networks in bf16, where the machine has units for it: "
                        "a third of the time to decompress, and an error of one or two grey levels")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print a report for machines, no progress bar")


def open_codec(args: argparse.Namespace) -> Codec:
    """The codec of --model or --weights; the calibration of a weights file stands beside it."""
    from finola.codec import Codec, calibration_path, find_calibration

    model = open_model(args)
    path = calibration_path(weights_path(args)) if args.weights else None
    return Codec(model, find_calibration(model, path), args.batch_size, args.fast)
