"""Object detection and instance segmentation: DETR and Mask R-CNN, the encoder frozen or trained."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from finola.data.loader import Batch
from finola.detection.detector import Detector
from finola.detection.drawing import beside_truth, grid
from finola.detection.loader import targets_of
from finola.detection.scores import CocoScores
from finola.drawing import PANEL_IMAGES, to_image
from finola.training.recipe import OptimSection
from finola.training.tasks.base import Task

COLUMNS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # of the paper's tables


class DetectionTask(Task):
    """Trains a `finola.detection.detector.Detector` on the batches of a `DetectionLoader`.

    Scores: COCO's average precision of boxes, and for Mask R-CNN of masks, in percent.
    """

    model: Detector
    follows_score = False
    unit = "%"

    def __init__(self, model: Detector, optim: OptimSection, total_steps: int, **options: Any):
        super().__init__(model, optim, total_steps, **options)
        masks = model.config.masks
        kinds = ("box", "mask") if masks else ("box",)
        self.scores = tuple(f"{kind}_{name}" for kind in kinds for name in COLUMNS)
        self.val_scores = CocoScores(masks=masks)
        self.drawn: list[Image.Image] = []

    def training_loss(self, batch: Batch) -> tuple[Tensor, None]:
        parts = self.model.losses(self._images(batch), batch["padding"], batch["size"], targets_of(batch))
        self.log_dict({f"train/{name}": value.detach() for name, value in parts.items()},
                      batch_size=len(batch["index"]))
        return reduce(torch.add, parts.values()), None

    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        found = self.model.detect(self._images(batch), batch["padding"], batch["size"], batch["original"])
        self.val_scores.update(found, targets_of(batch))
        if self.panel_due:
            self._draw(batch, found)

    def validation_scores(self) -> dict[str, Tensor]:
        scores = self.val_scores.compute()
        self.val_scores.reset()
        shares = {name: share if isinstance(share := scores[name], float) else math.nan for name in self.scores}
        return {name: torch.tensor(100 * share, device=self.device) for name, share in shares.items()}

    def panel(self) -> Image.Image | None:
        drawn, self.drawn = self.drawn, []
        return grid(drawn, columns=2) if drawn else None

    def _images(self, batch: Batch) -> Tensor:
        return batch["image"].contiguous(memory_format=self.memory_format)

    def _draw(self, batch: Batch, found: list[dict]) -> None:
        """Keep the first images with what is on them and what was found."""
        for i in range(min(len(found), PANEL_IMAGES - len(self.drawn))):
            height, width = batch["size"][i].tolist()
            picture = to_image(batch["image"][i, :, :height, :width])
            picture = picture.resize(batch["original"][i].flip(0).tolist())
            truth = targets_of(batch)[i]
            self.drawn.append(beside_truth(picture, truth, found[i], self.model.config.classes))
