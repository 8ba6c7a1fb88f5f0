"""A tiny codec, and its files."""

import pytest
from tiny_codecs import tiny_codec

from finola.codec import calibration_path
from finola.weights import save_weights


@pytest.fixture(scope="session")
def codec():
    """Not to be changed."""
    return tiny_codec()


@pytest.fixture(scope="session")
def weights(codec, tmp_path_factory):
    """The codec's weights, with the calibration beside them."""
    path = save_weights(codec.model, tmp_path_factory.mktemp("codec") / "tiny.safetensors")
    codec.calibration.save(calibration_path(path))
    return str(path)
