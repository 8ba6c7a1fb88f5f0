"""Yardsticks for a code of n numbers an image: PCA, a zonal DCT, and a thumbnail.

All of them are linear, keep about as many numbers as q has, and are not quantised, so that they say what a
vector of that length is worth without autoregression. `finola eval --baselines` prints them beside the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from finola.errors import DataError
from finola.evaluation.reconstruction import Code

_BLOCK = 4096  # pixel values handled at once while fitting
_CHROMA_SHARE = 64 / 753  # of all coefficients, for each of Cb and Cr


@dataclass(frozen=True)
class Pca:
    """The mean image and the orthonormal directions of largest variance."""

    mean: Tensor  # (D,) with D = 3 S S
    components: Tensor  # (n, D)

    def encode(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) -> coefficients (B, n)."""
        return (x.flatten(1) - self.mean) @ self.components.T

    def reconstruct(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) -> their projections, the same shape, unclamped."""
        return (self.encode(x) @ self.components + self.mean).view_as(x)


def fit_pca(images: Iterable[Tensor], components: int) -> Pca:
    """Exact PCA of batches of images (B, 3, S, S) in [0, 1], through the Gram matrix of the N images.

    The images are held as 8-bit numbers (N D bytes), the Gram matrix takes 4 N^2 bytes and 2 N^2 D
    operations, the eigenvectors O(N^3): about N = 10,000 images of 128 px take 3 GB and a few minutes on two
    cores. It runs where the images are.

    Raises:
        DataError: too few images for so many components.
    """
    data = torch.cat([batch.mul(255).round().to(torch.uint8).flatten(1) for batch in images])  # (N, D)
    if not 0 < components < min(data.shape):
        raise DataError(
            f"cannot fit {components} components to {len(data)} images of {data.shape[1]} values; "
            f"take more images or at most {min(data.shape) - 1} components"
        )
    mean = torch.cat([block.mean(0) for block in _blocks(data)])  # (D,)
    gram = torch.zeros(len(data), len(data), device=data.device)
    for block in _blocks(data):
        block -= block.mean(0)
        gram.addmm_(block, block.T)
    _, vectors = torch.linalg.eigh(gram)  # ascending
    top = vectors[:, -components:].flip(1)  # (N, n)
    directions = torch.cat([(block - block.mean(0)).T @ top for block in _blocks(data)])  # (D, n)
    return Pca(mean, torch.linalg.qr(directions).Q.T.contiguous())


def dct_zonal(x: Tensor, coefficients: int) -> Tensor:
    """Keep the lowest frequencies of a whole-image DCT: a x a of them in Y, b x b in each of Cb and Cr.

    b^2 is as near as possible to 64/753 of the coefficients and a as large as the rest allows, so 768 gives a
    = 25, b = 8 (753 kept) and 3072 gives a = 50, b = 16 (3012 kept).

    Args:
        x: (B, 3, S, S) RGB in [0, 1].
        coefficients: numbers an image, at least 3.

    Returns:
        The reconstructions, the same shape, unclamped.
    """
    luma, chroma = zone_sides(coefficients)
    size = x.shape[-1]
    if luma > size:
        raise DataError(f"{coefficients} DCT coefficients do not fit images of {size} px; take fewer")
    basis = _dct_matrix(size).to(x)  # (S, S), frequency x position
    ycc = torch.einsum("dc,bchw->bdhw", _RGB_TO_YCC.to(x), x)
    planes = []
    for plane, side in zip(ycc.unbind(1), (luma, chroma, chroma), strict=True):
        low = basis[:side]  # (side, S)
        planes.append(low.T @ (low @ plane @ low.T) @ low)
    return torch.einsum("cd,bdhw->bchw", torch.linalg.inv(_RGB_TO_YCC).to(x), torch.stack(planes, dim=1))


def zone_sides(coefficients: int) -> tuple[int, int]:
    """The sides (a, b) of the zones of `dct_zonal`; a^2 + 2 b^2 numbers are kept, at most `coefficients`."""
    if coefficients < 3:
        raise DataError(f"a zonal DCT of three planes needs 3 coefficients or more, got {coefficients}")
    chroma = max(1, round(math.sqrt(coefficients * _CHROMA_SHARE)))
    return math.isqrt(coefficients - 2 * chroma**2), chroma


def thumbnail(x: Tensor, size: int) -> Tensor:
    """Shrink (B, 3, S, S) to `size` x `size`, 3 size^2 numbers, and enlarge it; antialiased bicubic."""
    small = F.interpolate(x, size=(size, size), mode="bicubic", antialias=True)
    return F.interpolate(small, size=x.shape[-2:], mode="bicubic")


# JPEG's luma and colour differences (ITU-R BT.601), without the offset of Cb and Cr
_RGB_TO_YCC = torch.tensor(
    [[0.299, 0.587, 0.114], [-0.299 / 1.772, -0.587 / 1.772, 0.5], [0.5, -0.587 / 1.402, -0.114 / 1.402]],
    dtype=torch.float64,
)


def _dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II, (frequency, position) float64."""
    position = torch.arange(size, dtype=torch.float64) + 0.5
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    matrix = torch.cos(math.pi / size * frequency * position) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def _blocks(data: Tensor) -> Iterable[Tensor]:
    """The columns of (N, D) uint8 as float blocks in [0, 1]."""
    return (block.float().div_(255) for block in data.split(_BLOCK, dim=1))


def baselines(numbers: int, size: int, train: Iterable[Tensor] | None) -> dict[str, tuple[int, Code]]:
    """Linear codes of about `numbers` numbers an image of `size` pixels: name -> (numbers kept, code).

    Args:
        train: batches of images to fit the PCA to, of the preprocessing used in evaluation; None for no PCA.

    Raises:
        DataError: too few images or pixels for so many numbers.
    """
    luma, chroma = zone_sides(numbers)
    side = math.isqrt(numbers // 3)
    codes = {} if train is None else {"PCA": (numbers, fit_pca(train, numbers).reconstruct)}
    return codes | {
        "zonal DCT": (luma**2 + 2 * chroma**2, lambda x: dct_zonal(x, numbers)),
        f"bicubic {side}x{side} thumbnail": (3 * side**2, lambda x: thumbnail(x, side)),
    }
