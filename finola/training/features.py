"""What a frozen encoder gives for the images of a data set, computed once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from finola.data.loader import Batch, Batches, BatchOrder, Loader
from finola.errors import DataError, FinolaError
from finola.models.base import evaluating
from finola.models.classifier import Classifier


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
        cls, classifier: Classifier, batches: Iterable[Batch], count: int, folder: str | Path
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
        with evaluating(classifier):
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
    `head.classify(*batch["features"])` takes them.
    """

    def __init__(self, features: FrozenFeatures, batches: Batches, *, device: torch.device | str = "cpu"):
        super().__init__(BatchOrder(len(features), batches))
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
