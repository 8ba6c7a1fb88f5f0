"""What tests in several rooms share. `tests/helpers` is on the path, for what is not a fixture."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of several workers, and for the processes they start
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():  # Triton asks when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from coco_data import RECIPES
from hypothesis import HealthCheck, settings
from tiny_models import autoencoder
from training import RECIPE, make_images

from finola.weights import save_weights

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


@pytest.fixture(autouse=True)
def seed():
    """Each test draws the same random numbers, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread():
    """Sums in one order, for tests that compare bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model():
    """An untrained autoencoder of 32-px images, not to be changed."""
    return autoencoder()


@pytest.fixture(scope="session")
def weights(model, tmp_path_factory):
    """A file with its weights, not to be changed."""
    return save_weights(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder with train/ of 12 and val/ of 4 images in two classes."""
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
