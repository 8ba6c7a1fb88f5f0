"""Refinement of the q of an image's tiles against the image itself, before coding.

What is made small is D + λ R for each tile: its squared error and, where symbols are entropy coded, the bits they
are expected to take. λ is what a bit is worth with the steps in use: a step Δ leaves an error of Δ² / 12 in
proportion to 2^(-2 bits), of which the slope is 2 ln 2 Δ² / 12.

Gradient descent goes through rounding by stochastic Gumbel annealing (Yang, Bamler and Mandt, "Improving Inference for
Neural Image Compression", 2020): each number is one of the two symbols beside it, more likely the nearer, as a
Gumbel-softmax whose temperature falls.
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

RATE = 0.1  # of Adam at first, in quantisation steps; it falls to zero along half a cosine
HOTTEST, COLDEST = 0.5, 0.1  # temperatures, from the first step to the last


def refine(model: FinolaAutoencoder, calibration: Calibration, quantiser: Quantiser, q: Tensor, x: Tensor,
           steps: int, coded: bool) -> Tensor:
    """Symbols (B, C) of which each tile's D + λ R is at most that of q's own symbols.

    Args:
        q: (B, C) as encoded. x: (B, 3, side, side) the tiles at their own size, in [0, 1].
        steps: of Adam.
        coded: the symbols will be entropy coded; otherwise R plays no part.
    """
    bits = ExpectedBits(calibration, q.device)
    price = bit_price(calibration, quantiser, x[0].numel()) if coded else 0.0

    def cost(symbols: Tensor) -> Tensor:
        """Symbols (B, C), real -> D + λ R (B,)."""
        positions = quantiser.positions(symbols)
        error = (decode_tiles(model, calibration.vectors(positions), x.shape[-1]) - x).square().flatten(1).sum(1)
        return error + price * bits(positions) if price else error

    last = torch.from_numpy(quantiser.levels - 1).to(q.device)
    positions = calibration.positions(q)
    own = quantiser.symbols(positions)
    places = quantiser.places(positions).requires_grad_()  # (B, C)
    optimiser = torch.optim.Adam([places], betas=(0.9, 0.99))
    generator = torch.Generator(q.device).manual_seed(0)  # the same image becomes the same stream
    with frozen(model):
        for i in range(steps):
            temperature = HOTTEST * (COLDEST / HOTTEST) ** (i / max(steps - 1, 1))
            optimiser.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * i / steps)) / 2
            total = cost(between(places, last, temperature, generator)).sum()
            (places.grad,) = torch.autograd.grad(total, places)
            optimiser.step()
    refined = quantiser.symbols(quantiser.positions(places.detach()))
    with torch.no_grad():
        better = cost(refined) < cost(own)
    return torch.where(better[:, None], refined, own)


def between(places: Tensor, last: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """For each place (B, C) a random one between the two symbols beside it, of 0 ... `last` (C): the lower the
    temperature, the nearer to one of them, and the more often to the nearer."""
    low = torch.minimum(places.detach().floor().clamp_min(0), last - 1)
    share = (places - low).clamp(1e-5, 1 - 1e-5)  # of the way to the next symbol
    logits = torch.stack([-torch.atanh(share), -torch.atanh(1 - share)]) / temperature
    uniform = torch.rand(logits.shape, generator=generator, device=places.device).clamp_min(1e-9)
    weights = ((logits - torch.log(-torch.log(uniform))) / temperature).softmax(0)
    return low + weights[1]


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
