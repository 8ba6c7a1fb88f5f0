"""How well an encoder's features tell the classes of images: by votes of the nearest training images (k-NN)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from finola.data.loader import Batch
from finola.errors import FinolaError
from finola.models.base import ImageModel, evaluating
from finola.models.heads import map_and_tokens, pool

NEIGHBOURS = 20
KNN_CHUNK = 1024  # images compared with all training images at once


def neighbours_accuracy(model: ImageModel, train: Iterable[Batch], data: Iterable[Batch], num_classes: int) -> float:
    """Top-1 accuracy in percent of `data` by its nearest neighbours in `train`, which the encoder's features tell.

    Args:
        model: of any kind, with an encoder. Raises FinolaError for fewer than 20 training images."""
    known, queries = pooled_features(model, train), pooled_features(model, data)
    return 100 * knn_accuracy(*known, *queries, num_classes=num_classes, k=NEIGHBOURS)


def pooled_features(model: ImageModel, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """[mean of the map ; token] of every image: (N, W + d) float32, and the labels (N,), where the batches are.

    `model` has an `encoder` and `normalise`; it runs in eval mode, without gradients, in the caller's autocast."""
    features, labels = [], []
    with evaluating(model):
        for batch in batches:
            features.append(pool(*map_and_tokens(model.encoder, model.normalise(batch["image"]))))
            labels.append(batch["label"])
    return torch.cat(features), torch.cat(labels)


def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    num_classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> float:
    """Share of `val` that its `k` nearest neighbours in `train` classify rightly, in [0, 1].

    Nearness is cosine similarity s, and each neighbour votes for its class with the weight exp(s / temperature)
    (the weighted rule of Wu et al., CVPR 2018).

    Args:
        train, val: (N, D) and (M, D) features.
        train_labels, val_labels: (N,) and (M,) int64, 0 ... num_classes - 1.

    Raises:
        FinolaError: k outside 1 ... N, or a label out of range.
    """
    for name, labels in (("train_labels", train_labels), ("val_labels", val_labels)):
        if labels.min() < 0 or labels.max() >= num_classes:
            raise FinolaError(f"{name}: got labels from {labels.min()} to {labels.max()}, "
                              f"expected 0 to {num_classes - 1}; k-NN needs labelled images of the same classes")
    if not 1 <= k <= len(train):
        raise FinolaError(f"k: got {k} neighbours, expected 1 to {len(train)}, the number of training images")
    train, val = F.normalize(train.float(), dim=1), F.normalize(val.float(), dim=1)
    right = 0
    for chunk, truth in zip(val.split(KNN_CHUNK), val_labels.split(KNN_CHUNK), strict=True):
        similarity, nearest = (chunk @ train.mT).topk(k, dim=1)  # (m, k) each
        weights = ((similarity - 1) / temperature).exp()  # the constant factor changes no vote
        votes = weights.new_zeros(len(chunk), num_classes).scatter_add_(1, train_labels[nearest], weights)
        right += (votes.argmax(dim=1) == truth).sum().item()
    return right / len(val)
