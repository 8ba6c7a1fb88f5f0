"""The images of a training run: loaders for the process that asks, and features that need computing only once."""

from __future__ import annotations

import math
import shutil
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor

from finola.data import (
    Augment,
    Batches,
    ResidentImages,
    ResidentLoader,
    build_loader,
    check_same_classes,
    open_data,
)
from finola.data.datasets import Dataset, ImageDataset, Subset, require_labels, spread
from finola.data.images import center_square, shorter_side, to_tensor
from finola.data.loader import Batch, Loader, WorkerLoader
from finola.data.workers import usable_cores
from finola.errors import DataError, RecipeError
from finola.evaluation.neighbours import NEIGHBOURS, neighbours_accuracy
from finola.models.base import CLASSES_CROP_PCT, ImageModel
from finola.models.classifier import Classifier
from finola.training.features import FeatureLoader, FrozenFeatures
from finola.training.recipe import Recipe

BANK = 50_000  # training images that k-NN votes with, at most
EXAMPLES = 256  # images whose mean a finished run is compared with, at most


D = TypeVar("D", bound=Dataset)


class RunData(LightningDataModule, Generic[D]):
    """The training and validation sets of a run, and this process's share of them.

    Attributes:
        model: the model that is trained, set before a loader is asked for.
        first_epoch: the epoch a resumed run goes on in; Lightning restores the position within it.
        one_size: whether all images have the same size in the model: then it pays to let cuDNN try its algorithms,
            which it does for each new shape.
    """

    trainer: Trainer  # Lightning sets it before a loader is asked for
    model: ImageModel
    one_size = False

    def __init__(self, recipe: Recipe, train: D, val: D | None, folder: Path):
        super().__init__()
        self.recipe, self.train, self.val, self.folder = recipe, train, val, folder
        self.first_epoch = 0
        if self.total_steps == 0:
            raise DataError(f"{train.source}: {len(train)} images do not fill one batch of"
                            f" {recipe.optim.batch_size}; take more images, or --optim.batch_size"
                            f" {len(train) * recipe.trainer.accumulate} or less")

    @classmethod
    @abstractmethod
    def open(cls, recipe: Recipe, data: Sequence[str], val: Sequence[str] | None, folder: Path) -> RunData[D]:
        """The data that --data and --val name, for a run in `folder`. Raises DataError, RecipeError."""

    @abstractmethod
    def classes(self) -> dict[str, Any]:
        """What the data say of a model's configuration: num_classes, classes. Raises DataError where the training and
        the validation set differ, or hold no labels."""

    def some(self, count: int) -> Tensor:
        """(count, 3, S, S): training images that a model's start is fitted to. RecipeError where they have no one
        size."""
        raise RecipeError(f"optim.start_images: {self.recipe.model.name} trains on images of different sizes; leave it"
                          " out")

    def examples(self) -> Tensor:
        """(n, 3, S, S): validation images, or training images where there are none; none of images of many sizes."""
        return torch.empty(0, 3, 1, 1)

    def neighbours_accuracy(self, model: ImageModel) -> float | None:
        """Top-1 accuracy of the encoder's features in percent, by votes of the nearest training images; None where it
        cannot be measured."""
        return None

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


class Images(RunData[ImageDataset]):
    """Loaders of the training and validation images.

    With a frozen encoder, the features of images that are not augmented are computed once: of validation images, and of
    training images where `data.augment` is false. Random crops need new features at each step.
    """

    one_size = True

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
    def probing(self) -> bool:
        return self.recipe.optim.freeze_encoder and self.model.config.keeps_features

    def some(self, count: int) -> Tensor:
        """(count, 3, S, S): centre squares of training images, spread evenly over the set."""
        size, count = self.recipe.data.image_size, min(count, len(self.train))
        images = (self.train.load(round(i * (len(self.train) - 1) / max(count - 1, 1))) for i in range(count))
        return torch.stack([to_tensor(center_square(p, size)) for p in images])

    def examples(self) -> Tensor:
        """See `RunData`: centre squares of up to 256 images, spread evenly, those left out that cannot be decoded."""
        dataset = self.val if self.val is not None else self.train
        size, squares = self.recipe.data.image_size, []
        for index in spread(len(dataset), EXAMPLES).tolist():
            with suppress(DataError):
                squares.append(to_tensor(center_square(dataset.load(index), size, self._crop_pct)))
        return torch.stack(squares) if squares else super().examples()

    def train_dataloader(self) -> Loader:
        section, batches = self.recipe.data, self._batches(train=True)
        loader: Loader
        if section.augment:
            augment = Augment(section.crop_scale, section.hflip, section.policy, self.model.config.views)
            loader = self._loader(self.train, batches, augment=augment)
        else:
            squares = self.squares(self.train, self._crop_pct)
            features = self._features(squares, len(self.train), "train")
            loader = FeatureLoader(features, batches, device=self._device)
        loader.set_epoch(self.first_epoch)
        return loader

    def val_dataloader(self) -> Loader:
        assert self.val is not None  # without validation data, Lightning does not ask
        loader = self._loader(self.val, self._batches(train=False))
        if not self.probing:
            return loader
        features = self._features(loader, sum(map(len, loader.sampler.batches(0))), "val")
        return FeatureLoader(features, Batches(self._batch_size, train=False), device=self._device)

    def teardown(self, stage: str) -> None:
        """At the end of the run its features, which may take gigabytes, are deleted."""
        shutil.rmtree(self._feature_folder, ignore_errors=True)

    def squares(self, dataset: ImageDataset, crop_pct: float) -> WorkerLoader:
        """Every image's centre square, in order, in each process alike."""
        return build_loader(dataset, Batches(self._batch_size, train=False), image_size=self.recipe.data.image_size,
                            crop_pct=crop_pct, num_workers=self._workers, device=self._device)

    @property
    def _crop_pct(self) -> float:
        """Of validation, and of features that are kept."""
        return self.recipe.data.crop_pct or self.recipe.model_config().crop_pct

    def neighbours_accuracy(self, model: ImageModel) -> float | None:
        """See `RunData`; measured where all images have labels, of the same classes in training and validation, and
        there are enough to vote."""
        if self.val is None or not self._can_vote(self.val):
            return None
        bank = self.train if len(self.train) <= BANK else Subset(self.train, BANK)
        crop_pct = self.recipe.data.crop_pct or CLASSES_CROP_PCT  # whatever the model is: it judges classification
        known, queries = self.squares(bank, crop_pct), self.squares(self.val, crop_pct)
        with self._without_autocast():
            return neighbours_accuracy(model, known, queries, len(self.train.classes))

    def _can_vote(self, val: ImageDataset) -> bool:
        if len(self.train) < NEIGHBOURS or len(self.train.classes) < 2:
            return False
        labelled = all(bool((dataset.labels >= 0).all()) for dataset in (self.train, val))
        return labelled and self.train.classes == val.classes

    def _features(self, batches: Iterable[Batch], count: int, name: str) -> FrozenFeatures:
        model = cast(Classifier, self.model)  # or of another kind that `keeps_features`
        with self._without_autocast():
            return FrozenFeatures.collect(model, batches, count, self._feature_folder / name)

    @contextmanager
    def _without_autocast(self) -> Iterator[None]:
        """The run's precision, but no autocast: what tells an encoder's tokens of two images apart can be less than
        bf16 resolves, after masked pre-training above all."""
        with self.trainer.precision_plugin.forward_context(), torch.autocast(self._device.type, enabled=False):
            yield

    @property
    def _feature_folder(self) -> Path:
        return self.folder / f"features_{self.trainer.global_rank}"

    def _loader(self, dataset: ImageDataset, batches: Batches, **options: Any) -> Loader:
        section, train = self.recipe.data, batches.train
        options |= {"image_size": section.image_size, "crop_pct": self._crop_pct}
        if not section.resident:
            return build_loader(dataset, batches, num_workers=self._workers, device=self._device, **options)
        stored = section.resident_size or section.image_size
        size = stored if train else shorter_side(section.image_size, self._crop_pct)
        resident = ResidentImages(dataset, size, self._device, skip_bad=train, draft=train,
                                  progress=sys.stderr.isatty())
        return ResidentLoader(resident, batches, **options)
