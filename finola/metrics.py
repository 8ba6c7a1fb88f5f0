"""How reconstructions are judged. Images are float RGB on the scale of [0, 1], (B, 3, H, W)."""

from __future__ import annotations

import torch
from torch import Tensor


def psnr(x_hat: Tensor, x: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each image in dB, (B,): the reconstruction clamped to [0, 1], peak 1, the mean
    squared error over all pixels and channels. The score of a set is the mean of these; the paper leaves the
    definition open (docs/paper-map.md). Identical images give 100 dB, not infinity, so that means stay finite."""
    error = (x_hat.float().clamp(0, 1) - x.float()).square().flatten(1).mean(1)
    return -10 * torch.log10(error.clamp_min(1e-10))
