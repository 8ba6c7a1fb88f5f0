"""What happens around the steps of a run: checkpoints, stopping, averaged weights, speed."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, WeightAveraging
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from finola.data.loader import Batch
from finola.files import atomic_write
from finola.training.recipe import Recipe
from finola.training.tasks.base import Task


class WholeFileCheckpoints(TorchCheckpointIO):
    """Checkpoints that appear whole or not at all.

    Lightning's own are written to the system's temporary folder and then moved; where that is another file
    system, the move is a copy, which can be cut short.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        with atomic_write(path) as temporary:
            torch.save(checkpoint, temporary)


class Checkpoints(Checkpoint):
    """Writes `path` when it is due, and stops the run on SIGTERM, SIGINT or at `deadline` (monotonic).

    Only between optimiser steps, never within accumulation, whose gradients no checkpoint holds. After the last step
    of an epoch it waits for the validation, so that a resumed run has validated as often as an uninterrupted one.
    What stops at `deadline` validates in any epoch: its results have scores. A second signal stops at once, and
    leaves the checkpoint that is there.
    """

    def __init__(self, path: Path, recipe: Recipe, num_images: int, classes: Sequence[str], origin: dict[str, Any],
                 deadline: float):
        self.path, self.recipe, self.origin, self.deadline = path, recipe, origin, deadline
        self.data = {"images": num_images, "classes": list(classes)}
        self.signal: int | None = None
        self.out_of_time = False
        self._step = self._saved_step = 0
        self._saved_time = time.monotonic()
        self._handlers: dict[int, Any] = {}

    def identity(self, trainer: Trainer) -> dict[str, Any]:
        """What a resumed run must have in common with this one."""
        return {**self.recipe.as_dict(), "processes": trainer.world_size, **self.data, **self.origin}

    def on_save_checkpoint(self, trainer: Trainer, task: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["identity"] = self.identity(trainer)

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._step = self._saved_step = trainer.global_step
        self._saved_time = time.monotonic()
        if threading.current_thread() is threading.main_thread():  # after Lightning has set its own
            self._handlers = {number: signal.signal(number, self._on_signal)
                              for number in (signal.SIGTERM, signal.SIGINT)}

    def teardown(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Batch,
                           batch_idx: int) -> None:
        if trainer.is_last_batch:
            if trainer.strategy.reduce_boolean_decision(self._is_too_late(), all=False):
                trainer.check_val_every_n_epoch = 1
            return
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._save_and_stop_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: LightningModule) -> None:
        if self.out_of_time:  # the checkpoint was written in mid-epoch
            return
        self._step = trainer.global_step
        if trainer.current_epoch + 1 == trainer.max_epochs:
            self._save(trainer)
        else:
            self._save_and_stop_if_due(trainer)

    def _save_and_stop_if_due(self, trainer: Trainer) -> None:
        """All processes decide alike: what one of them was asked, all do."""
        agree = trainer.strategy.reduce_boolean_decision
        stop = self.signal is not None or self._is_too_late()
        if not agree(stop or self._is_due(), all=False):
            return
        self._save(trainer)
        if agree(self.signal is not None, all=False):
            number = self.signal or signal.SIGTERM
            if trainer.is_global_zero:
                name = signal.Signals(number).name
                print(f"finola: {name} at step {self._step}; {self.path} is written,"
                      " --resume continues", file=sys.stderr)
            raise SystemExit(128 + number)
        if agree(stop, all=False):
            self.out_of_time = trainer.should_stop = True
            trainer.check_val_every_n_epoch = 1

    def _is_too_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _is_due(self) -> bool:
        section = self.recipe.trainer
        steps, minutes = section.checkpoint_steps or math.inf, section.checkpoint_minutes or math.inf
        return self._step - self._saved_step >= steps or time.monotonic() - self._saved_time >= 60 * minutes

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_step, self._saved_time = self._step, time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number


class Average(AveragedModel):
    """The exponential moving average of a model's parameters and buffers on `device`, with a decay that starts low.

    It is min(decay, (1 + n) / (10 + n)) after n updates: the first weights are soon forgotten. n stays on the CPU,
    where reading it waits for no device.
    """

    def __init__(self, model: nn.Module, device: torch.device, decay: float):
        super().__init__(model)
        self.module.to(device)
        self.decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        n = int(self.n_averaged)
        weight = 1 - min(self.decay, (1 + n) / (10 + n))
        averaged, current = _floats_and_others(self.module), _floats_and_others(model)
        if n == 0:
            torch._foreach_copy_(averaged[0], current[0])
        else:
            torch._foreach_lerp_(averaged[0], current[0], weight)
        if averaged[1]:
            torch._foreach_copy_(averaged[1], current[1])
        self.n_averaged += 1


def _floats_and_others(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """A model's parameters and buffers; the others are counters."""
    tensors = [*model.parameters(), *model.buffers()]
    return [t for t in tensors if t.is_floating_point()], [t for t in tensors if not t.is_floating_point()]


class Averaging(WeightAveraging):
    """Lightning's `WeightAveraging` with an `Average` on the device of the run.

    Lightning's own would stay on the CPU, where the model is while it is set up, and every step would copy all weights
    there.
    """

    state_key = WeightAveraging.__qualname__  # in checkpoints

    def __init__(self, decay: float):
        super().__init__()
        self.decay = decay

    def setup(self, trainer: Trainer, task: LightningModule, stage: str) -> None:
        if stage == "fit":
            average = Average(task, trainer.strategy.root_device, self.decay)
            trainer.precision_plugin.convert_module(average)  # in place, as the task will be
            self._average_model = average


class Speed(Callback):
    """Seconds of the whole run, resumes included, and images a second of this process group.

    The speed counts from batch to batch within an epoch: data, step and logging, without validation and the
    first batch of each epoch.
    """

    def __init__(self) -> None:
        self._before = self._busy = 0.0
        self._images = 0
        self._began: float | None = None
        self._last: float | None = None

    @property
    def seconds(self) -> float:
        return self._before + (time.monotonic() - self._began if self._began else 0.0)

    @property
    def images_per_second(self) -> float | None:
        return self._images / self._busy if self._busy else None

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._began = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, task: LightningModule) -> None:
        self._last = None

    def on_train_batch_end(self, trainer: Trainer, task: LightningModule, outputs: Any, batch: Batch,
                           batch_idx: int) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._busy += now - self._last
            self._images += len(batch["index"]) * trainer.world_size
        self._last = now


class EpochLines(Callback):
    """One line an epoch, where no progress bar can be drawn."""

    @rank_zero_only
    def on_train_epoch_end(self, trainer: Trainer, task: LightningModule) -> None:
        metrics, history, names = trainer.callback_metrics, cast(Task, task).history, cast(Task, task).scores
        validated = bool(history) and history[-1]["epoch"] == trainer.current_epoch
        splits = ("train", "val") if validated else ("train",)
        wanted = ["train/loss", *(f"{split}/{score}" for score in names for split in splits)]
        wanted += ["val/knn"] if validated and "val_knn" in history[-1] else []
        scores = [f"{name} {metrics[name]:.4g}" for name in wanted if name in metrics]
        print(f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  step {trainer.global_step}  "
              f"{'  '.join(scores)}", flush=True)
