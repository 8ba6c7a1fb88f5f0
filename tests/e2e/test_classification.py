"""Classifiers by their shipped recipes at debug size: probing leaves the encoder alone and asks it no more often than
the augmentation demands, fine-tuning with everything on, resume in mid-epoch bit for bit."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch
from training import read_checkpoint, signal_at, unequal

from finola.data import Batches, build_loader, open_data
from finola.factory import create_model
from finola.training.recipe import load_recipe
from finola.weights import load_weights, save_weights

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
from finola.training.tasks.classification import ClassificationTask  # noqa: E402

pytest.importorskip("lightly", reason="MAE, SimMIM and MoCo need the extra 'ssl'")
pytestmark = pytest.mark.usefixtures("one_thread")

DEBUG = ["--data.image_size", "32", "--data.num_workers", "0", "--optim.epochs", "1", "--optim.batch_size", "6",
         "--trainer.accelerator", "cpu", "--trainer.val_every", "1"]
RESIDENT = ["--data.resident_size", "32"]
EVERYTHING = ["--optim.mixup", "0.8", "--optim.cutmix", "1.0", "--optim.random_erasing", "0.5",
              "--optim.layer_decay", "0.7"]


def train(name, images, out, *overrides, **options):
    recipe = load_recipe(f"imagenette/{name}", [*DEBUG, *overrides])
    return engine.fit(recipe, [images / "train"], [images / "val"], out, **options)


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """Weights of a masked FINOLA whose BatchNorm statistics are not those of a new one."""
    torch.manual_seed(0)
    model = create_model("masked_finola_b_mfw720", image_size=64, block_size=2, decoder_depth=1)
    with torch.no_grad():
        for _ in range(3):
            model(torch.rand(4, 3, 64, 64))
    return save_weights(model, tmp_path_factory.mktemp("masked") / "weights.safetensors")


@pytest.fixture(scope="module")
def mae(tmp_path_factory):
    torch.manual_seed(0)
    model = create_model("mae_vit_tiny", image_size=64, decoder_depth=1)
    return save_weights(model, tmp_path_factory.mktemp("mae") / "weights.safetensors")


@pytest.mark.parametrize(("name", "overrides"), [
    ("lin_vit_tiny", RESIDENT), ("tran1_ft_w720", EVERYTHING), ("supervised_w720", []),
    pytest.param("lin_w720", RESIDENT, marks=pytest.mark.slow),
    *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("tran1_w720", "tran4_ft_w720", "ft_vit_tiny")),
])
def test_two_steps(name, overrides, images, masked, mae, tmp_path):
    source = None if name.startswith("supervised") else mae if "vit" in name else masked
    run = tmp_path / "run"
    result = train(name, images, run, *overrides, init_from=source)
    assert result["finished"] and result["step"] == result["total_steps"] == 2
    assert json.loads((run / "result.json").read_text()) == result
    assert [key for key in result if key.startswith("val_")] == ["val_top1"]  # top-5 of two classes says nothing
    assert all(math.isfinite(number) for number in result["history"][0].values())
    assert result["chance"] == 50 and not any("top5" in key for point in result["history"] for key in point)
    assert (run / "curve.png").stat().st_size and (run / "panel.png").stat().st_size

    model = load_weights(run / "weights.safetensors").eval()
    assert model.config.classes == ("class_0", "class_1")
    assert model(torch.rand(1, 3, 32, 32)).shape == (1, 2)


def test_the_head_learns(images, masked, tmp_path):
    """Twelve images are learnt by heart from frozen features; the result says so and the weights know them."""
    result = train("lin_w720", images, tmp_path / "run", *RESIDENT, "--optim.epochs", "60", "--optim.base_lr", "0.1",
                   "--trainer.val_every", "10", "--data.augment", "false", init_from=masked)
    first, last = result["history"][0], result["history"][-1]
    assert last["train_loss"] < first["train_loss"] / 4 and last["train_top1"] == 100


# the frozen encoder -------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch):
    """Images that the encoder is shown, batch by batch."""
    from finola.models.mobileformer import MobileFormer

    sizes, original = [], MobileFormer.forward_map_and_tokens

    def counted(encoder, x):
        sizes.append(len(x))
        return original(encoder, x)

    monkeypatch.setattr(MobileFormer, "forward_map_and_tokens", counted)
    return sizes


@pytest.mark.parametrize(("name", "overrides", "augment"), [
    ("lin_w720", RESIDENT, False), ("tran1_w720", [], True),
    pytest.param("lin_w720", RESIDENT, True, marks=pytest.mark.slow),
    pytest.param("tran1_w720", [], False, marks=pytest.mark.slow),
])
def test_probing_leaves_the_encoder_alone(name, overrides, augment, images, masked, tmp_path, encoded):
    """Three epochs with three validations of 4 images; two batches of 6 an epoch."""
    options = [*overrides, "--optim.epochs", "3"]
    if not augment:
        options += ["--data.augment", "false", "--data.policy", "null", "--optim.random_erasing", "0"]
    result = train(name, images, tmp_path / "run", *options, init_from=masked)
    assert len(result["history"]) == 3
    assert sum(encoded) == 4 + (3 * 12 if augment else 12)
    before, after = (load_weights(path).encoder.state_dict() for path in (masked, tmp_path / "run/weights.safetensors"))
    assert unequal(before, after) == []
    assert not list((tmp_path / "run").glob("features*"))


def test_kept_features_score_as_the_images_do(images, masked, tmp_path):
    """The validation's accuracy and loss from kept features are those of the written weights."""
    result = train("tran1_w720", images, tmp_path / "run", "--trainer.precision", "32-true", init_from=masked)
    model = load_weights(tmp_path / "run/weights.safetensors").eval()
    batch, = build_loader(open_data([images / "val"]), Batches(4, train=False), image_size=32, crop_pct=0.875)
    with torch.no_grad():
        logits = model(batch["image"])
    loss = torch.nn.functional.cross_entropy(logits, batch["label"]).item()
    assert result["history"][-1]["val_loss"] == pytest.approx(loss, abs=1e-3)
    assert result["val_top1"] == 100 * (logits.argmax(1) == batch["label"]).float().mean().item()


@pytest.mark.parametrize(("overrides", "crop_pct"), [((), 0.875), (("--data.crop_pct", "1"), 1.0)])
@pytest.mark.parametrize("resident", ["false", "true"])
def test_a_run_is_judged_by_the_fields_protocol(overrides, crop_pct, resident, images, masked, tmp_path):
    """32 px of 36, in the proportion of 224 to 256, also where images are kept in memory."""
    result = train("lin_w720", images, tmp_path / "run", "--trainer.precision", "32-true", "--data.resident", resident,
                   "--data.augment", "true", *overrides, init_from=masked)
    model = load_weights(tmp_path / "run/weights.safetensors").eval()
    batch, = build_loader(open_data([images / "val"]), Batches(4, train=False), image_size=32, crop_pct=crop_pct)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).item()
    assert result["history"][-1]["val_loss"] == pytest.approx(loss, abs=1e-3)


# fine-tuning --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "overrides"), [
    ("tran1_ft_w720", EVERYTHING),
    pytest.param("tran1_w720", [], marks=pytest.mark.slow),
    ("lin_w720", [*RESIDENT, "--data.augment", "false"]),
])
def test_resume_in_mid_epoch(name, overrides, images, masked, tmp_path, monkeypatch):
    """Stopped after the first of two steps of the second epoch; the weights to start from are not needed again."""
    overrides = [*overrides, "--optim.epochs", "2", "--trainer.precision", "32-true"]
    train(name, images, tmp_path / "whole", *overrides, init_from=masked)
    with monkeypatch.context() as patch:
        signal_at(patch, ClassificationTask, 2)
        with pytest.raises(SystemExit) as stop:
            train(name, images, tmp_path / "run", *overrides, init_from=masked)
    assert stop.value.code == 128 + signal.SIGTERM
    assert read_checkpoint(tmp_path / "run")["global_step"] == 3
    train(name, images, tmp_path / "run", *overrides, init_from=masked, resume=True)
    assert unequal(read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "run")) == []


def test_lines_show_what_was_validated(images, masked, tmp_path, capsys):
    """Of four epochs every second is validated; the others show no number from before."""
    train("lin_w720", images, tmp_path / "run", *RESIDENT, "--optim.epochs", "4", "--trainer.val_every", "2",
          "--data.augment", "false", init_from=masked)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert ["val/top1" in line for line in lines] == [False, True, False, True]
    assert all("train/top1" in line for line in lines)


def test_layer_wise_learning_rates(images, tmp_path, monkeypatch):
    """The optimiser's groups: the head at the full rate, each layer below it at 0.5 of the one above."""
    seen = {}
    original = ClassificationTask.on_train_batch_end

    def record(task, *args):
        names = {id(parameter): name for name, parameter in task.model.named_parameters()}
        for group in task.optimizers().param_groups:
            for parameter in group["params"]:
                seen[names[id(parameter)]] = (group["lr"], group["weight_decay"])
        return original(task, *args)

    monkeypatch.setattr(ClassificationTask, "on_train_batch_end", record)
    train("tran1_ft_w720", images, tmp_path / "run", "--optim.layer_decay", "0.5", "--optim.epochs", "2",
          "--optim.batch_size", "12")
    model = create_model("mobileformer_w720+tran1", image_size=32, num_classes=2)
    assert seen.keys() == {name for name, _ in model.named_parameters()}
    full = seen["head.fc.weight"][0]
    scales = model.layer_scales(0.5)
    assert all(rate == pytest.approx(full * scales[name]) for name, (rate, _) in seen.items())
    assert min(rate for rate, _ in seen.values()) == pytest.approx(full * 0.5**13)
    assert seen["head.fc.weight"][1] == 0.05 and seen["head.fc.bias"][1] == 0
