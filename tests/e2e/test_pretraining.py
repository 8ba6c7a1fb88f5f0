"""Pre-training of every kind, by its shipped recipe at debug size: two steps, resume in mid-epoch bit for bit, and
the k-NN accuracy where there are labels."""

from __future__ import annotations

import json
import math
from pkgutil import resolve_name

import pytest
import torch
from training import make_images, read_checkpoint, signal_at, unequal

from finola.errors import RecipeError
from finola.evaluation.neighbours import neighbours_accuracy
from finola.training.recipe import load_recipe
from finola.weights import load_weights

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
pytest.importorskip("lightly", reason="MAE, SimMIM and MoCo need the extra 'ssl'")
pytestmark = pytest.mark.usefixtures("one_thread")

# 64-px images, a grid of 4x4 patches, a visible block of 2x2
DEBUG = ["--data.image_size", "64", "--data.resident_size", "64", "--data.num_workers", "0", "--optim.epochs", "1",
         "--optim.batch_size", "6", "--trainer.accelerator", "cpu", "--trainer.val_every", "1"]
KINDS = {
    "masked_b_w720": ["--model.block_size", "2", "--model.decoder_depth", "1"],
    "masked_e_w720": ["--model.block_size", "2"],
    "mae_tiny": ["--model.decoder_depth", "1"],
    "simmim_base": ["--model.encoder", "vit_tiny_patch16_224"],
    "moco_w720": ["--model.queue", "16"],
}


def pretrain(name, images, out, *overrides, **options):
    recipe = load_recipe(f"imagenette/{name}", [*DEBUG, *KINDS[name], *overrides])
    return engine.fit(recipe, [images / "train"], [images / "val"], out, **options)


@pytest.mark.parametrize("name", KINDS)
def test_two_steps(name, images, tmp_path):
    run = tmp_path / "run"
    result = pretrain(name, images, run)
    assert result["finished"] and result["step"] == result["total_steps"] == 2
    assert json.loads((run / "result.json").read_text()) == result
    scores = ["val_loss"] if name == "moco_w720" else ["val_psnr", "val_psnr_whole"]
    assert [key for key in result if key.startswith("val_")] == scores  # twelve images are too few for k-NN
    numbers = [result[score] for score in scores] + list(result["history"][0].values())
    assert all(math.isfinite(number) for number in numbers)
    assert (run / "curve.png").stat().st_size
    assert (run / "panel.png").exists() == (name != "moco_w720")

    model, state = load_weights(run / "weights.safetensors"), read_checkpoint(run)["state_dict"]
    trained = {f"model.{key}": value for key, value in model.state_dict().items()}
    assert unequal(trained, {key: state[key] for key in trained}) == []


@pytest.mark.parametrize("name", ["masked_b_w720", "moco_w720"])
def test_resume_in_mid_epoch(name, images, tmp_path, monkeypatch):
    """Stopped after the first of two steps of the second epoch."""
    epochs = ("--optim.epochs", "2", "--trainer.precision", "32-true")
    pretrain(name, images, tmp_path / "whole", *epochs)
    task = resolve_name(load_recipe(f"imagenette/{name}").model_config().task)
    with monkeypatch.context() as patch:
        signal_at(patch, task, 2)
        with pytest.raises(SystemExit):
            pretrain(name, images, tmp_path / "run", *epochs)
    assert read_checkpoint(tmp_path / "run")["global_step"] == 3
    pretrain(name, images, tmp_path / "run", *epochs, resume=True)
    assert unequal(read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "run")) == []


def test_moco_under_accumulation(images, tmp_path, monkeypatch):
    """The slow encoder follows once an optimiser step; the keys of every part of the batch enter the queue."""
    updates = []
    monkeypatch.setattr(
        "finola.models.selfsupervised.Moco.update_momentum_encoder", lambda model: updates.append(model))
    pretrain("moco_w720", images, tmp_path / "run", "--trainer.accumulate", "2")
    assert len(updates) == 2
    assert load_weights(tmp_path / "run/weights.safetensors").contrast.memory_bank.bank_ptr.item() == 12


# k-NN ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def more_images(tmp_path_factory):
    """Enough for twenty neighbours."""
    return make_images(tmp_path_factory.mktemp("more_images"), train=24)


def test_labels_give_a_knn_accuracy(more_images, tmp_path, monkeypatch):
    """At each `knn_every`-th validation, of features without autocast; measuring it does not change the training."""
    autocast = []

    def spied(*args):
        autocast.append(torch.is_autocast_enabled("cpu"))
        return neighbours_accuracy(*args)

    monkeypatch.setattr("finola.training.datamodule.neighbours_accuracy", spied)
    options = ("--optim.batch_size", "12", "--optim.epochs", "2", "--trainer.precision", "bf16-mixed")
    measured = pretrain("masked_b_w720", more_images, tmp_path / "measured", *options, "--trainer.knn_every", "2")
    assert autocast == [False]
    first, last = measured["history"]
    assert "val_knn" not in first
    assert measured["val_knn"] == last["val_knn"] and 0 <= measured["val_knn"] <= 100
    plain = pretrain("masked_b_w720", more_images, tmp_path / "plain", *options, "--trainer.knn_every", "null")
    assert "val_knn" not in plain and plain["val_psnr"] == measured["val_psnr"]
    with_knn, without = (read_checkpoint(tmp_path / run)["state_dict"] for run in ("measured", "plain"))
    assert unequal(with_knn, without) == []


def flat(folder, out):
    """The images of class folders side by side, in a folder without labels."""
    out.mkdir()
    for path in folder.glob("*/*.png"):
        (out / path.name).write_bytes(path.read_bytes())
    return out


@pytest.mark.parametrize("unlabelled", [
    ("train",), *(pytest.param(splits, marks=pytest.mark.slow) for splits in (("val",), ("train", "val"))),
])
def test_without_labels_there_is_no_knn(unlabelled, more_images, tmp_path):
    sets = {split: flat(more_images / split, tmp_path / split) if split in unlabelled else more_images / split
            for split in ("train", "val")}
    recipe = load_recipe("imagenette/masked_e_w720", [*DEBUG, *KINDS["masked_e_w720"], "--optim.batch_size", "24"])
    result = engine.fit(recipe, [sets["train"]], [sets["val"]], tmp_path / "run")
    assert result["finished"] and "val_knn" not in result and math.isfinite(result["val_psnr"])


def test_without_validation_images(images, tmp_path):
    recipe = load_recipe("imagenette/moco_w720", [*DEBUG, *KINDS["moco_w720"]])
    result = engine.fit(recipe, [images / "train"], None, tmp_path / "run")
    assert result["finished"] and result["val_loss"] is None and result["history"] == []
    assert not (tmp_path / "run/panel.png").exists()


def test_options_for_classifiers_alone(images, tmp_path):
    for options in ({"num_classes": 2}, {"new_head": True}):
        with pytest.raises(RecipeError, match="classifiers and detectors, imagenette/masked_e_w720 trains a model of"):
            pretrain("masked_e_w720", images, tmp_path / "run", init_from="weights.safetensors", **options)
    assert not (tmp_path / "run").exists()


# reconstruction from a masked encoder -------------------------------------------------------------


def test_reconstruction_from_a_frozen_masked_encoder(images, tmp_path):
    """The encoder stays as pre-trained, in every bit; pooling and matrices start there and move."""
    pretrain("masked_e_w720", images, tmp_path / "masked")
    recipe = load_recipe("imagenette/recon_masked_e", [*DEBUG, "--model.decoder_widths", "[16, 8, 8, 8]"])
    source = tmp_path / "masked/weights.safetensors"
    result = engine.fit(recipe, [images / "train"], [images / "val"], tmp_path / "run", init_from=source)
    assert result["step"] == 2 and math.isfinite(result["val_psnr"]) and (tmp_path / "run/panel.png").exists()

    donor, model = load_weights(source), load_weights(tmp_path / "run/weights.safetensors")
    assert_moved_from(donor, model)
    assert torch.allclose(donor.pool.value.weight, model.pool.value.weight, atol=1e-3)
    assert not torch.equal(donor.pool.value.weight, model.pool.value.weight)


def test_reconstruction_from_a_frozen_block_wise_encoder(images, tmp_path):
    """The matrices start as pre-trained, at the encoder's own width, and move."""
    pretrain("masked_b_w720", images, tmp_path / "masked")
    recipe = load_recipe("imagenette/recon_masked_b", [
        *DEBUG, "--model.decoder_widths", "[16, 8, 8, 8]", "--model.embed_dim", "720", "--model.pool_heads", "12"])
    source = tmp_path / "masked/weights.safetensors"
    result = engine.fit(recipe, [images / "train"], [images / "val"], tmp_path / "run", init_from=source)
    assert result["step"] == 2 and math.isfinite(result["val_psnr"])
    assert_moved_from(load_weights(source), load_weights(tmp_path / "run/weights.safetensors"))


def assert_moved_from(donor, model):
    """The encoder is the donor's in every bit; the matrices have moved a little from there."""
    assert unequal(donor.encoder.state_dict(), model.encoder.state_dict()) == []
    for name in ("right", "left", "down", "up"):
        before, after = getattr(donor.autoregression, name), getattr(model.autoregression, name)
        distance = (before - after).norm() / before.norm()
        assert 0 < distance < 0.1
