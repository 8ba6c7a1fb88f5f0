"""What every task promises wherever its losses are computed."""

from __future__ import annotations

import pytest
import torch
from tiny_models import autoencoder
from training import RECIPE

from finola.training.recipe import load_recipe

base = pytest.importorskip("finola.training.tasks.base", reason="needs the extra 'train'")
from finola.training.tasks.reconstruction import ReconstructionTask  # noqa: E402


@pytest.fixture
def task(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return ReconstructionTask(autoencoder(), load_recipe(tmp_path / "recipe.yaml").optim, total_steps=6)


def test_a_run_resumed_in_mid_epoch_sums_on_the_device_of_its_losses(task, monkeypatch):
    """The checkpoint is loaded before the model moves to its device, and no epoch starts: here the losses come on the
    device meta."""
    monkeypatch.setattr(base.LossCheck, "ask", lambda *_: None)  # it copies the answer to the host
    monkeypatch.setattr(base, "is_read_later", lambda loss: True)
    monkeypatch.setattr(ReconstructionTask, "global_step", 1)
    loss = torch.empty((), device="meta", requires_grad=True)
    monkeypatch.setattr(task, "training_loss", lambda batch: (loss, loss.detach()))
    task.on_load_checkpoint({"history": [], "train_sums": [0.5, 20.0, 1.0]})
    assert task.train_sums.tolist() == [0.5, 20.0, 1.0]
    for _ in range(2):
        task.training_step({"index": torch.arange(4)}, 1)
    assert task.train_sums.device.type == "meta" and not task.train_sums.requires_grad
