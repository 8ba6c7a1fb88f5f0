"""How far a model's maps obey the two differential equations, and what its vectors give on finer grids.

The paper extends the recursion to ∂z/∂x = A n(z), ∂z/∂y = B n(z) (section "Partial Differential Equations (PDEs)")
and leaves their validity open. Three measurements on images, all of `finola.pde`:

    residual      how far the map misses the recursion at each step, relative to the step
    commutator    how far the two paths to each position differ, of the trained model and of another one
    renderings    one q drawn 2, 3, 4 times larger than the model was trained to paint, against the original at that
                  size and beside the model's own image enlarged by bicubic interpolation
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from finola.autoregression import EPS
from finola.data.images import center_crop, resize_shorter, to_tensor
from finola.drawing import panel, rasterise
from finola.errors import DataError, FinolaError
from finola.evaluation.metrics import psnr
from finola.kernels.grid import resolve_origin
from finola.models.autoencoder import FinolaAutoencoder
from finola.pde import commutator, law_of, render, residual

SHOWN = 3  # examples in an image
BICUBIC = "the model's image, bicubic"


class Scheme(NamedTuple):
    """How a finer image is drawn; see `finola.pde.render`. `fine`: steps of 1 / factor instead of one position."""

    grid: str
    method: str
    fine: bool

    def step(self, factor: int) -> float:
        return 1 / factor if self.fine else 1.0

    def __str__(self) -> str:
        steps = "steps of 1/factor" if self.fine else "trained steps"
        return f"finer {self.grid}, {self.method}, {steps}"


SCHEMES = tuple(
    Scheme(grid, method, fine)
    for grid in ("map", "pixels")
    for method, fine in (("euler", False), ("euler", True), ("rk4", True))
)


@dataclass
class Renderings:
    """What one factor's renderings score: PSNR in dB by the way they were made, a number for each image.

    Attributes:
        scores: BICUBIC or str(scheme) -> the scores.
        shown: the same names, and "original" -> images (3, 2S, 2S), the middle of the first few images.
    """

    scores: dict[str, list[float]] = field(default_factory=dict)
    shown: dict[str, list[Tensor]] = field(default_factory=dict)

    def means(self) -> dict[str, float]:
        return {name: sum(scores) / len(scores) for name, scores in self.scores.items()}


@dataclass
class Equations:
    """Means over N images.

    Attributes:
        horizontal, vertical: (R, R - 1) and (R - 1, R), see `finola.pde.residual`.
        commutators: model -> (R, R), see `finola.pde.commutator`.
        origin: (y, x) of q in the first model's map.
        renderings: factor -> scores, of the images that have that many pixels.
        images: N.
    """

    horizontal: Tensor
    vertical: Tensor
    commutators: dict[str, Tensor]
    origin: tuple[int, int]
    renderings: dict[int, Renderings]
    images: int


@torch.no_grad()
def measure_equations(
    model: FinolaAutoencoder, images: Iterable[Image.Image], factors: Sequence[int],
    against: tuple[str, FinolaAutoencoder] | None = None,
) -> Equations:
    """All three measurements, one image at a time.

    Args:
        model: an autoencoder with FINOLA, in evaluation mode.
        images: RGB, of any size; the largest centre square of each is taken, and resized (antialiased bicubic).
        factors: enlargements; an image smaller than `factor` · S takes no part in that factor's renderings.
        against: a name and another model, whose commutator is measured too; its untrained start by default.

    Raises:
        FinolaError: a model without such equations, or with a map of one position.
        DataError: no images.
    """
    law = law_of(model)
    if not law.directions:
        raise FinolaError("model: its map has a single position, so no step is taken; expected map_size 2 or more")
    models = {"this model": model, **dict([against or untrained(model)])}
    horizontal: list[Tensor] = []
    vertical: list[Tensor] = []
    commutators: dict[str, list[Tensor]] = {name: [] for name in models}
    renderings = {factor: Renderings() for factor in factors}
    for image in images:
        square = center_crop(image, min(image.size))
        q = model.encode(_resized(square, model))
        misses = residual(model.grow(q), **law.matrices(), origin=law.origin, norm=law.norm, eps=EPS)
        for found, miss in zip((horizontal, vertical), misses, strict=True):
            found.append(miss[0].cpu())
        for name, other in models.items():
            commutators[name].append(_commutator(other, square))
        for factor, rendered in renderings.items():
            if square.width >= factor * model.config.image_size:
                _render(model, q, square, factor, rendered)
    if not horizontal:
        raise DataError("images: got none, expected at least one")
    mean = {name: torch.stack(found).mean(0) for name, found in commutators.items()}
    return Equations(torch.stack(horizontal).mean(0), torch.stack(vertical).mean(0), mean,
                     resolve_origin(law.origin, law.size), renderings, len(horizontal))


def untrained(model: FinolaAutoencoder) -> tuple[str, FinolaAutoencoder]:
    """A name for, and the model of the same configuration with the weights that training starts from (seed 0)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        start = model.config.build()
    return f"untrained ({model.config.start} start)", start.to(model.mean.device).eval()


def off_axes(values: Tensor, origin: tuple[int, int], kind: str) -> Tensor:
    """The numbers of a residual or commutator by position that may differ from zero, flat. Exact are the horizontal
    residual in the origin's row, the vertical in its column, the commutator in both."""
    y, x = origin
    rows = [i for i in range(values.shape[0]) if i != y or kind == "vertical"]
    columns = [i for i in range(values.shape[1]) if i != x or kind == "horizontal"]
    return values[rows][:, columns].flatten()


def plot_equations(measured: Equations) -> Image.Image:
    """Residuals and commutators by position, means over the images."""
    from matplotlib.figure import Figure

    maps = {
        "residual of the steps along x": (measured.horizontal, "horizontal"),
        "residual of the steps along y": (measured.vertical, "vertical"),
        **{f"commutator, {name}": (values, "commutator") for name, values in measured.commutators.items()},
    }
    residuals, commutators = ([values for values, _ in maps.values()][i : i + 2] for i in (0, 2))
    highest = [max(values.max().item() for values in pair) for pair in (residuals, commutators)]
    figure = Figure(figsize=(11, 10), layout="constrained", dpi=90)
    panels = zip(figure.subplots(2, 2).flat, maps.items(), strict=True)
    for i, (axes, (title, (values, kind))) in enumerate(panels):
        top = highest[i // 2] or 1.0
        drawn = axes.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=top)
        mean = off_axes(values, measured.origin, kind)
        axes.set_title(f"{title}\nmean {mean.mean():.3f}" if len(mean) else title)
        axes.set(xlabel="column" if kind != "horizontal" else "step between columns",
                 ylabel="row" if kind != "vertical" else "step between rows")
        if max(values.shape) <= 16:
            for (row, column), value in zip(torch.cartesian_prod(*map(torch.arange, values.shape)).tolist(),
                                            values.flatten().tolist(), strict=True):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8,
                          color="white" if value < 0.6 * top else "black")
        figure.colorbar(drawn, ax=axes, shrink=0.8)
    figure.suptitle(f"mean of {measured.images} images; 0: the equation holds "
                    f"(in the row {measured.origin[0]} and the column {measured.origin[1]} of q it must)")
    return rasterise(figure)


def renderings_panel(renderings: Renderings) -> Image.Image:
    """A row for the original, the bicubic enlargement and each scheme, best first: the middle of some images."""
    means = renderings.means()
    names = ["original", *sorted(means, key=means.__getitem__, reverse=True)]
    labels = ["original", *(f"{name}: {means[name]:.2f} dB, mean of {len(renderings.scores[name])}"
                            for name in names[1:])]
    captions = [[""] * len(renderings.shown["original"]),
                *([f"{score:.2f} dB" for score in renderings.scores[name][:SHOWN]] for name in names[1:])]
    return panel([torch.stack(renderings.shown[name]) for name in names], labels, captions)


def _commutator(model: FinolaAutoencoder, square: Image.Image) -> Tensor:
    """(R, R), of the model's own vector of the image."""
    law = law_of(model)
    q = model.encode(_resized(square, model))
    return commutator(q, law.size, **law.matrices(), origin=law.origin, norm=law.norm, eps=EPS)[0].cpu()


def _render(model: FinolaAutoencoder, q: Tensor, square: Image.Image, factor: int, found: Renderings) -> None:
    """Draw one image in all ways and take note of the scores."""
    x = _resized(square, model, factor)
    images = {str(s): render(model, q, factor, grid=s.grid, method=s.method, step=s.step(factor)) for s in SCHEMES}
    images[BICUBIC] = F.interpolate(model.decode(q), x.shape[-2:], mode="bicubic", align_corners=False)
    for name, image in images.items():
        found.scores.setdefault(name, []).append(psnr(image, x).item())
    if len(found.shown.get("original", [])) < SHOWN:
        start = (x.shape[-1] - 2 * model.config.image_size) // 2
        window = slice(start, start + 2 * model.config.image_size)
        for name, image in {"original": x, **images}.items():
            found.shown.setdefault(name, []).append(image[0, :, window, window].cpu())


def _resized(square: Image.Image, model: FinolaAutoencoder, factor: int = 1) -> Tensor:
    """(1, 3, factor · S, factor · S) on the model's device."""
    return to_tensor(resize_shorter(square, factor * model.config.image_size))[None].to(model.mean.device)
