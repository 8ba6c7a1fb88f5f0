"""An image of any size <-> squares of the model's size, with tiles of any side.

Tiles of the model's own side are the paper's mode; smaller ones are enlarged to it (antialiased bicubic), which
gives each vector less to describe, larger ones are shrunk. Tiles that share pixels are blended there. Where they
only touch, as they do by default in an image that divides evenly, the step from one to the other is spread over
`SEAM` pixels on both sides, unless it is so high that it may belong to the image.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from finola.drawing import to_image

SEAM = 4  # pixels
SEAM_LIMIT = 0.1  # of a step between tiles, on the scale of [0, 1]


@dataclass(frozen=True)
class Tiling:
    """Tiles of `side` pixels over `width` x `height`, row by row, that share at least `overlap` pixels.

    A side of the image shorter than a tile is stretched to one, and shrunk again by `paint`; where it was `padded`
    instead, as in version 1 of the `.fnl` format, `paint` cuts it off.
    """

    width: int
    height: int
    side: int
    overlap: int = 0
    padded: bool = False

    def covers(self) -> tuple[Cover, Cover]:
        """Of the rows and of the columns."""
        return cover(self.height, self.side, self.overlap), cover(self.width, self.side, self.overlap)

    def cut(self, image: Image.Image, size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The tiles of an RGB image in batches: (B, 3, side, side) at their own size, (B, 3, S, S) at the model's."""
        rows, columns = self.covers()
        pixels = enlarged(image, self.side)
        corners = [(y, x) for y in rows.starts for x in columns.starts]
        for first in range(0, len(corners), batch_size):
            tiles = np.stack([pixels[y : y + self.side, x : x + self.side]
                              for y, x in corners[first : first + batch_size]])  # (B, side, side, 3)
            x = torch.from_numpy(tiles).permute(0, 3, 1, 2).float().div_(255)
            yield x, resize(x, size)

    def paint(self, squares: Iterable[Tensor]) -> Image.Image:
        """The RGB image of its tiles (3, side, side), given row by row."""
        rows, columns = self.covers()
        canvas = blend(iter(squares), rows, columns)
        soften(canvas, _touching(columns, self.side), vertical=True)
        soften(canvas, _touching(rows, self.side), vertical=False)
        if self.padded:
            return canvas.crop((0, 0, self.width, self.height))
        return canvas.resize((self.width, self.height), Image.Resampling.BICUBIC)


def resize(x: Tensor, size: int) -> Tensor:
    """(B, 3, s, s) -> (B, 3, size, size), antialiased bicubic; as it is where s = size."""
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, (size, size), mode="bicubic", antialias=True, align_corners=False)


def soften(canvas: Image.Image, seams: list[int], vertical: bool) -> None:
    """Spread the step across each seam, in place; a seam at p lies between the columns (rows) p - 1 and p."""
    for seam in seams:
        box = (seam - SEAM, 0, seam + SEAM, canvas.height) if vertical else (0, seam - SEAM, canvas.width, seam + SEAM)
        pixels = np.asarray(canvas.crop(box), dtype=np.float32)
        lines = pixels if vertical else pixels.swapaxes(0, 1)  # (length, 2 · SEAM, 3)
        before, after = lines[:, SEAM - 1], lines[:, SEAM]
        slope = ((before - lines[:, SEAM - 2]) + (lines[:, SEAM + 1] - after)) / 2  # of the image itself
        step = after - before - slope
        step[np.abs(step) > 255 * SEAM_LIMIT] = 0
        ramp = (np.arange(SEAM) + 0.5) / (2 * SEAM)  # up to one half
        share = np.concatenate([ramp, -ramp[::-1]]).astype(np.float32)
        lines = np.rint(lines + share[:, None] * step[:, None]).clip(0, 255).astype(np.uint8)
        canvas.paste(Image.fromarray(np.ascontiguousarray(lines if vertical else lines.swapaxes(0, 1))), box[:2])


def _touching(line: Cover, side: int) -> list[int]:
    """Where a tile begins at the very pixel at which the one before ends."""
    return [start for before, start in pairwise(line.starts) if start - before == side]


@dataclass(frozen=True)
class Cover:
    """Tiles that cover one side of an image.

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


def blend(squares: Iterator[Tensor], rows: Cover, columns: Cover) -> Image.Image:
    """Paint the squares, given row by row, into one image; only one row of them is held as floats."""
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


def enlarged(image: Image.Image, size: int) -> np.ndarray:
    """(H, W, 3) uint8 with both sides at least `size` pixels; a shorter one is stretched to that, bicubic."""
    larger = (max(image.width, size), max(image.height, size))
    return np.asarray(image if larger == image.size else image.resize(larger, Image.Resampling.BICUBIC))
