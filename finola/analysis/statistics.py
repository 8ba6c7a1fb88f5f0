"""Mean, covariance and principal components of the vectors q of any number of images, in one pass.

Everything is float64 on the CPU. Memory: C² numbers, whatever the number of images: 4.7 MB for C = 768,
75 MB for C = 3072.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from finola.errors import DataError, FinolaError, WeightsError
from finola.files import atomic_write
from finola.models.autoencoder import FinolaAutoencoder
from finola.weights import read_tensors

FORMAT, COMPONENTS_FORMAT = "finola-statistics/1", "finola-components/1"
KEPT = 6  # components in a file of `save_components`


class Statistics:
    """Running mean and covariance of vectors of C numbers; the order and the batches they come in do not matter.

    Two sets are merged by the update of Chan, Golub and LeVeque (1979), which subtracts means before it squares,
    so that a large mean costs no precision.

    Attributes:
        count: vectors so far.
        mean: (C,) float64.
        scatter: (C, C) float64, the sum of (q - mean)(q - mean)ᵀ.
    """

    def __init__(self, dim: int):
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64)

    def add(self, q: Tensor) -> None:
        """Take in q (B, C) of any type, on any device.

        Raises:
            DataError: a value that is not finite.
            FinolaError: vectors of another length.
        """
        if q.ndim != 2 or q.shape[1] != len(self.mean):
            raise FinolaError(f"q: got shape {tuple(q.shape)}, expected (B, {len(self.mean)})")
        q = q.detach().cpu().double()
        if not torch.isfinite(q).all():
            raise DataError("q: got values that are not finite (NaN or infinity); check the images and the weights")
        mean = q.mean(0)
        self._combine(len(q), mean, (q - mean).T @ (q - mean))

    def merge(self, other: Statistics) -> None:
        """Take in all the vectors that `other` has seen."""
        if other.mean.shape != self.mean.shape:
            raise FinolaError(f"statistics: got vectors of {len(other.mean)} numbers, expected {len(self.mean)}")
        self._combine(other.count, other.mean, other.scatter)

    def covariance(self) -> Tensor:
        """(C, C), divided by count - 1; DataError for fewer than two vectors."""
        if self.count < 2:
            raise DataError(f"statistics: got {self.count} images, expected at least 2 for a covariance")
        return self.scatter / (self.count - 1)

    def _combine(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        if count == 0:
            return
        total, difference = self.count + count, mean - self.mean
        self.scatter += scatter + torch.outer(difference, difference) * (self.count * count / total)
        self.mean += difference * (count / total)
        self.count = total


class Components(NamedTuple):
    """Principal components, the one with the largest variance first.

    Attributes:
        variances: (C,) float64, at least 0.
        vectors: (C, C) float64, orthonormal columns; (C, K) where the first K alone were kept.
    """

    variances: Tensor
    vectors: Tensor

    def explained(self, count: int) -> float:
        """The share of all variance that the first `count` components hold."""
        return (self.variances[:count].sum() / self.variances.sum()).item()


def principal_components(statistics: Statistics) -> Components:
    """Eigenvectors of the covariance. From n images at most n - 1 variances are above zero.

    Raises:
        DataError: fewer than two images, or all of them with the same vector.
    """
    variances, vectors = torch.linalg.eigh(statistics.covariance())  # ascending
    if not variances[-1] > 0:
        raise DataError(f"statistics: the {statistics.count} images all have the same vector; expected different ones")
    return Components(variances.flip(0).clamp_min(0), vectors.flip(1))


@torch.no_grad()
def embedding_statistics(model: FinolaAutoencoder, batches: Iterable[dict[str, Tensor]]) -> Statistics:
    """Statistics of q over batches {"image": (B, 3, S, S)}, in one pass; the model in evaluation mode."""
    statistics = Statistics(model.config.embed_dim)
    for batch in batches:
        statistics.add(model.encode(batch["image"]))
    return statistics


def save_statistics(statistics: Statistics, path: str | Path, weights_sha256: str, metadata: dict[str, str]) -> None:
    """One safetensors file, whole or not at all; it names the weights that made the vectors.

    Args:
        metadata: further strings for the file's header (data, preprocessing, ...).
    """
    tensors = {"count": torch.tensor(statistics.count), "mean": statistics.mean, "scatter": statistics.scatter}
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata={**metadata, "format": FORMAT, "weights_sha256": weights_sha256})


def load_statistics(path: str | Path, weights_sha256: str, dim: int) -> tuple[Statistics, dict[str, str]]:
    """The statistics that `save_statistics` wrote, and the file's metadata.

    Args:
        weights_sha256, dim: of the model they are to be used with.

    Raises:
        WeightsError: not such a file, damaged, or of another model's vectors.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise WeightsError(f"{path}: got format {metadata.get('format')!r}, expected {FORMAT!r}, a file that "
                           "finola inspect embedding wrote")
    if metadata.get("weights_sha256") != weights_sha256:
        raise WeightsError(f"{path}: statistics of the weights {str(metadata.get('weights_sha256'))[:12]}, expected "
                           f"those of {weights_sha256[:12]}; make new ones with --data")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"count": (), "mean": (dim,), "scatter": (dim, dim)}:
        raise WeightsError(f"{path}: got tensors {shapes}, expected count, mean and scatter of {dim} channels")
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()) or tensors["count"] < 0:
        raise WeightsError(f"{path}: holds values that are not finite or a negative count; make it again with --data")
    statistics = Statistics(dim)
    statistics.count = int(tensors["count"])
    statistics.mean, statistics.scatter = tensors["mean"].double(), tensors["scatter"].double()
    return statistics, metadata


def components_path(weights: str | Path) -> Path:
    """Where what `save_components` writes of a weights file stands: W.safetensors -> W.components.safetensors."""
    return Path(weights).with_suffix(".components.safetensors")


def save_components(statistics: Statistics, path: str | Path, weights_sha256: str, data: str) -> None:
    """The mean and the first `KEPT` principal components in a small file, whole or not at all; `data` says in words
    which images the statistics are of.

    Raises:
        DataError: as `principal_components`.
    """
    variances, vectors = principal_components(statistics)
    vectors = vectors[:, :KEPT]
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()  # of two signs always this one
    tensors = {"mean": statistics.mean, "variances": variances, "vectors": vectors}
    header = {"format": COMPONENTS_FORMAT, "weights_sha256": weights_sha256,
              "of": f"{statistics.count:,} images of {data}"}
    with atomic_write(path) as temporary:
        save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, temporary, metadata=header)


def load_components(path: str | Path, weights_sha256: str) -> tuple[Tensor, Components, str]:
    """The mean (C,) and the components that `save_components` wrote, and of which images they are.

    Args:
        weights_sha256: of the model they are to be used with.

    Raises:
        WeightsError: not such a file, damaged, or of another model's vectors.
    """
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != COMPONENTS_FORMAT or metadata.get("weights_sha256") != weights_sha256:
        raise WeightsError(f"{path}: got format {metadata.get('format')!r} of the weights "
                           f"{str(metadata.get('weights_sha256'))[:12]}, expected {COMPONENTS_FORMAT!r} of "
                           f"{weights_sha256[:12]}; make it again with finola calibrate")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dim = len(tensors["mean"]) if "mean" in tensors else 0
    if shapes != {"mean": (dim,), "variances": (dim,), "vectors": (dim, min(KEPT, dim))}:
        raise WeightsError(f"{path}: got tensors {shapes}, expected mean, variances and vectors; make it again with "
                           "finola calibrate")
    if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        raise WeightsError(f"{path}: holds values that are not finite; make it again with finola calibrate")
    mean, variances, vectors = (tensors[name].double() for name in ("mean", "variances", "vectors"))
    return mean, Components(variances, vectors), metadata.get("of", "unknown images")
