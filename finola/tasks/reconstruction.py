"""The reconstruction task: an autoencoder, the squared error of its pixels, and what is logged on the way.

Training settings are those of Table `appendix:FINOLA`; what the paper leaves open is a field of the recipe.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.image import StructuralSimilarityIndexMeasure
from torchvision.transforms.functional import pil_to_tensor

from finola.errors import FinolaError
from finola.files import atomic_write
from finola.metrics import psnr
from finola.model import IMAGENET_STD
from finola.pictures import panel
from finola.recipe import OptimSection

PANEL_IMAGES = 8


class NonFiniteLoss(FinolaError):
    """The loss became infinite or not a number: the run did not converge ("not converge" in the paper).

    Attributes:
        step: optimiser steps taken before it.
        indices: the images of the batch, as numbers in the training set.
    """

    def __init__(self, step: int, indices: list[int]):
        self.step, self.indices = step, indices
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        super().__init__(
            f"the loss is not finite at step {step}, batch of images {shown}: the run did not converge;"
            " the last checkpoint is kept; lower optim.base_lr or set optim.clip_grad"
        )


class Reconstruction(LightningModule):
    """Trains `model` to give back its input.

    Args:
        model: (B, 3, S, S) in [0, 1] -> the same; has `no_weight_decay()`.
        optim: the recipe's section.
        total_steps: optimiser steps of the whole run, from the recipe and the number of images; asking
            Lightning for them would lose the position in the data on resume.
        seed: with the batch number and the rank it decides all randomness inside the model, so that a resumed
            run needs no stored generator state.
        panel_folder: where pictures of some validation images go, every `panel_every` validations.

    `history` has one entry for each validation: step, epoch, mean training loss and PSNR of the epoch (this
    process alone), mean validation loss, PSNR and SSIM; None for what is not finite. It is stored in the
    checkpoint.
    """

    def __init__(
        self, model: nn.Module, optim: OptimSection, total_steps: int, *, seed: int = 0,
        panel_folder: Path | None = None, panel_every: int = 1, channels_last: bool = False,
    ):
        super().__init__()
        self.model, self.optim, self.total_steps, self.seed = model, optim, total_steps, seed
        self.panel_folder, self.panel_every = panel_folder, panel_every
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model.to(memory_format=self.memory_format)
        scale = IMAGENET_STD if optim.loss == "normalised" else (1.0, 1.0, 1.0)
        self.register_buffer("scale", torch.tensor(scale).view(1, 3, 1, 1), persistent=False)
        self.val_loss = MeanMetric(nan_strategy="disable")  # by default they are left out of the mean
        self.val_psnr = MeanMetric(nan_strategy="disable")
        self.val_ssim = StructuralSimilarityIndexMeasure(data_range=1.0)
        self.history: list[dict] = []
        self.train_sums = torch.zeros(3)  # loss, PSNR, batches of this epoch; no buffer: weights are averaged
        self._examples: list[tuple[Tensor, Tensor]] = []  # of the present validation: original, reconstruction

    def loss(self, x_hat: Tensor, x: Tensor) -> Tensor:
        """Mean squared error of raw pixels, or of those normalised as for the encoder (the means cancel)."""
        return ((x_hat - x) / self.scale).square().mean()

    def reconstruct(self, x: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, 3, S, S) in fp32, whatever the precision of the model."""
        return self.model(x.contiguous(memory_format=self.memory_format)).float()

    # training

    def configure_optimizers(self):
        """AdamW; biases, norms and embeddings are not decayed, the autoregression's matrices are."""
        free = self.model.no_weight_decay()
        decayed, others = [], []
        for name, parameter in self.model.named_parameters():
            (others if parameter.ndim < 2 or name in free else decayed).append(parameter)
        groups = [{"params": decayed, "decayed": True}, {"params": others, "decayed": False}]
        fused = self.optim.clip_grad is None  # Lightning does not clip for a fused optimiser
        return torch.optim.AdamW(groups, lr=self.optim.lr, fused=fused)

    def on_train_epoch_start(self):
        self.train_sums = torch.zeros(3, device=self.device)

    def on_train_batch_start(self, batch, batch_idx):
        """Set what depends on the step: learning rate and seed. Both are computed, never restored."""
        lr = learning_rate(self.global_step, self.total_steps, self.optim.warmup, self.optim.lr)
        for group in self.optimizers().param_groups:
            decay = self.optim.weight_decay if group["decayed"] else 0.0
            group.update(lr=lr, betas=self.optim.betas, weight_decay=decay)
        batches = self.trainer.fit_loop.total_batch_idx
        torch.manual_seed((self.seed * 1_000_003 + batches) * 1_009 + self.global_rank)
        self.log("lr", lr)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["image"]  # (B, 3, S, S)
        x_hat = self.reconstruct(x)
        loss = self.loss(x_hat, x)
        if not self.trainer.strategy.reduce_boolean_decision(bool(loss.isfinite()), all=True):
            raise NonFiniteLoss(self.global_step, batch["index"].tolist())
        quality = psnr(x_hat.detach(), x).mean()
        self.train_sums += torch.stack([loss.detach(), quality, torch.ones_like(quality)])
        self.log("train/loss", loss, batch_size=len(x))
        self.log("train/psnr", quality, prog_bar=True, batch_size=len(x))
        return loss

    # validation

    def on_validation_epoch_start(self):
        self._examples = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        x = batch["image"]
        x_hat = self.reconstruct(x)
        self.val_loss.update(self.loss(x_hat, x), weight=len(x))
        self.val_psnr.update(psnr(x_hat, x))
        self.val_ssim.update(x_hat.clamp(0, 1), x)
        batches = self.trainer.num_val_batches[0]
        if batch_idx % math.ceil(batches / PANEL_IMAGES) == 0:  # sets are sorted by class: take some of each part
            share = math.ceil(PANEL_IMAGES / batches)
            self._examples += zip(x[:share].cpu(), x_hat[:share].cpu(), strict=True)

    def on_validation_epoch_end(self):
        scores = {}
        for name in ("loss", "psnr", "ssim"):
            metric = getattr(self, f"val_{name}")
            scores[f"val/{name}"] = metric.compute()  # over all processes
            metric.reset()
        self.log_dict(scores, prog_bar=True, sync_dist=True)
        train_loss, train_psnr = (self.train_sums[:2] / self.train_sums[2]).tolist()
        point = {"train_loss": train_loss, "train_psnr": train_psnr}
        point |= {name.replace("/", "_"): value.item() for name, value in scores.items()}
        point = {name: value if math.isfinite(value) else None for name, value in point.items()}
        self.history.append({"step": self.global_step, "epoch": self.current_epoch, **point})
        if self.panel_folder and (len(self.history) - 1) % self.panel_every == 0 and self.global_rank == 0:
            self._write_panel()

    def _write_panel(self) -> None:
        """Some validation images over their reconstructions: a PNG, and TensorBoard."""
        originals, reconstructions = (torch.stack(images) for images in zip(*self._examples, strict=True))
        picture = panel([originals, reconstructions], labels=["original", "reconstruction"])
        with atomic_write(self.panel_folder / f"step_{self.global_step:07d}.png") as path:
            picture.save(path)
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_image("val/panel", pil_to_tensor(picture), self.global_step)

    # checkpoints

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history
        checkpoint["train_sums"] = self.train_sums.tolist()

    def on_load_checkpoint(self, checkpoint):
        self.history = checkpoint["history"]
        self.train_sums = torch.tensor(checkpoint["train_sums"], device=self.device)


def learning_rate(step: int, total_steps: int, warmup: float, peak: float) -> float:
    """The rate of optimiser step `step`, counted from 0.

    Linear to `peak` over the part `warmup` of all steps, then a half cosine to zero.
    """
    warmup_steps = round(warmup * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
