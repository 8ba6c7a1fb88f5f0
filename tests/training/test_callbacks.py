"""The averaged weights lie on the run's device, and no step waits for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

plugins = pytest.importorskip("lightning.pytorch.plugins", reason="needs the extra 'train'")
callbacks = pytest.importorskip("finola.training.callbacks", reason="needs the extra 'train'")

META = torch.device("meta")


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_averages_are_made_on_the_runs_device_and_read_nothing_from_it():
    """The model moves there after the averages are made. The device meta raises where a number is read from it or
    copied to the host."""
    model, averaging = small(), callbacks.Averaging(0.9)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=META), precision_plugin=plugins.Precision(),
                              global_step=0)
    averaging.setup(trainer, model, "fit")
    model.to(META)
    for trainer.global_step in (1, 2, 3):
        averaging.on_train_batch_end(trainer, model, None, {}, 0)
    averaging.on_validation_epoch_start(trainer, model)
    averaging.on_validation_epoch_end(trainer, model)
    average = averaging._average_model
    assert {t.device for t in (*average.module.parameters(), *average.module.buffers())} == {META}
    assert average.n_averaged.device.type == "cpu" and average.n_averaged.item() == 3


def test_averages_follow_their_rule():
    """The first weights are copied; then the decay is (1 + n) / (10 + n), at most what is asked for. Counters are
    copied."""
    model = small()
    average = callbacks.Average(model, torch.device("cpu"), decay=0.2)
    expected = None
    for n in range(4):
        with torch.no_grad():
            model[0].weight.normal_()
        model[1].num_batches_tracked += 1
        average.update_parameters(model)
        decay = min(0.2, (1 + n) / (10 + n))
        current = model[0].weight.detach().clone()
        expected = current if expected is None else decay * expected + (1 - decay) * current
        torch.testing.assert_close(average.module[0].weight, expected)
        assert average.module[1].num_batches_tracked == n + 1
