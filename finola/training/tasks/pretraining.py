"""Self-supervised pre-training: masked image models (masked FINOLA, MAE, SimMIM) and contrast (MoCo-v2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchmetrics import MeanMetric

from finola.data.loader import Batch
from finola.drawing import panel
from finola.evaluation.masked import fixed_masks, masked_psnr
from finola.models.masked import MaskedImageModel
from finola.models.selfsupervised import Moco
from finola.training.recipe import OptimSection
from finola.training.tasks.base import PanelImages, Task, compute_and_reset, mean_image_loss


class MaskedPredictionTask(Task):
    """Trains a `MaskedImageModel` to predict the masked region of an image from what is visible.

    Scores: PSNR of the masked region alone, and of the whole image with the visible region as it is. The paper
    gives a "Recon-PSNR" without saying which of the two it is.
    """

    model: MaskedImageModel
    scores = ("psnr", "psnr_whole")
    unit = "dB"

    def __init__(self, model: MaskedImageModel, optim: OptimSection, total_steps: int, **options: Any):
        super().__init__(model, optim, total_steps, **options)
        self.val_psnr = MeanMetric(nan_strategy="disable")
        self.val_psnr_whole = MeanMetric(nan_strategy="disable")
        self._examples = PanelImages()

    def training_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch["image"]  # (B, 3, S, S)
        patches, mask = self.model(x)
        return self.model.loss(x, patches, mask), masked_psnr(self.model, x, patches.detach(), mask)[0].mean()

    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        x = batch["image"]
        with fixed_masks(batch_idx):
            patches, mask = self.model(x)
        self.val_loss.update(self.model.loss(x, patches, mask), weight=len(x))
        masked, whole, visible, x_hat = masked_psnr(self.model, x, patches, mask)
        self.val_psnr.update(masked)
        self.val_psnr_whole.update(whole)
        if self.panel_due:
            self._examples.add(self.trainer.num_val_batches[0], batch_idx, visible, x_hat, x)

    def validation_scores(self) -> dict[str, Tensor]:
        return {"psnr": compute_and_reset(self.val_psnr), "psnr_whole": compute_and_reset(self.val_psnr_whole)}

    def guess_loss(self, examples: Callable[[], Tensor]) -> tuple[float, str] | None:
        loss = mean_image_loss(self._loss_of_guess, examples(), self.model.mean.device)
        return None if loss is None else (loss, "the mean patch" if self.model.norm_pix_loss else "the mean image")

    def _loss_of_guess(self, guess: Tensor, x: Tensor) -> Tensor:
        """The model's own loss over all patches of x (n, 3, S, S), each guessed as that of `guess`."""
        patches = self.model.patches_of(guess)  # (n, h, w, 3 p p)
        patches = torch.zeros_like(patches) if self.model.norm_pix_loss else patches
        return self.model.loss(x, patches, torch.ones(patches.shape[:3], dtype=torch.bool, device=x.device))

    def panel(self) -> Image.Image:
        return panel(self._examples.take(), labels=["visible", "prediction", "original"])


class ContrastTask(Task):
    """Trains MoCo-v2: two crops of one image are to be told from all other images."""

    model: Moco

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:  # once an optimiser step
            self.model.update_momentum_encoder()

    def training_loss(self, batch: Batch) -> tuple[Tensor, None]:
        return self.model(batch["image"]), None  # (B, 2, 3, S, S)

    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        """The loss of the image against its mirror image; the k-NN accuracy says more."""
        x = batch["image"]
        self.val_loss.update(self.model(torch.stack([x, x.flip(-1)], dim=1)), weight=len(x))

    def validation_scores(self) -> dict[str, Tensor]:
        return {}

    def guess_loss(self, examples: Callable[[], Tensor]) -> tuple[float, str]:
        return math.log(1 + self.model.config.queue), "guessing among the queue"
