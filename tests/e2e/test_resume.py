"""A run that was stopped at any moment and resumed ends like one that was not, in every bit of its
checkpoint: weights, averages, optimiser, position in the data, history. A promise for CPUs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
import torch
from training import read_checkpoint, signal_at, unequal

from finola.training.recipe import load_recipe
from finola.weights import read_tensors

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
from finola.training.tasks.reconstruction import ReconstructionTask  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def train(recipe_file, images, out, *overrides, **options):
    recipe = load_recipe(recipe_file, list(overrides))
    return engine.fit(recipe, [images / "train"], [images / "val"], out, **options)


@pytest.fixture(scope="module")
def uninterrupted(one_thread, recipe_file, images, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    train(recipe_file, images, out)
    return out


@pytest.mark.parametrize(("batch", "number"), [
    (0, signal.SIGTERM),  # first step
    (2, signal.SIGINT),  # last step of the first epoch: stops after its validation
    (4, signal.SIGTERM),  # in the middle of the second epoch
])
def test_signal_and_resume(batch, number, uninterrupted, recipe_file, images, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at(patch, ReconstructionTask, batch, number)
        with pytest.raises(SystemExit) as stop:
            train(recipe_file, images, out)
    assert stop.value.code == 128 + number
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert signal.Signals(number).name in message and "--resume" in message
    assert read_checkpoint(out)["global_step"] == batch + 1
    train(recipe_file, images, out, resume=True)
    assert unequal(read_checkpoint(uninterrupted), read_checkpoint(out)) == []


def test_resume_of_a_checkpoint_with_averages_of_lightnings_own(uninterrupted, recipe_file, images, tmp_path,
                                                                monkeypatch):
    """Runs before `Averaging` wrote their checkpoints with Lightning's callback and this rule."""
    from lightning.pytorch.callbacks import WeightAveraging

    def rule(averaged, current, num_averaged):
        n = float(num_averaged)
        if averaged[0].is_floating_point():
            torch._foreach_lerp_(averaged, current, 1 - min(0.9, (1 + n) / (10 + n)))
        else:
            torch._foreach_copy_(averaged, current)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(engine, "Averaging", lambda decay: WeightAveraging(multi_avg_fn=torch.no_grad()(rule)))
        signal_at(patch, ReconstructionTask, 4, signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(recipe_file, images, out)
    checkpoint = read_checkpoint(out)
    assert checkpoint["callbacks"]["WeightAveraging"] == {"latest_update_step": 5}
    assert checkpoint["averaging_state"] == {"n_averaged": torch.tensor(5)}
    train(recipe_file, images, out, resume=True)
    assert unequal(read_checkpoint(uninterrupted), read_checkpoint(out)) == []


def test_resume_within_accumulation(recipe_file, images, tmp_path, monkeypatch):
    """A signal between the two halves of a step waits for the step: no checkpoint holds half a gradient."""
    halves = ("--trainer.accumulate", "2")
    train(recipe_file, images, tmp_path / "whole", *halves)
    with monkeypatch.context() as patch:
        signal_at(patch, ReconstructionTask, 2, signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(recipe_file, images, tmp_path / "run", *halves)
    assert read_checkpoint(tmp_path / "run")["global_step"] == 2
    train(recipe_file, images, tmp_path / "run", *halves, resume=True)
    assert unequal(read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "run")) == []


def test_kill_and_resume(uninterrupted, recipe_file, images, tmp_path):
    """kill -9 once there is a checkpoint; with one after every step, often while the next is written."""
    out = tmp_path / "run"
    program = "import sys, torch; from finola.cli.main import main; torch.set_num_threads(1); main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "train", str(recipe_file), "--data", str(images / "train"),
               "--val", str(images / "val"), "--out", str(out), "--trainer.checkpoint_steps", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (out / "last.ckpt").exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.3)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    assert 0 < read_checkpoint(out)["global_step"] < 6
    train(recipe_file, images, out, resume=True)
    assert unequal(read_checkpoint(uninterrupted), read_checkpoint(out)) == []
    assert not list(out.glob(".*.ckpt"))


def test_resume_of_a_finished_run_writes_its_results_again(uninterrupted, recipe_file, images):
    path = uninterrupted / "weights.safetensors"
    before, _ = read_tensors(path)
    path.unlink()
    result = train(recipe_file, images, uninterrupted, resume=True)
    assert result["step"] == 6 and len(result["history"]) == 2
    assert unequal(before, read_tensors(path)[0]) == []


def test_max_time_stops_and_resumes(uninterrupted, recipe_file, images, tmp_path):
    """At the end of the time there are a checkpoint and results; the pause does not change the rest."""
    out = tmp_path / "run"
    result = train(recipe_file, images, out, "--trainer.max_time", "1e-9")
    assert not result["finished"] and result["step"] == 1 and result["val_psnr"] is not None
    assert (out / "weights.safetensors").exists()
    assert train(recipe_file, images, out, resume=True)["finished"]
    assert unequal(read_checkpoint(uninterrupted), read_checkpoint(out)) == []

@pytest.mark.parametrize(("batch", "step"), [(4, 1), (12, 1)], ids=["in mid-epoch", "at the end of an epoch"])
def test_what_stops_in_time_is_validated(batch, step, recipe_file, images, tmp_path):
    """Also in an epoch that would not be: results without scores are of no use."""
    result = train(recipe_file, images, tmp_path / "run", "--trainer.max_time", "1e-9", "--optim.epochs", "4",
                   "--trainer.val_every", "4", "--optim.batch_size", str(batch))
    assert not result["finished"] and result["step"] == step
    assert [point["step"] for point in result["history"]] == [step] and result["val_psnr"] > 0


def test_resume_with_nothing_there_starts(recipe_file, images, tmp_path):
    result = train(recipe_file, images, tmp_path / "run", "--optim.epochs", "1", resume=True)
    assert result["finished"] and result["step"] == 3
