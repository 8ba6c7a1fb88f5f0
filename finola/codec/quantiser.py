"""Numbers of q -> symbols and back, uniformly per channel, on one integer grid.

Channel c is measured on a grid of spacing unit = σ / 256 around its training mean μ, a *position* being
(q - μ) / unit. A quantiser has n levels of `step` grid units each, centred on μ: symbol s stands for the positions
from (2s - n) step / 2 to (2s - n + 2) step / 2 and is read as their centre. Outermost symbols take what lies beyond.

    bits b (paper, Table "Image compression")   n = 2^b levels over a range that fits training embeddings best
    level 1 ... 100                             n odd, steps in proportion to 1 / sensitivity of the decoder

The paper leaves the range open. Here it is the one with the least squared error on training embeddings, for each
channel and number of bits: about 2.7 σ to both sides at 4 bits were q normal, more where it has long tails. With
a level one step of error costs the same in every channel, so that a channel of large variance gets more bits than
a small one: reverse water-filling. Steps, edges and centres are integers, so that every machine forms the same
probabilities from them (`finola.codec.entropy`); only μ + position · unit, the way back to q, is floating point.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finola.errors import BitstreamError

GRID = 256  # units in a deviation
REACH = 11 * GRID  # units to both sides of the mean that a level can express
SMALLEST_STEP = GRID // 16


@dataclass(frozen=True)
class Quantiser:
    """Attributes: `steps` (C,) in grid units, `levels` (C,); int64. Where a level is even, so is its step."""

    steps: np.ndarray
    levels: np.ndarray

    @classmethod
    def from_bits(cls, bits: int, steps: np.ndarray) -> Quantiser:
        """The paper's: 2^bits levels, for even steps (C,)."""
        return cls(steps.astype(np.int64), np.full(len(steps), 1 << bits, np.int64))

    @classmethod
    def from_steps(cls, steps: np.ndarray) -> Quantiser:
        """An odd number of levels, one around the mean, that reach `REACH` units to both sides."""
        steps = np.clip(steps.astype(np.int64), SMALLEST_STEP, 2 * REACH)
        return cls(steps, 2 * -(-REACH // steps) + 1)

    def symbols(self, positions: Tensor) -> Tensor:
        """positions (N, C), real -> symbols (N, C) int64."""
        steps, levels = self._tensors(positions.device)
        symbols = torch.floor(positions / steps + levels / 2).long().clamp_min(0)
        return torch.minimum(symbols, levels - 1)

    def centres(self, symbols: Tensor) -> Tensor:
        """symbols (N, C) -> the positions they stand for, (N, C) int64."""
        steps, levels = self._tensors(symbols.device)
        return ((2 * symbols.long() - levels + 1) * steps) >> 1

    def edges(self, channel: int) -> np.ndarray:
        """(levels - 1,) int64: the positions between neighbouring symbols of a channel, rounded down."""
        step, levels = int(self.steps[channel]), int(self.levels[channel])
        return ((2 * np.arange(1, levels, dtype=np.int64) - levels) * step) >> 1

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.steps).to(device), torch.from_numpy(self.levels).to(device)


def pack_bits(symbols: np.ndarray, bits: int) -> bytes:
    """Symbols (N, C) below 2^bits -> ceil(N · C · bits / 8) bytes, most significant bit first, tile by tile."""
    planes = np.unpackbits(symbols.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - bits :]  # (N · C, bits)
    return np.packbits(planes).tobytes()


def unpack_bits(payload: bytes, shape: tuple[int, int], bits: int) -> np.ndarray:
    """The symbols (N, C), int16, of `pack_bits`.

    Raises:
        BitstreamError: another number of bytes, or padding that is not zero.
    """
    count = shape[0] * shape[1] * bits
    if len(payload) != (expected := -(-count // 8)):
        raise BitstreamError(f"payload: got {len(payload)} bytes, expected {expected} for {shape[0]} tiles of "
                             f"{shape[1]} numbers of {bits} bits")
    stream = np.unpackbits(np.frombuffer(payload, np.uint8))
    if stream[count:].any():
        raise BitstreamError("payload: its last bits are not zero; the file is damaged")
    planes = np.zeros((shape[0] * shape[1], 8), np.uint8)
    planes[:, 8 - bits :] = stream[:count].reshape(-1, bits)
    return np.packbits(planes, axis=1).reshape(shape).astype(np.int16)
