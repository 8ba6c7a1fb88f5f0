"""`finola detect`: train a detector, score it, and find the objects on photographs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli import train
from finola.cli.images import find_images, go_through, name_panels, raise_worst
from finola.cli.options import (
    SOURCES,
    Subparsers,
    add_device,
    add_limit,
    add_workers,
    open_weights,
    positive,
    weights_identity,
    weights_path,
)
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.detection.coco import CocoDetection
    from finola.detection.detector import Detector
    from finola.detection.evaluation import Evaluation
    from finola.training.recipe import Recipe

EXAMPLE = """examples:
  finola detect train coco128/finetuned_default --data coco128/annotations/instances_train2017.json
  finola detect eval runs/coco128/finetuned_default/weights.safetensors --data annotations.json photos --out scores
  finola detect predict holidays --weights W --out found

`finola detect COMMAND --help` says more of each."""

TRAIN = """examples:
  finola detect train --list
  finola detect train coco/frozen_522_w2880_finola --data coco/annotations/instances_train2017.json \\
      --val coco/annotations/instances_val2017.json --weights pretrained.safetensors
  finola detect train coco/finetuned_522_w2880_finola --weights runs/coco/frozen_522_w2880_finola/weights.safetensors \\
      --data coco/annotations/instances_train2017.json --val coco/annotations/instances_val2017.json
  finola detect train coco128/finetuned_default --data mine.json photos --weights coco.safetensors --num-classes 3

--data and --val: an annotation file in COCO's format and, unless it lies in the standard place, the folder of its
images. The class names are read from it. --weights: the encoder of any model, or a detector to train further; for
other classes say --num-classes (a new last layer) or --new-head (the encoder alone). Every key of a recipe can be
overridden by --SECTION.KEY VALUE; --print-recipe shows them all. SIGTERM, Ctrl-C and --max-time as in finola train."""

EVAL = """examples:
  finola detect eval runs/mine/weights.safetensors --data coco/annotations/instances_val2017.json
  finola detect eval W --data mine.json photos --out scores --json

Average precision (AP) is COCO's: the mean over the classes and over the overlaps 0.50, 0.55, ... 0.95, of at most
100 objects in an image; printed in %, in JSON from 0 to 1 and for each class too. --out receives scores.json,
detections.json (COCO's results format) and panel.png. Latency is the time of the detector alone, a batch at once."""

PREDICT = """examples:
  finola detect predict photo.jpg --weights runs/mine/weights.safetensors --out found
  finola detect predict holidays "scans/*.tif" --weights W --out found --threshold 0.3

Writes each image with boxes, names, scores and masks as a PNG file, and detections.json in COCO's results format
(image_id counts the images from 1, file_name says which). An image that cannot be decoded is reported and left
out; the exit code is then 3."""

SHOWN_CLASSES = 20  # with more, the scores of each class are in the JSON alone


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "detect", help="train, score and use object detectors", description=__doc__, epilog=EXAMPLE)
    commands = parser.add_subparsers(dest="detect_command", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_eval(commands)
    _add_predict(commands)
    for sub in commands.choices.values():
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show an error's traceback")
    return parser


def run(args: argparse.Namespace) -> None:
    {"train": _train, "eval": _eval, "predict": _predict}[args.detect_command](args)


# train --------------------------------------------------------------------------------------------


def _add_train(commands: Subparsers) -> None:
    parser = commands.add_parser("train", help="train a detector by a recipe", description="Train a detector.",
                                 epilog=TRAIN)
    train.add_options(parser, "FILE", "annotations in COCO's format, and perhaps the folder of their images",
                      "the same for validation",
                      f"start from these weights, or from their encoder: {SOURCES}")


def _train(args: argparse.Namespace) -> None:
    train.run(args, _check)


def _check(recipe: Recipe) -> None:
    if recipe.model_config().score != "objects":
        raise RecipeError(f"{recipe.name}: is no recipe for a detector; finola detect train --list names some")


# eval ---------------------------------------------------------------------------------------------


def _add_eval(commands: Subparsers) -> None:
    parser = commands.add_parser("eval", help="score a detector", description="COCO's average precision of a detector.",
                                 epilog=EVAL)
    parser.add_argument("weights", metavar="WEIGHTS", help=f"a detector's weights: {SOURCES}")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE [DIR]",
                        help="annotations in COCO's format, and the folder of their images")
    add_limit(parser)
    parser.add_argument("--batch-size", type=positive, default=1, metavar="N", help="(%(default)s)")
    add_workers(parser)
    parser.add_argument("--out", metavar="DIR", help="for scores.json, detections.json and panel.png")
    parser.add_argument("--json", action="store_true", help="print the scores as JSON, no progress bar")
    add_device(parser)


def _eval(args: argparse.Namespace) -> None:
    from finola.detection.coco import open_coco
    from finola.detection.detector import require_detector
    from finola.detection.evaluation import evaluate
    from finola.files import check_folder

    model = open_weights(args, require_detector)
    out = check_folder(args.out) if args.out else None
    dataset = open_coco(args.data, limit=args.limit)
    evaluation = evaluate(model, dataset, batch_size=args.batch_size, num_workers=args.workers,
                          progress=sys.stderr.isatty() and not args.json)
    report = _report(args, model, dataset, evaluation)
    if args.json:
        print(json.dumps(report))
    else:
        _print_scores(report)
    if out:
        _write_evaluation(out, model, dataset, evaluation.results, report)


def _report(args: argparse.Namespace, model: Detector, dataset: CocoDetection, evaluation: Evaluation) -> dict:
    from finola.provenance import record

    return record(model.mean.device, {
        **weights_identity(weights_path(args), model.config),
        "data": dataset.source, "images": len(dataset), **evaluation.scores,
        "batch_size": args.batch_size, "latency_ms": evaluation.latency_ms,
        "images_per_second": evaluation.images_per_second, "peak_memory": evaluation.peak_memory,
    })


def _print_scores(report: dict) -> None:
    print(f"{report['weights']}: {report['images']} images of {report['data']}; average precision in %")
    for what in ("box", "mask"):
        if f"{what}_ap" not in report:
            continue
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar_100")
        print(f"{what:5}" + "".join(f"  {name} {_percent(report[f'{what}_{name}'])}" for name in names))
    for what in ("box", "mask"):
        of_class = report.get(f"{what}_ap_per_class", {})
        if 1 < len(of_class) <= SHOWN_CLASSES:
            print(f"{what:5}" + "".join(f"  {name} {_percent(ap)}" for name, ap in of_class.items()))
    print(f"{report['latency_ms']:.0f} ms for a batch of {report['batch_size']}, {report['images_per_second']:.2f} "
          f"images/s, on {report['hardware']}")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _write_evaluation(
    out: Path, model: Detector, dataset: CocoDetection, results: list[dict], report: dict
) -> None:
    from finola.data.datasets import spread
    from finola.detection.drawing import beside_truth, grid
    from finola.detection.predict import detect
    from finola.drawing import PANEL_IMAGES
    from finola.files import atomic_write, write_json

    for name, content in (("scores.json", report), ("detections.json", results)):
        write_json(out / name, content, indent=None)
    pairs = []
    for i in spread(len(dataset), PANEL_IMAGES).tolist():
        image, truth = dataset.load(i), dataset.target(i, model.config.masks)
        pairs.append(beside_truth(image, truth, detect(model, image, 0), model.config.classes))
    with atomic_write(out / "panel.png") as temporary:
        grid(pairs, columns=2).save(temporary, format="png")


# predict ------------------------------------------------------------------------------------------


def _add_predict(commands: Subparsers) -> None:
    parser = commands.add_parser("predict", help="find the objects on photographs",
                                 description="Find the objects on photographs of any size.", epilog=PREDICT)
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders or patterns")
    parser.add_argument("--weights", metavar="FILE", help=f"a detector's weights: {SOURCES}")
    parser.add_argument("--out", required=True, metavar="DIR", help="for the drawn images and detections.json")
    parser.add_argument("--threshold", type=_share, default=0.5, metavar="P",
                        help="the least score of an object, 0 to 1 (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the objects as JSON, no progress bar")
    add_device(parser)


def _predict(args: argparse.Namespace) -> None:
    from finola.detection.detector import require_detector
    from finola.files import write_json

    paths, faults = find_images(args.images)
    drawn = name_panels(paths, Path(args.out))
    model = open_weights(args, require_detector)
    numbers = {path: number for number, path in enumerate(paths, start=1)}

    def work(path: Path, target: Path) -> list[dict]:
        return _predict_one(args, model, path, numbers[path], target)

    found, errors = go_through(drawn, work, faults, sys.stderr.isatty() and not args.json)
    results = [detection for image in found for detection in image]
    write_json(Path(args.out) / "detections.json", results, indent=None)
    if args.json:
        print(json.dumps({"detections": results, "failed": [str(error) for error in errors]}))
    if errors:
        raise_worst(errors, len(found))


def _predict_one(args: argparse.Namespace, model: Detector, path: Path, number: int, target: Path) -> list[dict]:
    """Draw one image, print a line, and return what was found on it in COCO's results format."""
    from tqdm import tqdm

    from finola.data.images import upright_rgb
    from finola.detection.detector import class_names
    from finola.detection.drawing import draw, listed, told
    from finola.detection.predict import detect
    from finola.detection.scores import coco_results
    from finola.files import atomic_write

    image, config = upright_rgb(path), model.config
    found = detect(model, image, 0)
    nothing = told(found, config.classes, args.threshold)
    keep = found["scores"] >= args.threshold
    found = {name: value[keep] for name, value in found.items() if name != "names"}
    with atomic_write(target) as temporary:
        draw(image, found, config.classes, args.threshold).save(temporary, format="png")
    names = class_names(found["labels"], config.classes)
    if not args.json:
        tqdm.write(f"{path}: {listed(names, found['scores'].tolist()) or nothing}")
    rows = coco_results(found, number, config.category_ids or tuple(range(config.num_classes)))
    return [{**row, "file_name": str(path), "category": name} for row, name in zip(rows, names, strict=True)]


def _share(text: str) -> float:
    """A number between 0 and 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return value
