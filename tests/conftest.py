"""Fixtures of the tests that train. `tests/` is on the path, so that they share `training.py`."""

import pytest
import torch
from coco_data import RECIPES
from training import RECIPE, make_images


@pytest.fixture(scope="module")
def one_thread():
    """Sums in one order, for tests that compare bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def recipe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="session")
def recipes(tmp_path_factory):
    """Kind of detector -> recipe file."""
    folder = tmp_path_factory.mktemp("recipes")
    for kind, text in RECIPES.items():
        (folder / f"{kind}.yaml").write_text(text)
    return {kind: folder / f"{kind}.yaml" for kind in RECIPES}
