"""Gaussian curvature of the feature surfaces (paper, appendix "Calculation of Gaussian Curvature", and the figure
"Comparing Gaussian curvature of critical features").

Each channel of a map z (C, H, W) is a surface over the grid, with a spacing of one. Its curvature is

    K = (z_xx z_yy - z_xy²) / (1 + z_x² + z_y²)²

Channels are ranked within each image by the root mean square of the highest and the lowest curvature of their
surface, and the k-th rank has a distribution over images.

Curvature depends on the scale of z. So every measure is taken twice: of z as it is, and of z divided by the
deviation of its own surfaces, which two models can be compared by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from finola.drawing import rasterise
from finola.errors import FinolaError, RecipeError, WeightsError
from finola.models.autoencoder import FinolaAutoencoder
from finola.models.base import ImageModel
from finola.models.masked import MaskedFinola

GrowingModel = FinolaAutoencoder | MaskedFinola
MAX_BANDS = 4  # more of them hide one another
LEGEND_COLUMNS = 2
DASHES = ("-", "--", ":", "-.")
QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}
TITLES = {"raw": "z as it is", "standardised": "z divided by its surfaces' deviation"}


def gaussian_curvature(z: Tensor) -> Tensor:
    """Surfaces z (..., H, W) -> their Gaussian curvature at each position, of the same shape.

    First differences are central, and one-sided at the borders; the mixed one is taken along x and then along y.
    Second differences are z(x-1) - 2 z(x) + z(x+1); a border position has that of its inner neighbour.

    Raises:
        FinolaError: fewer than 3 positions along a side.
    """
    if z.ndim < 2 or min(z.shape[-2:]) < 3:
        raise FinolaError(f"z: got shape {tuple(z.shape)}, expected (..., H, W) with H and W of at least 3")
    z_x, z_y = _first_difference(z, -1), _first_difference(z, -2)
    z_xy = _first_difference(z_x, -2)
    bend = _second_difference(z, -1) * _second_difference(z, -2) - z_xy**2
    return bend / (1 + z_x**2 + z_y**2) ** 2


def peak_curvature(z: Tensor, interior: bool = False) -> Tensor:
    """Surfaces z (..., H, W) -> sqrt((K₊² + K₋²) / 2), (...), by which channels are ranked.

    K₊ is the highest curvature of a surface if that is above zero, K₋ the lowest if that is below; else zero.

    Args:
        interior: leave the border positions out.
    """
    curvature = gaussian_curvature(z)
    if interior:
        curvature = curvature[..., 1:-1, 1:-1]
    highest, lowest = curvature.amax((-2, -1)).clamp_min(0), curvature.amin((-2, -1)).clamp_max(0)
    return ((highest**2 + lowest**2) / 2).sqrt()


def standardise(z: Tensor) -> Tensor:
    """A map z (C, H, W) divided by one number, the root mean square over all channels and positions of the
    distance from the channel's mean. A map of flat surfaces stays as it is."""
    deviation = (z - z.mean((-2, -1), keepdim=True)).square().mean().sqrt()
    return z / deviation if deviation > 0 else z


def feature_map(model: GrowingModel, x: Tensor) -> Tensor:
    """Images x (B, 3, S, S) -> z (B, C, H, W): of an autoencoder the map that its vector grows to, of a masked
    FINOLA the whole map that grows from the block in the middle.

    Raises:
        WeightsError: a model of another kind.
    """
    require_growing_map(model)
    if isinstance(model, FinolaAutoencoder):
        return model.grow(model.encode(x))
    corner = central_corner(model)
    return model.grow(model.encode_block(x, corner), corner)


def require_growing_map(model: ImageModel, source: str | Path = "model") -> GrowingModel:
    """The model itself; raises WeightsError unless it is an autoencoder or a masked FINOLA. `source` is what the
    message calls it."""
    if not isinstance(model, FinolaAutoencoder | MaskedFinola):
        raise WeightsError(f"{source}: got a model of kind {model.config.kind!r}, whose map does not grow; expected an "
                           "autoencoder or a masked FINOLA")
    return model


def central_corner(model: MaskedFinola) -> tuple[int, int]:
    """The corner (y0, x0), in patches, of the block in the middle of the grid."""
    y, x = ((grid - block) // 2 for grid, block in zip(model.grid, model.block, strict=True))
    return y, x


@dataclass(frozen=True)
class Curvatures:
    """The channels of N images ranked by peak curvature, each image by itself; `top` ranks are kept.

    Attributes:
        raw, standardised: (N, top) scores, the highest first, of z as it is and of z standardised.
        leaders: (N,) int64, the channel that ranks first.
        map_shape: (C, H, W) of z.
    """

    raw: Tensor
    standardised: Tensor
    leaders: Tensor
    map_shape: tuple[int, int, int]

    def distribution(self, name: str, ranks: Sequence[int]) -> list[dict[str, float]]:
        """Mean and quantiles over the images of the scores at some ranks, counted from 1; `name` is "raw" or
        "standardised"."""
        rows = []
        for rank in ranks:
            scores = getattr(self, name)[:, rank - 1].double()
            quantiles = {key: scores.quantile(q).item() for key, q in QUANTILES.items()}
            rows.append({"rank": rank, "mean": scores.mean().item(), **quantiles})
        return rows


@torch.no_grad()
def measure_curvature(
    model: GrowingModel, batches: Iterable[dict[str, Tensor]], top: int, interior: bool = False
) -> Curvatures:
    """Rank the channels of every image of batches {"image": (B, 3, S, S)}; the model in evaluation mode.

    Memory beside one batch of maps: `top` numbers for each image.

    Raises:
        RecipeError: `top` below 1 or above the channels of the map.
        WeightsError: see `feature_map`.
    """
    ranked, shape = [], (0, 0, 0)
    for batch in batches:
        for z in feature_map(model, batch["image"]).float():  # one at a time: the curvature takes several maps' room
            if not 1 <= top <= len(z):
                raise RecipeError(f"top: got {top}, expected 1 to {len(z)}, the channels of the map")
            raw, channels = peak_curvature(z, interior).topk(top)
            standardised = peak_curvature(standardise(z), interior).topk(top).values
            ranked.append((raw.cpu(), standardised.cpu(), channels[0].cpu()))
            shape = (z.shape[0], z.shape[1], z.shape[2])
    raw, standardised, leaders = (torch.stack(part) for part in zip(*ranked, strict=True))
    return Curvatures(raw, standardised, leaders, shape)


def plot_curvatures(measured: dict[str, Curvatures]) -> Image.Image:
    """Rank against peak curvature, the models over one another: the median over images, and from the 10th to the
    90th percentile, unless there are too many models to tell them apart. Left z as it is, right standardised.

    Args:
        measured: what the legend calls a model -> its curvatures, all with the same number of ranks. Models that are
            called the same up to a comma have one colour.
    """
    from matplotlib.figure import Figure

    rows = -(-len(measured) // LEGEND_COLUMNS)
    figure = Figure(figsize=(10, 4.4 + 0.25 * rows), layout="constrained", dpi=110)
    banded = len(measured) <= MAX_BANDS
    looks = _looks(list(measured))
    for axes, name in zip(figure.subplots(1, 2), ("raw", "standardised"), strict=True):
        for label, curvatures in measured.items():
            scores = getattr(curvatures, name).double()
            low, middle, high = (scores.quantile(q, dim=0) for q in QUANTILES.values())  # (top,) each
            ranks = range(1, len(middle) + 1)
            (line,) = axes.plot(ranks, middle, label=label, **looks[label])
            if banded:
                axes.fill_between(ranks, low, high, color=line.get_color(), alpha=0.25, linewidth=0)
        axes.set(xscale="log", yscale="log", title=TITLES[name], xlabel="rank of the channel within its image")
        axes.set_ylabel("peak Gaussian curvature (root mean square)")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=8,
                  title="median, 10 to 90 % of images" if banded else "median")
    return rasterise(figure)


def _looks(labels: list[str]) -> dict[str, dict[str, str]]:
    """A line's look: the colour by the label's part before a comma, the dashes by its place among those."""
    kinds = [label.partition(",")[0] for label in labels]
    colours = {kind: f"C{i}" for i, kind in enumerate(dict.fromkeys(kinds))}
    return {label: {"color": colours[kind], "linestyle": DASHES[kinds[:i].count(kind) % len(DASHES)]}
            for i, (label, kind) in enumerate(zip(labels, kinds, strict=True))}


def _first_difference(z: Tensor, dim: int) -> Tensor:
    return torch.gradient(z, dim=dim)[0]  # central inside, one-sided at the ends


def _second_difference(z: Tensor, dim: int) -> Tensor:
    n = z.shape[dim]
    before, here, after = (z.narrow(dim, start, n - 2) for start in range(3))
    nearest = torch.arange(n, device=z.device).clamp(1, n - 2) - 1
    return (before - 2 * here + after).index_select(dim, nearest)
