"""Both loaders."""

import pytest

from finola.data import ResidentImages, ResidentLoader, build_loader


@pytest.fixture(params=["folder", "resident"])
def make_loader(request, data):
    """A function: a loader of the file's `data` with the file's OPTIONS, from files or from memory."""
    defaults = request.module.OPTIONS
    if request.param == "folder":
        return lambda **options: build_loader(data, **defaults | options)
    images = ResidentImages(data, 30, progress=False)
    return lambda **options: ResidentLoader(images, **defaults | options)
