"""The images and boxes of a detector's training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from finola.data import check_same_classes
from finola.detection.coco import CocoDetection, open_coco
from finola.detection.detector import Detector, DetectorConfig
from finola.detection.loader import DetectionLoader, build_detection_loader
from finola.detection.transforms import ViewPolicy
from finola.errors import DataError, RecipeError
from finola.training.datamodule import RunData
from finola.training.recipe import Recipe


class DetectionImages(RunData[CocoDetection]):
    """Loaders of two `CocoDetection`s: shuffled and augmented for training, in order and whole for validation.

    Raises, before anything is written, RecipeError for scales that do not fit and DataError where there is no object to
    train on or masks are missing."""

    model: Detector

    def __init__(self, recipe: Recipe, train: CocoDetection, val: CocoDetection | None, folder: Path):
        super().__init__(recipe, train, val, folder)
        if recipe.data.crop_pct is not None:
            raise RecipeError(f"data.crop_pct: got {recipe.data.crop_pct}, expected none: detectors see whole images")
        config = cast(DetectorConfig, recipe.model_config())
        ViewPolicy(self._scales, config.max_size)  # for its checks
        if not train.objects:
            raise DataError(f"{train.source}: no object on any image; a detector needs some to train on")
        if config.masks:
            for dataset in (train, val) if val is not None else (train,):
                dataset.require_masks()

    @classmethod
    def open(cls, recipe: Recipe, data: Sequence[str], val: Sequence[str] | None, folder: Path) -> DetectionImages:
        return cls(recipe, open_coco(data), open_coco(val, "--val") if val else None, folder)

    def classes(self) -> dict[str, Any]:
        if self.val is not None:
            check_same_classes(self.train, self.val)
        return {"num_classes": len(self.train.classes), "classes": tuple(self.train.classes),
                "category_ids": tuple(self.train.category_ids)}

    @property
    def _scales(self) -> tuple[int, ...]:
        return self.recipe.data.scales or (self.recipe.data.image_size,)

    def train_dataloader(self) -> DetectionLoader:
        section = self.recipe.data
        loader = self._loader(self.train, train=True, scales=self._scales, hflip=section.hflip,
                              crop=section.random_crop)
        loader.set_epoch(self.first_epoch)
        return loader

    def val_dataloader(self) -> DetectionLoader:
        assert self.val is not None  # without validation data, Lightning does not ask
        return self._loader(self.val, train=False)

    def _loader(self, dataset: CocoDetection, *, train: bool, **options: Any) -> DetectionLoader:
        config = self.model.config
        return build_detection_loader(
            dataset, self._batches(train=train), image_size=config.image_size, max_size=config.max_size,
            masks=config.masks, num_workers=self._workers, device=self._device, **options)
