"""What `finola eval` measures, by the kind of model: its reconstructions, its predictions of masked patches, its
classes, or what its encoder's features tell of the classes.

Each measure is a function (args, model, dataset, progress) -> Measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from finola.errors import RecipeError

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from finola.data.datasets import ImageDataset
    from finola.data.loader import Batch
    from finola.evaluation.reconstruction import Code, Examples
    from finola.models.autoencoder import FinolaAutoencoder
    from finola.models.base import ImageModel, ModelConfig
    from finola.models.classifier import Classifier
    from finola.models.masked import MaskedImageModel


class Measured(NamedTuple):
    """Attributes:
        fields: what the measure adds to the result's JSON.
        table: the same for people, lines of text.
        note: what the numbers of the table are.
        panel: draws the image of --panel.
    """

    fields: dict
    table: list[str]
    note: str
    panel: Callable[[], Image.Image] | None = None


def choose(args: argparse.Namespace, config: ModelConfig) -> Callable[..., Measured]:
    """The measure for a model and the options; RecipeError where they do not go together."""
    if config.score == "objects":
        raise RecipeError(f"{args.model}: is a detector; finola detect eval scores it")
    if args.knn:
        if not args.train:
            raise RecipeError("--knn: needs --train, labelled images among which to look for neighbours")
        _refuse(args, "--knn", "baselines", "panel")
        return neighbours
    if config.score is None:
        raise RecipeError(f"{args.model}: a {config.kind} model has no score but its encoder's; add --knn --train DIR")
    if config.score != "reconstruction":
        _refuse(args, f"a model of kind {config.kind!r}", "baselines")
    measures: dict[str, Callable[..., Measured]] = {
        "reconstruction": reconstructions, "classes": classes, "masked": masked_patches}
    return measures[config.score]


def _refuse(args: argparse.Namespace, what: str, *options: str) -> None:
    for option in options:
        if getattr(args, option):
            raise RecipeError(f"--{option}: does not go together with {what}; leave it out")


# --- the measures ------------------------------------------------------------------------------------------


def reconstructions(
    args: argparse.Namespace, model: FinolaAutoencoder, dataset: ImageDataset, progress: bool
) -> Measured:
    """PSNR and SSIM of an autoencoder, beside those of linear codes if asked."""
    from finola.evaluation.reconstruction import evaluate

    codes: dict[str, tuple[int, Code]] = {"model": (model.config.embed_dim, model)}
    linear, left_out = _baselines(args, model, progress)
    codes |= linear
    batches = squares(args, dataset, model)
    scores, examples = evaluate({name: code for name, (_, code) in codes.items()}, batches, len(dataset), progress)
    rows = [{"code": name, "numbers": codes[name][0], **score.means()} for name, score in scores.items()]
    table = [f"{'code':25}{'numbers':>8}{'PSNR':>8}{'pooled':>8}{'8-bit':>8}{'SSIM':>8}{'images/s':>10}"]
    table += [
        f"{row['code']:25}{row['numbers']:8}{row['psnr']:8.3f}{row['psnr_pooled']:8.3f}"
        f"{row['psnr_8bit']:8.3f}{row['ssim']:8.4f}{row['images_per_second']:10.1f}"
        for row in rows
    ]
    note = "\n".join([*left_out, "PSNR in dB; images/s of the code alone"])
    fields = {"pca_fitted_to": args.train if "PCA" in codes else None, "left_out": left_out, "scores": rows}
    return Measured(fields, table, note, lambda: reconstruction_panel(examples))


def classes(args: argparse.Namespace, model: Classifier, dataset: ImageDataset, progress: bool) -> Measured:
    """Accuracies of a classifier."""
    from finola.drawing import confusion
    from finola.evaluation.classification import evaluate_classifier, require_classes
    from finola.inference.classify import readable_names

    require_classes(dataset, model.config, args.model)
    batches = squares(args, dataset, model, progress)
    accuracy = evaluate_classifier(model, model.config.num_classes, batches)
    scores = accuracy.means()
    columns = {"top-1": "top1", "top-5": "top5", "mean per class": "mean_per_class", "images/s": "images_per_second"}
    shown = {name: scores[key] for name, key in columns.items() if key in scores}
    table = ["".join(f"{name:>16}" for name in shown), "".join(f"{value:16.2f}" for value in shown.values())]
    note = f"{_chance(model.config.num_classes)}; accuracies in percent; images/s of the model alone"
    fields = {"kind": model.config.kind, "chance": 100 / model.config.num_classes, "scores": scores}
    return Measured(fields, table, note, lambda: confusion(accuracy.confusion, readable_names(dataset.classes)))


def masked_patches(
    args: argparse.Namespace, model: MaskedImageModel, dataset: ImageDataset, progress: bool
) -> Measured:
    """PSNR of what a masked image model predicts."""
    from finola.evaluation.masked import MASK_SEED, evaluate_masked

    result = evaluate_masked(model, squares(args, dataset, model, progress), len(dataset))
    scores = result.means()
    table = [
        f"{'PSNR masked':>12}{'PSNR whole':>12}{'images/s':>10}",
        f"{scores['psnr']:12.3f}{scores['psnr_whole']:12.3f}{scores['images_per_second']:10.1f}",
    ]
    note = (
        f"PSNR in dB of the masked region and of the whole image, masks drawn for batches of {args.batch_size}; "
        "images/s of the model alone"
    )
    masks = {"seed": MASK_SEED, "batch_size": args.batch_size}
    fields = {"kind": model.config.kind, "masks": masks, "scores": scores}
    return Measured(fields, table, note, lambda: _masked_panel(result.rows))


def neighbours(args: argparse.Namespace, model: ImageModel, dataset: ImageDataset, progress: bool) -> Measured:
    """k-NN accuracy of any model's encoder."""
    from finola.data import check_same_classes, open_data
    from finola.data.datasets import require_labels
    from finola.evaluation.neighbours import NEIGHBOURS, neighbours_accuracy

    train = open_data(args.train)
    require_labels(train)
    require_labels(dataset)
    check_same_classes(train, dataset)
    known, queries = squares(args, train, model, progress, "training images"), squares(args, dataset, model, progress)
    top1 = neighbours_accuracy(model, known, queries, len(train.classes))
    fields = {
        "kind": model.config.kind,
        "chance": 100 / len(train.classes),
        "neighbours": {"k": NEIGHBOURS, "train": args.train, "images": len(train)},
        "scores": {"knn_top1": top1},
    }
    table = [f"{'k-NN top-1':>10}", f"{top1:10.2f}"]
    note = f"{_chance(len(train.classes))}; "
    note += f"votes of the {NEIGHBOURS} nearest of {len(train)} images of {train.source}; accuracy in percent"
    return Measured(fields, table, note)


# --- what they share ---------------------------------------------------------------------------------------


def _chance(classes: int) -> str:
    return f"a guess among {classes} classes is right in {100 / classes:.2f} %"


def result_of(
    args: argparse.Namespace, device: torch.device, identity: dict[str, Any], size: int, images: int, fields: dict
) -> dict[str, Any]:
    """The result as it is printed and written."""
    from finola.provenance import record

    return record(device, {
        **identity,
        "data": args.data,
        "images": images,
        "preprocessing": {"size": size, "shorter_side": f"antialiased {args.resample}", "crop": "centre",
                          "crop_pct": args.crop_pct},
        **fields,
    })


def squares(
    args: argparse.Namespace, dataset: ImageDataset, model: ImageModel, progress: bool = False, bar: str = "evaluating"
) -> Iterable[Batch]:
    """Batches of centre squares of the model's size on its device, with a bar of that name if `progress`."""
    return squares_of(args, dataset, model.config.image_size, next(model.parameters()).device, progress, bar)


def squares_of(
    args: argparse.Namespace, dataset: ImageDataset, size: int, device: torch.device, progress: bool = False,
    bar: str = "evaluating",
) -> Iterable[Batch]:
    """Batches of centre squares of `size` pixels on a device."""
    from tqdm import tqdm

    from finola.data.loader import read_squares

    batches = read_squares(
        dataset,
        size,
        batch_size=args.batch_size,
        workers=args.workers,
        device=device,
        crop_pct=getattr(args, "crop_pct", 1.0),  # `finola inspect` has no such option
        resample=args.resample,
    )
    total = -(-len(dataset) // args.batch_size)
    return tqdm(batches, bar, total, unit="batch", disable=not progress)


def _baselines(
    args: argparse.Namespace, model: FinolaAutoencoder, progress: bool
) -> tuple[dict[str, tuple[int, Code]], list[str]]:
    """The linear codes of --baselines, and a line for each that is left out."""
    from finola.data import open_data
    from finola.evaluation.linear_codes import baselines

    numbers, size = model.config.embed_dim, model.config.image_size
    if not args.baselines:
        return {}, []
    if not args.train:
        return baselines(numbers, size, None), ["PCA left out: it needs --train"]
    train = open_data(args.train)
    if len(train) <= numbers:
        reason = f"{numbers} components need at least {numbers + 1} images in --train, got {len(train)}"
        return baselines(numbers, size, None), [f"PCA left out: {reason}"]
    batches = (batch["image"] for batch in squares(args, train, model, progress, "PCA"))
    return baselines(numbers, size, batches), []


def reconstruction_panel(examples: Examples) -> Image.Image:
    import torch

    from finola.drawing import panel

    count = len(examples.originals)
    rows = [torch.stack(row) for row in (examples.originals, *examples.rows.values())]
    captions = [[""] * count] + [[f"{score:.2f} dB" for score in scores] for scores in examples.psnr.values()]
    return panel(rows, ["original", *examples.rows], captions)


def _masked_panel(rows: list[tuple[Tensor, Tensor, Tensor]]) -> Image.Image:
    import torch

    from finola.drawing import panel

    return panel([torch.stack(row) for row in zip(*rows, strict=True)], ["visible", "prediction", "original"])
