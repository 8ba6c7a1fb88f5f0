"""A tiny codec for the tests: a model of 32-pixel squares and 16 numbers, untrained, with its calibration."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from finola.codec import Codec, calibration_path
from finola.codec.calibrate import calibrate
from finola.factory import create_model
from finola.registry import DEFAULT_MODEL
from finola.weights import save_weights

SIZE, CHANNELS = 32, 16


@cache
def tiny_codec() -> Codec:
    torch.manual_seed(0)
    options = {"image_size": SIZE, "embed_dim": CHANNELS, "decoder_widths": (16, 8, 8), "pool_heads": 2}
    model = create_model(DEFAULT_MODEL, start="random", **options).eval()
    pixels = np.random.RandomState(0).uniform(size=(96, 3, 2, 2)).astype(np.float32)
    with torch.no_grad():
        squares = torch.nn.functional.interpolate(torch.from_numpy(pixels), (SIZE, SIZE), mode="bilinear")
        q = model.encode(squares)
    calibration = calibrate(model, q)
    # an untrained decoder hardly minds an error, so that its steps would be wider than q's range
    calibration = replace(calibration, step=calibration.step.clip(max=400))
    return Codec(model, calibration, batch_size=5)


def save_tiny_codec(folder: Path) -> Path:
    """The file of its weights, with the calibration beside them."""
    path = save_weights(tiny_codec().model, folder / "tiny.safetensors")
    tiny_codec().calibration.save(calibration_path(path))
    return path


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours with some noise."""
    numbers = np.random.RandomState(seed)
    small = Image.fromarray(numbers.randint(0, 256, (3, 3, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((width, height), Image.Resampling.BILINEAR), dtype=np.int16)
    pixels = (pixels + numbers.randint(-20, 21, pixels.shape)).clip(0, 255).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    return Image.fromarray(pixels).convert(mode)
