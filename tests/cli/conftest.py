"""Images for the commands."""

import pytest
from pictures import good_and_bad


@pytest.fixture
def pictures(tmp_path):
    """A folder with two good images and three bad ones."""
    return good_and_bad(tmp_path / "pictures")
