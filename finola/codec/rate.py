"""Training for rate: what tiles of photographs cost in the codec, as a loss (docs/codec.md).

    cost = D + rate · λ · R      D: squared error of a tile at its own size; R: the bits its vector is expected to take

Tiles are those of the codec, at the sizes and levels around quality 50. Rounding is replaced by uniform noise of a
step's width (Ballé et al., "End-to-end optimized image compression"), λ is the codec's own price of a bit
(`finola.codec.refine`), and R the cost in the tables of the weights' calibration. These stay as they are, so that a
model that was trained so wants a new calibration.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from finola.codec.calibration import Calibration
from finola.codec.codec import level_of, side_of
from finola.codec.quantiser import Quantiser
from finola.codec.refine import ExpectedBits, bit_price
from finola.inference.tiles import resize

QUALITIES = (40, 62)  # of tiles, least and greatest: sides of 116 to 63 pixels for a model of 128


class Tiles(NamedTuple):
    """pixels: (B, 3, side, side) at their own size. squares: (B, 3, S, S), enlarged for the model."""

    pixels: Tensor
    squares: Tensor
    quantiser: Quantiser


class TileCost:
    """Cuts tiles and says what they cost.

    Args:
        calibration: of the weights that training starts from.
        rate: the price of a bit, relative to the codec's own.
    """

    def __init__(self, calibration: Calibration, rate: float, device: torch.device):
        self.calibration, self.rate = calibration, rate
        self._bits = ExpectedBits(calibration, device)

    def cut(self, x: Tensor) -> Tiles:
        """A tile of each photograph x (B, 3, S, S): of one size and quality, which torch's generator draws, each at a
        place of its own."""
        size = x.shape[-1]
        quality = torch.empty(()).uniform_(*QUALITIES).item()
        side = min(round(side_of(quality)), size)
        corners = torch.randint(size - side + 1, (len(x), 2)).tolist()
        pixels = torch.stack([image[:, top : top + side, left : left + side]
                              for image, (top, left) in zip(x, corners, strict=True)])
        return Tiles(pixels, resize(pixels, size), self.calibration.quantiser(level=level_of(quality)))

    def quantise(self, q: Tensor, quantiser: Quantiser) -> tuple[Tensor, Tensor]:
        """q (B, C) -> q with noise in place of rounding, and the bits (B,) that it is expected to take."""
        steps = torch.from_numpy(quantiser.steps).to(q.device).float()
        positions = self.calibration.positions(q.float())
        positions = positions + (torch.rand_like(positions) - 0.5) * steps
        return self.calibration.vectors(positions), self._bits(positions)

    def __call__(self, painted: Tensor, bits: Tensor, tiles: Tiles) -> Tensor:
        """The mean cost of squares painted (B, 3, S, S) and their bits (B,), for each value of a tile."""
        values = tiles.pixels[0].numel()
        error = (resize(painted, tiles.pixels.shape[-1]) - tiles.pixels).square().mean()
        price = bit_price(self.calibration, tiles.quantiser, values)
        return error + self.rate * price * bits.mean() / values
