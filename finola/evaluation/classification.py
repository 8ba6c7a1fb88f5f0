"""How well a model knows the classes of a set of images: by its own head, or by its encoder's nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores

from finola.data.datasets import ImageDataset, require_labels
from finola.data.loader import Batch
from finola.errors import DataError
from finola.evaluation.speed import timed
from finola.models.classifier import ClassifierConfig

TOP = 5  # of top-5


def has_top5(num_classes: int) -> bool:
    """Whether top-5 accuracy says anything: of five classes or fewer, all are among the five likeliest."""
    return num_classes > TOP


@dataclass(frozen=True)
class ClassScores:
    """What a classifier of n classes got right.

    Attributes:
        confusion: (n, n) int64, images of class i taken for class j.
        top5: images whose class is among the five likeliest.
        seconds: spent on classifying, loading aside.
    """

    confusion: Tensor
    top5: int
    seconds: float

    def means(self) -> dict[str, float]:
        """Accuracies in percent: of all images, top-5 too where it says anything (`has_top5`), and the mean of each
        class's own over the classes with images."""
        images, right = self.confusion.sum(1), self.confusion.diagonal()  # (n,) each
        count, shown = images.sum().item(), images > 0
        return {
            "top1": 100 * right.sum().item() / count,
            **({"top5": 100 * self.top5 / count} if has_top5(len(self.confusion)) else {}),
            "mean_per_class": 100 * (right[shown] / images[shown]).double().mean().item(),
            "images_per_second": count / self.seconds,
        }


@torch.no_grad()
def evaluate_classifier(model: Callable[[Tensor], Tensor], num_classes: int, batches: Iterable[Batch]) -> ClassScores:
    """Classify all batches {"image": (B, 3, S, S), "label": (B,)}; a model must be in evaluation mode."""
    metrics = MetricCollection([
        MulticlassConfusionMatrix(num_classes),
        MulticlassStatScores(num_classes, top_k=min(TOP, num_classes), average="micro"),
    ])
    seconds = 0.0
    for batch in batches:
        logits, taken = timed(model, batch["image"])
        metrics.to(logits.device).update(logits, batch["label"])
        seconds += taken
    found = metrics.cpu().compute()
    return ClassScores(found["MulticlassConfusionMatrix"], int(found["MulticlassStatScores"][0]), seconds)


def require_classes(dataset: ImageDataset, config: ClassifierConfig, weights: str) -> None:
    """Raise DataError unless the classes of a data set are those of a classifier, in the same order.

    Where the weights name no classes, their number is compared."""
    require_labels(dataset)
    theirs, ours = list(config.classes), list(dataset.classes)
    if len(ours) == config.num_classes and theirs in ([], ours):
        return
    counts = f"{len(ours)} classes in {dataset.source}, {config.num_classes} in {weights}"
    first = next(((a, b) for a, b in zip_longest(ours, theirs) if a != b), None) if theirs else None
    names = "; the first that differ: {} and {}".format(*(name or "none" for name in first)) if first else ""
    raise DataError(f"{counts}{names}; take data with the weights' classes, or "
                    "finetune the weights to these with finola finetune")
