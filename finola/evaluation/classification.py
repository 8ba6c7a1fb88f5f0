"""How well a model knows the classes of a set of images: by its own head, or by its encoder's nearest neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest

import torch
from torch import Tensor

from finola.data.datasets import require_labels
from finola.data.loader import Batch
from finola.errors import DataError
from finola.evaluation.speed import timed
from finola.models.classifier import ClassifierConfig


class Accuracy:
    """What a classifier of n classes gets right of the images shown to it so far.

    Attributes:
        confusion: (n, n) int64, images of class i taken for class j.
        top5: images whose class is among the five likeliest.
        seconds: spent on classifying, loading aside.
    """

    def __init__(self, num_classes: int):
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.top5 = 0
        self.seconds = 0.0

    def add(self, logits: Tensor, labels: Tensor, seconds: float) -> None:
        """Take in logits (B, n) and labels (B,)."""
        classes = len(self.confusion)
        best = logits.topk(min(5, classes), dim=1).indices  # (B, 5), the likeliest first
        self.top5 += (best == labels[:, None]).sum().item()
        pairs = (labels * classes + best[:, 0]).bincount(minlength=classes**2)
        self.confusion += pairs.view(classes, classes).cpu()
        self.seconds += seconds

    def means(self) -> dict[str, float]:
        """Accuracies in percent: of all images, and the mean of each class's own over the classes with images."""
        images, right = self.confusion.sum(1), self.confusion.diagonal()  # (n,) each
        count, shown = images.sum().item(), images > 0
        return {
            "top1": 100 * right.sum().item() / count,
            "top5": 100 * self.top5 / count,
            "mean_per_class": 100 * (right[shown] / images[shown]).double().mean().item(),
            "images_per_second": count / self.seconds,
        }


@torch.no_grad()
def evaluate_classifier(model: Callable[[Tensor], Tensor], num_classes: int, batches: Iterable[Batch]) -> Accuracy:
    """Classify all batches {"image": (B, 3, S, S), "label": (B,)}; a model must be in evaluation mode."""
    accuracy = Accuracy(num_classes)
    for batch in batches:
        logits, seconds = timed(model, batch["image"])
        accuracy.add(logits, batch["label"], seconds)
    return accuracy


def require_classes(dataset, config: ClassifierConfig, weights: str) -> None:
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
