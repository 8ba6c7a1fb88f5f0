"""Stored streams are read as the stored symbols, on every machine and with every version of what is used.

After a change that is meant to alter the format, which needs a new version in `finola.codec.container`:
GENERATE_EXPECTED=1 pytest tests/golden
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_codecs import CHANNELS, tiny_codec

from finola.codec import Calibration
from finola.codec.codec import read_symbols
from finola.codec.container import Header, Mode, pack
from finola.codec.entropy import encode
from finola.codec.quantiser import pack_bits

FOLDER = Path(__file__).parent
CALIBRATION, SYMBOLS = FOLDER / "tiny.codec.safetensors", FOLDER / "symbols.safetensors"
STREAMS = {"fixed1": Mode(1), "fixed4": Mode(4), "fixed8": Mode(8), "coded4": Mode(4, None, True),
           "coded8": Mode(8, None, True), "level20": Mode(None, 20, True), "level60": Mode(None, 60, True),
           "level100": Mode(None, 100, True)}
WIDTH, HEIGHT, SIDE = 100, 70, 32  # 4 x 3 tiles


def generate() -> None:
    """Streams of numbers from a stream that NumPy keeps the same for ever, near the mean and far from it."""
    calibration = tiny_codec().calibration
    calibration.save(CALIBRATION)
    numbers = np.random.RandomState(0).standard_t(3, (12, CHANNELS))
    stored = {}
    for name, mode in STREAMS.items():
        quantiser = calibration.quantiser(mode.bits, mode.level)
        symbols = quantiser.symbols(torch.from_numpy(numbers * 256))
        payload = (encode(symbols.numpy(), calibration, quantiser) if mode.entropy
                   else pack_bits(symbols.numpy(), mode.bits))
        (FOLDER / f"{name}.fnl").write_bytes(
            pack(Header(WIDTH, HEIGHT, SIDE, 0, mode, calibration.identity), payload))
        stored[name] = symbols.numpy().astype(np.int16)
    save_file(stored, SYMBOLS)
    for path in (CALIBRATION, SYMBOLS):
        path.chmod(0o644)


@pytest.fixture(scope="module")
def calibration():
    if os.environ.get("GENERATE_EXPECTED"):
        generate()
    return Calibration.load(CALIBRATION)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stored_stream_gives_the_stored_symbols(calibration, name):
    header, symbols = read_symbols((FOLDER / f"{name}.fnl").read_bytes(), calibration)
    assert (header.width, header.height, header.side, header.mode) == (WIDTH, HEIGHT, SIDE, STREAMS[name])
    expected = load_file(SYMBOLS)[name]
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(symbols, expected)


@pytest.mark.parametrize("name", STREAMS)
def test_symbols_are_written_as_the_stored_stream(calibration, name):
    """Not only read: the bytes are the same, so that a stream can be named by its hash."""
    data = (FOLDER / f"{name}.fnl").read_bytes()
    header, symbols = read_symbols(data, calibration)
    quantiser = calibration.quantiser(header.mode.bits, header.mode.level)
    payload = (encode(symbols, calibration, quantiser) if header.mode.entropy
               else pack_bits(symbols, header.mode.bits))
    assert pack(header, payload) == data
