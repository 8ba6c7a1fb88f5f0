"""A tiny codec, and its files."""

import pytest
from tiny_codecs import save_tiny_codec, tiny_codec


@pytest.fixture(scope="session")
def codec():
    """Not to be changed."""
    return tiny_codec()


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """The codec's weights, with the calibration beside them."""
    return str(save_tiny_codec(tmp_path_factory.mktemp("codec")))
