"""Entropy coding of symbols with a range coder (constriction) and integer probabilities.

Channel after channel, for many tiles at once. What is known of a tile so far gives two integers: a prediction of the
channel's position on the grid, from earlier channels,

    residual bins     ... 0 1 2 | 3 4 5 6 | 7 8 9 ...      table of this activity, frequencies of sum 2^16
    symbols' edges              ^         ^                scaled around the prediction

and its activity, a running mean of the sizes of its residuals in bins, which picks the table. A symbol's
probability is the sum of the bins between its two edges. So one set of tables serves every bit depth and level.

Why a stream decodes to the same symbols everywhere: all of this is integer arithmetic on stored integers. The n
probabilities of a symbol are integers f of sum 2^24, each at least 1; constriction, whose precision is 24 bits, is
handed f - 1. It scales what it is given to the sum 2^24 - n, which it has already, so the scale is exactly 1, and
adds 1 to each; integers below 2^24 are exact in the fp32 it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import constriction
import numpy as np

from finola.codec.calibration import BINS, GAIN_BITS, TABLE_BITS, WEIGHT_BITS, Calibration
from finola.codec.quantiser import Quantiser
from finola.errors import BitstreamError

Categorical = constriction.stream.model.Categorical
RangeDecoder, RangeEncoder = constriction.stream.queue.RangeDecoder, constriction.stream.queue.RangeEncoder

PRECISION = 24  # bits of a probability in constriction
GROUP = 256  # tiles coded side by side
FRACTION, MEMORY = 4, 4  # activity: in 1 / 16 bins, over about 16 channels
START = 25 << FRACTION  # activity before the first channel: the mean size of a normal residual


class Model:
    """The probabilities of one channel after the other, for a group of tiles; the coder's and the decoder's state.

    Args:
        tiles: in the group.
    """

    def __init__(self, calibration: Calibration, quantiser: Quantiser, tiles: int):
        self.calibration, self.quantiser = calibration, quantiser
        self.positions = np.zeros((calibration.channels + 1, tiles), np.int64)  # the last stands for no parent
        self.activity = np.full(tiles, START, np.int64)
        self.cumulated = np.zeros((len(calibration.tables), BINS + 1), np.int64)
        np.cumsum(calibration.tables, axis=1, out=self.cumulated[:, 1:])

    def frequencies(self, channel: int) -> np.ndarray:
        """(tiles, n) fp32: the integers f - 1 of the channel's n symbols in each tile; of sum 2^24 - n."""
        calibration, edges = self.calibration, self.quantiser.edges(channel)
        self.prediction = self.predict(channel)
        bins = ((edges - self.prediction[:, None]) * calibration.gain[channel] >> GAIN_BITS) + BINS // 2
        table = np.searchsorted(calibration.thresholds, self.activity, side="right")
        below = self.cumulated[table[:, None], bins.clip(0, BINS)]  # (tiles, n - 1)
        total = (1 << PRECISION) - len(edges) - 1
        counts: np.ndarray = np.diff(below * total >> TABLE_BITS, axis=1, prepend=0, append=total)
        return counts.astype(np.float32)

    def predict(self, channel: int) -> np.ndarray:
        """(tiles,) the channel's position as its parents tell it."""
        parents, weights = self.calibration.parents[channel], self.calibration.weights[channel]
        predicted: np.ndarray = weights @ self.positions[parents] >> WEIGHT_BITS
        return predicted

    def update(self, channel: int, symbols: np.ndarray) -> None:
        """Take note of what the channel's symbols (tiles,) turned out to be."""
        step, levels = self.quantiser.steps[channel], self.quantiser.levels[channel]
        positions = ((2 * symbols.astype(np.int64) - levels + 1) * step) >> 1
        self.positions[channel] = positions
        size = np.abs(positions - self.prediction) * self.calibration.gain[channel] >> GAIN_BITS
        self.activity += ((size << FRACTION) - self.activity) >> MEMORY


def encode(symbols: np.ndarray, calibration: Calibration, quantiser: Quantiser) -> bytes:
    """Symbols (N, C) -> payload."""
    encoder, family = RangeEncoder(), Categorical(perfect=False)
    for group in _groups(len(symbols)):
        model = Model(calibration, quantiser, group.stop - group.start)
        for channel in range(calibration.channels):
            encoder.encode(symbols[group, channel].astype(np.int32), family, model.frequencies(channel))
            model.update(channel, symbols[group, channel])
    words: np.ndarray = encoder.get_compressed()
    return words.astype("<u4").tobytes()


def decode(payload: bytes, tiles: int, calibration: Calibration, quantiser: Quantiser) -> np.ndarray:
    """Payload -> symbols (N, C), int16.

    Raises:
        BitstreamError: the payload was not made by `encode` for so many tiles.
    """
    if len(payload) % 4:
        raise BitstreamError(f"payload: got {len(payload)} bytes, expected a multiple of 4")
    decoder, family = RangeDecoder(np.frombuffer(payload, "<u4").astype(np.uint32)), Categorical(perfect=False)
    symbols = np.empty((tiles, calibration.channels), np.int16)
    for group in _groups(tiles):
        model = Model(calibration, quantiser, group.stop - group.start)
        for channel in range(calibration.channels):
            symbols[group, channel] = _decode_some(decoder, family, model.frequencies(channel))
            model.update(channel, symbols[group, channel])
    if not decoder.maybe_exhausted():
        raise BitstreamError("payload: something follows the last tile; the file is damaged")
    return symbols


def _decode_some(decoder: Any, family: Any, frequencies: np.ndarray) -> np.ndarray:
    """One symbol of each tile, by constriction's `RangeDecoder` and `Categorical`, which have no types."""
    try:
        symbols: np.ndarray = decoder.decode(family, frequencies)
        return symbols
    except AssertionError as error:  # constriction's name for data that no encoder writes
        raise BitstreamError(f"payload: cannot be decoded ({error}); the file is damaged") from error


def _groups(tiles: int) -> Iterator[slice]:
    for first in range(0, tiles, GROUP):
        yield slice(first, min(first + GROUP, tiles))
