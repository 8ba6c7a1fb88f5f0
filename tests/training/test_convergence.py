"""A run that is finite and worse than a guess did not converge: its result says so and why, its weights stay."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny_models import autoencoder, classifier
from training import make_images

from finola.factory import create_model
from finola.models.autoencoder import FinolaAutoencoder
from finola.training.recipe import OptimSection, load_recipe
from finola.weights import load_weights, read_tensors

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
from finola.training.convergence import why_not_converged  # noqa: E402
from finola.training.tasks.classification import ClassificationTask  # noqa: E402
from finola.training.tasks.pretraining import ContrastTask, MaskedPredictionTask  # noqa: E402
from finola.training.tasks.reconstruction import ReconstructionTask  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def train(recipe_file, images, out, *overrides, val="val", **options):
    recipe = load_recipe(recipe_file, list(overrides))
    return engine.fit(recipe, [images / "train"], [images / val] if val else None, out, **options)


@pytest.fixture
def diverged(monkeypatch):
    """The reconstructions are finite, and far from any image."""
    original = FinolaAutoencoder.decode_map
    monkeypatch.setattr(FinolaAutoencoder, "decode_map", lambda model, z: original(model, z) + 5)


@pytest.mark.parametrize("val", ["val", None])
def test_a_run_that_diverged(val, diverged, recipe_file, images, tmp_path, capsys):
    result = train(recipe_file, images, tmp_path / "run", val=val)
    assert (result["finished"], result["converged"]) == (True, False)
    assert result["reason"].startswith("the training loss is ") and result["reason"].endswith(" of the mean image")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"finished, but did not converge ({result['reason']}): step 6 of 6")
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    path = tmp_path / "run/weights.safetensors"
    load_weights(path)
    metadata = read_tensors(path)[1]
    assert (metadata["converged"], json.loads(metadata["reason"])) == ("false", result["reason"])


def test_a_run_that_is_better_than_the_mean_image(recipe_file, tmp_path, capsys):
    images = make_images(tmp_path / "images", train=4, val=4)
    result = train(recipe_file, images, tmp_path / "run", "--optim.epochs", "60", "--optim.base_lr", "0.2",
                   "--data.crop_scale", "[1.0, 1.0]", "--data.hflip", "false", "--data.resident", "true",
                   "--trainer.val_every", "60", val="train")
    assert result["converged"] is True and "reason" not in result
    assert capsys.readouterr().out.splitlines()[-1].startswith("finished: step")
    assert read_tensors(tmp_path / "run/weights.safetensors")[1]["converged"] == "true"


def test_a_run_that_is_not_at_its_end_is_not_judged(diverged, recipe_file, images, tmp_path):
    result = train(recipe_file, images, tmp_path / "run", "--trainer.max_time", "1e-9")
    assert (result["finished"], result["converged"]) == (False, None)
    result = train(recipe_file, images, tmp_path / "run", resume=True)
    assert (result["finished"], result["converged"]) == (True, False)


def test_weights_that_are_not_finite_are_not_written(recipe_file, images, tmp_path, monkeypatch):
    original = ReconstructionTask.on_validation_epoch_end

    def spoil(task):
        original(task)
        with torch.no_grad():
            task.model.decoder.to_rgb.bias.fill_(math.inf)

    monkeypatch.setattr(ReconstructionTask, "on_validation_epoch_end", spoil)
    result = train(recipe_file, images, tmp_path / "run", "--optim.epochs", "1", "--trainer.ema_decay", "null")
    assert (result["converged"], result["reason"]) == (False, "its weights are not finite")
    assert not (tmp_path / "run/weights.safetensors").exists()


# what a guess is worth ----------------------------------------------------------------------------


def guess(task_class, model, x=None):
    return task_class(model, OptimSection(), total_steps=1).guess_loss(lambda: x)


def test_the_mean_image_by_hand():
    """Of each image the error of the mean of the two others, over normalised pixels."""
    x = torch.rand(3, 3, 32, 32)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    errors = [(((x[j] + x[k]) / 2 - x[i]) / std).square().mean() for i, j, k in ((0, 1, 2), (1, 0, 2), (2, 0, 1))]
    loss, words = guess(ReconstructionTask, autoencoder(), x)
    assert loss == pytest.approx(sum(errors).item() / 3, rel=1e-5) and words == "the mean image"
    assert guess(ReconstructionTask, autoencoder(), x[:1]) is None


def test_masked_patches():
    """The same in a masked model's own loss; the mean of patches of no mean and unit deviation is 0."""
    options = {"image_size": 64, "block_size": 2, "decoder_dim": 64, "decoder_depth": 1}
    x = torch.rand(40, 3, 64, 64)
    plain = create_model("masked_finola_b_mfw720", **options)
    image = create_model("finola_mfw720_c768_r8", start="random", image_size=64, embed_dim=16, pool_heads=2,
                         decoder_widths=(8,) * 4)
    expected = guess(ReconstructionTask, image, x)[0]
    assert guess(MaskedPredictionTask, plain, x) == (pytest.approx(expected, rel=1e-4), "the mean image")
    normalised = create_model("masked_finola_b_mfw720", norm_pix_loss=True, **options)
    assert guess(MaskedPredictionTask, normalised, x) == (pytest.approx(1, rel=1e-3), "the mean patch")


def test_chance():
    assert guess(ClassificationTask, classifier()) == (math.log(3), "guessing every class alike")
    pytest.importorskip("lightly")
    moco = create_model("moco_mfw720", image_size=32, queue=16)
    assert guess(ContrastTask, moco) == (math.log(17), "guessing among the queue")


@pytest.mark.parametrize(("loss", "converged"), [(math.log(3), True), (1.0987, False), (None, False)])
def test_a_loss_is_held_against_the_guess(loss, converged):
    task = ClassificationTask(classifier(), OptimSection(), total_steps=1)
    task.history = [{"train_loss": 9.0}, {"train_loss": loss, "val_loss": 9.0}]
    assert (why_not_converged(task, NoImages()) is None) == converged


class NoImages:
    def examples(self):
        raise AssertionError("no image is needed")
