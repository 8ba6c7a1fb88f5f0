"""Gradient descent on the q of an image's tiles against the image itself, through the quantiser, before coding.

What is made small is D + λ R for each tile: its squared error and, where symbols are entropy coded, the bits they
are expected to take. λ is what a bit is worth with the steps in use: a step Δ leaves an error of Δ² / 12 in
proportion to 2^(-2 bits), of which the slope is 2 ln 2 Δ² / 12.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from finola.codec.calibration import BINS, GAIN_BITS, NOISE_AT_50, WEIGHT_BITS, Calibration
from finola.codec.quantiser import Quantiser
from finola.inference.tiles import resize
from finola.models.autoencoder import FinolaAutoencoder

RATE = 0.3  # of Adam at first, in quantisation steps; it falls to zero along half a cosine


def refine(model: FinolaAutoencoder, calibration: Calibration, quantiser: Quantiser, q: Tensor, x: Tensor,
           steps: int, coded: bool) -> Tensor:
    """Symbols (B, C) of which each tile's D + λ R is at most that of q's own symbols.

    The image is made from the quantised positions; the gradient is taken as if they were not (straight-through).

    Args:
        q: (B, C) as encoded. x: (B, 3, side, side) the tiles at their own size, in [0, 1].
        steps: of Adam.
        coded: the symbols will be entropy coded; otherwise R plays no part.
    """
    size = torch.from_numpy(quantiser.steps).to(q.device).float()
    bits = ExpectedBits(calibration, q.device)
    price = bit_price(calibration, quantiser, x[0].numel()) if coded else 0.0
    scaled = (calibration.positions(q) / size).requires_grad_()  # (B, C) in quantisation steps
    optimiser = torch.optim.Adam([scaled], lr=RATE, betas=(0.9, 0.99))
    best, least = quantiser.symbols(scaled.detach() * size), torch.full((len(q),), torch.inf, device=q.device)
    with frozen(model):
        for i in range(steps + 1):
            symbols = quantiser.symbols(scaled.detach() * size)
            positions = scaled * size
            seen = positions + (quantiser.centres(symbols) - positions).detach()
            error = (decode_tiles(model, calibration.vectors(seen), x.shape[-1]) - x).square().flatten(1).sum(1)
            cost = error + price * bits(seen) if price else error  # (B,)
            better = cost.detach() < least
            best, least = torch.where(better[:, None], symbols, best), torch.where(better, cost.detach(), least)
            if i < steps:
                optimiser.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * i / steps)) / 2
                (scaled.grad,) = torch.autograd.grad(cost.sum(), scaled)
                optimiser.step()
    return best


def decode_tiles(model: FinolaAutoencoder, q: Tensor, side: int) -> Tensor:
    """q (B, C) -> tiles (B, 3, side, side) in [0, 1], as the decoder paints them."""
    return resize(model.decode(q), side).clamp(0, 1)


def bit_price(calibration: Calibration, quantiser: Quantiser, values: int) -> float:
    """λ: the squared error, summed over a tile's `values`, that one bit is worth."""
    relative = quantiser.steps / calibration.step  # to steps that together leave NOISE_AT_50
    return 2 * math.log(2) * NOISE_AT_50 * values / calibration.channels * float(np.square(relative).mean())


class ExpectedBits:
    """Positions (B, C) -> bits (B,) up to a constant, differentiable: the mean of the tables, without the activity."""

    def __init__(self, calibration: Calibration, device: torch.device):
        channels = calibration.channels
        weights = np.zeros((channels, channels + 1), np.float32)  # the last column: no parent
        np.put_along_axis(weights, calibration.parents % (channels + 1), calibration.weights / 2**WEIGHT_BITS, axis=1)
        self.weights = torch.from_numpy(weights[:, :channels]).to(device)
        self.gain = torch.from_numpy(calibration.gain / 2**GAIN_BITS).float().to(device)
        share = calibration.tables.sum(0) + 1
        self.bits = torch.from_numpy(-np.log2(share / share.sum())).float().to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        residual = (positions - positions @ self.weights.T) * self.gain + (BINS - 1) / 2
        residual = residual.clamp(0, BINS - 1.001)
        left = residual.detach().long()
        share = residual - left
        return ((1 - share) * self.bits[left] + share * self.bits[left + 1]).sum(1)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients of the model's own parameters for a while."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
