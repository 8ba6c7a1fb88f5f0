"""Batches that are a function of (seed, epoch, position): the same with any number of workers and processes,
and resumed in mid-epoch exactly where they stopped.

`BatchOrder` decides which images make up which batch, and holds the position. A loader turns that order into
tensors: `WorkerLoader` here decodes files in worker processes, `ResidentLoader` in `in_memory.py` crops on the
device. Lightning finds `state_dict` and `load_state_dict` on the loader and `set_epoch` on `loader.sampler`,
and calls all three by itself.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from finola.data.crops import DEFAULT_AUGMENT, Augment, apply_crop, epoch_order, policy_seeds, random_crops
from finola.data.datasets import ImageDataset
from finola.data.images import center_square, shorter_side, to_uint8
from finola.data.policies import get_policy
from finola.errors import DataError, RecipeError

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """How a loader cuts a data set into batches.

    Attributes:
        batch_size: images a batch in this process.
        train: a new order every epoch; otherwise 0 ... N - 1.
        seed: of the orders and, in training, of what is drawn for each image.
        rank, world_size: this process, of so many that share the images.
        drop_last: leave out the last global batch if it is not full; None: only when training.

    Raises:
        RecipeError: a batch size or rank out of range.
    """

    batch_size: int
    train: bool
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RecipeError(f"batch_size: got {self.batch_size}, expected at least 1")
        if not 0 <= self.rank < self.world_size:
            raise RecipeError(f"rank: got {self.rank}, expected 0 to {self.world_size - 1}, one below world_size")


class BatchOrder:
    """The images of every batch of every epoch, for one of `world_size` processes.

    An epoch is one order of all `length` images, cut into global batches of `batch_size * world_size`; each process
    takes its slice of each. So two processes at half the batch size see the same global batches as one.

    Raises:
        DataError: not one batch.
    """

    def __init__(self, length: int, batches: Batches):
        self.length, self.global_batch = length, batches.batch_size * batches.world_size
        self.train, self.seed = batches.train, batches.seed
        self.drop_last = batches.train if batches.drop_last is None else batches.drop_last
        self.rank, self.world_size = batches.rank, batches.world_size
        self.epoch = 0
        self.position = 0  # batches handed out in this epoch
        self._resume_at = 0
        if len(self) == 0:
            raise DataError(f"{length} images do not fill a batch of {self.global_batch}; take a smaller one")

    def __len__(self) -> int:
        """Batches in an epoch: the same in each process, unless the last has fewer images than processes."""
        full, rest = divmod(self.length, self.global_batch)
        return full + (not self.drop_last and self.rank < rest)

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of another epoch; within the current one nothing changes."""
        if epoch != self.epoch:
            self.epoch, self.position, self._resume_at = epoch, 0, 0

    def start(self) -> int:
        """Begin the epoch, or go on in it after `load_state_dict`; returns the number of the first batch."""
        self.position, self._resume_at = self._resume_at, 0
        return self.position

    def batches(self, first: int) -> Iterator[np.ndarray]:
        """The image indices, (n,) int64, of this process's batches from number `first` to the epoch's end."""
        order = epoch_order(self.length, self.seed, self.epoch) if self.train else np.arange(self.length)
        for number in range(first, len(self)):
            whole = order[number * self.global_batch : (number + 1) * self.global_batch]
            yield np.array_split(whole, self.world_size)[self.rank]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises RecipeError if the state belongs to another data set, seed or global batch size."""
        now = self._identity()
        changed = [f"{key} was {state.get(key)}, is {now[key]}" for key in now if state.get(key) != now[key]]
        if changed:
            raise RecipeError(
                f"cannot resume in mid-epoch with other batches: {'; '.join(changed)}; use the values of the "
                "interrupted run or resume from a checkpoint at the end of an epoch"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._resume_at = self.position

    def _identity(self) -> dict[str, int]:
        return {"images": self.length, "global_batch": self.global_batch, "seed": self.seed}


class Loader(ABC):
    """What all loaders share: epochs, resume, and the count of images that could not be decoded.

    Iterating yields {"image": (B, 3, S, S) float32 in [0, 1], "label": (B,) int64, "index": (B,) int64};
    with V > 1 views of each image, "image" is (B, V, 3, S, S).
    """

    def __init__(self, order: BatchOrder):
        self.sampler = order  # the name under which Lightning looks for set_epoch
        self.batch_sampler = None  # Lightning asks for it wherever there is a sampler
        self.skipped = 0  # images left out of training batches so far

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        # a generator: nothing is decided before the first batch is asked for, since Lightning makes the
        # iterator first and sets the epoch afterwards
        for batch in self._batches(self.sampler.start()):
            self.sampler.position += 1  # counted when handed out, not when a worker reads ahead
            yield batch

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.load_state_dict(state)

    @abstractmethod
    def _batches(self, first: int) -> Iterator[Batch]:
        """The batches of the current epoch from number `first` on."""

    def _leave_out(self, errors: list[str], left: int) -> None:
        """Count and report the images left out of a training batch; raise if none remains."""
        for error in errors:
            warnings.warn(f"image left out of training: {error}", stacklevel=3)
        self.skipped += len(errors)
        if left == 0:
            raise DataError(f"no image of a batch of {len(errors)} can be decoded, the last: {errors[-1]}")


class WorkerLoader(Loader):
    """Makes samples in worker processes; `build_loader` makes one of files.

    In training a sample that failed is left out of its batch; in evaluation it raises.

    Args:
        samples: (epoch, index) -> a sample, or the message of its DataError.
        collate: one or more samples -> a batch on the CPU, "image" in 8-bit numbers.
    """

    def __init__(
        self,
        samples: Dataset[Any],
        order: BatchOrder,
        *,
        collate: Callable[[list], dict],
        num_workers: int,
        device: torch.device | str,
    ):
        super().__init__(order)
        self.device = device = torch.device(device)
        self._numbers = _Numbers(order)
        self._loader = DataLoader(
            samples,
            batch_sampler=self._numbers,
            num_workers=num_workers,
            collate_fn=_Collate(collate),
            pin_memory=device.type == "cuda",
            persistent_workers=num_workers > 0,
        )

    def _batches(self, first: int) -> Iterator[Batch]:
        self._numbers.first = first
        for batch, good, errors in self._loader:
            if errors and not self.sampler.train:
                raise DataError(errors[0])
            if errors:
                self._leave_out(errors, good)
            yield self._finish(batch)

    def _finish(self, batch: Batch) -> Batch:
        """To the device, and the image to floats there."""
        batch = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        return batch | {"image": batch["image"].float().div_(255)}


def build_loader(
    dataset: ImageDataset,
    batches: Batches,
    *,
    image_size: int,
    augment: Augment = DEFAULT_AUGMENT,
    crop_pct: float = 1.0,
    resample: str = "bicubic",
    num_workers: int = 0,
    device: torch.device | str = "cpu",
) -> WorkerLoader:
    """A loader over a data set of `finola.data`:

        build_loader(open_data(["images"]), Batches(64, train=True), image_size=224, num_workers=4)

    Training: shuffled, crops (antialiased bicubic) as `augment` says; an image that cannot be decoded is left out of
    its batch, counted in `loader.skipped` and reported with a warning.
    Evaluation: in order, shorter side resized to `image_size` / `crop_pct`, centre crop; an image that cannot be
    decoded raises DataError.

    Args:
        augment: of training; with two or more views, "image" is (B, views, 3, S, S).
        crop_pct: of evaluation, the share of the resized shorter side that the centre crop keeps (see `shorter_side`).
        resample: of evaluation, "bilinear" or "bicubic" (see `resize_shorter`); PSNR depends on it.
        device: where the batches go; they travel as 8-bit numbers, a quarter of the bytes.

    Raises:
        DataError: not one batch.
        RecipeError: a `crop_pct` outside 0 < crop_pct <= 1.
    """
    order, _ = BatchOrder(len(dataset), batches), shorter_side(image_size, crop_pct)  # checked here, not in a worker
    samples = _Samples(dataset, image_size, batches.seed, augment if batches.train else None, crop_pct, resample)
    return WorkerLoader(samples, order, collate=_stack, num_workers=num_workers, device=device)


class _Numbers:
    """Batches of (epoch, index): workers need no state of their own, and live on from epoch to epoch."""

    def __init__(self, order: BatchOrder):
        self.order = order
        self.first = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.order.batches(self.first):
            yield [(self.order.epoch, int(index)) for index in indices]


class _Samples(Dataset[Any]):
    """(epoch, index) -> (image uint8, label, index), or the message of the DataError.

    The image is (3, S, S), with several views (V, 3, S, S)."""

    def __init__(
        self, dataset: ImageDataset, image_size: int, seed: int, augment: Augment | None, crop_pct: float,
        resample: str,
    ):
        self.dataset, self.image_size = dataset, image_size
        self.seed, self.augment, self.crop_pct, self.resample = seed, augment, crop_pct, resample

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: tuple[int, int]) -> tuple[Tensor, int, int] | str:
        epoch, index = number
        try:
            image = self.dataset.load(index)
        except DataError as error:
            return str(error)
        if self.augment is None:
            pixels = to_uint8(center_square(image, self.image_size, self.crop_pct, self.resample))
        else:
            views = [self._view(image, self.augment, epoch, index, view) for view in range(self.augment.views)]
            pixels = torch.stack(views) if len(views) > 1 else views[0]
        return pixels, int(self.dataset.labels[index]), index

    def _view(self, image: Image.Image, augment: Augment, epoch: int, index: int, view: int) -> Tensor:
        size, where = np.array([[image.height, image.width]]), np.array([index])
        draw = {"seed": self.seed, "epoch": epoch, "view": view}
        crops = random_crops(size, where, augment=augment, **draw)
        image = apply_crop(image, crops.boxes[0], bool(crops.flips[0]), self.image_size)
        if augment.policy is not None:
            image = get_policy(augment.policy)(image, policy_seeds(where, **draw)[0])
        return to_uint8(image)


class _Collate:
    """A batch of the samples that are good (None without any), their number, and the messages of the others."""

    def __init__(self, collate: Callable[[list], dict]):
        self.collate = collate

    def __call__(self, samples: list) -> tuple[dict | None, int, list[str]]:
        errors = [sample for sample in samples if isinstance(sample, str)]
        good = [sample for sample in samples if not isinstance(sample, str)]
        return (self.collate(good) if good else None), len(good), errors


def _stack(samples: list[tuple[Tensor, int, int]]) -> Batch:
    """Images (B, [V,] 3, S, S) uint8, labels (B,), indices (B,)."""
    images, labels, indices = zip(*samples, strict=True)
    return {"image": torch.stack(images), "label": torch.tensor(labels), "index": torch.tensor(indices)}


MOST_FAULTS = 10  # bad images named in an error


def read_squares(
    dataset: ImageDataset,
    size: int,
    *,
    batch_size: int,
    workers: int,
    device: torch.device | str = "cpu",
    crop_pct: float = 1.0,
    resample: str = "bicubic",
) -> Iterator[Batch]:
    """Batches of centre squares of all images, in order; `crop_pct` and `resample` as in `build_loader`.

    Raises:
        DataError: images that cannot be decoded; all of them are counted, the first ones named.
    """
    batches = Batches(batch_size, train=False)
    loader = build_loader(
        dataset, batches, image_size=size, crop_pct=crop_pct, resample=resample, num_workers=workers, device=device)
    try:
        yield from loader
    except DataError as first:
        raise DataError(_list_faults(dataset, first)) from None


def _list_faults(dataset: ImageDataset, first: DataError) -> str:
    faults = []
    for index in range(len(dataset)):
        try:
            dataset.load(index)
        except DataError as error:
            faults.append(str(error))
    faults = faults or [str(first)]  # of a file that can be read again now
    more = f"; and {len(faults) - MOST_FAULTS} more" if len(faults) > MOST_FAULTS else ""
    return (
        f"{len(faults)} of {len(dataset)} images cannot be decoded, so the set has no score: "
        f"{'; '.join(faults[:MOST_FAULTS])}{more}"
    )
