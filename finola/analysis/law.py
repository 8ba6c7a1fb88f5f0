"""Do maps obey a first-order law that nothing imposed on them? The paper calls it an invariance of images.

A law of the paper's form is fitted to maps z (B, C, H, W) by least squares, a matrix for each direction,

    z(x+1, y) - z(x, y) = A n(z(x, y)),     n: mean 0 and deviation 1 over the channels

and beside it the best affine step, z(x+1, y) - z(x, y) = M z(x, y) + b, which is free to do what A n cannot. Both are
judged on maps that they were not fitted to:

    explained    1 - |error of the step|² / |step|², summed over positions and images. 0: no better than to stand still
    grown        1 - |error|² / |z - mean|² of a map grown from its middle by A alone, at each distance from it

Half of a step is explained where neighbours have nothing to do with each other, by the way back to the mean. So each
map is measured a second time with its positions shuffled within the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from finola.autoregression import autoregress, normalise
from finola.drawing import rasterise
from finola.errors import DataError, FinolaError
from finola.kernels.grid import DIRECTIONS
from finola.kernels.plan import HORIZONTAL

RIDGE = 1e-6  # of the mean square of the inputs, which makes the least squares of few images solvable
LAWS = {"norm+linear": "A n(z)", "affine": "M z + b"}
Maps = Callable[[Tensor], Tensor]  # images (B, 3, S, S) -> z (B, C, H, W)


def steps(z: Tensor, direction: str) -> tuple[Tensor, Tensor]:
    """z (B, C, H, W) -> the states that have a neighbour in a direction (N, C), and the steps to it (N, C)."""
    axis = 3 if direction in HORIZONTAL else 2
    near, far = z.narrow(axis, 0, z.shape[axis] - 1), z.narrow(axis, 1, z.shape[axis] - 1)
    if direction in ("left", "up"):
        near, far = far, near
    rows = near.permute(0, 2, 3, 1).flatten(0, 2)
    return rows, far.permute(0, 2, 3, 1).flatten(0, 2) - rows


def _inputs(law: str, rows: Tensor) -> Tensor:
    """States (N, C) -> what a law's matrix is multiplied with, (N, C) or (N, C + 1)."""
    if law == "norm+linear":
        return normalise(rows)
    return F.pad(rows, (0, 1), value=1.0)


def _on_cpu(z: Tensor) -> Tensor:
    """In its own precision, float32 at least."""
    return z.detach().cpu().to(torch.promote_types(z.dtype, torch.float32))


class LeastSquares:
    """The matrices of every law and direction, out of the maps that `add` has seen. Products are formed in float64: in
    float32 their rounding is larger than the smallest variances of an encoder's channels, and the fit is noise."""

    def __init__(self) -> None:
        self.count, self.total = 0, torch.zeros((), dtype=torch.float64)
        self._products: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}

    def add(self, z: Tensor) -> None:
        """z (B, C, H, W), more than one position a side."""
        z = _on_cpu(z)
        if z.ndim != 4 or min(z.shape[2:]) < 2:
            raise FinolaError(f"z: got shape {tuple(z.shape)}, expected (B, C, H, W) with H and W of at least 2")
        if not torch.isfinite(z).all():
            raise DataError("z: got values that are not finite (NaN or infinity); check the images and the weights")
        self.count += z.shape[0] * z.shape[2] * z.shape[3]
        self.total = self.total + z.double().sum((0, 2, 3))
        for direction in DIRECTIONS:
            rows, step = steps(z, direction)
            step = step.double()
            for law in LAWS:
                x = _inputs(law, rows).double()
                square, cross = self._products.get((law, direction), (0.0, 0.0))
                self._products[law, direction] = (square + x.T @ x, cross + x.T @ step)

    def solve(self) -> Fitted:
        """DataError where nothing was added."""
        if not self.count:
            raise DataError("law: got no maps to fit; give at least one image")
        matrices: dict[str, dict[str, Tensor]] = {law: {} for law in LAWS}
        for (law, direction), (square, cross) in self._products.items():
            ridge = RIDGE * square.diagonal().mean().clamp_min(1e-12)
            matrices[law][direction] = torch.linalg.solve(square + ridge * torch.eye(len(square)), cross).T
        return Fitted(matrices, self.total / self.count)


@dataclass
class Fitted:
    """`matrices[law][direction]`: (C, C), or of the affine step (C, C + 1); `mean`: of z over the maps, (C)."""

    matrices: Mapping[str, Mapping[str, Tensor]]
    mean: Tensor


@dataclass
class Scores:
    """How well maps obey a fitted law; sums over the maps that `add` has seen."""

    fitted: Fitted
    errors: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LAWS, 0.0))
    length: float = 0.0
    grown: dict[str, Tensor] = field(default_factory=dict)  # sums of squares by distance: error, standing, spread

    def add(self, z: Tensor) -> None:
        z = _on_cpu(z)
        for direction in DIRECTIONS:
            rows, step = steps(z, direction)
            self.length += step.square().sum().item()
            for law in LAWS:
                error = step - _inputs(law, rows) @ self.fitted.matrices[law][direction].T.to(z.dtype)
                self.errors[law] += error.square().sum().item()
        self._add_grown(z)

    def _add_grown(self, z: Tensor) -> None:
        z = z.double()
        height, width = z.shape[2:]
        y, x = height // 2, width // 2
        middle = z[:, :, y, x]
        law = self.fitted.matrices["norm+linear"]
        grown = autoregress(middle, (height, width), right=law["right"], left=law["left"], down=law["down"],
                            up=law["up"], origin=(y, x))
        distance = ((torch.arange(height) - y).abs()[:, None] + (torch.arange(width) - x).abs()[None]).flatten()
        for name, guess in (("error", grown), ("standing", middle[:, :, None, None]),
                            ("spread", self.fitted.mean[None, :, None, None])):
            squares = (z - guess).square().sum((0, 1)).flatten()
            sums = torch.zeros(int(distance.max()) + 1, dtype=z.dtype).index_add_(0, distance, squares)
            self.grown[name] = self.grown.get(name, torch.zeros_like(sums)) + sums

    def explained(self) -> dict[str, float | None]:
        """law -> share of the steps' squared length; None of maps that are the same everywhere."""
        return {law: 1 - error / self.length if self.length else None for law, error in self.errors.items()}

    def by_distance(self) -> dict[str, list[float]]:
        """"grown" and, for a map that is its middle everywhere, "standing": from distance 0 on."""
        spread = self.grown["spread"].clamp_min(1e-30)
        return {"grown": (1 - self.grown["error"] / spread).tolist(),
                "standing": (1 - self.grown["standing"] / spread).tolist()}

    def as_dict(self) -> dict[str, Any]:
        return {"explained": self.explained(), "by_distance": self.by_distance()}


def shuffled(z: Tensor, seed: int = 0) -> Tensor:
    """z (B, C, H, W) with each image's positions in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    flat = z.detach().cpu().flatten(2)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=generator).argsort(2)
    mixed: Tensor = flat.gather(2, order.expand_as(flat)).unflatten(2, z.shape[2:])
    return mixed


@torch.no_grad()
def measure_law(sources: Mapping[str, Maps], train: Iterable[Tensor], val: Iterable[Tensor],
                ) -> dict[str, dict[str, Scores]]:
    """Fit each source's maps on batches of images (B, 3, S, S) and judge the fit on others.

    Returns:
        source -> "maps" and "shuffled" -> scores.
    """
    fits = {(name, kind): LeastSquares() for name in sources for kind in KINDS}
    _add_maps(fits, sources, train)
    scores = {key: Scores(fit.solve()) for key, fit in fits.items()}
    _add_maps(scores, sources, val)
    return {name: {kind: scores[name, kind] for kind in KINDS} for name in sources}


def _add_maps(sums: Mapping[tuple[str, str], LeastSquares] | Mapping[tuple[str, str], Scores],
              sources: Mapping[str, Maps], batches: Iterable[Tensor]) -> None:
    """Add each source's maps of the images, as they are and shuffled, to the sums of (source, kind)."""
    for x in batches:
        for name, maps in sources.items():
            z = maps(x)
            for kind, change in KINDS.items():
                sums[name, kind].add(change(z))


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"maps": lambda z: z, "shuffled": shuffled}


HEAD = ["A n(z)", "shuffled", "M z + b", "shuffled", "grown, 1 step", "farthest"]


def as_record(measured: Mapping[str, Mapping[str, Scores]]) -> list[dict[str, Any]]:
    """What results keep of each source: its name, and "maps" and "shuffled" as `Scores.as_dict`."""
    return [{"name": name, **{kind: scores.as_dict() for kind, scores in kinds.items()}}
            for name, kinds in measured.items()]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A source of `as_record` under `HEAD`."""
    values = [row[kind]["explained"][law] for law in LAWS for kind in KINDS]
    grown = row["maps"]["by_distance"]["grown"]
    return ["-" if value is None else f"{value:.2f}" for value in (*values, grown[1], grown[-1])]


def plot_law(rows: Sequence[Mapping[str, Any]]) -> Image.Image:
    """Of the sources of `as_record`. Left: what the two laws explain of a step, of the maps and of shuffled ones.
    Right: maps grown from their middle, by distance."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 0.7 * len(rows) + 3), layout="constrained", dpi=110)
    bars, curves = figure.subplots(1, 2)
    styles = [(law, kind) for law in LAWS for kind in KINDS]
    for i, row in enumerate(rows):
        for j, (law, kind) in enumerate(styles):
            value = row[kind]["explained"][law] or 0.0
            place = i + (j - 1.5) * 0.2
            bars.barh(place, max(value, -0.5), height=0.18, color=f"C{j // 2}",
                      alpha=1.0 if kind == "maps" else 0.4, label=f"{LAWS[law]}, {kind}" if i == 0 else None)
            bars.text(max(value, 0.0) + 0.01, place, f"{value:.2f}", va="center", fontsize=7)
        by_distance = row["maps"]["by_distance"]
        curves.plot(by_distance["grown"], color=f"C{i + 2}", marker="o", markersize=3, label=row["name"])
        curves.plot(by_distance["standing"], color=f"C{i + 2}", linestyle=":")
    bars.set_yticks(range(len(rows)), [row["name"] for row in rows])
    bars.invert_yaxis()
    bars.set(xlabel="share of the step explained, on images not fitted to", xlim=(None, 1.1))
    curves.axhline(0, color="0.7", linewidth=0.8)
    curves.set(xlabel="distance from the middle, positions", ylim=(-1.0, 1.05),
               ylabel="share of the spread explained\ndotted: the middle everywhere")
    for axes in (bars, curves):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    return rasterise(figure)
