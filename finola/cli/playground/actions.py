"""What the page of `finola playground` can do with a photograph: images out of the library, and a line about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from finola.analysis.embedding import along_line, mix
from finola.analysis.growth import growth_frames, write_gif
from finola.analysis.statistics import Components
from finola.codec import Codec
from finola.codec.container import OVERHEAD
from finola.data.images import decode_image, fit, to_tensor
from finola.drawing import to_image
from finola.errors import FinolaError
from finola.evaluation.metrics import image_psnr
from finola.models.autoencoder import FinolaAutoencoder
from finola.pde import render

LARGEST = 4  # times the model's size, up to which a photograph is kept
MOST_PIXELS = 50_000_000  # of a photograph, so that memory and time are bounded


@dataclass(frozen=True, eq=False)
class Photograph:
    """What is kept of a photograph.

    Attributes:
        square: RGB, S x S, what the model sees.
        large: the same square with as many pixels as the photograph has, at most LARGEST · S a side.
        q: (1, C), on the model's device.
        words: what was done to it, plain text; all other words are Markdown.
    """

    square: Image.Image
    large: Image.Image
    q: Tensor
    words: str


class Axes(NamedTuple):
    """What is known of q over many images: the mean (C,), the first principal components, and what they are of."""

    mean: Tensor
    components: Components
    of: str


class Shown(NamedTuple):
    """An image and a line about it."""

    image: Image.Image
    words: str


@dataclass(frozen=True)
class Playground:
    """A model with what stands beside its weights.

    Attributes:
        model: an autoencoder in evaluation mode.
        codec: None where there is no calibration.
        axes: None where there are no components.
        folder: for files to download.
    """

    model: FinolaAutoencoder
    codec: Codec | None
    axes: Axes | None
    folder: Path

    @property
    def size(self) -> int:
        return self.model.config.image_size

    @torch.no_grad()
    def open(self, path: str | Path) -> Photograph:
        """A photograph of any size and mode, its centre square resized to the model's, and its vector.

        Raises:
            DataError: not an image, damaged, or too large.
        """
        name, most = Path(path).name, LARGEST * self.size
        image = decode_image(path, name=name, max_pixels=MOST_PIXELS, draft=most)
        square, side = fit(image, self.size), min(image.size)
        q = self.model.encode(to_tensor(square)[None].to(self.model.mean.device))
        cut = "" if image.width == image.height else "the centre square was cut out and "
        words = f"{name}: {cut}{'enlarged' if side < self.size else 'resized'} to {self.size}×{self.size} pixels."
        return Photograph(square, fit(image, min(max(side, self.size), most)), q, words)

    def rebuild(self, photo: Photograph) -> Shown:
        """The image of q."""
        image, numbers = self._paint(photo.q), self.model.config.embed_dim
        return Shown(image, f"{self.size}×{self.size} pixels from {numbers} numbers, {3 * self.size**2 / numbers:.0f} "
                     f"times fewer than the square has: **{_decibels(image, photo.square)}**")

    def slide(self, first: Photograph, second: Photograph, share: float) -> Shown:
        """The image of (1 - share) of the first vector and `share` of the second."""
        image = self._paint(mix(second.q, first.q, share))
        return Shown(image, f"q = {1 - share:.2f} · q₁ + {share:.2f} · q₂")

    def move(self, photo: Photograph, line: float, steps: Sequence[float]) -> Shown:
        """q on the line through the mean (1: q itself, 0: the mean, -1: the mirror), moved along each principal
        component by so many of its standard deviations."""
        if self.axes is None:
            raise self._missing("principal components")
        mean, components = self.axes.mean, self.axes.components
        q = along_line(photo.q.cpu().double(), mean, line)
        lengths = torch.tensor(steps, dtype=torch.float64) * components.variances[: len(steps)].sqrt()
        q = q + components.vectors[:, : len(steps)] @ lengths
        places = {1.0: "q itself", 0.0: "the mean m", -1.0: "the mirror, 2m − q"}
        words = places.get(line, f"m {'+' if line > 0 else '−'} {abs(line):.2f} · (q − m)")
        moved = ", ".join([words, *(f"{step:+.1f} σ{i}" for i, step in enumerate(steps, 1) if step)])
        return Shown(self._paint(q.float().to(photo.q.device)), f"{moved}; mean and components of {self.axes.of}")

    def grow(self, photo: Photograph) -> tuple[Path, str]:
        """An animated GIF of the map and the image as the law walks away from q."""
        frames = growth_frames(self.model, photo.q[0])
        path = self.folder / "growth.gif"
        write_gif(frames, path)
        rows = self.model.config.map_size
        return path, f"a map of {rows}×{rows} positions, from one vector of {self.model.config.embed_dim} numbers"

    def quantise(self, photo: Photograph, bits: int, entropy: bool) -> tuple[Shown, Path]:
        """The image of q with so many bits a number, and the .fnl file that holds it."""
        if self.codec is None:
            raise self._missing("calibration")
        data = self.codec.compress(photo.square, bits=bits, entropy=entropy, side=self.size)
        image, path = self.codec.decompress(data), self.folder / "photograph.fnl"
        path.write_bytes(data)
        payload, numbers = len(data) - OVERHEAD, self.model.config.embed_dim
        words = f"""
| | |
|---|---|
| numbers | {numbers} of {bits} bit{"s" * (bits > 1)}{", entropy coded" * entropy} |
| coded | **{payload} bytes**, {8 * payload / self.size**2:.3f} bit per pixel |
| file | {len(data)} bytes with its header |
| PSNR | **{_decibels(image, photo.square)}**; {_decibels(self._paint(photo.q), photo.square)} before |
"""
        return Shown(image, words), path

    @torch.no_grad()
    def finer(self, photo: Photograph, factor: int, grid: str) -> tuple[Image.Image, Image.Image, Image.Image, str]:
        """Three images `factor` times larger: of q on a finer grid, the model's own enlarged, and the photograph."""
        painted = to_image(render(self.model, photo.q, factor, grid=grid)[0])
        enlarged = self._paint(photo.q).resize(painted.size, Image.Resampling.BICUBIC)
        original = photo.large.resize(painted.size, Image.Resampling.BICUBIC)
        size = f"{painted.width}×{painted.height} pixels from the same {self.model.config.embed_dim} numbers"
        if photo.large.width < painted.width:
            return painted, enlarged, original, (f"{size}; the photograph has {photo.large.width}×{photo.large.height} "
                                                 "alone, so there is nothing to compare with.")
        return painted, enlarged, original, (f"{size}: by the law **{_decibels(painted, original)}**, by plain bicubic "
                                             f"enlargement **{_decibels(enlarged, original)}**.")

    def keep(self, image: Image.Image, name: str) -> str:
        """The image as a PNG file of that name, which stays until the next one."""
        path = self.folder / f"{name}.png"
        image.save(path)
        return str(path)

    @torch.no_grad()
    def _paint(self, q: Tensor) -> Image.Image:
        return to_image(self.model.decode(q)[0])

    def _missing(self, what: str) -> FinolaError:
        return FinolaError(f"no {what} beside these weights; finola calibrate --weights FILE --data DIR makes them")


def _decibels(image: Image.Image, original: Image.Image) -> str:
    return f"{image_psnr(image, original):.2f} dB"
