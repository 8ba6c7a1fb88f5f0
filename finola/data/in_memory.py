"""Small data sets held on the device: decoded once, cropped and resized there, so that a GPU never waits.

Each image is stored with its shorter side at `size` pixels, in 8 bits; one more than twice as long as
wide is cut to its centre. Portraits are stored on their side, so that one (N, 3, size, width) tensor with
size <= width <= 2 size holds them all. It takes 3 N size width bytes: 0.7 GB for 9,469 squares of 160 px.

A crop is two matrix products, one along the rows and one along the columns. `weights` holds, for each output
pixel, the share of each input pixel: the same antialiased kernel as Pillow's, so that the crops equal
Pillow's but for its rounding to 8 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from finola.data.crops import DEFAULT_AUGMENT, Augment, Crops, policy_seeds, random_crops
from finola.data.datasets import ImageDataset
from finola.data.images import cut_long, resize_shorter, shorter_side, to_tensor, to_uint8
from finola.data.loader import Batch, Batches, BatchOrder, Loader
from finola.data.policies import get_policy
from finola.data.workers import threads, usable_cores
from finola.drawing import to_image
from finola.errors import DataError, RecipeError

LONGEST_KEPT = 2  # a stored image's longer side, in shorter sides
CPU_PART = 16  # images cropped at once on a CPU: larger buffers leave its cache and run at half the speed


class ResidentImages:
    """A data set decoded once onto a device.

    Args:
        dataset: a data set of `finola.data`.
        size: the stored shorter side in pixels. For evaluation exactly `shorter_side(image_size, crop_pct)`; for
            training a little more than the model's image size, since a crop keeps only part of the image.
        skip_bad: leave out images that cannot be decoded, with a warning for each, instead of raising.
        resample: "bilinear" or "bicubic" (see `resize_shorter`).
        draft: let much larger JPEGs be decoded at reduced scale: several times faster, but it changes pixels
            slightly, so not for evaluation.

    Raises:
        DataError: an image that cannot be decoded, unless `skip_bad`.

    Attributes:
        pixels: (N, 3, size, width) uint8, portraits on their side, padded with zeros.
        labels: (N,) int64 on the device.
        sizes: (N, 2) int64 numpy, the stored heights and widths, upright.
        errors: index -> message, for the images that could not be decoded.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        size: int,
        device: torch.device | str = "cpu",
        *,
        skip_bad: bool = False,
        resample: str = "bicubic",
        draft: bool = False,
        progress: bool = True,
    ):
        self.size, self.device = size, torch.device(device)
        self.labels = torch.from_numpy(dataset.labels).to(self.device)
        self.sizes = np.full((len(dataset), 2), size)
        self.errors: dict[int, str] = {}
        with threads(usable_cores()) as pool:
            decoded = pool.map(_Decoder(dataset, size, resample, draft), range(len(dataset)))
            bar = tqdm(decoded, "decoding", len(dataset), disable=not progress, unit="image")
            self.pixels = self._store(bar, skip_bad).to(self.device)

    def __len__(self) -> int:
        return len(self.sizes)

    def _store(self, images: Iterable[Tensor | DataError], skip_bad: bool) -> Tensor:
        store = torch.zeros(len(self), 3, self.size, self.size, dtype=torch.uint8)
        for index, picture in enumerate(images):
            if isinstance(picture, DataError):
                if not skip_bad:
                    raise picture
                warnings.warn(f"image left out of training: {picture}", stacklevel=3)
                self.errors[index] = str(picture)
                continue
            height, width = picture.shape[1:]
            self.sizes[index] = height, width
            if height > width:
                picture, width = picture.mT, height
            if width > store.shape[3]:
                room = min(width + self.size // 4, LONGEST_KEPT * self.size)  # with a reserve: growing copies
                store = torch.nn.functional.pad(store, (0, room - store.shape[3]))
            store[index, :, :, :width] = picture
        return store[:, :, :, : self.sizes.max()].contiguous()


class ResidentLoader(Loader):
    """The same batches as `build_loader`, from `ResidentImages`; the tensors are on their device.

    Training draws the same crops as there, relative to the stored image. Evaluation takes the centre crop
    of images stored at exactly `shorter_side(image_size, crop_pct)`.

    The policy of `augment` works on 8-bit crops on the CPU, one after the other: it draws from the process's global
    generators, so threads cannot share the work. `build_loader` has worker processes for it.

    Raises:
        RecipeError: evaluation at another size than the stored one.
    """

    def __init__(
        self, images: ResidentImages, batches: Batches, *, image_size: int, augment: Augment = DEFAULT_AUGMENT,
        crop_pct: float = 1.0,
    ):
        needed = shorter_side(image_size, crop_pct)
        if not batches.train and images.size != needed:
            raise RecipeError(
                f"cannot evaluate at {image_size} px images stored at {images.size} px; "
                f"make ResidentImages with size={needed}"
            )
        super().__init__(BatchOrder(len(images), batches))
        self.images, self.image_size = images, image_size
        self.augment = augment if batches.train else None

    def _batches(self, first: int) -> Iterator[Batch]:
        for indices in self.sampler.batches(first):
            indices = self._decodable(indices)
            where = upload(indices, self.images.device)
            size = CPU_PART if where.device.type == "cpu" else len(where)
            parts = [slice(i, i + size) for i in range(0, len(where), size)]
            image = torch.cat([self._crop(indices[part], where[part]) for part in parts])
            yield {"image": image, "label": self.images.labels[where], "index": where}

    def _crop(self, indices: np.ndarray, where: Tensor) -> Tensor:
        """Indices (n,), on the CPU and on the device -> (n, 3, S, S), with several views (n, V, 3, S, S)."""
        pixels, sizes = self.images.pixels[where], self.images.sizes[indices]
        if self.augment is None:
            return crop_and_resize(pixels, sizes, _centre_crops(sizes, self.image_size), self.image_size)
        views = [self._view(pixels, sizes, indices, self.augment, view) for view in range(self.augment.views)]
        return torch.stack(views, dim=1) if len(views) > 1 else views[0]

    def _view(self, pixels: Tensor, sizes: np.ndarray, indices: np.ndarray, augment: Augment, view: int) -> Tensor:
        draw = {"seed": self.sampler.seed, "epoch": self.sampler.epoch, "view": view}
        crops = random_crops(sizes, indices, augment=augment, **draw)
        images = crop_and_resize(pixels, sizes, crops, self.image_size)
        if augment.policy is None:
            return images
        policy, seeds = get_policy(augment.policy), policy_seeds(indices, **draw)
        distorted = [
            to_tensor(policy(to_image(image), seed)) for image, seed in zip(images.cpu(), seeds, strict=True)
        ]
        return torch.stack(distorted).to(images.device)

    def _decodable(self, indices: np.ndarray) -> np.ndarray:
        bad = np.isin(indices, list(self.images.errors))
        if bad.any():
            self._leave_out([self.images.errors[index] for index in indices[bad].tolist()], int((~bad).sum()))
        return indices[~bad]


def crop_and_resize(pixels: Tensor, sizes: np.ndarray, crops: Crops, size: int) -> Tensor:
    """Cut a box out of each image, resize it (antialiased bicubic), mirror it where asked.

    Args:
        pixels: (B, 3, H, W) uint8, portraits on their side, padded at the right.
        sizes: (B, 2) true heights and widths, upright.
        crops: B boxes in upright coordinates.

    Returns:
        (B, 3, size, size) float32 in [0, 1].
    """
    portrait = sizes[:, :1] > sizes[:, 1:]  # (B, 1)
    horizontal, vertical = crops.boxes[:, 0::2], crops.boxes[:, 1::2]  # (B, 2) each: first, last coordinate
    horizontal = np.where(crops.flips[:, None], horizontal[:, ::-1], horizontal)  # read from right to left
    along = np.where(portrait, vertical, horizontal)  # along the stored, longer side
    across = np.where(portrait, horizontal, vertical)
    numbers = np.hstack([along, across, np.sort(sizes), portrait]).astype(np.float32)  # (B, 7): one way to the device
    column_span, row_span, shorter, longer, on_side = upload(numbers, pixels.device).split([2, 2, 1, 1, 1], dim=1)

    height, width = pixels.shape[2:]
    columns = weights(column_span, longer, width, size)  # (B, size, W)
    rows = weights(row_span, shorter, height, size)  # (B, size, H)
    lines = pixels.float().flatten(1, 2)  # (B, 3 H, W)
    narrow = torch.bmm(lines, columns.mT).unflatten(1, (3, height))  # (B, 3, H, size)
    image = (rows[:, None] @ narrow).div_(255).clamp_(0, 1)  # (B, 3, size, size)
    return torch.where(on_side[:, :, None, None] > 0, image.mT, image)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on a device; a GPU is not waited for, since the memory that it reads is pinned."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def weights(spans: Tensor, lengths: Tensor, padded: int, size: int) -> Tensor:
    """The matrices that resize spans of B lines to `size` pixels: (B, size, padded) float32, rows sum to one.

    The kernel is the cubic of Keys (1981) with a = -1/2, stretched by the scale when the span is shrunk. It
    may look past the span, but never past the end of the line.

    Args:
        spans: (B, 2) float32, first and last coordinate in input pixels; in the other order the result is mirrored.
        lengths: (B, 1) float32, true lengths of the lines, at most `padded`.
    """
    device = spans.device
    start, step = spans[:, :1], spans.diff(dim=1) / size  # (B, 1) each
    centres = start + step * (torch.arange(size, device=device) + 0.5)  # (B, size)
    inputs = torch.arange(padded, device=device) + 0.5  # (padded,)
    stretch = step.abs().clamp(min=1)[:, :, None]  # (B, 1, 1)
    weight = _cubic((inputs - centres[:, :, None]).abs_().div_(stretch))  # (B, size, padded)
    weight *= (inputs < lengths)[:, None]
    return weight.div_(weight.sum(-1, keepdim=True))


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2 at distances x >= 0: 1.5 x^3 - 2.5 x^2 + 1 up to 1, then
    -0.5 x^3 + 2.5 x^2 - 4 x + 2 up to 2, then 0. With u = max(2 - x, 0) and v = max(u - 1, 0) both pieces are
    u^2 (u - 1) / 2 + v^2 (3 - 2 u)."""
    u = (2 - x).clamp_(min=0)
    v = (u - 1).clamp_(min=0)
    return u.square().mul_(u - 1).mul_(0.5).add_(v.square_().mul_(3 - 2 * u))


def _centre_crops(sizes: np.ndarray, size: int) -> Crops:
    """The whole-pixel crops that `images.center_crop` takes."""
    top, left = ((sizes - size) // 2).T
    boxes = np.stack([left, top, left + size, top + size], axis=1).astype(np.float64)
    return Crops(boxes, np.zeros(len(sizes), dtype=bool))


@dataclass(frozen=True)
class _Decoder:
    """Index -> (3, H, W) uint8, upright, shorter side `size`, longer at most twice that; or the error."""

    dataset: ImageDataset
    size: int
    resample: str
    draft: bool

    def __call__(self, index: int) -> Tensor | DataError:
        try:
            image = self.dataset.load(index, self.size if self.draft else None)
        except DataError as error:
            return error
        return to_uint8(cut_long(resize_shorter(image, self.size, self.resample), LONGEST_KEPT * self.size))
