"""A kind of model of one's own, as a package outside this one would add it: its configuration, model and task are here,
and training, weights, the list of models and `finola info` know it by `register_kind` alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from training import make_images

import finola
from finola import registry
from finola.data.loader import Batch
from finola.errors import FinolaError
from finola.evaluation import complexity
from finola.models.base import ImageModel, ModelConfig
from finola.models.classifier import ClassifierConfig
from finola.training.engine import fit
from finola.training.recipe import load_recipe
from finola.training.tasks.base import Task

RECIPE = """
model: {name: toy_small}
data: {image_size: 32, num_workers: 0}
optim: {batch_size: 6, epochs: 1, base_lr: 0.1}
trainer: {precision: 32-true, accelerator: cpu}
"""


class ToyEncoder(nn.Module):
    """Normalised images (B, 3, H, W) -> map (B, width, H/16, W/16)."""

    def __init__(self, width: int):
        super().__init__()
        self.num_features = self.head_hidden_size = width
        self.conv = nn.Conv2d(3, width, 16, 16)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward_features(self, x: Tensor) -> Tensor:
        return self.conv(x) * self.scale

    def no_weight_decay(self) -> set[str]:
        return {"scale"}


class Toy(ImageModel):
    """Images (B, 3, S, S) -> their mean colours (B, 3)."""

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.encoder = ToyEncoder(config.width)
        self.head = nn.Linear(config.width, 3)
        self.register_buffer("peak", torch.empty(()).fill_(255.0), persistent=False)  # in no file

    def forward(self, x: Tensor) -> Tensor:
        self.check_image(x)
        return self.head(self.encoder.forward_features(self.normalise(x)).mean((2, 3)))


class ToyTask(Task):
    """Trains a `Toy`. Score: the error of the colours in 1/255."""

    model: Toy
    scores = ("error",)

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.val_error = MeanMetric()

    def training_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, error = self._compare(batch)
        return loss, error.mean()

    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        loss, error = self._compare(batch)
        self.val_loss.update(loss, weight=len(error))
        self.val_error.update(error)

    def validation_scores(self) -> dict[str, Tensor]:
        scores = {"error": self.val_error.compute()}
        self.val_error.reset()
        return scores

    def _compare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found, wanted = self.model(batch["image"]), batch["image"].mean((2, 3))
        return F.mse_loss(found, wanted), self.model.peak * (found - wanted).detach().abs().mean(1)


@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    kind: ClassVar[str] = "toy"
    task: ClassVar[type] = ToyTask

    encoder: str = "toy_encoder"
    image_size: int = 32
    width: int = 4

    def faults(self):
        return self.wrong_image_size(16)

    def build(self) -> Toy:
        return Toy(self)


@pytest.fixture
def toy() -> Iterator[None]:
    """The kind "toy" and its model "toy_small", known while a test runs."""
    with patch.dict(registry.KINDS), patch.dict(registry.MODELS):
        finola.registry.register_kind(ToyConfig, {"toy_small": {"width": 8}})
        complexity.row.cache_clear()
        yield
    complexity.row.cache_clear()


def test_it_is_listed_and_created(toy):
    assert finola.list_models("toy*") == ["toy_small"]
    assert finola.create_model("toy_small", image_size=48).config == ToyConfig(image_size=48, width=8)
    assert finola.create_model("toy_small")(torch.rand(2, 3, 32, 32)).shape == (2, 3)
    with pytest.raises(FinolaError, match="did you mean toy_small"):
        finola.create_model("toy_smal")


def test_its_weights_are_saved_and_loaded(toy, tmp_path):
    model = finola.create_model("toy_small")
    loaded = finola.load_weights(finola.save_weights(model, tmp_path / "toy.safetensors"))
    assert type(loaded) is Toy and loaded.config == model.config
    x = torch.rand(1, 3, 32, 32)
    assert torch.equal(loaded(x), model(x)) and loaded.peak == 255


def test_it_is_trained(toy, tmp_path):
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(RECIPE)
    images, out = make_images(tmp_path / "images"), tmp_path / "run"
    fit(load_recipe(recipe), [str(images / "train")], [str(images / "val")], out)
    result = json.loads((out / "result.json").read_text())
    assert (result["step"], result["finished"], result["converged"]) == (2, True, True)
    assert result["val_error"] == result["history"][-1]["val_error"] > 0
    assert {"train_error", "train_loss", "val_loss"} <= result["history"][-1].keys()
    assert (out / "curve.png").exists()
    trained = finola.load_weights(out / "weights.safetensors")
    assert trained.config == ToyConfig(width=8)

    recipe.write_text(RECIPE.replace("epochs: 1", "epochs: 2"))  # the weights are a start for another run
    again = fit(load_recipe(recipe), [str(images / "train")], None, tmp_path / "again",
                init_from=out / "weights.safetensors")
    assert again["step"] == 4


def test_the_keys_of_other_kinds_are_refused(toy, tmp_path):
    recipe = tmp_path / "toy.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(FinolaError, match="which only classifiers have"):
        load_recipe(recipe, ["--optim.mixup", "0.5"])
    started = load_recipe(recipe, ["--optim.start_images", "16"])
    images = make_images(tmp_path / "images")
    with pytest.raises(FinolaError, match="start_images: .* got one of kind 'toy'"):
        fit(started, [str(images / "train")], None, tmp_path / "run")


def test_its_cost_is_counted(toy):
    row = complexity.row("toy_small")
    assert row.input == "3x32x32"
    assert row.params == (3 * 16 * 16 + 1) * 8 + 8 + 8 * 3 + 3
    assert row.macs == 4 * 8 * 3 * 16 * 16 + 8 * 3


def test_a_taken_kind_is_refused(toy):
    @dataclass(frozen=True)
    class Other(ToyConfig):
        pass

    with pytest.raises(FinolaError, match="'toy' is .*ToyConfig.* already"):
        registry.register_kind(Other, {})


def test_a_taken_name_is_refused(toy):
    for name in ("mobileformer_w720+lin", "toy_small"):
        with pytest.raises(FinolaError, match="is a (classifier|toy) already"):
            registry.register_kind(ToyConfig, {"toy_other": {}, name: {"width": 2}})
    assert finola.list_models("toy*") == ["toy_small"]
    registry.register_kind(ToyConfig, {"toy_small": {"width": 8}})  # the same once more


def test_a_kind_that_no_weights_file_can_name_is_refused(toy):
    class Other(ToyConfig):
        kind = "two words"

    with pytest.raises(FinolaError, match="kind: got 'two words', expected letters"):
        registry.register_kind(Other, {})


def test_a_known_kind_takes_further_names(toy):
    registry.register_kind(ClassifierConfig, {"my_classifier": {"num_classes": 3}})
    assert finola.create_model("my_classifier").config == ClassifierConfig(num_classes=3)


def test_nothing_is_left(tmp_path: Path):
    assert "toy" not in registry.KINDS and not finola.list_models("toy*") and not finola.list_models("my_classifier")
