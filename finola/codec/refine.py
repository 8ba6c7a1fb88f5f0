"""Refinement of the q of an image's tiles against the image itself, before coding.

What is made small is D + λ R for each tile: its squared error and, where symbols are entropy coded, the bits they
are expected to take. λ is what a bit is worth with the steps in use: a step Δ leaves an error of Δ² / 12 in
proportion to 2^(-2 bits), of which the slope is 2 ln 2 Δ² / 12.

This is gradient descent, each channel measured by the curvature that D has along it: the sensitivity of the decoder,
which the calibration's steps are made from. Its first step has a fixed length; each later one has, for each tile, the
length that the change of the gradient along the last one suggests (Barzilai and Borwein, "Two-Point Step Size Gradient
Methods", 1988).
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

# Lengths of a step, as shares of the step to each channel's own minimum. All channels move at once, so that whole steps
# would go too far (found on photographs with the shipped weights).
FIRST = 0.25
SHORTEST, LONGEST = 0.01, 0.6
CAUTION = 0.9  # of the length that the last step suggests


def refine(model: FinolaAutoencoder, calibration: Calibration, quantiser: Quantiser, q: Tensor, x: Tensor,
           steps: int, coded: bool, at_once: int) -> Tensor:
    """Symbols (B, C) of which each tile's D + λ R is lower, as a rule, than that of q's own symbols.

    Args:
        q: (B, C) as encoded. x: (B, 3, side, side) the tiles at their own size, in [0, 1].
        steps: of gradient descent, each with one pass forward and backward through the decoder.
        coded: the symbols will be entropy coded; otherwise R plays no part.
        at_once: tiles in one pass.
    """
    bits = ExpectedBits(calibration, q.device)
    price = bit_price(calibration, quantiser, x[0].numel()) if coded else 0.0

    def gradient(positions: Tensor, x: Tensor) -> Tensor:
        """Of D + λ R, at positions (b, C), for their tiles x."""
        positions = positions.detach().requires_grad_()
        cost = (decode_tiles(model, calibration.vectors(positions), x.shape[-1]) - x).square().sum()
        (slope,) = torch.autograd.grad(cost + price * bits(positions).sum() if price else cost, positions)
        return slope

    curvature = torch.from_numpy(error_curvature(calibration, x[0].numel())).to(q)
    positions = calibration.positions(q)
    slope = move = torch.zeros_like(positions)
    with frozen(model), torch.enable_grad():
        for _ in range(steps):
            parts = zip(positions.split(at_once), x.split(at_once), strict=True)
            before, slope = slope, torch.cat([gradient(*part) for part in parts])
            move = -step_length(move, slope - before, curvature) * slope / curvature
            positions = positions + move
    return quantiser.symbols(positions)


def step_length(move: Tensor, bend: Tensor, curvature: Tensor) -> Tensor:
    """(B, 1), from the last step (B, C) and the gradient's change along it (B, C): Barzilai and Borwein's where the
    gradient grew; FIRST elsewhere, and where there was no step yet."""
    met = (move * bend).sum(1, keepdim=True)
    suggested = (move.square() * curvature).sum(1, keepdim=True) / met
    return torch.where(met > 0, CAUTION * suggested, FIRST).clamp(SHORTEST, LONGEST)


def error_curvature(calibration: Calibration, values: int) -> np.ndarray:
    """(C,): the second derivative of D, summed over a tile's `values`, along each channel's position. A step Δ of the
    calibration adds curvature Δ² / 24 to it, the same in every channel, and all of them NOISE_AT_50 a value."""
    curvature: np.ndarray = 24 * NOISE_AT_50 * values / calibration.channels / np.square(calibration.step, dtype=float)
    return curvature


def decode_tiles(model: FinolaAutoencoder, q: Tensor, side: int) -> Tensor:
    """q (B, C) -> tiles (B, 3, side, side) in [0, 1], as the decoder paints them."""
    return resize(model.decode(q), side).clamp(0, 1)


def bit_price(calibration: Calibration, quantiser: Quantiser, values: int) -> float:
    """λ: the squared error, summed over a tile's `values`, that one bit is worth."""
    added = error_curvature(calibration, values) * np.square(quantiser.steps, dtype=float) / 24  # by each channel
    return 2 * math.log(2) * float(added.mean())


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
