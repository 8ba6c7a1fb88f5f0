"""A tiny model's output does not change: stored images, vectors and reconstructions.

After a change that is meant to alter them: GENERATE_EXPECTED=1 pytest tests/golden
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from finola import AutoencoderConfig, FinolaAutoencoder

EXPECTED = Path(__file__).parent / "model.safetensors"
CONFIG = AutoencoderConfig("mobileformer_w720", embed_dim=32, image_size=32, map_size=8, pool_heads=4,
                           decoder_widths=(16, 8, 8))


@torch.no_grad()
def fixed_model() -> FinolaAutoencoder:
    """Weights, biases and running statistics from a stream that NumPy keeps the same for ever."""
    numbers = np.random.RandomState(0)
    model = FinolaAutoencoder(CONFIG).double().eval()  # so that the order of sums does not show
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        drawn = torch.from_numpy(numbers.standard_normal(tensor.shape))
        if tensor.ndim >= 2:  # unit gain over the inputs of one output
            drawn *= tensor[0].numel() ** -0.5
        elif name.endswith(("running_var", ".weight")):  # of a norm
            drawn = 1 + 0.1 * drawn.abs()
        else:
            drawn *= 0.1
        tensor.copy_(drawn)
    return model


def outputs() -> dict[str, torch.Tensor]:
    blocks = np.random.RandomState(1).randint(0, 256, (2, 3, 4, 4), dtype=np.uint8)
    pixels = torch.from_numpy(np.kron(blocks, np.ones((8, 8), dtype=np.uint8)))  # (2, 3, 32, 32)
    model = fixed_model()
    with torch.no_grad():
        q = model.encode(pixels.double() / 255)
        return {"pixels": pixels, "q": q.float(), "x_hat": model.decode(q).float()}


@pytest.fixture(scope="module")
def expected():
    if os.environ.get("GENERATE_EXPECTED"):
        save_file({name: tensor.contiguous() for name, tensor in outputs().items()}, EXPECTED)
        EXPECTED.chmod(0o644)
    return load_file(EXPECTED)


def test_the_stored_tensors_tell_images_apart(expected):
    for name in ("q", "x_hat"):
        first, second = expected[name]
        assert first.std() > 0.05
        assert (first - second).abs().mean() > 0.01


@pytest.mark.parametrize("name", ["pixels", "q", "x_hat"])
def test_outputs_are_the_stored_ones(expected, name):
    torch.testing.assert_close(outputs()[name], expected[name], rtol=1e-5, atol=1e-5)
