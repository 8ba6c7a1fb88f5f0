"""Images for the detectors."""

import pytest
from coco_data import padded_pair


@pytest.fixture
def images():
    return padded_pair()
