"""Do pre-trained encoders detect better? People in coco128, found in pictures that were not trained on.

    python benchmarks/transfer.py --coco coco128 --encoders untrained=a.safetensors FINOLA=b.safetensors \\
        --out runs/transfer

128 pictures make two folds: a detector (by the recipe: DETR with a small Mobile-Former decoder, pictures of at most
128 px) is trained on each half, with the encoder frozen and with it fine-tuned, and scored on the other. People alone,
since no other class is in a quarter of the pictures. OUT/transfer.json holds box AP and AP50 of both folds, in %.
Finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from selfsupervised import call, has_finished

from finola.cli.options import positive
from finola.files import write_json
from finola.provenance import record
from finola.training.report import markdown_table

MODES = {"frozen": "true", "fine-tuned": "false"}  # -> optim.freeze_encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coco", type=Path, required=True, metavar="DIR", help="the folder of coco128")
    parser.add_argument("--encoders", nargs="+", required=True, metavar="NAME=FILE", help="weights to start from")
    parser.add_argument("--recipe", default="coco128/finetuned_default", help="of the detector (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=100, help="of each training (%(default)s)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    annotations = args.coco / "annotations" / "instances_train2017.json"
    halves = write_folds(json.loads(annotations.read_text()), args.out)
    rows = []
    for encoder in args.encoders:
        name, _, weights = encoder.partition("=")
        for mode in MODES:
            folds = [run(args, halves[1 - fold], halves[fold], weights, mode, args.out / name / f"{mode}{fold}")
                     for fold in (0, 1)]
            rows.append({"encoder": name, "mode": mode, "folds": folds})
            found = record(torch.device("cpu"), {"recipe": args.recipe, "epochs": args.epochs, "detectors": rows})
            write_json(args.out / "transfer.json", found)
    print("\n".join(markdown_table(cells(found))))


def write_folds(coco: dict[str, Any], out: Path, category: str = "person") -> list[Path]:
    """The annotations of every other picture, of one category, in two files."""
    (kept,) = (row for row in coco["categories"] if row["name"] == category)
    out.mkdir(parents=True, exist_ok=True)
    files = []
    for fold in (0, 1):
        images = sorted(coco["images"], key=lambda image: image["id"])[fold::2]
        chosen = {image["id"] for image in images}
        boxes = [a for a in coco["annotations"] if a["image_id"] in chosen and a["category_id"] == kept["id"]]
        write_json(out / f"fold{fold}.json", {"images": images, "annotations": boxes, "categories": [kept]})
        files.append(out / f"fold{fold}.json")
    return files


def run(args: argparse.Namespace, train: Path, val: Path, weights: str, mode: str, out: Path) -> dict[str, float]:
    """One detector, trained to its end unless it has been; its scores on the other half."""
    if not has_finished(out):
        images, epochs = args.coco / "train2017", str(args.epochs)
        call("detect", "train", args.recipe, "--data", train, images, "--val", val, images,
             "--weights", weights, "--out", out, "--resume", "--data.hflip", "true", "--optim.freeze_encoder",
             MODES[mode], "--optim.epochs", epochs, "--trainer.val_every", epochs)
    result = json.loads((out / "result.json").read_text())
    last = result["history"][-1]
    return {"box_ap": last["val_box_ap"], "box_ap50": last["val_box_ap50"], "hours": result["seconds"] / 3600}


def cells(found: dict[str, Any]) -> list[list[str]]:
    """Head and rows: encoder | frozen or not | each score: mean (fold, fold) | hours of both."""
    def cell(folds: list[dict[str, float]], score: str) -> str:
        values = [fold[score] for fold in folds]
        return f"{statistics.fmean(values):.1f} ({', '.join(f'{value:.1f}' for value in values)})"

    return [["encoder", "in training", "box AP (folds)", "AP50 (folds)", "hours"],
            *([row["encoder"], row["mode"], cell(row["folds"], "box_ap"), cell(row["folds"], "box_ap50"),
               f"{sum(fold['hours'] for fold in row['folds']):.1f}"] for row in found["detectors"])]


if __name__ == "__main__":
    main()
