"""`finola rd`: rate and distortion of the codec, beside JPEG, WebP, JPEG 2000 and AVIF."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from finola.cli.compress import add_codec, open_codec
from finola.cli.options import Subparsers, add_limit, natural, open_limited
from finola.errors import RecipeError

if TYPE_CHECKING:
    from PIL import Image

    from finola.codec.rd import ImageCodec, Point
    from finola.data.datasets import ImageDataset

T = TypeVar("T")

EXAMPLE = """examples:
  finola rd kodak --out rd                                a curve of each codec: plot, JSON, BD-rate against JPEG
  finola rd kodak --out rd --limit 4 --codecs finola jpeg
  finola rd kodak --target 0.19                           the paper's table: each codec's best at that rate

Sizes are those of whole files. The JSON files have the form of CompressAI's results. At a target each codec takes the
highest setting whose file stays below it, image by image; the paper's own mode is 4 bits a number."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "rd",
        help="rate and distortion beside JPEG, WebP, JPEG 2000 and AVIF",
        description="Rate and distortion of the codec and of Pillow's, on a folder of images.",
        epilog=EXAMPLE,
    )
    parser.add_argument("data", metavar="DIR", help="a folder of images, best never compressed before")
    parser.add_argument("--out", metavar="FOLDER", help="for the plot and the JSON files, made if need be")
    parser.add_argument("--target", type=float, metavar="BPP", help="compare at this rate in place of drawing curves")
    parser.add_argument("--refine", type=natural, default=0, metavar="N", help="also with N steps of refinement")
    parser.add_argument("--codecs", nargs="+", metavar="NAME", help="only these")
    add_limit(parser)
    add_codec(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.codec import rd
    from finola.files import check_folder
    from finola.provenance import record

    if args.target is None and not args.out:
        raise RecipeError("--out: missing; name a folder for the curves, or give --target")
    if args.target is not None and not args.target > 0:
        raise RecipeError(f"--target: got {args.target}, expected more than 0 bit per pixel")
    dataset, codec = open_limited([args.data], args.limit), open_codec(args)
    codecs = rd.choose([*rd.finola_codecs(codec, args.refine), *rd.classical_codecs()], args.codecs)
    source = record(codec.device, {"data": Path(args.data).resolve().name, "images": len(dataset),
                                   "weights_id": codec.calibration.weights_id})
    if args.target is None:
        check_folder(args.out)
        _curves(args, codecs, dataset, source)
    else:
        _table(args, codecs, dataset, source)


def _curves(args: argparse.Namespace, codecs: list[ImageCodec], dataset: ImageDataset, source: dict) -> None:
    from finola.codec import rd

    def measure_all(codec: ImageCodec, image: Image.Image) -> list[Point]:
        return [rd.measure(codec, image, setting) for setting in codec.settings]

    points = _for_all(args, codecs, dataset, measure_all)
    curves = {name: [rd.mean_point(column) for column in zip(*rows, strict=True)] for name, rows in points.items()}
    rates = {name: rd.bd_rate(curves["jpeg"], curve) for name, curve in curves.items()} if "jpeg" in curves else {}
    out = Path(args.out)
    for codec in codecs:
        _write_json(out / f"{codec.name}.json", rd.to_compressai(
            codec, curves[codec.name], {**source, "bd_rate_against_jpeg": rates.get(codec.name)}))
    _write_plot(out / "rd.png", curves, f"{source['data']}, {source['images']} images")
    if args.json:
        print(json.dumps({"curves": curves, "bd_rate_against_jpeg": rates, **source}))
        return
    for name, curve in curves.items():
        for point in curve:
            print(_row(name, point))
    for name, rate in rates.items():
        if rate is None:
            print(f"{name:18} BD-rate against JPEG: no common PSNR")
        else:  # a mean over the PSNR that both have: those over different ranges are not to be compared
            shared = rd.shared_psnr(curves["jpeg"], curves[name])
            span = f", from {shared[0]:.1f} to {shared[1]:.1f} dB" if shared else ""
            print(f"{name:18} BD-rate against JPEG {rate:+.1f} %{span}")
    print(f"plot and JSON in {out}")


def _table(args: argparse.Namespace, codecs: list[ImageCodec], dataset: ImageDataset, source: dict) -> None:
    from finola.codec import rd

    points = _for_all(args, codecs, dataset, lambda codec, image: rd.at_most(codec, image, args.target))
    rows = {name: {**rd.mean_point(of), "above_target": sum(p.bpp > args.target for p in of)}
            for name, of in points.items()}
    report = {"target": args.target, "codecs": rows, **source}
    if args.out:
        _write_json(Path(args.out) / "target.json", report)
    if args.json:
        print(json.dumps(report))
        return
    for name, row in rows.items():
        note = f"  ({row['above_target']} images do not get so small)" if row["above_target"] else ""
        print(_row(name, row) + note)


def _for_all(
    args: argparse.Namespace,
    codecs: list[ImageCodec],
    dataset: ImageDataset,
    work: Callable[[ImageCodec, Image.Image], T],
) -> dict[str, list[T]]:
    """What `work` (codec, image) gives, by codec, for each image."""
    from tqdm import tqdm

    results: dict[str, list[T]] = {codec.name: [] for codec in codecs}
    with tqdm(total=len(dataset) * len(codecs), unit="run", disable=not sys.stderr.isatty() or args.json) as bar:
        for i in range(len(dataset)):
            image = dataset.load(i)
            for codec in codecs:
                bar.set_description(f"{Path(dataset.name(i)).name}, {codec.name}")
                results[codec.name].append(work(codec, image))
                bar.update()
    return results


def _row(name: str, point: dict) -> str:
    similarity = "" if point["ms_ssim"] is None else f"  MS-SSIM {point['ms_ssim']:.4f}"
    return (f"{name:18} at {point['setting']:6.2f}  {point['bpp']:.4f} bpp  {point['psnr']:.2f} dB{similarity}  "
            f"{point['encoding_time']:.2f} s + {point['decoding_time']:.2f} s")


def _write_json(path: Path, report: dict) -> None:
    from finola.files import atomic_write

    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n")


def _write_plot(path: Path, curves: dict, title: str) -> None:
    from finola.codec import rd
    from finola.files import atomic_write

    with atomic_write(path) as temporary:
        rd.plot(curves, title, temporary)
