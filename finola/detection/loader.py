"""Batches of images of different sizes with their objects, in the order and with the promises of
`finola.data.loader`."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from finola.data.images import to_uint8
from finola.data.loader import Batch, Batches, BatchOrder, WorkerLoader
from finola.detection.coco import CocoDetection, Target
from finola.detection.detector import SIDE_UNIT
from finola.detection.transforms import ViewPolicy, random_view, view_image, view_target, whole_view
from finola.errors import DataError


class DetectionLoader(WorkerLoader):
    """`build_detection_loader` makes one. Iterating yields dicts of

    image     (B, 3, H, W) float32 in [0, 1], zero at the right and the bottom of smaller images
    padding   (B, H, W) bool, True where there is no image
    size      (B, 2) int64, height and width of each image in the batch
    original  (B, 2) int64, height and width of its file
    index     (B,) int64, its place in the data set
    targets   list of B dicts. Training: boxes (n, 4) float32, labels (n,) int64 and with `masks` masks (n, h, w)
              uint8, in the batch's pixels and without crowds. Evaluation: all of `CocoDetection.target`, in the
              file's pixels.
    """

    def _finish(self, batch: dict) -> dict:
        targets = [
            {key: value.to(self.device, non_blocking=True) for key, value in target.items()}
            for target in batch.pop("targets")
        ]
        batch = super()._finish(batch)
        return batch | {"padding": padding_of(batch["size"], *batch["image"].shape[-2:]), "targets": targets}


def build_detection_loader(
    dataset: CocoDetection,
    batches: Batches,
    *,
    scales: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800),
    image_size: int = 800,
    max_size: int = 1333,
    hflip: bool = True,
    crop: bool = False,
    masks: bool = False,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
) -> DetectionLoader:
    """A loader over a COCO-format data set.

    Training: shuffled, each image seen as `random_view` draws it, those without objects included; an image that
    cannot be decoded is left out of its batch, counted in `loader.skipped` and reported with a warning.
    Evaluation: in order, the shorter side resized to `image_size`; an image that cannot be decoded
    raises DataError.

    Args:
        scales, hflip, crop: of training (see `ViewPolicy`).
        image_size: of evaluation.
        max_size: limit of the longer side.
        masks: give the objects' masks too.
        device: where the batches go; images travel as 8-bit numbers, a quarter of the bytes.

    Raises:
        RecipeError: an option out of range.
        DataError: not one batch, or masks are asked of annotations that have none.
    """
    if masks:
        dataset.require_masks()
    order = BatchOrder(len(dataset), batches)
    policy = ViewPolicy(tuple(scales), max_size, hflip, crop) if batches.train else None
    samples = _Samples(dataset, policy, image_size, max_size, masks, batches.seed)
    return DetectionLoader(samples, order, collate=_collate, num_workers=num_workers, device=device)


def targets_of(batch: Batch) -> list[Target]:
    """The targets of a batch of a `DetectionLoader`, its only entry that is no tensor."""
    return cast("list[Target]", batch["targets"])


def pad_batch(images: list[Tensor]) -> Tensor:
    """Images (3, h, w) of any sizes -> (B, 3, H, W), zero at the right and the bottom; H and W are the largest h
    and w, rounded up to multiples of 32."""
    sides = torch.tensor([image.shape[-2:] for image in images]).amax(dim=0)
    height, width = (-(-side // SIDE_UNIT) * SIDE_UNIT for side in sides.tolist())
    batch = images[0].new_zeros(len(images), 3, height, width)
    for room, image in zip(batch, images, strict=True):
        room[:, : image.shape[1], : image.shape[2]] = image
    return batch


def padding_of(sizes: Tensor, height: int, width: int) -> Tensor:
    """Sizes (B, 2), heights and widths of images in a padded batch -> (B, height, width) bool, True outside."""
    rows = torch.arange(height, device=sizes.device) >= sizes[:, :1]  # (B, height)
    columns = torch.arange(width, device=sizes.device) >= sizes[:, 1:]  # (B, width)
    return rows[:, :, None] | columns[:, None, :]


class _Samples(Dataset[Any]):
    """(epoch, index) -> an image (3, h, w) uint8 with its size, index and target, or the message of the DataError."""

    def __init__(
        self,
        dataset: CocoDetection,
        policy: ViewPolicy | None,
        image_size: int,
        max_size: int,
        masks: bool,
        seed: int,
    ):
        self.dataset, self.policy, self.seed = dataset, policy, seed
        self.image_size, self.max_size, self.masks = image_size, max_size, masks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: tuple[int, int]) -> dict | str:
        epoch, index = number
        try:
            image, target = self.dataset.load(index), self.dataset.target(index, self.masks)
        except DataError as error:
            return str(error)
        original = (image.height, image.width)
        if self.policy is None:
            view = whole_view(original, self.image_size, self.max_size)
        else:
            view = random_view(original, index, seed=self.seed, epoch=epoch, policy=self.policy)
            target = view_target(target, view)
        return {
            "image": to_uint8(view_image(image, view)),
            "size": view.size,
            "original": original,
            "index": index,
            "targets": target,
        }


def _collate(samples: list[dict]) -> dict:
    columns = {key: [sample[key] for sample in samples] for key in samples[0]}
    numbers = {key: torch.from_numpy(np.array(columns[key])) for key in ("size", "original", "index")}
    return {"image": pad_batch(columns["image"]), **numbers, "targets": columns["targets"]}
