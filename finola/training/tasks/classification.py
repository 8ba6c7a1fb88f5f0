"""Classification: an encoder and a head, the encoder frozen (probing) or trained (fine-tuning, supervised)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from finola.data.loader import Batch
from finola.drawing import confusion
from finola.evaluation.classification import TOP, has_top5
from finola.models.classifier import Classifier
from finola.training.recipe import OptimSection
from finola.training.tasks.base import Task, compute_and_reset

if TYPE_CHECKING:
    from timm.data.random_erasing import RandomErasing


class ClassificationTask(Task):
    """Trains a `Classifier` (B, 3, S, S) -> logits (B, classes), by cross-entropy.

    Random erasing, mixup and cutmix act here, on the device; the crops and RandAugment belong to the loader. A batch
    may also hold a frozen encoder's "features" in place of images. Scores: top-1 accuracy in percent, and top-5 of more
    than five classes.
    """

    model: Classifier
    unit = "%"

    def __init__(self, model: Classifier, optim: OptimSection, total_steps: int, **options: Any):
        from timm.data.mixup import Mixup
        from timm.data.random_erasing import RandomErasing

        super().__init__(model, optim, total_steps, **options)
        classes = model.config.num_classes
        self.erasing = RandomErasing(optim.random_erasing, mode="pixel") if optim.random_erasing else None
        self.mixup = None
        if optim.mixup or optim.cutmix:
            self.mixup = Mixup(optim.mixup, optim.cutmix, label_smoothing=optim.label_smoothing, num_classes=classes)
        self.chance = 100 / classes
        self.scores = ("top1", "top5") if has_top5(classes) else ("top1",)
        self.val_top1 = MeanMetric(nan_strategy="disable")
        self.val_top5 = MeanMetric(nan_strategy="disable")
        self.val_confusion = MulticlassConfusionMatrix(classes)
        self.confusion: Tensor | None = None  # of the last validation: (true class, predicted class) counts

    def logits(self, batch: Batch) -> Tensor:
        if "features" in batch:
            features = cast("tuple[Tensor, ...]", batch["features"])
            logits: Tensor = self.model.head.classify(*features)
        else:
            logits = self.model(batch["image"].contiguous(memory_format=self.memory_format))
        return logits.float()

    def learning_rate_scales(self) -> dict[str, float]:
        """With `layer_decay` a parameter's learning rate falls with its distance from the head."""
        decay = self.optim.layer_decay
        return self.model.layer_scales(decay) if decay is not None else {}

    def training_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["label"]
        targets, smoothing = labels, self.optim.label_smoothing
        if self.erasing is not None:
            batch = batch | {"image": self._erase(batch["image"], self.erasing)}
        if self.mixup is not None and len(labels) > 1:
            even = len(labels) // 2 * 2  # timm mixes an image with its mirror place in the batch
            image, targets = self.mixup(batch["image"][:even].clone(), labels[:even])
            batch, labels, smoothing = batch | {"image": image}, labels[:even], 0.0
        logits = self.logits(batch)
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        return loss, 100 * (logits.argmax(1) == labels).float().mean()

    def _erase(self, x: Tensor, erasing: RandomErasing) -> Tensor:
        """Random rectangles replaced by noise of the encoder's input scale: unit variance after normalisation."""
        erasing.device = x.device
        erased: Tensor = erasing(self.model.normalise(x))
        return erased * self.model.std + self.model.mean

    def validate_batch(self, batch: Batch, batch_idx: int) -> None:
        labels, logits = batch["label"], self.logits(batch)
        self.val_loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        best = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]  # (B, 5)
        self.val_top1.update(100 * best[:, 0].float())
        self.val_top5.update(100 * best.any(1).float())
        self.val_confusion.update(logits, labels)

    def validation_scores(self) -> dict[str, Tensor]:
        self.confusion = compute_and_reset(self.val_confusion).cpu()
        found = {"top1": compute_and_reset(self.val_top1), "top5": compute_and_reset(self.val_top5)}
        return {name: found[name] for name in self.scores}

    def guess_loss(self, examples: Callable[[], Tensor]) -> tuple[float, str]:
        return math.log(self.model.config.num_classes), "guessing every class alike"

    def panel(self) -> Image.Image | None:
        if self.confusion is None:
            return None
        return confusion(self.confusion, self.model.config.classes)
