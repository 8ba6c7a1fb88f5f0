"""`finola compress`: a photograph as a .fnl file."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

EXAMPLE = """examples:
  finola compress photo.jpg photo.fnl
  finola compress photo.jpg photo.fnl --quality 70 --refine 20
  finola compress photo.jpg photo.fnl --target-size 8000
  finola compress photo.jpg photo.fnl --bits 4 --no-entropy      the paper's mode

Images of any size and mode, made RGB; the exact size is restored by finola decompress. With --bits every number of
every vector takes so many bits; with --quality channels get unequal bits and tiles a fitting size, which is better
at every file size. Entropy coding needs pip install 'finola[codec]'."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "compress",
        help="compress a photograph to a .fnl file",
        description="Compress a photograph: one vector for each tile, quantised and entropy coded.",
        epilog=EXAMPLE,
    )
    parser.add_argument("photo", metavar="PHOTO", help="an image of any size and mode")
    parser.add_argument("out", metavar="OUT.fnl", help="the file to write")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--quality", type=positive, metavar="N", help="1 to 100 (default: 50)")
    rate.add_argument("--target-bpp", type=above_zero, metavar="R",
                      help="the highest quality of at most so many bits per pixel; compresses some seven times")
    rate.add_argument("--target-size", type=positive, metavar="BYTES", help="the same, of at most so many bytes")
    rate.add_argument("--bits", type=positive, metavar="N", help="1 to 8 for each number, as in the paper")
    parser.add_argument("--no-entropy", action="store_true", help="with --bits: fixed length, as in the paper")
    parser.add_argument("--refine", type=natural, default=0, metavar="N",
                        help="steps of gradient descent on the vectors against this image (%(default)s); slow")
    parser.add_argument("--psnr", action="store_true", help="decompress again, and say how near the image comes back")
    parser.add_argument("--side", type=positive, metavar="N", help="pixels of a tile (default: by the quality)")
    parser.add_argument("--overlap", type=natural, default=0, metavar="N", help="pixels that tiles share (%(default)s)")
    add_codec(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.data.images import SUFFIXES, lost, upright_rgb
    from finola.evaluation.metrics import image_psnr
    from finola.files import atomic_write

    if Path(args.out).resolve() == Path(args.photo).resolve():
        raise RecipeError(f"{args.out}: is the photograph itself; choose another name")
    if Path(args.out).suffix.lower() in SUFFIXES:
        raise RecipeError(f"{args.out}: ends like an image, which it is not; choose a name in .fnl")
    image = upright_rgb(args.photo)
    show = sys.stderr.isatty() and not args.json
    codec = open_codec(args)
    data, quality = _compressed(args, codec, image, show)
    with atomic_write(args.out) as temporary:
        temporary.write_bytes(data)
    report = {"file": args.out, "width": image.width, "height": image.height, "bytes": len(data),
              "bpp": 8 * len(data) / (image.width * image.height)}
    if quality is not None:
        report["quality"] = quality
    report["lost"] = lost(args.photo)
    if args.psnr:
        report["psnr"] = image_psnr(codec.decompress(data, progress=show), image)
    if args.json:
        print(json.dumps(report))
    else:
        print(f"{args.out}: {image.width}x{image.height} pixels in {len(data):,} bytes, "
              f"{report['bpp']:.4f} bit per pixel" + (f", quality {quality}" if quality is not None else "")
              + (f", {report['psnr']:.2f} dB" if args.psnr else ""))
        if report["lost"]:
            print(f"of {args.photo}: {', '.join(report['lost'])}")


def _compressed(args: argparse.Namespace, codec: Codec, image: Image.Image, show: bool) -> tuple[bytes, int | None]:
    """The stream, and the quality that was found for a target."""
    options: dict[str, Any] = {"refine": args.refine, "side": args.side, "overlap": args.overlap, "progress": show}
    most = args.target_size
    if args.target_bpp is not None:
        most = int(args.target_bpp * image.width * image.height / 8)
    if most is None:
        entropy = not args.no_entropy
        return codec.compress(image, bits=args.bits, quality=args.quality, entropy=entropy, **options), None
    if args.no_entropy:
        raise RecipeError("--no-entropy: goes with --bits alone; leave it out")
    return codec.compress_to(image, most, **options)


def add_codec(parser: argparse.ArgumentParser) -> None:
    """Options of every command that opens a codec."""
    add_model(parser)
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="tiles at once (%(default)s)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print a report for machines, no progress bar")


def open_codec(args: argparse.Namespace) -> Codec:
    """The codec of --model or --weights; the calibration of a weights file stands beside it."""
    from finola.codec import Codec, calibration_path, find_calibration

    model = open_model(args)
    path = calibration_path(weights_path(args)) if args.weights else None
    return Codec(model, find_calibration(model, path), args.batch_size)
