"""Photographs of any size and mode through the autoencoder: one centre square, or the whole picture in tiles.

A model takes squares of S = `model.config.image_size` pixels, and each costs one q of C numbers. Fitted, a
picture is one square. Tiled, a picture of H x W pixels is covered by n = rows · columns squares and costs
n · C numbers. With S = 128 and C = 768 a square alone takes 768 / 128² = 0.047 numbers a pixel, a large picture
768 / 112² = 0.061, since neighbours share at least S / 8 = 16 pixels. There they are blended, so that no seam
shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from tqdm import tqdm

from finola.data.images import center_crop, decode_image, resize_shorter, to_image, to_rgb, to_tensor
from finola.errors import DataError, FinolaError
from finola.model import FinolaAutoencoder
from finola.pictures import GAP, LABEL_HEIGHT

LONGEST = 4  # sides of a picture before it is fitted, in shorter sides; what lies beyond is cropped anyway
STRIP = 64  # rows compared at once


@dataclass(frozen=True)
class Reconstruction:
    """A picture and what the model made of it.

    Attributes:
        original: 8-bit RGB, what the model was given: the centre square at its size, or the whole picture.
        reconstruction: 8-bit RGB, of the same size.
        psnr: of the two pictures as they are (8 bits, peak 255), in dB.
        tiles: rows and columns of squares, each one q; (1, 1) where the picture was fitted.
    """

    original: Image.Image
    reconstruction: Image.Image
    psnr: float
    tiles: tuple[int, int]

    def panel(self) -> Image.Image:
        """Original | reconstruction with captions; one above the other if the picture is wider than 2 : 1."""
        (width, height), font = self.original.size, ImageFont.load_default(size=12)
        below = width > 2 * height
        captions = ("original", f"reconstruction, {self.psnr:.2f} dB")
        cell = max(width, math.ceil(max(font.getlength(caption) for caption in captions))) + GAP
        line = LABEL_HEIGHT + height + GAP
        size = (GAP + cell, GAP + 2 * line) if below else (GAP + 2 * cell, GAP + line)
        canvas = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(canvas)
        for i, (picture, caption) in enumerate(
            zip((self.original, self.reconstruction), captions, strict=True)
        ):
            left, top = (GAP, GAP + i * line) if below else (GAP + i * cell, GAP)
            draw.text((left, top), caption, fill="black", font=font)
            canvas.paste(picture, (left, top + LABEL_HEIGHT))
        return canvas


def reconstruct(
    model: FinolaAutoencoder,
    image: Image.Image | str | Path,
    tile: bool = False,
    *,
    batch_size: int = 16,
    progress: bool = False,
) -> Reconstruction:
    """Encode a photograph to one q, or to one q for each tile, and paint it again.

    Args:
        model: in evaluation mode, on any device.
        image: a path, or a PIL image of any size and mode (`finola.data.images`: how each becomes RGB).
        tile: take the whole picture at its own size. Otherwise its shorter side is resized to the model's
            size (antialiased bicubic) and the centre square is taken.
        batch_size: squares at once. Beside the two pictures in 8 bits, memory holds these and one row of tiles.
        progress: show a bar of the squares on stderr.

    Raises:
        DataError: a picture that cannot be decoded or has no pixels. FinolaError: a model in training mode.
    """
    if model.training:
        raise FinolaError(
            "model: is in training mode, where a square depends on the others of its batch; "
            "call model.eval() first"
        )
    if batch_size < 1:
        raise FinolaError(f"batch_size: got {batch_size}, expected at least 1")
    size, original = model.config.image_size, upright_rgb(image)
    if not tile:
        original = fit(original, size)
    rows, columns = cover(original.height, size), cover(original.width, size)
    corners = [(y, x) for y in rows.starts for x in columns.starts]
    squares = _reconstructed(model, padded(original, size), corners, batch_size, progress)
    painted = blend(squares, rows, columns).crop((0, 0, *original.size))
    return Reconstruction(
        original, painted, picture_psnr(painted, original), (len(rows.starts), len(columns.starts))
    )


def fit(image: Image.Image, size: int) -> Image.Image:
    """Shorter side resized to `size` (antialiased bicubic), then the centre square, as in `finola eval`."""
    longest = LONGEST * min(image.size)
    width, height = min(image.width, longest), min(image.height, longest)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    return center_crop(resize_shorter(image, size), size)


def load_square(image: Image.Image | str | Path, size: int) -> Tensor:
    """The centre square of a photograph, (3, size, size) in [0, 1]; DataError where it cannot be decoded."""
    return to_tensor(fit(upright_rgb(image), size))


@dataclass(frozen=True)
class Cover:
    """Tiles that cover one side of a picture.

    Attributes:
        length: of the side in pixels, at least one tile's.
        starts: first pixel of each of the n tiles.
        weights: (n, size), each tile's share in its pixels; at every pixel the tiles' shares sum to one.
    """

    length: int
    starts: list[int]
    weights: Tensor


def cover(length: int, size: int, overlap: int | None = None) -> Cover:
    """As few tiles of `size` pixels as share `overlap` (`size` // 8) with the next, spread evenly from end to end."""
    length, overlap = max(length, size), size // 8 if overlap is None else overlap
    count = max(1, math.ceil((length - overlap) / (size - overlap)))
    starts = [round(i * (length - size) / max(count - 1, 1)) for i in range(count)]
    shared = max([size - (b - a) for a, b in pairwise(starts)], default=0)
    inner = torch.arange(size) + 0.5
    slope = torch.minimum(inner, size - inner).clamp(max=max(shared, 1))  # (size,) up, flat, down
    total = torch.zeros(length)
    for start in starts:
        total[start : start + size] += slope
    return Cover(length, starts, torch.stack([slope / total[start : start + size] for start in starts]))


def picture_psnr(a: Image.Image, b: Image.Image) -> float:
    """`finola.psnr` of two 8-bit RGB pictures of one size, a strip of rows at a time."""
    tops = range(0, a.height, STRIP)
    squares = sum(_squared_error(_strip(a, top), _strip(b, top)) for top in tops)
    error = squares / (3 * a.width * a.height * 255**2)
    return -10 * math.log10(max(error, 1e-10))


def upright_rgb(image: Image.Image | str | Path) -> Image.Image:
    if not isinstance(image, Image.Image):
        return decode_image(image)
    if 0 in image.size:
        raise DataError(f"image: got {image.width}x{image.height} pixels, expected at least 1x1")
    return to_rgb(ImageOps.exif_transpose(image))


def padded(image: Image.Image, size: int) -> np.ndarray:
    """(H, W, 3) uint8 with both sides at least `size`; a shorter one is mirrored over and over."""
    missing = [(0, max(0, size - side)) for side in (image.height, image.width)]
    if missing == [(0, 0), (0, 0)]:
        return np.asarray(image)
    return np.pad(np.asarray(image), [*missing, (0, 0)], mode="symmetric")


def _reconstructed(
    model: FinolaAutoencoder,
    pixels: np.ndarray,
    corners: list[tuple[int, int]],
    batch_size: int,
    progress: bool,
) -> Iterator[Tensor]:
    """The reconstruction (3, S, S) of the square at each corner of `pixels` (H, W, 3), in their order."""
    size, device = model.config.image_size, next(model.parameters()).device
    with tqdm(total=len(corners), desc="tiles", unit="tile", leave=False, disable=not progress) as bar:
        for first in range(0, len(corners), batch_size):
            batch = corners[first : first + batch_size]
            squares = np.stack([pixels[y : y + size, x : x + size] for y, x in batch])  # (B, S, S, 3)
            x = torch.from_numpy(squares).to(device).permute(0, 3, 1, 2).float().div_(255)
            with torch.no_grad():
                x_hat = model(x).float().clamp(0, 1).cpu()
            bar.update(len(batch))
            yield from x_hat


def blend(squares: Iterator[Tensor], rows: Cover, columns: Cover) -> Image.Image:
    """Paint the squares, given row by row, into one picture; only one row of them is held as floats."""
    size = rows.weights.shape[1]
    canvas = Image.new("RGB", (columns.length, rows.length))
    band = torch.zeros(3, size, columns.length)  # the rows of pixels that the present row of tiles covers
    for top, after, down in zip(rows.starts, [*rows.starts[1:], rows.length], rows.weights, strict=True):
        for left, across in zip(columns.starts, columns.weights, strict=True):
            band[:, :, left : left + size] += next(squares) * (down[:, None] * across)
        done = after - top  # no later tile reaches these
        canvas.paste(to_image(band[:, :done]), (0, top))
        band = torch.cat([band[:, done:], torch.zeros(3, done, columns.length)], dim=1)
    return canvas


def _squared_error(a: Image.Image, b: Image.Image) -> int:
    difference = np.asarray(a, dtype=np.int32) - np.asarray(b, dtype=np.int32)
    return int(np.square(difference).sum(dtype=np.int64))


def _strip(image: Image.Image, top: int) -> Image.Image:
    return image.crop((0, top, image.width, min(top + STRIP, image.height)))
