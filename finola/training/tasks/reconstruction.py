"""The reconstruction task: an autoencoder and the squared error of its pixels; with a rate, the codec's cost too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.image import StructuralSimilarityIndexMeasure

from finola.codec.rate import TileCost
from finola.data.loader import Batch
from finola.drawing import panel
from finola.evaluation.metrics import psnr
from finola.models.autoencoder import FinolaAutoencoder
from finola.models.base import IMAGENET_STD
from finola.training.recipe import OptimSection
from finola.training.tasks.base import PanelImages, Task, compute_and_reset, mean_image_loss


class ReconstructionTask(Task):
    """Trains a model (B, 3, S, S) in [0, 1] -> the same to give back its input."""

    model: FinolaAutoencoder
    scale: Tensor
    scores = ("psnr", "ssim")
    unit = "dB"

    def __init__(self, model: FinolaAutoencoder, optim: OptimSection, total_steps: int, **options: Any):
        super().__init__(model, optim, total_steps, **options)
        scale = {"normalised": IMAGENET_STD, "raw": (1.0, 1.0, 1.0)}[optim.loss]
        self.register_buffer("scale", torch.tensor(scale).view(1, 3, 1, 1), persistent=False)
        self.tile_cost: TileCost | None = None
        self.val_psnr = MeanMetric(nan_strategy="disable")
        self.val_ssim = StructuralSimilarityIndexMeasure(data_range=1.0)
        self._examples = PanelImages()

    def on_fit_start(self) -> None:
        if self.optim.rate:
            assert self.calibration, "optim.rate: set `calibration` first"
            self.tile_cost = TileCost(self.calibration, self.optim.rate, self.device)

    def loss(self, x_hat: Tensor, x: Tensor) -> Tensor:
        """Mean squared error of raw pixels, or of those normalised as for the encoder (the means cancel)."""
        return ((x_hat - x) / self.scale).square().mean()

    def reconstruct(self, x: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, 3, S, S) in fp32, whatever the precision of the model."""
        x_hat: Tensor = self.model(x.contiguous(memory_format=self.memory_format))
        return x_hat.float()

    def training_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch["image"]  # (B, 3, S, S)
        if self.tile_cost and len(x) > 1:
            return self._loss_with_tiles(x, self.tile_cost)
        x_hat = self.reconstruct(x)
        return self.loss(x_hat, x), psnr(x_hat.detach(), x).mean()

    def _loss_with_tiles(self, x: Tensor, cost: TileCost) -> tuple[Tensor, Tensor]:
        """The mean of the plain loss of half of the images (B, 3, S, S) and of the codec's for tiles of the rest."""
        plain, others = x.split([len(x) - len(x) // 2, len(x) // 2])
        tiles = cost.cut(others)
        squares = torch.cat([plain, tiles.squares]).contiguous(memory_format=self.memory_format)
        q, q_tiles = self.model.encode(squares).split([len(plain), len(others)])
        q_tiles, bits = cost.quantise(q_tiles, tiles.quantiser)
        x_hat = self.model.decode(torch.cat([q, q_tiles.to(q.dtype)])).float()
        x_hat, painted = x_hat.split([len(plain), len(others)])
        loss = (self.loss(x_hat, plain) + cost(painted, bits, tiles) * self.scale.square().reciprocal().mean()) / 2
        return loss, psnr(x_hat.detach(), plain).mean()

    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        x = batch["image"]
        x_hat = self.reconstruct(x)
        self.val_loss.update(self.loss(x_hat, x), weight=len(x))
        self.val_psnr.update(psnr(x_hat, x))
        self.val_ssim.update(x_hat.clamp(0, 1), x)
        if self.panel_due:
            self._examples.add(self.trainer.num_val_batches[0], batch_idx, x, x_hat)

    def validation_scores(self) -> dict[str, Tensor]:
        return {"psnr": compute_and_reset(self.val_psnr), "ssim": compute_and_reset(self.val_ssim)}

    def guess_loss(self, examples: Callable[[], Tensor]) -> tuple[float, str] | None:
        loss = mean_image_loss(self.loss, examples(), self.scale.device)
        return None if loss is None else (loss, "the mean image")

    def panel(self) -> Image.Image:
        """Some validation images over their reconstructions."""
        return panel(self._examples.take(), labels=["original", "reconstruction"])
