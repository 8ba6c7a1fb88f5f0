"""Small data sets held on the device: decoded once, cropped and resized there, so that a fast GPU never waits.

Each picture is stored with its shorter side at `size` pixels as 8-bit numbers; pictures more than twice as long as
wide are cut to their centre. Portraits are stored on their side, so that one (N, 3, size, width) tensor with
size <= width <= 2 size holds them all: 3 N size width bytes, 0.7 GB for 9,469 squares of 160 px.

A crop is two matrix products, rows and columns: `weights` holds for each output pixel the share of each input pixel,
the antialiased kernel that Pillow uses, so that the crops equal Pillow's to within the rounding of 8-bit pixels.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from finola.data.images import resize_shorter, to_uint8
from finola.data.loader import Batch, BatchOrder, Loader
from finola.data.transforms import Augment, random_crops
from finola.errors import DataError, RecipeError

LONGEST = 2  # a stored picture's longer side, in shorter sides


class ResidentImages:
    """A data set decoded once onto a device.

    Args:
        dataset: a data set of `finola.data`.
        size: the stored shorter side in pixels. For evaluation exactly the model's image size; for training a little
            more, since a crop keeps only part of the picture.
        skip_bad: leave out images that cannot be decoded, with a warning for each, instead of raising DataError.
        draft: let much larger JPEGs be decoded at reduced scale, several times faster (not for evaluation, whose
            pixels it changes slightly).

    Attributes:
        pixels: (N, 3, size, width) uint8, portraits on their side, padded with zeros.
        sizes: (N, 2) int64 numpy, the stored heights and widths, upright.
        good: (N,) bool numpy, False where the image could not be decoded.
    """

    def __init__(
        self, dataset, size: int, device: torch.device | str = "cpu", *, skip_bad: bool = False, draft: bool = False,
        progress: bool = True,
    ):
        self.size, self.device = size, torch.device(device)
        self.labels = torch.from_numpy(dataset.labels).to(self.device)
        self.sizes = np.zeros((len(dataset), 2), dtype=np.int64)
        self.good = np.ones(len(dataset), dtype=bool)
        self.errors: dict[int, str] = {}
        pictures = _decode_all(dataset, size, size if draft else None, progress)
        self.pixels = self._store(pictures, skip_bad)

    def __len__(self) -> int:
        return len(self.sizes)

    def _store(self, pictures: Iterator[Tensor | DataError], skip_bad: bool) -> Tensor:
        store = torch.zeros(len(self), 3, self.size, self.size, dtype=torch.uint8)  # widened when a wider one comes
        for index, picture in enumerate(pictures):
            if isinstance(picture, DataError):
                if not skip_bad:
                    raise picture
                warnings.warn(f"image left out of training: {picture}", stacklevel=3)
                self.good[index], self.errors[index] = False, str(picture)
                self.sizes[index] = self.size
                continue
            self.sizes[index] = picture.shape[1:]
            if picture.shape[1] > picture.shape[2]:
                picture = picture.transpose(1, 2)
            width = picture.shape[2]
            if width > store.shape[3]:
                store = torch.nn.functional.pad(store, (0, width - store.shape[3]))
            store[index, :, :, :width] = picture
        return store.to(self.device)


class ResidentLoader(Loader):
    """The same batches as `build_loader`, from `ResidentImages`; the tensors are on their device.

    Training crops are drawn as there, relative to the stored picture. Evaluation takes the centre crop of pictures
    stored at exactly `image_size`.

    Raises:
        RecipeError: evaluation at another size than the stored one.
    """

    def __init__(
        self, images: ResidentImages, *, batch_size: int, image_size: int, train: bool, seed: int = 0, rank: int = 0,
        world_size: int = 1, crop_scale: tuple[float, float] = (0.2, 1.0), hflip: bool = True,
        drop_last: bool | None = None,
    ):
        if not train and images.size != image_size:
            raise RecipeError(
                f"images are stored at {images.size} px but evaluated at {image_size} px; store them at {image_size} px"
            )
        drop_last = train if drop_last is None else drop_last
        order = BatchOrder(
            len(images), batch_size, shuffle=train, seed=seed, rank=rank, world_size=world_size, drop_last=drop_last
        )
        super().__init__(order)
        self.images, self.image_size = images, image_size
        self.augment = Augment(crop_scale, hflip) if train else None

    def _batches(self, first: int) -> Iterator[Batch]:
        for indices in self.sampler.batches(first):
            indices = self._decodable(indices)
            if self.augment is None:
                boxes, flips = _centre_boxes(self.images.sizes[indices], self.image_size), None
            else:
                crops = random_crops(
                    self.images.sizes[indices], indices,
                    seed=self.sampler.seed, epoch=self.sampler.epoch, augment=self.augment,
                )
                boxes, flips = crops.boxes, crops.flips
            yield self._batch(indices, boxes, flips)

    def _decodable(self, indices: np.ndarray) -> np.ndarray:
        good = self.images.good[indices]
        if not good.all():
            self._leave_out([self.images.errors[int(index)] for index in indices[~good]], int(good.sum()))
        return indices[good]

    def _batch(self, indices: np.ndarray, boxes: np.ndarray, flips: np.ndarray | None) -> Batch:
        where = torch.from_numpy(indices).to(self.images.device)
        pixels = self.images.pixels[where].float().div_(255)  # (B, 3, size, width)
        image = crop_and_resize(pixels, self.images.sizes[indices], boxes, flips, self.image_size)
        return {"image": image, "label": self.images.labels[where], "index": where}


def crop_and_resize(
    pixels: Tensor, sizes: np.ndarray, boxes: np.ndarray, flips: np.ndarray | None, size: int
) -> Tensor:
    """Cut a box out of each picture and resize it, antialiased bicubic, by two batched matrix products.

    Args:
        pixels: (B, 3, H, W) floats, portraits on their side, padded right and below.
        sizes: (B, 2) true heights and widths, upright.
        boxes: (B, 4) left, top, right, bottom in pixels, upright.
        flips: (B,) bool, mirrored left to right after the resize; None for none.

    Returns:
        (B, 3, size, size), clamped to [0, 1].
    """
    portrait = sizes[:, 0] > sizes[:, 1]  # (B,)
    across = np.where(portrait[:, None], boxes[:, 1::2], boxes[:, 0::2])  # (B, 2) along the stored width
    down = np.where(portrait[:, None], boxes[:, 0::2], boxes[:, 1::2])  # (B, 2) along the stored height
    if flips is not None:  # a mirrored picture reads its box from right to left
        across = np.where((flips & ~portrait)[:, None], across[:, ::-1], across)
        down = np.where((flips & portrait)[:, None], down[:, ::-1], down)
    kind = dict(dtype=pixels.dtype, device=pixels.device)
    columns = weights(torch.tensor(across, **kind), torch.tensor(sizes.max(axis=1), **kind), pixels.shape[3], size)
    rows = weights(torch.tensor(down, **kind), torch.tensor(sizes.min(axis=1), **kind), pixels.shape[2], size)
    narrow = pixels @ columns.mT[:, None]  # (B, 3, H, size)
    small = (rows[:, None] @ narrow).clamp_(0, 1)  # (B, 3, size, size)
    on_side = torch.from_numpy(portrait).to(pixels.device)[:, None, None, None]
    return torch.where(on_side, small.mT, small) if portrait.any() else small


def weights(spans: Tensor, lengths: Tensor, padded: int, size: int) -> Tensor:
    """The matrices that resize spans of B lines to `size` pixels: (B, size, padded), each row summing to one.

    The kernel is the cubic of Keys (1981) with a = -1/2, stretched by the scale when the span is shrunk. It may
    look past the span, but never past the line's true length.

    Args:
        spans: (B, 2) first and last coordinate in input pixels; a mirrored span has them in the other order.
        lengths: (B,) true lengths of the lines, at most `padded`.
    """
    start, step = spans[:, :1], (spans[:, 1:] - spans[:, :1]) / size  # (B, 1) each
    stretch = step.abs().clamp(min=1)[:, :, None]  # (B, 1, 1)
    centres = start + (torch.arange(size, dtype=spans.dtype, device=spans.device) + 0.5) * step  # (B, size)
    inputs = torch.arange(padded, dtype=spans.dtype, device=spans.device) + 0.5  # (padded,)
    distance = (inputs - centres[:, :, None]).abs_().div_(stretch)  # (B, size, padded)
    weight = _cubic(distance) * (inputs < lengths[:, None])[:, None]
    return weight.div_(weight.sum(-1, keepdim=True))


def _cubic(x: Tensor) -> Tensor:
    """Keys' kernel, a = -1/2, of distances x >= 0: ((1.5 x - 2.5) x) x + 1 below 1, ((-0.5 x + 2.5) x - 4) x + 2
    from 1 to 2, zero beyond."""
    near = ((1.5 * x - 2.5) * x) * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, far * (x < 2))


def _centre_boxes(sizes: np.ndarray, size: int) -> np.ndarray:
    """(n, 4) boxes of the centre crops, whole pixels, as `images.center_crop` takes them."""
    top, left = ((sizes - size) // 2).T
    return np.stack([left, top, left + size, top + size], axis=1).astype(np.float64)


def _decode_all(dataset, size: int, draft: int | None, progress: bool) -> Iterator[Tensor | DataError]:
    """All pictures in order, upright, shorter side `size`; Pillow lets go of the interpreter while it decodes."""

    def decode(index: int) -> Tensor | DataError:
        try:
            return to_uint8(_cut_long(resize_shorter(dataset.load(index, draft), size), LONGEST * size))
        except DataError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from tqdm(pool.map(decode, range(len(dataset))), "decoding", len(dataset), disable=not progress, unit="image")


def _cut_long(image: Image.Image, longest: int) -> Image.Image:
    """The centre of an image whose longer side is more than `longest`."""
    width, height = min(image.width, longest), min(image.height, longest)
    x, y = (image.width - width) // 2, (image.height - height) // 2
    return image if (width, height) == image.size else image.crop((x, y, x + width, y + height))
