"""Random matrices to grow maps with."""

from __future__ import annotations

import torch
from torch import Tensor

from finola.kernels.grid import DIRECTIONS


def random_law(channels: int, batch: int = 2, seed: int = 0, gain: float = 0.5) -> tuple[Tensor, dict[str, Tensor]]:
    """q, (batch, channels), and a matrix for each direction, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, channels, generator=generator, dtype=torch.float64)
    matrices = {d: gain / channels**0.5 * torch.randn(channels, channels, generator=generator, dtype=torch.float64)
                for d in DIRECTIONS}
    return q, matrices
