"""What an encoder gives for an image, as its final map and one token; what a frozen one gives for a data set,
computed once; and the k-NN accuracy of it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from finola.data.loader import Batch, BatchOrder, Loader
from finola.encoder import MobileFormer
from finola.errors import DataError, FinolaError
from finola.heads import pool

KNN_CHUNK = 1024  # images compared with all training images at once


def map_and_tokens(encoder: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised images (B, 3, S, S) -> the final map (B, W, h, w) and one token (B, d).

    The token is the first of a Mobile-Former's (the one that steers its dynamic ReLUs), or the class token of one
    of timm's ViTs, where d = W.

    Raises FinolaError for an encoder of another kind."""
    if isinstance(encoder, MobileFormer):
        features, tokens = encoder.forward_map_and_tokens(x)
        return features, tokens[:, 0]
    _check_vit(encoder)
    tokens = encoder.forward_features(x)  # (B, prefix + h w, W)
    positions = tokens[:, encoder.num_prefix_tokens :].mT  # (B, W, h w)
    return positions.unflatten(2, encoder.patch_embed.grid_size), tokens[:, 0]


def token_width(encoder: nn.Module) -> int:
    """d, the length of the token that `map_and_tokens` gives; the map has `encoder.num_features` channels.

    Raises FinolaError for an encoder of another kind."""
    if isinstance(encoder, MobileFormer):
        return encoder.tokens.shape[-1]
    _check_vit(encoder)
    return encoder.num_features


class FrozenFeatures:
    """What a frozen encoder gives for each image of a data set, computed once.

    Attributes:
        tensors: what `head.reduce` gives, each (N, ...) float16, in files that are mapped into memory: they may be
            larger than it.
        labels: (N,) int64.
        indices: (N,) int64, the images' places in the data set.
    """

    def __init__(self, tensors: tuple[Tensor, ...], labels: Tensor, indices: Tensor):
        self.tensors, self.labels, self.indices = tensors, labels, indices

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def collect(
        cls, classifier: nn.Module, batches: Iterable[Batch], count: int, folder: str | Path
    ) -> FrozenFeatures:
        """Run `classifier.features` over all batches, in eval mode, without gradients, in the caller's autocast.

        Args:
            batches: {"image", "label", "index"}; images left out of their batch are left out of the features.
            count: number of images, an upper bound.
            folder: where the files `features0.bin`, ... are written; made if it is not there.

        Raises:
            FinolaError: a feature that float16 cannot hold.
            DataError: more than `count` images, or none, or a disk too full.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        stores: tuple[Tensor, ...] = ()
        labels, indices = [], []
        seen = 0
        with _evaluating(classifier):
            for batch in batches:
                features = classifier.features(batch["image"])
                stores = stores or tuple(
                    _mapped_file(folder / f"features{i}.bin", (count, *feature.shape[1:]))
                    for i, feature in enumerate(features)
                )
                rows = slice(seen, seen + len(batch["label"]))
                if rows.stop > count:
                    raise DataError(f"features: got more than count={count} images; give the data set's length")
                for i, (store, feature) in enumerate(zip(stores, features, strict=True)):
                    store[rows] = _to_half(feature, i)
                labels.append(batch["label"].cpu())
                indices.append(batch["index"].cpu())
                seen = rows.stop
        if seen == 0:
            raise DataError("features: got no image, expected at least one batch")
        return cls(tuple(store[:seen] for store in stores), torch.cat(labels), torch.cat(indices))


class FeatureLoader(Loader):
    """Batches of `FrozenFeatures`, shuffled for training, in order for evaluation.

    Iterating yields {"features": tuple of (B, ...) float32, "label": (B,) int64, "index": (B,) int64} on `device`;
    `head.classify(*batch["features"])` takes them. The options are those of `build_loader`.
    """

    def __init__(
        self,
        features: FrozenFeatures,
        *,
        batch_size: int,
        train: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool | None = None,
        device: torch.device | str = "cpu",
    ):
        order = BatchOrder(
            len(features),
            batch_size,
            shuffle=train,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        super().__init__(order)
        self.frozen, self.device = features, torch.device(device)

    def _batches(self, first: int) -> Iterator[dict]:
        frozen = self.frozen
        for numbers in self.sampler.batches(first):
            rows = torch.from_numpy(numbers)
            yield {
                "features": tuple(tensor[rows].to(self.device).float() for tensor in frozen.tensors),
                "label": frozen.labels[rows].to(self.device),
                "index": frozen.indices[rows].to(self.device),
            }


def pooled_features(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """[mean of the map ; token] of every image: (N, W + d) float32, and the labels (N,), where the batches are.

    `model` has an `encoder` and `normalise`; it runs in eval mode, without gradients, in the caller's autocast."""
    features, labels = [], []
    with _evaluating(model):
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


def _check_vit(encoder: nn.Module) -> None:
    if not (isinstance(encoder, VisionTransformer) and encoder.has_class_token):
        raise FinolaError(
            f"encoder: got {type(encoder).__name__}, expected a Mobile-Former or a timm ViT with a class token"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards the model is in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _mapped_file(path: Path, shape: tuple[int, ...]) -> Tensor:
    """A float16 tensor whose memory is a new file."""
    path.unlink(missing_ok=True)  # one of another size may still be mapped by another tensor
    size, free = math.prod(shape), shutil.disk_usage(path.parent).free
    if size * torch.float16.itemsize > free:  # asked now, because a full disk would kill the process later
        raise DataError(f"{path}: features of {size * torch.float16.itemsize:,} bytes for {free:,} bytes of free disk; "
                        "choose a folder on a larger one")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.float16).view(shape)


def _to_half(feature: Tensor, number: int) -> Tensor:
    half = feature.half()
    if not half.isfinite().all():
        raise FinolaError(
            f"features{number}: got a value of {feature.abs().max().item():g}, expected at most "
            f"{torch.finfo(torch.float16).max:g}, the limit of float16; train the head on images instead"
        )
    return half
