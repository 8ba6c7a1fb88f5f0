"""The images of a training run: loaders for the process that asks, and features that need computing only once."""

from __future__ import annotations

import math
import shutil
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn

from finola.data import (
    Augment,
    Batches,
    ResidentImages,
    ResidentLoader,
    build_loader,
    check_same_classes,
    open_data,
)
from finola.data.datasets import Subset, require_labels
from finola.data.images import center_crop, resize_shorter, to_tensor
from finola.data.workers import usable_cores
from finola.errors import DataError
from finola.evaluation.neighbours import NEIGHBOURS, neighbours_accuracy
from finola.training.features import FeatureLoader, FrozenFeatures
from finola.training.recipe import Recipe

BANK = 50_000  # training images that k-NN votes with, at most


class RunData(LightningDataModule):
    """The training and validation sets of a run, and this process's share of them.

    Attributes:
        model: the model that is trained.
        first_epoch: the epoch a resumed run goes on in; Lightning restores the position within it.
        has_neighbours: whether k-NN can be measured.
    """

    has_neighbours = False

    def __init__(self, recipe: Recipe, train, val, folder: Path):
        super().__init__()
        self.recipe, self.train, self.val, self.folder = recipe, train, val, folder
        self.model: nn.Module | None = None
        self.first_epoch = 0
        if self.total_steps == 0:
            raise DataError(f"{train.source}: {len(train)} images do not fill one batch of"
                            f" {recipe.optim.batch_size}; lower optim.batch_size")

    @classmethod
    @abstractmethod
    def open(cls, recipe: Recipe, data: Sequence[str], val: Sequence[str] | None, folder: Path) -> RunData:
        """The data that --data and --val name, for a run in `folder`. Raises DataError, RecipeError."""

    @abstractmethod
    def classes(self) -> dict[str, Any]:
        """What the data say of a model's configuration: num_classes, classes. Raises DataError where the training and
        the validation set differ, or hold no labels."""

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run; the last images of an epoch that fill no batch are left out."""
        accumulate = self.recipe.trainer.accumulate
        batches = len(self.train) // (self.recipe.optim.batch_size // accumulate)
        return self.recipe.optim.epochs * math.ceil(batches / accumulate)

    @property
    def _device(self) -> torch.device:
        return self.trainer.strategy.root_device

    def _batches(self, *, train: bool) -> Batches:
        """This process's share of the batches."""
        return Batches(self._batch_size, train, seed=self.recipe.seed if train else 0, rank=self.trainer.global_rank,
                       world_size=self.trainer.world_size)

    @property
    def _batch_size(self) -> int:
        """Images of one process's part of a batch."""
        return self.recipe.optim.batch_size // (self.trainer.world_size * self.recipe.trainer.accumulate)

    @property
    def _workers(self) -> int:
        """Processes that decode: no more than there are cores for this process."""
        return min(self.recipe.data.num_workers, usable_cores())


class Images(RunData):
    """Loaders of the training and validation images.

    What a frozen encoder makes of an image that is always seen alike is computed once, as features of `model`: of
    validation images, and of training images where `data.augment` is false. Random crops demand features anew at each
    step.
    """

    @classmethod
    def open(cls, recipe: Recipe, data: Sequence[str], val: Sequence[str] | None, folder: Path) -> Images:
        return cls(recipe, open_data(data), open_data(val) if val else None, folder)

    def classes(self) -> dict[str, Any]:
        require_labels(self.train)
        if self.val is not None:
            require_labels(self.val)
        if len(self.train.classes) < 2:
            raise DataError(f"{self.train.source}: holds 1 class ({self.train.classes[0]}), expected at least 2; name"
                            " the folder above the class folders")
        if self.val is not None:
            check_same_classes(self.train, self.val)
        return {"num_classes": len(self.train.classes), "classes": tuple(self.train.classes)}

    @property
    def has_neighbours(self) -> bool:
        """Whether k-NN can be measured: all images labelled, the same classes on both sides, enough images to vote."""
        if self.val is None or len(self.train) < NEIGHBOURS or len(self.train.classes) < 2:
            return False
        labelled = all((dataset.labels >= 0).all() for dataset in (self.train, self.val))
        return labelled and self.train.classes == self.val.classes

    @property
    def probing(self) -> bool:
        return self.recipe.optim.freeze_encoder and self.model.config.keeps_features

    def some(self, count: int) -> Tensor:
        """(count, 3, S, S): centre squares of training images, spread evenly over the set."""
        size, count = self.recipe.data.image_size, min(count, len(self.train))
        pictures = (self.train.load(round(i * (len(self.train) - 1) / max(count - 1, 1))) for i in range(count))
        return torch.stack([to_tensor(center_crop(resize_shorter(p, size), size)) for p in pictures])

    def train_dataloader(self):
        section, batches = self.recipe.data, self._batches(train=True)
        if section.augment:
            augment = Augment(section.crop_scale, section.hflip, section.policy, self.model.config.views)
            loader = self._loader(self.train, batches, augment=augment)
        else:
            features = self._features(self.squares(self.train), len(self.train), "train")
            loader = FeatureLoader(features, batches, device=self._device)
        loader.set_epoch(self.first_epoch)
        return loader

    def val_dataloader(self):
        loader = self._loader(self.val, self._batches(train=False))
        if not self.probing:
            return loader
        features = self._features(loader, sum(map(len, loader.sampler.batches(0))), "val")
        return FeatureLoader(features, Batches(self._batch_size, train=False), device=self._device)

    def teardown(self, stage: str) -> None:
        """The run is over: its features, gigabytes perhaps, are of no further use."""
        shutil.rmtree(self._feature_folder, ignore_errors=True)

    def squares(self, dataset):
        """Every image's centre square, in order, in each process alike."""
        return build_loader(dataset, Batches(self._batch_size, train=False), image_size=self.recipe.data.image_size,
                            num_workers=self._workers, device=self._device)

    def neighbours_accuracy(self, model: nn.Module) -> float:
        """Top-1 accuracy of the encoder's features in percent, by votes of the nearest training images."""
        bank = self.train if len(self.train) <= BANK else Subset(self.train, BANK)
        with self.trainer.precision_plugin.forward_context():
            return neighbours_accuracy(model, self.squares(bank), self.squares(self.val), len(self.train.classes))

    def _features(self, batches, count: int, name: str) -> FrozenFeatures:
        with self.trainer.precision_plugin.forward_context():
            return FrozenFeatures.collect(self.model, batches, count, self._feature_folder / name)

    @property
    def _feature_folder(self) -> Path:
        return self.folder / f"features_{self.trainer.global_rank}"

    def _loader(self, dataset, batches: Batches, **options):
        section, train = self.recipe.data, batches.train
        options["image_size"] = section.image_size
        if not section.resident:
            return build_loader(dataset, batches, num_workers=self._workers, device=self._device, **options)
        size = (section.resident_size or section.image_size) if train else section.image_size
        resident = ResidentImages(dataset, size, self._device, skip_bad=train, draft=train,
                                  progress=sys.stderr.isatty())
        return ResidentLoader(resident, batches, **options)
