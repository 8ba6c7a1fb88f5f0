"""Photographs of any size and mode through the autoencoder: one centre square, or the whole image in tiles.

A model takes squares of S = `model.config.image_size` pixels, and each costs one q of C numbers. Fitted, a
image is one square. Tiled, an image of H x W pixels is covered by n = rows · columns squares and costs
n · C numbers. With S = 128 and C = 768 a square alone takes 768 / 128² = 0.047 numbers a pixel, a large image
768 / 112² = 0.061, since neighbours share at least S / 8 = 16 pixels. There they are blended, so that no seam
shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from tqdm import tqdm

from finola.data.images import ImageLike, SeveralImages, fit, upright_rgb
from finola.drawing import GAP, LABEL_HEIGHT
from finola.errors import FinolaError
from finola.evaluation.metrics import image_psnr
from finola.inference.tiles import blend, cover, enlarged
from finola.models.autoencoder import FinolaAutoencoder
from finola.models.base import require_evaluation


@dataclass(frozen=True)
class Reconstruction:
    """An image and what the model made of it.

    Attributes:
        original: 8-bit RGB, what the model was given: the centre square at its size, or the whole image.
        reconstruction: 8-bit RGB, of the same size.
        psnr: of the two images as they are (8 bits, peak 255), in dB.
        tiles: rows and columns of squares, each one q; (1, 1) where the image was fitted.
    """

    original: Image.Image
    reconstruction: Image.Image
    psnr: float
    tiles: tuple[int, int]

    def panel(self) -> Image.Image:
        """Original | reconstruction with captions; one above the other if the image is wider than 2 : 1."""
        (width, height), font = self.original.size, ImageFont.load_default(size=12)
        below = width > 2 * height
        captions = ("original", f"reconstruction, {self.psnr:.2f} dB")
        cell = max(width, math.ceil(max(font.getlength(caption) for caption in captions))) + GAP
        line = LABEL_HEIGHT + height + GAP
        size = (GAP + cell, GAP + 2 * line) if below else (GAP + 2 * cell, GAP + line)
        canvas = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(canvas)
        for i, (image, caption) in enumerate(
            zip((self.original, self.reconstruction), captions, strict=True)
        ):
            left, top = (GAP, GAP + i * line) if below else (GAP + i * cell, GAP)
            draw.text((left, top), caption, fill="black", font=font)
            canvas.paste(image, (left, top + LABEL_HEIGHT))
        return canvas


@overload
def reconstruct(model: FinolaAutoencoder, image: ImageLike, tile: bool = False, *, batch_size: int = 16,
                progress: bool = False) -> Reconstruction: ...


@overload
def reconstruct(model: FinolaAutoencoder, image: SeveralImages, tile: bool = False, *, batch_size: int = 16,
                progress: bool = False) -> list[Reconstruction]: ...


def reconstruct(
    model: FinolaAutoencoder,
    image: ImageLike | SeveralImages,
    tile: bool = False,
    *,
    batch_size: int = 16,
    progress: bool = False,
) -> Reconstruction | list[Reconstruction]:
    """Encode a photograph to one q, or to one q for each tile, and paint it again.

    Args:
        model: in evaluation mode, on any device.
        image: a path, a PIL image of any size and mode (`finola.data.images`: how each becomes RGB), an array
            (H, W, 3) or a tensor (3, H, W); or a list of them, for a list of results.
        tile: take the whole image at its own size. Otherwise its shorter side is resized to the model's
            size (antialiased bicubic) and the centre square is taken.
        batch_size: squares at once. Beside the two images in 8 bits, memory holds these and one row of tiles.
        progress: show a bar of the squares on stderr.

    Raises:
        DataError: an image that cannot be decoded or has no pixels.
        FinolaError: a model in training mode.
    """
    if isinstance(image, list | tuple):
        return [reconstruct(model, one, tile, batch_size=batch_size, progress=progress) for one in image]
    require_evaluation(model, "where a square depends on the others of its batch")
    if batch_size < 1:
        raise FinolaError(f"batch_size: got {batch_size}, expected at least 1")
    size, original = model.config.image_size, upright_rgb(image)
    if not tile:
        original = fit(original, size)
    rows, columns = cover(original.height, size), cover(original.width, size)
    corners = [(y, x) for y in rows.starts for x in columns.starts]
    squares = _reconstructed(model, enlarged(original, size), corners, batch_size, progress)
    painted = blend(squares, rows, columns).resize(original.size, Image.Resampling.BICUBIC)
    return Reconstruction(
        original, painted, image_psnr(painted, original), (len(rows.starts), len(columns.starts))
    )


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


