"""How reconstructions are judged. Images are float RGB on the scale of [0, 1], (B, 3, H, W)."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def psnr(x_hat: Tensor, x: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, (B,): the reconstruction clamped to [0, 1], peak 1, the mean
    squared error over all pixels and channels. The score of a set is the mean of these; the paper leaves the
    definition open (docs/paper-map.md). Identical images give 100 dB, not infinity, so that means stay finite."""
    error = (x_hat.float().clamp(0, 1) - x.float()).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp_min(1e-10))


STRIP = 64  # rows compared at once


def image_psnr(a: Image.Image, b: Image.Image) -> float:
    """`finola.psnr` of two 8-bit RGB images of one size, a strip of rows at a time."""
    tops = range(0, a.height, STRIP)
    squares = sum(_squared_error(_strip(a, top), _strip(b, top)) for top in tops)
    error = squares / (3 * a.width * a.height * 255**2)
    return -10 * math.log10(max(error, 1e-10))


def _squared_error(a: Image.Image, b: Image.Image) -> int:
    difference = np.asarray(a, dtype=np.int32) - np.asarray(b, dtype=np.int32)
    return int(np.square(difference).sum(dtype=np.int64))


def _strip(image: Image.Image, top: int) -> Image.Image:
    return image.crop((0, top, image.width, min(top + STRIP, image.height)))
