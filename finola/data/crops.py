"""Random crops that depend on (seed, epoch, index, view) alone.

Every random number of the data pipeline is a hash of these four, so a sample's augmentation and an epoch's
order are the same whatever the number of workers or processes, after a resume, and on every platform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from finola.data.policies import get_policy
from finola.errors import RecipeError

ATTEMPTS = 10  # crops tried before the largest centre crop is taken
DRAWS = 2 * ATTEMPTS + 3  # random numbers of a crop: areas, ratios, place and flip
VIEW_DRAWS = DRAWS + 1  # of a view: its crop's, then the seed of its policy
RATIO = (3 / 4, 4 / 3)  # width over height of a crop
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # the step of SplitMix64


@dataclass(frozen=True)
class Augment:
    """RandomResizedCrop with a flip, and what follows it.

    Attributes:
        scale: share of the area kept; from a fifth on as in MAE's pre-training. Supervised training, probing and
            fine-tuning customarily start at 0.08, as torchvision and timm do.
        hflip: mirror half of the crops.
        policy: name of a `finola.data.policies.Policy` for the crops, or None.
        views: crops of each image, each drawn by itself.

    Raises:
        RecipeError: a share outside 0 < low <= high <= 1, no view, or an unknown policy.
    """

    scale: tuple[float, float] = (0.2, 1.0)
    hflip: bool = True
    policy: str | None = None
    views: int = 1

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise RecipeError(f"crop_scale: got ({low}, {high}), expected 0 < low <= high <= 1")
        if self.views < 1:
            raise RecipeError(f"views: got {self.views}, expected at least 1")
        if self.policy is not None:
            get_policy(self.policy)


DEFAULT_AUGMENT = Augment()


@dataclass(frozen=True)
class Crops:
    """One crop for each of n images."""

    boxes: np.ndarray  # (n, 4) float64: left, top, right, bottom in pixels
    flips: np.ndarray  # (n,) bool: mirrored left to right


def epoch_order(length: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `length` images in one epoch, (length,) int64: they are sorted by their hashes."""
    return np.argsort(_hash(seed, epoch, np.arange(length)), kind="stable")


def random_crops(
    sizes: np.ndarray, indices: np.ndarray, *, seed: int, epoch: int, augment: Augment, view: int = 0
) -> Crops:
    """Draw a crop for each image: area uniform in `augment.scale`, log aspect ratio uniform in RATIO,
    position uniform. Boxes are not rounded to pixels, so an image stored smaller gets the same crop of the
    scene.

    Args:
        sizes: (n, 2) heights and widths.
        indices: (n,) the images' places in the data set.
        view: which of an image's crops.
    """
    height, width = np.asarray(sizes, dtype=np.float64).T  # (n,) each
    draws = uniforms(seed, epoch, indices, DRAWS, skip=view * VIEW_DRAWS)  # (n, 23)

    low, high = augment.scale
    area = (height * width)[:, None] * (low + (high - low) * draws[:, :ATTEMPTS])  # (n, 10)
    log_low, log_high = math.log(RATIO[0]), math.log(RATIO[1])
    ratio = np.exp(log_low + (log_high - log_low) * draws[:, ATTEMPTS : 2 * ATTEMPTS])  # (n, 10)
    widths, heights = np.sqrt(area * ratio), np.sqrt(area / ratio)

    fits = (widths <= width[:, None]) & (heights <= height[:, None])
    first = fits.argmax(axis=1)  # the first attempt that fits, or 0 where none does
    rows = np.arange(len(first))
    found = fits[rows, first]
    w = np.where(found, widths[rows, first], np.minimum(width, height * RATIO[1]))
    h = np.where(found, heights[rows, first], np.minimum(height, width / RATIO[0]))

    x, y, flip = draws[:, -3:].T
    left = np.where(found, x, 0.5) * (width - w)
    top = np.where(found, y, 0.5) * (height - h)
    boxes = np.stack([left, top, np.minimum(left + w, width), np.minimum(top + h, height)], axis=1)
    return Crops(boxes, (flip < 0.5) & augment.hflip)


def policy_seeds(indices: np.ndarray, *, seed: int, epoch: int, view: int = 0) -> list[int]:
    """The seed below 2^32 of each image's policy."""
    draws = uniforms(seed, epoch, indices, 1, skip=view * VIEW_DRAWS + DRAWS)[:, 0]
    seeds: list[int] = (draws * 2.0**32).astype(np.int64).tolist()
    return seeds


def apply_crop(image: Image.Image, box: np.ndarray, flip: bool, size: int) -> Image.Image:
    """Crop and resize to `size` x `size` (antialiased bicubic), then mirror if `flip`."""
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=tuple(box.tolist()))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image


def uniforms(seed: int, epoch: int, indices: np.ndarray, count: int, skip: int = 0) -> np.ndarray:
    """`count` numbers in [0, 1) for each index, (n, count) float64: a function of (seed, epoch, index).

    `skip` leaves out the first numbers."""
    keys = _hash(seed, epoch, np.asarray(indices))[:, None]  # (n, 1)
    bits = splitmix64(keys + GOLDEN * np.arange(skip + 1, skip + count + 1, dtype=np.uint64))  # (n, count)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _hash(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """(n,) uint64, one for each (seed, epoch, index)."""
    state = splitmix64(np.array([seed], dtype=np.int64).view(np.uint64) + GOLDEN)
    state = splitmix64(state + GOLDEN * np.array([epoch + 1], dtype=np.uint64))
    return splitmix64(state + GOLDEN * (indices.astype(np.uint64) + np.uint64(1)))


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The last stage of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers in which each
    bit of x affects every bit of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x
