"""What all training tasks share: optimiser, schedule, seeds, the check of the loss, the history of a run.

Training settings are those of the paper's tables `appendix:FINOLA`, `appendix:lin-tran-setting` and
`appendix:finetune-setting`; what they leave open is a field of the recipe.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor
from torchmetrics import MeanMetric, Metric
from torchvision.transforms.functional import pil_to_tensor

from finola.data.loader import Batch
from finola.drawing import PANEL_IMAGES
from finola.errors import FinolaError
from finola.files import atomic_write
from finola.models.base import ImageModel
from finola.training.recipe import OptimSection

if TYPE_CHECKING:
    from finola.codec.calibration import Calibration


class NonFiniteLoss(FinolaError):
    """The loss became infinite or not a number: the run did not converge ("not converge" in the paper).

    Attributes:
        step: optimiser steps taken before it.
        indices: the images of the batch, as numbers in the training set.
    """

    def __init__(self, step: int, indices: list[int]):
        self.step, self.indices = step, indices
        super().__init__(
            f"the training loss is not finite at step {step} (images {indices}); nothing was changed by this step and"
            " the last checkpoint is kept; lower optim.base_lr or set optim.clip_grad"
        )


class LossCheck:
    """Asks of each loss whether it is finite, in all processes, and reads the answer later.

    To wait for a loss leaves a GPU without work until the next kernel is launched. Its answer travels to the host while
    the GPU goes on with the step, and is read by `check`, at the latest when the next step begins."""

    def __init__(self) -> None:
        self._asked: tuple[torch.cuda.Event | None, Tensor, int, Tensor] | None = None

    def ask(self, loss: Tensor, step: int, indices: Tensor) -> None:
        """Of the loss of optimiser step `step`, whose images are `indices` (n,)."""
        finite = loss.detach().isfinite().int()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        answer = finite.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        arrived = torch.cuda.current_stream(loss.device).record_event() if loss.is_cuda else None
        self._asked = arrived, answer, step, indices

    def check(self) -> None:
        """Raises NonFiniteLoss if the loss asked for last was not finite."""
        if self._asked is None:
            return
        (arrived, answer, step, indices), self._asked = self._asked, None
        if arrived is not None:
            arrived.synchronize()
        if not answer:
            raise NonFiniteLoss(step, indices.tolist())


def is_read_later(loss: Tensor) -> bool:
    """Whether reading the loss at once would cost time: a CPU has finished it."""
    return loss.is_cuda


class Task(LightningModule):
    """Trains `model`; a subclass says what the loss and the scores are.

    Args:
        optim: the recipe's section.
        total_steps: optimiser steps of the whole run, from the recipe and the number of images; asking
            Lightning for them would lose the position in the data on resume.
        seed: with the batch number and the rank it decides all randomness inside the model, so that a resumed
            run needs no stored generator state.
        panel_folder: where panels of some validation images go, every `panel_every` validations.

    `history` has one entry for each validation: step, epoch, mean training loss and score of the epoch (this
    process alone), mean validation loss and scores, as far as the task has them; None for what is not finite. It is
    stored in the checkpoint.

    A loss that is not finite ends the run before anything is kept of its step: no checkpoint, no validation, no next
    step. On a CPU the weights are not even touched; a GPU is a part of the step ahead, see `LossCheck`.

    Attributes:
        scores: what a validation finds besides the loss.
        panel_due: whether this process draws the image of the validation that is on.
        follows_score: whether the first score is also followed in training.
        unit: of the first score.
        chance: what a guess would have of the first score, where that is known.
        neighbours: a function that gives the k-NN accuracy of the encoder, in percent, where it is due.
        calibration: of the weights the run starts from, where it trains for the codec's rate; set before the run.
    """

    model: ImageModel
    scores: tuple[str, ...] = ()
    follows_score = True
    unit = ""
    chance: float | None = None

    def __init__(
        self, model: ImageModel, optim: OptimSection, total_steps: int, *, seed: int = 0,
        panel_folder: Path | None = None, panel_every: int = 1, channels_last: bool = False,
    ):
        super().__init__()
        self.model, self.optim, self.total_steps, self.seed = model, optim, total_steps, seed
        self.panel_folder, self.panel_every = panel_folder, panel_every
        self.panel_due = False
        self.neighbours: Callable[[], float | None] | None = None
        self.calibration: Calibration | None = None
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model.to(memory_format=self.memory_format)
        if optim.freeze_encoder:
            self.model.freeze_encoder()
        self.val_loss = MeanMetric(nan_strategy="disable")  # by default they are left out of the mean
        self.history: list[dict[str, Any]] = []
        self.train_sums = torch.zeros(3)  # loss, score, batches of this epoch; no buffer: weights are averaged
        self._knn: float | None = None
        self._losses = LossCheck()

    # what a subclass defines

    @abstractmethod
    def training_loss(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss of a batch and its first score (None where the task does not follow one), both scalars."""

    @abstractmethod
    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        """Take a batch into `val_loss` and into the metrics of the scores."""

    @abstractmethod
    def validation_scores(self) -> dict[str, Tensor]:
        """The scores of the validation that has just ended, over all processes; the metrics start anew."""

    def panel(self) -> Image.Image | None:
        """An image of the validation that has just ended."""

    def guess_loss(self, examples: Callable[[], Tensor]) -> tuple[float, str] | None:
        """The loss of a guess that looks at no image, and what it guesses: a run that ends above it has not converged.
        None where there is no such guess. `examples()` gives some images (n, 3, S, S), perhaps none."""
        return None

    # training

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, or SGD with momentum; biases, norms and embeddings are not decayed, the autoregression's matrices
        are."""
        groups: dict[tuple[bool, float], dict[str, Any]] = {}
        free, scales = self.model.no_weight_decay(), self.learning_rate_scales()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                decayed, scale = parameter.ndim >= 2 and name not in free, scales.get(name, 1.0)
                group = groups.setdefault((decayed, scale), {"params": [], "decayed": decayed, "scale": scale})
                group["params"].append(parameter)
        ordered = sorted(groups.values(), key=lambda group: (-group["scale"], not group["decayed"]))
        if self.optim.optimizer == "sgd":
            return torch.optim.SGD(ordered, lr=self.optim.lr, momentum=0.9)
        fused = self.optim.clip_grad is None  # Lightning does not clip for a fused optimiser
        return torch.optim.AdamW(ordered, lr=self.optim.lr, fused=fused)

    def learning_rate_scales(self) -> dict[str, float]:
        """Parameter name -> factor of its learning rate; 1 for those it does not name."""
        return {}

    def on_train_epoch_start(self) -> None:
        self.train_sums = torch.zeros(3, device=self.device)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set what depends on the step: learning rate and seeds. Both are computed, never restored."""
        optim = self.optim
        milestones = None if optim.milestones is None else [epoch / optim.epochs for epoch in optim.milestones]
        lr = learning_rate(self.global_step, self.total_steps, optim.warmup, optim.lr, milestones)
        for group in self.trainer.optimizers[0].param_groups:
            group.update(lr=lr * group["scale"], weight_decay=self.optim.weight_decay if group["decayed"] else 0.0)
            if self.optim.optimizer == "adamw":
                group.update(betas=self.optim.betas)
        batches = self.trainer.fit_loop.total_batch_idx
        seed = (self.seed * 1_000_003 + batches) * 1_009 + self.global_rank
        torch.manual_seed(seed)
        random.seed(seed)  # timm's mixup and random erasing draw from these two
        np.random.seed(seed % 2**32)
        self.log("lr", torch.tensor(lr))  # of a number Lightning makes a tensor on the device, and waits for it

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._losses.check()  # of the step before
        loss, score = self.training_loss(batch)
        self._losses.ask(loss, self.global_step, batch["index"])
        if not is_read_later(loss):
            self._losses.check()
        size = len(batch["index"])
        followed = loss.detach() if score is None else score.detach()
        sums = torch.stack([loss.detach(), followed, torch.ones_like(followed)])
        self.train_sums = self.train_sums.to(sums.device)  # a checkpoint is loaded before the model moves
        self.train_sums += sums
        self.log("train/loss", loss, prog_bar=score is None, batch_size=size)
        if score is not None:
            self.log(f"train/{self.scores[0]}", score, prog_bar=True, batch_size=size)
        return loss

    # validation

    def on_validation_epoch_start(self) -> None:
        self._losses.check()
        due = len(self.history) % self.panel_every == 0
        self.panel_due = self.panel_folder is not None and due and self.global_rank == 0
        self._knn = self.neighbours() if self.neighbours else None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validate_batch(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        scores: dict[str, Tensor] = {}
        if self.val_loss.update_called:
            scores["val/loss"] = compute_and_reset(self.val_loss)
        scores |= {f"val/{name}": value for name, value in self.validation_scores().items()}
        if self._knn is not None:
            scores["val/knn"] = torch.tensor(self._knn, device=self.device)
        self.log_dict(scores, prog_bar=True, sync_dist=True)
        train_loss, train_score = (self.train_sums[:2] / self.train_sums[2]).tolist()
        point: dict[str, float | None] = {"train_loss": train_loss}
        if self.scores and self.follows_score:
            point[f"train_{self.scores[0]}"] = train_score
        point |= {name.replace("/", "_"): value.item() for name, value in scores.items()}
        point = {name: value if value is not None and math.isfinite(value) else None for name, value in point.items()}
        self.history.append({"step": self.global_step, "epoch": self.current_epoch, **point})
        if self.panel_due:
            self._write_panel()

    def _write_panel(self) -> None:
        """The validation's image: a PNG, and TensorBoard."""
        image = self.panel()
        if image is None or self.panel_folder is None:
            return
        with atomic_write(self.panel_folder / f"step_{self.global_step:07d}.png") as path:
            image.save(path)
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("val/panel", pil_to_tensor(image), self.global_step)

    # checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._losses.check()
        checkpoint["history"] = self.history
        checkpoint["train_sums"] = self.train_sums.tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = checkpoint["history"]
        self.train_sums = torch.tensor(checkpoint["train_sums"])


def compute_and_reset(metric: Metric) -> Tensor:
    """What a metric has found over all processes; it starts anew."""
    value: Tensor = metric.compute()
    metric.reset()
    return value


GUESS_CHUNK = 16  # images whose guess is judged at once


def mean_image_loss(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, device: torch.device) -> float | None:
    """The mean of `loss(guess, image)`, where each of the images x (n, 3, S, S) is guessed as the mean of the others;
    None for fewer than two."""
    if len(x) < 2:
        return None
    total, sums = 0.0, x.sum(0)  # (3, S, S)
    for part in x.split(GUESS_CHUNK):
        guess = (sums - part) / (len(x) - 1)
        total += loss(guess.to(device), part.to(device)).item() * len(part)
    return total / len(x)


class PanelImages:
    """Some images of a validation, taken evenly over it, since sets are sorted by class."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, ...]] = []

    def add(self, batches: float, batch_idx: int, *images: Tensor) -> None:
        """Keep a share of each of `batches` batches of tensors (B, 3, S, S), PANEL_IMAGES in all."""
        if batch_idx % math.ceil(batches / PANEL_IMAGES) == 0:
            share = math.ceil(PANEL_IMAGES / batches)
            self.rows += zip(*(image[:share].float().cpu() for image in images), strict=True)

    def take(self) -> list[Tensor]:
        """The images, (n, 3, S, S) for each of the tensors given to `add`; forgotten afterwards."""
        rows, self.rows = self.rows, []
        return [torch.stack(images) for images in zip(*rows, strict=True)]


def learning_rate(step: int, total_steps: int, warmup: float, peak: float,
                  milestones: Sequence[float] | None = None) -> float:
    """The rate of optimiser step `step`, counted from 0.

    Linear to `peak` over the part `warmup` of all steps, then a half cosine to zero; or, with `milestones`, parts of
    the run too, constant and divided by ten at each.
    """
    warmup_steps = round(warmup * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if milestones is not None:
        return peak * 0.1 ** sum(step >= round(part * total_steps) for part in milestones)
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
