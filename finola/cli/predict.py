"""`finola predict`: the most likely classes of photographs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.images import as_errors, find_images, name_panels, raise_worst, tell
from finola.cli.options import SOURCES, Subparsers, add_crop_pct, add_device, open_weights, positive
from finola.errors import DataError, FinolaError

if TYPE_CHECKING:
    from torch import Tensor

    from finola.inference.classify import Prediction
    from finola.models.classifier import Classifier

EXAMPLE = """examples:
  finola predict photo.jpg --weights runs/mine/weights.safetensors
  finola predict holidays "scans/*.tif" --weights W --top 3 --out charts

The shorter side of each image is resized to the model's size over --crop-pct (224 px: to 256), and the centre
square of the model's size is classified, as in `finola eval`. The charts are PNG files named after the images:
the image, and a bar for each class. An image that cannot be decoded is reported and left out; the exit code is
then 3. `finola probe` and `finola finetune` make classifiers."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "predict",
        help="name what is on photographs",
        description="Classify photographs of any size and print the most likely classes of each.",
        epilog=EXAMPLE,
    )
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders or patterns")
    parser.add_argument("--weights", metavar="FILE", help=f"a classifier's weights: {SOURCES}")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="classes for each image (%(default)s)")
    parser.add_argument("--out", metavar="DIR", help="write a chart for each image; made if need be")
    add_crop_pct(parser)
    parser.add_argument("--batch-size", type=positive, default=16, metavar="N", help="images at once (%(default)s)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print a report for machines, no progress bar")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.inference.classify import require_classifier

    paths, faults = find_images(args.images)
    charts = name_panels(paths, Path(args.out)) if args.out else {}
    model = open_weights(args, require_classifier)
    results, errors = _predict_all(args, model, paths, charts, faults)
    if args.json:
        print(json.dumps({"images": results, "failed": [str(error) for error in errors]}))
    if errors:
        raise_worst(errors, len(results))


def _predict_all(
    args: argparse.Namespace, model: Classifier, paths: list[Path], charts: dict[Path, Path], faults: list[str]
) -> tuple[list[dict], list[FinolaError]]:
    """As `go_through`, batch after batch."""
    import torch
    from tqdm import tqdm

    from finola.inference.classify import predict_squares

    results: list[dict] = []
    total = len(paths) + len(faults)
    errors = as_errors(faults, total)
    crop_pct = args.crop_pct or model.config.crop_pct
    with tqdm(total=len(paths), unit="image", disable=args.json or not sys.stderr.isatty()) as bar:
        for first in range(0, len(paths), args.batch_size):
            batch = paths[first : first + args.batch_size]
            squares = _load_squares(batch, model.config.image_size, crop_pct, errors, total)
            if squares:
                predicted = predict_squares(model, torch.stack(list(squares.values())), args.top)
                results += [_report(args, path, best, charts) for path, best in zip(squares, predicted, strict=True)]
            bar.update(len(batch))
    return results, errors


def _load_squares(
    paths: list[Path], size: int, crop_pct: float, errors: list[FinolaError], total: int
) -> dict[Path, Tensor]:
    """The squares of the images that can be decoded; what is wrong with the others is told and put in `errors`."""
    from finola.data.images import load_square

    squares = {}
    for path in paths:
        try:
            squares[path] = load_square(path, size, crop_pct)
        except DataError as error:
            errors.append(tell(error, total))
    return squares


def _report(
    args: argparse.Namespace, path: Path, predictions: list[Prediction], charts: dict[Path, Path]
) -> dict:
    """Write the chart of one image if asked, print its classes, and return them for the JSON."""
    from tqdm import tqdm

    from finola.files import atomic_write
    from finola.inference.classify import chart

    if path in charts:
        with atomic_write(charts[path]) as temporary:
            chart(path, predictions).save(temporary, format="png")
    if not args.json:
        tqdm.write(f"{path}: {', '.join(map(str, predictions))}")
    rows = [{"class": p.label, "name": p.name, "probability": p.probability} for p in predictions]
    return {"file": str(path), "predictions": rows}
