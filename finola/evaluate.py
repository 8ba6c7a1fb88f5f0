"""How well a model reconstructs a set of images, and what linear codes of its length do on the same pixels.

Preprocessing, stated with every number because PSNR depends on it: the shorter side resized to the model's
size (antialiased), the centre square cropped, 8-bit RGB. PSNR is that of `finola.psnr`, SSIM that of
torchmetrics (Gaussian window of 11 px, peak 1); both are computed for each image and averaged over images.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure as ssim
from tqdm import tqdm

from finola.baselines import dct_zonal, fit_pca, thumbnail, zone_sides
from finola.data import build_loader
from finola.errors import DataError
from finola.metrics import psnr

MOST_FAULTS = 10  # bad images named in an error
PANEL_IMAGES = 8

Code = Callable[[Tensor], Tensor]  # images (B, 3, S, S) -> their reconstructions
T = TypeVar("T")


@dataclass
class Scores:
    """What one code scores on the images shown to it so far, summed over images."""

    images: int = 0
    psnr: float = 0.0
    psnr_8bit: float = 0.0
    ssim: float = 0.0
    squared_error: float = 0.0  # mean over pixels, summed over images
    seconds: float = 0.0  # spent on reconstructing, loading aside

    def add(self, x_hat: Tensor, x: Tensor, seconds: float) -> Tensor:
        """Take in a batch (B, 3, S, S); returns the PSNR of each image, (B,)."""
        x_hat = x_hat.float().clamp(0, 1)
        scores = psnr(x_hat, x)
        self.images += len(x)
        self.psnr += scores.double().sum().item()
        self.psnr_8bit += psnr(x_hat.mul(255).round().div(255), x).double().sum().item()
        self.ssim += ssim(x_hat, x, data_range=1.0, reduction="none").double().sum().item()
        self.squared_error += (x_hat - x).square().flatten(1).mean(1).double().sum().item()
        self.seconds += seconds
        return scores

    def means(self) -> dict[str, float]:
        """Means over the images: PSNR, PSNR after rounding to 8 bits, SSIM; `psnr_pooled` is the PSNR of the
        mean squared error of all pixels. In dB, but for SSIM."""
        pooled = -10 * math.log10(max(self.squared_error / self.images, 1e-10))
        return {
            "psnr": self.psnr / self.images,
            "psnr_pooled": pooled,
            "psnr_8bit": self.psnr_8bit / self.images,
            "ssim": self.ssim / self.images,
            "images_per_second": self.images / self.seconds,
        }


@dataclass
class Examples:
    """Some of the images, spread evenly over the set, with each code's reconstruction and PSNR."""

    originals: list[Tensor] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    psnr: dict[str, list[float]] = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    codes: Mapping[str, Code], batches: Iterable[dict[str, Tensor]], images: int, progress: bool = False
) -> tuple[dict[str, Scores], Examples]:
    """Score codes on the same batches, in one pass.

    Args:
        codes: name -> reconstruction; a model must be in evaluation mode.
        batches: {"image": (B, 3, S, S) in [0, 1], "index": (B,)}, as `read_squares` yields them.
        images: their number in all.
    """
    scores, examples = {name: Scores() for name in codes}, Examples()
    chosen = set(spread(images, PANEL_IMAGES).tolist())
    with tqdm(total=images, desc="evaluating", unit="image", disable=not progress) as bar:
        for batch in batches:
            x = batch["image"]
            kept = [i for i, index in enumerate(batch["index"].tolist()) if index in chosen]
            examples.originals += x[kept].cpu()
            for name, code in codes.items():
                x_hat, seconds = timed(code, x)
                quality = scores[name].add(x_hat, x, seconds)
                examples.rows.setdefault(name, []).extend(x_hat[kept].cpu())
                examples.psnr.setdefault(name, []).extend(quality[kept].tolist())
            bar.update(len(x))
    return scores, examples


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


def read_squares(
    dataset,
    size: int,
    *,
    batch_size: int,
    workers: int,
    device: torch.device | str = "cpu",
    resample: str = "bicubic",
) -> Iterator[dict[str, Tensor]]:
    """Batches of centre squares of all images, in order.

    Raises:
        DataError: images that cannot be decoded; all of them are counted, the first ones named.
    """
    loader = build_loader(
        dataset,
        batch_size=batch_size,
        image_size=size,
        train=False,
        num_workers=workers,
        resample=resample,
        device=device,
    )
    try:
        yield from loader
    except DataError as first:
        raise DataError(_list_faults(dataset, first)) from None


class Subset:
    """`count` images of a data set, spread evenly over it."""

    def __init__(self, dataset, count: int):
        self.dataset, self.indices = dataset, spread(len(dataset), count)
        self.classes, self.source = dataset.classes, dataset.source
        self.labels = dataset.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int, draft: int | None = None):
        return self.dataset.load(int(self.indices[index]), draft)

    def name(self, index: int) -> str:
        return self.dataset.name(int(self.indices[index]))


def timed(function: Callable[[Tensor], T], x: Tensor) -> tuple[T, float]:
    """What a function makes of images, and the seconds it took: from a GPU that is idle until it is again."""
    start = _now(x.device)
    result = function(x)
    return result, _now(x.device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spread(length: int, count: int) -> np.ndarray:
    """`count` of the numbers 0 ... length - 1, evenly spread; all of them if there are no more."""
    return np.arange(min(count, length)) * length // min(count, length)


def _list_faults(dataset, first: DataError) -> str:
    faults = []
    for index in range(len(dataset)):
        try:
            dataset.load(index)
        except DataError as error:
            faults.append(str(error))
    faults = faults or [str(first)]  # of a file that can be read again now
    more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
    return (
        f"{len(faults)} of {len(dataset)} images cannot be decoded, so the set has no score: "
        f"{'; '.join(faults[:MOST_FAULTS])}{more}"
    )
