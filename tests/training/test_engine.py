"""Runs that go wrong: nothing half-written, nothing lost, one clear line."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from training import read_checkpoint

from finola.data import open_data
from finola.errors import DataError, RecipeError, WeightsError
from finola.training.recipe import load_recipe

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
from finola.training.callbacks import WholeFileCheckpoints  # noqa: E402
from finola.training.datamodule import Images  # noqa: E402
from finola.training.tasks import base  # noqa: E402
from finola.training.tasks.base import NonFiniteLoss, learning_rate  # noqa: E402
from finola.training.tasks.reconstruction import ReconstructionTask  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def train(recipe_file, images, out, *overrides, **options):
    recipe = load_recipe(recipe_file, ["--optim.epochs", "1", *overrides])
    return engine.fit(recipe, [images / "train"], None, out, **options)


@pytest.fixture(scope="module")
def finished(one_thread, recipe_file, images, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    train(recipe_file, images, out)
    return out


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a finished run of three steps, to be spoilt."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_folder_in_use_is_refused(recipe_file, images, run):
    before = sorted(run.rglob("*"))
    with pytest.raises(RecipeError, match="not empty; add --resume"):
        train(recipe_file, images, run)
    assert sorted(run.rglob("*")) == before


def test_a_file_in_place_of_the_folder(recipe_file, images, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="is a file"):
        train(recipe_file, images, tmp_path / "file")


@pytest.mark.parametrize(("change", "shown"), [
    (["--optim.batch_size", "6"], "optim.batch_size: 4 then, 6 now"),
    (["--model.embed_dim", "32"], "model.embed_dim: 16 then, 32 now"),
    (["--seed", "1"], "seed: 0 then, 1 now"),
])
def test_resume_of_another_run_is_refused_with_the_difference(change, shown, recipe_file, images, run):
    with pytest.raises(RecipeError) as error:
        train(recipe_file, images, run, *change, resume=True)
    assert shown in str(error.value) and "--allow-changes" in str(error.value)


def test_resume_of_another_run_on_demand(recipe_file, images, run):
    result = train(recipe_file, images, run, "--optim.epochs", "2", resume=True, allow_changes=True)
    assert result["step"] == 6


@pytest.mark.parametrize("keep", [0, 1000, 0.5])
def test_a_damaged_checkpoint_is_named(keep, recipe_file, images, run):
    whole = (run / "last.ckpt").read_bytes()
    (run / "last.ckpt").write_bytes(whole[:int(len(whole) * keep if keep < 1 else keep)])
    with pytest.raises(WeightsError, match=r"last\.ckpt: not a whole checkpoint"):
        train(recipe_file, images, run, resume=True)


def test_a_hostile_checkpoint_is_not_run(recipe_file, images, run):
    class Trap:
        def __reduce__(self):
            return open, (str(run / "trap"), "w")

    torch.save({"identity": Trap()}, run / "last.ckpt", pickle_module=pickle)
    with pytest.raises(WeightsError, match=r"last\.ckpt"):
        train(recipe_file, images, run, resume=True)
    assert not (run / "trap").exists()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    WholeFileCheckpoints().save_checkpoint({"step": 1}, path)

    def full(checkpoint, temporary):
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        WholeFileCheckpoints().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("later", [False, True])
def test_a_loss_that_is_not_finite(later, recipe_file, images, tmp_path, monkeypatch):
    """The run stops before anything is kept of the step and says where; its result says it did not converge. Also
    where the loss is read `later`, as on a GPU."""
    monkeypatch.setattr(base, "is_read_later", lambda loss: later)
    original = ReconstructionTask.loss

    def loss(task, x_hat, x):
        return original(task, x_hat, x) * (float("nan") if task.global_step == 2 else 1)

    monkeypatch.setattr(ReconstructionTask, "loss", loss)
    with pytest.raises(NonFiniteLoss, match="not finite at step 2") as error:
        train(recipe_file, images, tmp_path / "run", "--trainer.checkpoint_steps", "1")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["converged"], result["finished"], result["step"]) == (False, False, 2)
    names = open_data([images / "train"])
    assert result["failed_batch"] == [names.name(index) for index in error.value.indices]
    checkpoint = read_checkpoint(tmp_path / "run")
    assert checkpoint["global_step"] == 2
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())
    assert not (tmp_path / "run/weights.safetensors").exists()


@pytest.mark.parametrize(("bad", "validations"), [(0, 0), (1, 0), (2, 0), (3, 1), (5, 1)])
def test_a_loss_that_is_read_later(bad, validations, recipe_file, images, tmp_path, monkeypatch):
    """At any step of two epochs of three, the last of an epoch and of the run among them: the step and its images are
    named, it is not validated, and the newest checkpoint is of the steps before it."""
    seen = []
    original = ReconstructionTask.training_loss

    def training_loss(task, batch):
        seen.append(batch["index"].tolist())
        loss, score = original(task, batch)
        return loss * (float("inf") if task.global_step == bad else 1), score

    monkeypatch.setattr(base, "is_read_later", lambda loss: True)
    monkeypatch.setattr(ReconstructionTask, "training_loss", training_loss)
    recipe = load_recipe(recipe_file, ["--trainer.checkpoint_steps", "1"])
    with pytest.raises(NonFiniteLoss, match=f"not finite at step {bad} ") as error:
        engine.fit(recipe, [images / "train"], [images / "val"], tmp_path / "run")
    assert (len(seen), error.value.indices) == (bad + 1, seen[bad])
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["step"], len(result["history"])) == (bad, validations)
    assert (tmp_path / "run/last.ckpt").exists() == (bad > 0)
    if bad:
        checkpoint = read_checkpoint(tmp_path / "run")
        assert checkpoint["global_step"] == bad
        assert all(tensor.isfinite().all() for tensor in checkpoint["current_model_state"].values())


def test_a_loss_that_is_read_by_the_next_step(recipe_file, images, tmp_path, monkeypatch):
    """With no checkpoint in between, before the next loss is computed from the spoilt weights."""
    seen = []
    original = ReconstructionTask.training_loss

    def training_loss(task, batch):
        seen.append(task.global_step)
        loss, score = original(task, batch)
        return loss * (float("nan") if task.global_step == 1 else 1), score

    monkeypatch.setattr(base, "is_read_later", lambda loss: True)
    monkeypatch.setattr(ReconstructionTask, "training_loss", training_loss)
    with pytest.raises(NonFiniteLoss, match="not finite at step 1 "):
        train(recipe_file, images, tmp_path / "run")
    assert seen == [0, 1] and not (tmp_path / "run/last.ckpt").exists()


def test_scores_that_are_not_finite_are_null(recipe_file, images, tmp_path, monkeypatch):
    """JSON has no NaN; and one such image is not left out of the mean."""
    def psnr(x_hat, x):
        return torch.tensor([20.0] * (len(x) - 1) + [float("nan")])

    monkeypatch.setattr("finola.training.tasks.reconstruction.psnr", psnr)
    recipe = load_recipe(recipe_file, ["--optim.epochs", "1"])
    engine.fit(recipe, [images / "train"], [images / "val"], tmp_path / "run")
    text = (tmp_path / "run/result.json").read_text()
    assert "NaN" not in text and json.loads(text)["val_psnr"] is None
    assert json.loads(text)["val_ssim"] is not None


@pytest.mark.parametrize(("gpu", "one_size", "accelerator", "tries"), [
    (True, True, "auto", True), (True, False, "auto", False), (True, True, "cpu", False), (False, True, "auto", False)])
def test_cudnn_tries_its_algorithms_where_shapes_stay(gpu, one_size, accelerator, tries, recipe_file, tmp_path,
                                                      monkeypatch):
    options = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(engine, "Trainer", lambda **given: options.update(given))
    recipe = load_recipe(recipe_file, ["--trainer.accelerator", accelerator])
    engine._trainer(recipe, tmp_path, [], SimpleNamespace(one_size=one_size, val=None))
    assert options["benchmark"] is tries


def test_a_batch_that_cannot_be_shared_out(recipe_file, images, tmp_path):
    with pytest.raises(RecipeError, match=r"optim\.batch_size: got 4, expected a multiple of 3"):
        train(recipe_file, images, tmp_path / "run", "--trainer.devices", "3")
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data(recipe_file, images, tmp_path):
    with pytest.raises(DataError, match="12 images"):
        train(recipe_file, images, tmp_path / "run", "--optim.batch_size", "64")
    assert not (tmp_path / "run").exists()


def test_weights_of_another_model(recipe_file, images, finished, tmp_path):
    with pytest.raises(WeightsError, match=r"weights\.safetensors"):
        train(recipe_file, images, tmp_path / "run", "--model.embed_dim", "32",
              init_from=finished / "weights.safetensors")


def test_sigterm_to_the_command(recipe_file, images, tmp_path):
    """Exit code 143, one line, a checkpoint; signalled as soon as the first epoch is over."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "finola.cli", "train", str(recipe_file), "--data", str(images / "train"),
               "--out", str(out), "--optim.epochs", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    for line in process.stdout:
        if line.startswith("epoch 1/"):
            process.send_signal(signal.SIGTERM)
    error = process.stderr.read()
    assert process.wait() == 143, error
    assert "SIGTERM" in error.splitlines()[-1] and "--resume" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert read_checkpoint(out)["global_step"] >= 3


def test_ctrl_c_before_the_first_step(recipe_file, images, tmp_path, monkeypatch):
    """Lightning would turn it into exit code 1."""
    def interrupted(images):
        raise KeyboardInterrupt

    monkeypatch.setattr(Images, "train_dataloader", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(recipe_file, images, tmp_path / "run")


def test_learning_rate():
    """Rises to the peak over the warm-up, falls to nothing, and a short run still warms up for half of it."""
    rates = [learning_rate(step, 100, 0.1, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5) and 0 < rates[-1] < 1e-3
    assert load_recipe("imagenet/default", ["--optim.epochs", "10"]).optim.warmup == 0.5
    rates = [learning_rate(step, 10, 0.2, 1.0, milestones=(0.5, 0.8)) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01])
