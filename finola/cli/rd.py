"""`finola rd`: rate and distortion of the codec, beside JPEG, WebP, JPEG 2000 and AVIF."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finola.cli.compress import add_codec, open_codec
from finola.cli.options import Subparsers, add_limit, natural, open_limited, positive
from finola.errors import DataError, RecipeError
from finola.files import atomic_write, check_folder, write_json

if TYPE_CHECKING:
    from finola.codec.competitors import ImageCodec
    from finola.codec.literature import Reported
    from finola.data.datasets import ImageDataset

WRITE_READ = "write + read, s"  # the head of a column: seconds for an image
SAME_IMAGES = ("data", "images", "crop")  # results that have these in common belong together

EXAMPLE = """examples:
  finola rd kodak --out rd --literature                   a curve of each codec: plot, JSON, BD-rate against JPEG
  finola rd kodak --out rd --limit 4 --codecs finola jpeg
  finola rd kodak --target 0.19 0.5                       each codec at these rates: the paper's table
  finola rd imagenet/val --crop 256 --limit 100 --target 0.19 0.5

What codecs make of one rate is compared in two ways. "fixed": every image at one setting, means over the images,
interpolated in the logarithm of the rate between the settings below and above. "per image": each image at its
highest setting below the rate, interpolated for each image between that and the next; and as it is ("below").

Rates count whole files, or with --count payload the coded data without headers and tables; both are printed. The
paper's own mode is finola-paper at 4 bits. The JSON files of curves have the form of CompressAI's results. What earlier
runs on the same images left in the folder is taken in: curves into the plot, rows into the table of --target."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "rd",
        help="rate and distortion beside JPEG, WebP, JPEG 2000 and AVIF",
        description="Rate and distortion of the codec and of Pillow's, on a folder of images.",
        epilog=EXAMPLE,
    )
    parser.add_argument("data", metavar="DIR", help="a folder of images, best never compressed before")
    parser.add_argument("--out", metavar="FOLDER", help="for the plot and the JSON files, made if need be")
    parser.add_argument("--target", type=float, nargs="+", metavar="BPP",
                        help="compare at these rates in place of drawing curves")
    parser.add_argument("--count", choices=("file", "payload"), default="file",
                        help="what the rate of --target counts (%(default)s)")
    parser.add_argument("--crop", type=positive, metavar="N",
                        help="take squares of N pixels: shorter side resized, centre cut out, as finola eval does")
    parser.add_argument("--literature", action="store_true",
                        help="with what papers report beside it; for the 24 Kodak images alone")
    parser.add_argument("--refine", nargs="+", type=natural, default=[], metavar="N",
                        help="also with N steps of refinement: a codec finola-refineN for each N")
    parser.add_argument("--codecs", nargs="+", metavar="NAME", help="only these")
    add_limit(parser)
    add_codec(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.codec import rd
    from finola.codec.competitors import classical_codecs
    from finola.provenance import record

    if args.target is None and not args.out:
        raise RecipeError("--out: missing; name a folder for the curves, or give --target")
    if wrong := [rate for rate in args.target or () if not 0 < rate < float("inf")]:
        raise RecipeError(f"--target: got {wrong[0]}, expected more than 0 bit per pixel")
    if args.out:
        check_folder(args.out)
    dataset, codec = _open_images(args), open_codec(args)
    reported = _reported(dataset) if args.literature else ()
    codecs = rd.choose([*rd.finola_codecs(codec, args.refine), *classical_codecs()], args.codecs)
    source = record(codec.device, {"data": Path(args.data).resolve().name, "images": len(dataset), "crop": args.crop,
                                   "weights_id": codec.calibration.weights_id})
    if args.target is None:
        _curves(args, codecs, dataset, source, reported)
    else:
        _table(args, codecs, dataset, source, reported)


def _open_images(args: argparse.Namespace) -> ImageDataset:
    from finola.data.datasets import Squares

    dataset = open_limited([args.data], args.limit)
    return Squares(dataset, args.crop) if args.crop else dataset


def _reported(dataset: ImageDataset) -> Sequence[Reported]:
    """What papers report of Kodak; DataError where the images are not those."""
    from finola.codec.literature import IMAGES, KODAK, SIZES

    sizes = {dataset.load(i).size for i in range(len(dataset))} if len(dataset) == IMAGES else set()
    if not sizes or not sizes <= set(SIZES):
        raise DataError(f"--literature: its figures are for Kodak's {IMAGES} whole images of 768x512 pixels, got "
                        f"{len(dataset)} images of {dataset.source}; leave it out")
    return KODAK


# --- curves ------------------------------------------------------------------------------------------------


def _curves(args: argparse.Namespace, codecs: list[ImageCodec], dataset: ImageDataset, source: dict,
            reported: Sequence[Reported]) -> None:
    from finola.codec import rd

    out = Path(args.out)
    curves = _measure_curves(args, codecs, dataset)
    known = {**_stored_curves(out, source), **curves}
    rates = {name: rd.bd_rate(known["jpeg"], curve) for name, curve in curves.items()} if "jpeg" in known else {}
    for codec in codecs:
        write_json(out / f"{codec.name}.json", rd.to_compressai(
            codec, curves[codec.name], {**source, "bd_rate_against_jpeg": rates.get(codec.name)}))
    _write_plot(out / "rd.png", known, f"{source['data']}, {source['images']} images", reported)
    if args.json:
        print(json.dumps({"curves": curves, "bd_rate_against_jpeg": rates, **source}))
        return
    print("means over the images; a setting is a quality, a factor or bits of a number, as the codec has it")
    print(f"{'codec':18}{'setting':>8}{'bpp':>9}{'payloads':>10}{'PSNR, dB':>10}{'MS-SSIM':>9}{WRITE_READ:>18}")
    for name, curve in curves.items():
        for point in curve:
            print(f"{name:18}{point['setting']:8g}{point['bpp']:9.4f}{point['payload_bpp']:10.4f}{point['psnr']:10.2f}"
                  f"{_number(point['ms_ssim'], 4):>9}{_seconds(point):>18}")
    for name, rate in rates.items():
        if rate is None:
            print(f"{name:18} BD-rate against JPEG: no common PSNR")
        else:  # a mean over the PSNR that both have: those over different ranges are not to be compared
            shared = rd.shared_psnr(known["jpeg"], curves[name])
            span = f", from {shared[0]:.1f} to {shared[1]:.1f} dB" if shared else ""
            print(f"{name:18} BD-rate against JPEG {rate:+.1f} %{span}")
    _print_codecs(codecs)
    print(f"plot and JSON in {out}")


def _stored_curves(out: Path, source: dict) -> dict[str, list[dict]]:
    """The curves that earlier runs on the same images left in a folder; ours only of the same weights."""
    from finola.codec import rd

    curves = {}
    for path in sorted(out.glob("*.json")):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if _belongs(stored["name"], stored["record"], source):
                curves[stored["name"]] = rd.from_compressai(stored["results"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # another file: a table of rates, say
    return curves


def _belongs(codec: str, stored: dict, source: dict) -> bool:
    """Whether what a codec did in an earlier run holds for this one: on the same images, and, of a codec of ours, with
    the same weights."""
    keys = (*SAME_IMAGES, "weights_id") if codec.startswith("finola") else SAME_IMAGES
    return all(stored.get(key) == source[key] for key in keys)


def _measure_curves(args: argparse.Namespace, codecs: list[ImageCodec], dataset: ImageDataset) -> dict[str, list[dict]]:
    """Each codec's mean points at its settings."""
    from finola.codec import rd

    curves: dict[str, list[dict]] = {}
    with _bar(args, len(dataset) * len(codecs)) as bar:
        for codec in codecs:
            bar.set_description(codec.name)
            rows = []
            for i in range(len(dataset)):
                image = dataset.load(i)
                rows.append([rd.measure(codec, image, setting) for setting in codec.settings])
                bar.update()
            curves[codec.name] = [rd.mean_point(column) for column in zip(*rows, strict=True)]
    return curves


# --- rates -------------------------------------------------------------------------------------------------


def _table(args: argparse.Namespace, codecs: list[ImageCodec], dataset: ImageDataset, source: dict,
           reported: Sequence[Reported]) -> None:
    from finola.codec import rd

    path = Path(args.out or "", "target.json")
    report: dict[str, Any] = {"count": args.count, "targets": {f"{rate:g}": [] for rate in args.target},
                              "paper_mode": None, "literature": [row._asdict() for row in reported], **source}
    earlier = _stored_table(path, report) if args.out else None
    with _bar(args) as bar:  # how many trials a search takes is not known before
        for number, codec in enumerate(codecs, 1):
            trials = rd.Trials(codec, dataset.load, len(dataset), args.count, bar.update)
            for rate in args.target:
                bar.set_description(f"{codec.name} ({number} of {len(codecs)} codecs), {rate:g} bit per pixel")
                report["targets"][f"{rate:g}"].append({"codec": codec.name, "description": codec.description,
                                                       "commit": source["commit"], "fixed": trials.fixed(rate),
                                                       "per_image": trials.per_image(rate)})
            if codec.name == "finola-paper":
                report["paper_mode"] = trials.mean_point(rd.PAPER_BITS)
            if args.out:  # what is known so far: AVIF alone can take an hour
                write_json(path, _joined(earlier, report))
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report, reported)
        _print_codecs(codecs)


def _stored_table(path: Path, report: dict) -> dict | None:
    """What an earlier run on the same images, with the same count, left at a path: the rows that still hold."""
    try:
        stored: dict = json.loads(path.read_text(encoding="utf-8"))
        if stored["count"] != report["count"]:
            return None
        targets = {rate: [row for row in rows if _belongs(row["codec"], stored, report)]
                   for rate, rows in stored["targets"].items()}
        mode = stored["paper_mode"] if _belongs("finola-paper", stored, report) else None
        return {**stored, "targets": {rate: rows for rate, rows in targets.items() if rows}, "paper_mode": mode}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _joined(earlier: dict | None, report: dict) -> dict:
    """A table with the rows of an earlier one that it has not itself."""
    if earlier is None:
        return report
    targets = {}
    for rate in sorted({*earlier["targets"], *report["targets"]}, key=float):
        rows = report["targets"].get(rate, [])
        fresh = {row["codec"] for row in rows}
        targets[rate] = [row for row in earlier["targets"].get(rate, []) if row["codec"] not in fresh] + rows
    kept = {key: report[key] or earlier[key] for key in ("paper_mode", "literature")}
    return {**report, **kept, "targets": targets}


def _print_table(report: dict, reported: Sequence[Reported]) -> None:
    what = "whole files" if report["count"] == "file" else "payloads"
    for rate, rows in report["targets"].items():
        print(f"{rate} bit per pixel of {what}, {report['images']} images of {report['data']}")
        print(f"{'':18}{'PSNR at the rate, dB':>19}{'each image at its highest setting below the rate':>58}")
        print(f"{'codec':18}{'fixed':>8}{'per image':>11}{'bpp':>12}{'payloads':>10}{'PSNR, dB':>10}"
              f"{'MS-SSIM':>9}{WRITE_READ:>18}")
        for row in rows:
            print(_target_row(row))
        for paper in reported:
            if (psnr := paper.psnr.get(float(rate))) is not None:
                print(f"{paper.name:30}{psnr:6.2f} dB, reported ({paper.source})")
    if mode := report["paper_mode"]:
        print(f"the paper's mode, 4 bits a number: {mode['bpp']:.4f} bit per pixel of files, {mode['payload_bpp']:.4f}"
              f" of payloads, {mode['psnr']:.2f} dB, MS-SSIM {_number(mode['ms_ssim'], 4)}")


def _target_row(row: dict) -> str:
    fixed, single = row["fixed"], row["per_image"]
    chosen = single["chosen"]
    notes = {"above_target": "do not get so small, and count with their smallest file",
             "below_target": "do not get so large, and count with their largest file"}
    said = "".join(f"  ({single[key]} images {words})" for key, words in notes.items() if single[key])
    return (f"{row['codec']:18}{_number(fixed['psnr'], 2):>8}{_number(single['psnr'], 2):>11}"
            f"{chosen['bpp']:12.4f}{chosen['payload_bpp']:10.4f}{chosen['psnr']:10.2f}"
            f"{_number(chosen['ms_ssim'], 4):>9}{_seconds(chosen):>18}{said}")


# --- what they share ---------------------------------------------------------------------------------------


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _seconds(point: dict) -> str:
    return f"{point['encoding_time']:.2f} + {point['decoding_time']:.2f}"


def _print_codecs(codecs: Sequence[ImageCodec]) -> None:
    for codec in codecs:
        print(f"{codec.name}: {codec.description}")


def _bar(args: argparse.Namespace, total: int | None = None) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit="image", disable=not sys.stderr.isatty() or args.json)


def _write_plot(path: Path, curves: dict, title: str, reported: Sequence[Reported]) -> None:
    from finola.codec import rd

    with atomic_write(path) as temporary:
        rd.plot(curves, title, temporary, reported=reported)
