"""Gradient descent on the q of a picture's tiles against the picture itself, through the quantiser, before coding."""

from __future__ import annotations

import torch
from torch import Tensor

from finola.codec.calibration import Calibration
from finola.codec.quantiser import Quantiser
from finola.codec.tiles import resize
from finola.model import FinolaAutoencoder

RATE = 0.15  # of Adam, in quantisation steps


def refine(model: FinolaAutoencoder, calibration: Calibration, quantiser: Quantiser, q: Tensor, x: Tensor,
           steps: int) -> Tensor:
    """Symbols (B, C) of which each tile's reconstruction is at least as near to it as that of q's own symbols.

    The picture is made from the quantised positions; the gradient is taken as if they were not (straight-through).

    Args:
        q: (B, C) as encoded. x: (B, 3, side, side) the tiles at their own size, in [0, 1].
        steps: of Adam.
    """
    levels = torch.from_numpy(quantiser.steps).to(q.device).float()
    scaled = (calibration.positions(q) / levels).requires_grad_()  # (B, C) in quantisation steps
    optimiser = torch.optim.Adam([scaled], lr=RATE, betas=(0.9, 0.99))
    best, least = quantiser.symbols(scaled.detach() * levels), torch.full((len(q),), torch.inf, device=q.device)
    for i in range(steps + 1):
        symbols = quantiser.symbols(scaled.detach() * levels)
        positions = scaled * levels
        seen = positions + (quantiser.centres(symbols) - positions).detach()
        error = (picture(model, calibration.vectors(seen), x.shape[-1]) - x).square().flatten(1).mean(1)  # (B,)
        better = error.detach() < least
        best, least = torch.where(better[:, None], symbols, best), torch.where(better, error.detach(), least)
        if i < steps:
            (scaled.grad,) = torch.autograd.grad(error.sum(), scaled)
            optimiser.step()
    return best


def picture(model: FinolaAutoencoder, q: Tensor, side: int) -> Tensor:
    """q (B, C) -> tiles (B, 3, side, side) in [0, 1], as the decoder paints them."""
    return resize(model.decode(q), side).clamp(0, 1)
