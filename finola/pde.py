"""The law between grid points: the two differential equations that FINOLA's recursion becomes as its steps shrink.

Paper, section "Partial Differential Equations (PDEs)": with n(z) the normalised z,

    ∂z/∂x = A n(z)      ∂z/∂y = B n(z)          A = right, B = down; leftwards A₋ = left, upwards B₋ = up

The recursion of `finola.autoregression` is Euler's method with a step of one position. Here the step is free, the
method may be Runge-Kutta's, and z can be asked for at any coordinates (`map_at`), so that one q is drawn on a grid
finer than the one it was trained on (`render`). Two equations for one z hold together only where their flows φ
(along x) and ψ (along y) commute: `commutator` measures how far the two paths differ, `residual` how far a map,
which is their mean, fails the recursion.

Shapes: z (..., C) for single vectors, (B, C, H, W) for maps. Coordinates are in map positions, x to the right and y
downwards, relative to the origin that holds q.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from finola.autoregression import EPS, PATHS, Finola, Norm, autoregress, checked_matrix, normalise
from finola.errors import FinolaError, check_choice
from finola.kernels.grid import Origin, resolve_origin, state_dtype

if TYPE_CHECKING:
    from finola.models.autoencoder import FinolaAutoencoder

NORMS = ("layer", "none")  # the norms that need no other position or image
GRIDS = ("map", "pixels")
REACH = "the coordinates reach out"  # in a direction whose matrix is missing
SLACK = 1e-9  # a distance this much short of a whole number of steps counts as whole

Step = Callable[[Tensor, Tensor, float, Norm], Tensor]  # of a method: z (..., C), matrix, length, norm -> z


def flow(
    z: Tensor,
    matrix: Tensor,
    distance: float,
    *,
    step: float = 1.0,
    method: str = "rk4",
    norm: str = "layer",
    eps: float = EPS,
) -> Tensor:
    """Carry z along dz/dx = matrix · n(z) over `distance`.

    As many whole steps as fit are taken, then one shorter step for what is left. "euler" with a step of one is the
    recursion the models are trained with; between the positions it draws straight lines from each to the next.

    Args:
        z: (..., C).
        matrix: (C, C), the direction's.
        distance: at least 0, in positions; the way back has a matrix of its own.
        step: length of a step, in positions.
        method: "euler" (error of order step) or "rk4" (order step⁴).
        norm: "layer" (the paper's) or "none", where the exact flow is exp(distance · matrix).
        eps: of the norm.

    Returns:
        (..., C) in z's dtype.

    Raises:
        FinolaError: an unknown method or norm, a negative distance, a step that is not positive, a matrix that does
            not fit.
    """
    if not (math.isfinite(distance) and distance >= 0):
        raise FinolaError(f"distance: got {distance}, expected a finite number of at least 0; the opposite direction "
                          "has a matrix of its own")
    _check_scheme(step, method, norm)
    matrix = checked_matrix("matrix", matrix, z.shape[-1], REACH)
    return _trajectory(z, matrix, [distance], step, _STEPS[method], _norm(norm, eps))[0]


def map_at(
    q: Tensor,
    ys: Sequence[float],
    xs: Sequence[float],
    *,
    right: Tensor | None = None,
    left: Tensor | None = None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    path: str = "average",
    method: str = "euler",
    step: float = 1.0,
    norm: str = "layer",
    eps: float = EPS,
) -> Tensor:
    """z at the coordinates ys x xs, relative to the origin that holds q; at integers and by default `autoregress`.

    Args:
        q: (B, C).
        ys, xs: the rows' and the columns' coordinates, any finite numbers in any order. Their signs choose the
            matrices.
        right, left, down, up: the (C, C) matrices A, A₋, B, B₋; those of directions without a coordinate may be
            left out.
        path: "average" of both paths, "row_first" (along x, then along y) or "column_first".
        method, step, norm, eps: as for `flow`.

    Returns:
        (B, C, len(ys), len(xs)) in q's dtype, channels-last.

    Raises:
        FinolaError: as for `flow`; a missing matrix, a coordinate that is not finite.
    """
    if q.ndim != 2:
        raise FinolaError(f"q: got shape {tuple(q.shape)}, expected (B, C)")
    check_choice("path", path, PATHS)
    _check_scheme(step, method, norm)
    ys, xs = _coordinates("ys", ys), _coordinates("xs", xs)
    used = {"right": (right, max(xs) > 0), "left": (left, min(xs) < 0), "down": (down, max(ys) > 0),
            "up": (up, min(ys) < 0)}
    matrices = {
        name: checked_matrix(name, matrix, q.shape[1], REACH) for name, (matrix, needed) in used.items() if needed}
    one_step, normal = _STEPS[method], _norm(norm, eps)

    def along(z: Tensor, coordinates: list[float], forth: str, back: str) -> Tensor:
        """z (..., C) -> (n, ..., C), at each coordinate."""
        order = sorted(range(len(coordinates)), key=lambda i: abs(coordinates[i]))
        found: dict[int, Tensor] = {}
        for direction, side in ((forth, [i for i in order if coordinates[i] >= 0]),
                                (back, [i for i in order if coordinates[i] < 0])):
            distances = [abs(coordinates[i]) for i in side]
            found |= zip(side, _trajectory(z, matrices.get(direction), distances, step, one_step, normal), strict=True)
        return torch.stack([found[i] for i in range(len(coordinates))])

    z = q.to(state_dtype(q))
    maps = []
    if path != "column_first":
        maps.append(along(along(z, xs, "right", "left"), ys, "down", "up").permute(2, 3, 0, 1))  # from (H, W, B, C)
    if path != "row_first":
        maps.append(along(along(z, ys, "down", "up"), xs, "right", "left").permute(2, 3, 1, 0))  # from (W, H, B, C)
    mean = maps[0] if len(maps) == 1 else (maps[0] + maps[1]) / 2
    return mean.to(q.dtype, memory_format=torch.channels_last)


def render(
    model: FinolaAutoencoder,
    q: Tensor,
    factor: int,
    *,
    grid: str = "map",
    method: str = "euler",
    step: float = 1.0,
) -> Tensor:
    """The image of q, `factor` times larger than the model was trained to paint. Two ways to get there:

    "map": the map is drawn on a grid `factor` times finer, and the decoder, which is convolutional, runs on that.
    Each position is cut into factor x factor ones. The decoder paints at each of them what it has learned to
    paint at a whole one, so this is right only as far as the decoder does not depend on scale.

    "pixels": map and decoder keep their grid, which is moved by fractions of a pixel, factor² times over; the
    images are interleaved. This asks for the map at coordinates that are never further than half a pixel
    (R / 2S of a position) from the trained ones.

    Either way the image covers the same square as the model's own, which is the case factor = 1. The outermost
    coordinates lie less than half a position beyond the trained map; where q stands at its edge, the model has no
    matrix for them, and the edge's own z is taken.

    Args:
        model: an autoencoder with FINOLA and the layer norm (or none).
        q: (B, C).
        factor: 1, 2, 3, ...
        grid: "map" or "pixels".
        method, step: as for `flow`.

    Returns:
        (B, 3, factor · S, factor · S) on the scale of [0, 1], unclamped.

    Raises:
        FinolaError: a factor below 1, an unknown grid, another kind of autoregression.
    """
    if not isinstance(factor, int) or factor < 1:
        raise FinolaError(f"factor: got {factor!r}, expected a whole number of at least 1")
    check_choice("grid", grid, GRIDS)
    law = law_of(model)
    starts = resolve_origin(law.origin, law.size)

    def paint(ys: list[float], xs: list[float]) -> Tensor:
        ys, xs = _within_reach(ys, law, "up", "down"), _within_reach(xs, law, "left", "right")
        return model.decode_map(
            map_at(q, ys, xs, **law.matrices(), path=law.path, method=method, step=step, norm=law.norm, eps=EPS))

    if grid == "map":
        return paint(*(_parts(n, start, factor) for n, start in zip(law.size, starts, strict=True)))
    upsampling = model.config.image_size // model.config.map_size
    moves = [((i + 0.5) / factor - 0.5) / upsampling for i in range(factor)]
    images = [
        paint(*([i - start + move for i in range(n)] for n, start, move in zip(law.size, starts, pair, strict=True)))
        for pair in itertools.product(moves, moves)  # (down, right)
    ]
    return F.pixel_shuffle(torch.stack(images, dim=2).flatten(1, 2), factor)  # from (B, 3 factor², S, S)


def _parts(length: int, origin: int, factor: int) -> list[float]:
    """Centres of the `factor` parts that each of a side's `length` positions is cut into, relative to the origin."""
    return [(i + 0.5) / factor - 0.5 - origin for i in range(length * factor)]


def _within_reach(coordinates: list[float], law: Finola, back: str, forth: str) -> list[float]:
    low = -math.inf if back in law.directions else 0.0
    high = math.inf if forth in law.directions else 0.0
    return [min(max(c, low), high) for c in coordinates]


def law_of(model: FinolaAutoencoder) -> Finola:
    """The model's autoregression; FinolaError unless it is FINOLA with the layer norm or none."""
    law = getattr(model, "autoregression", None)
    if not isinstance(law, Finola) or law.norm not in NORMS:
        raise FinolaError("model: has no autoregression with the layer norm (or none), so it obeys no differential "
                          "equation; choose an autoencoder with autoregression 'norm_linear' or 'linear'")
    return law


def residual(
    z: Tensor,
    *,
    right: Tensor | None = None,
    left: Tensor | None = None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    origin: Origin = "center",
    norm: str = "layer",
    eps: float = EPS,
) -> tuple[Tensor, Tensor]:
    """How far a map fails the recursion: ‖z(x+1) - z(x) - A n(z(x))‖ / ‖A n(z(x))‖ for each of its steps.

    0: the step is the law's. 1: the error is as large as the step. Of a map that `autoregress` grew, the steps along
    the origin's row and column are exact; the others are so only with a single path and along its second sweep, since
    the mean of two solutions of a nonlinear equation is not a solution.

    Args:
        z: (B, C, H, W).
        right, left, down, up, origin, norm, eps: as for `autoregress`.

    Returns:
        horizontal (B, H, W - 1): entry x is the step between the columns x and x + 1, taken away from the origin;
        vertical (B, H - 1, W), likewise.

    Raises:
        FinolaError: a map of another shape, a missing matrix or one that does not fit, an unknown norm.
    """
    if z.ndim != 4:
        raise FinolaError(f"z: got shape {tuple(z.shape)}, expected (B, C, H, W)")
    y, x = resolve_origin(origin, (z.shape[2], z.shape[3]))
    normal = _norm(norm, eps)
    rows = z.permute(0, 2, 3, 1)  # (B, H, W, C)
    horizontal = _misses(rows, x, {"right": right, "left": left}, normal)
    vertical = _misses(rows.transpose(1, 2), y, {"down": down, "up": up}, normal).transpose(1, 2)
    return horizontal, vertical


def commutator(
    q: Tensor,
    size: tuple[int, int],
    *,
    right: Tensor | None = None,
    left: Tensor | None = None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    origin: Origin = "center",
    norm: str = "layer",
    eps: float = EPS,
) -> Tensor:
    """How far the two paths to each position differ: ‖φᵘψᵛq - ψᵛφᵘq‖ / r, with r the distance from q that they
    cover, √((‖φᵘψᵛq - q‖² + ‖ψᵛφᵘq - q‖²) / 2).

    0: φ and ψ commute, and one map solves both equations. √2: the two displacements are at right angles. 2 at most.

    Args:
        q: (B, C).
        size, right, left, down, up, origin, norm, eps: as for `autoregress`.

    Returns:
        (B, H, W); 0 in the origin's row and column, where there is only one path.

    Raises:
        FinolaError: as for `autoregress`; the batch norm.
    """
    _norm(norm, eps)
    matrices = {"right": right, "left": left, "down": down, "up": up}
    row_first, column_first = (
        autoregress(q, size, **matrices, origin=origin, path=path, norm=norm, eps=eps, implementation="auto")
        for path in ("row_first", "column_first")
    )
    start = q[:, :, None, None]
    one, other = ((z - start).square().sum(1) for z in (row_first, column_first))
    ratio = _ratio((row_first - column_first).norm(dim=1), ((one + other) / 2).sqrt())
    y, x = resolve_origin(origin, size)
    ratio[:, y], ratio[:, :, x] = 0, 0  # one path, though products of other shapes may round it differently
    return ratio


def _misses(rows: Tensor, origin: int, matrices: dict[str, Tensor | None], normal: Norm) -> Tensor:
    """rows (B, M, N, C) -> (B, M, N - 1), the relative miss of each step along N, away from `origin`."""
    forth, back = matrices
    steps = {back: (rows[:, :, 1 : origin + 1], rows[:, :, :origin]),
             forth: (rows[:, :, origin:-1], rows[:, :, origin + 1 :])}
    misses = []
    for name, (before, after) in steps.items():
        if before.shape[2]:
            advance = F.linear(normal(before), checked_matrix(name, matrices[name], rows.shape[-1], REACH))
            misses.append(_ratio((after - before - advance).norm(dim=-1), advance.norm(dim=-1)))
    return torch.cat(misses, dim=2) if misses else rows.new_zeros(*rows.shape[:2], 0)


def _trajectory(
    z: Tensor, matrix: Tensor | None, distances: list[float], step: float, one_step: Step, normal: Norm
) -> list[Tensor]:
    """z (..., C) after each of the distances, which ascend from 0 on; without a matrix all of them are 0."""
    if matrix is None:
        return [z] * len(distances)
    done, found = 0, []
    for distance in distances:
        whole = math.floor(distance / step + SLACK)
        for _ in range(whole - done):
            z = one_step(z, matrix, step, normal)
        done, rest = whole, distance - whole * step
        found.append(one_step(z, matrix, rest, normal) if rest > SLACK * step else z)
    return found


def _euler(z: Tensor, matrix: Tensor, h: float, normal: Norm) -> Tensor:
    return z + h * F.linear(normal(z), matrix)


def _rk4(z: Tensor, matrix: Tensor, h: float, normal: Norm) -> Tensor:
    """The classical Runge-Kutta method of order four."""
    k1 = F.linear(normal(z), matrix)
    k2 = F.linear(normal(z + h / 2 * k1), matrix)
    k3 = F.linear(normal(z + h / 2 * k2), matrix)
    k4 = F.linear(normal(z + h * k3), matrix)
    return z + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


_STEPS: dict[str, Step] = {"euler": _euler, "rk4": _rk4}
METHODS = tuple(_STEPS)


def _norm(name: str, eps: float) -> Norm:
    check_choice("norm", name, NORMS)
    return (lambda z: normalise(z, eps)) if name == "layer" else lambda z: z


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where both are 0."""
    return part / whole.clamp_min(torch.finfo(whole.dtype).tiny)


def _coordinates(name: str, values: Sequence[float]) -> list[float]:
    values = [float(value) for value in values]
    if not values or not all(map(math.isfinite, values)):
        raise FinolaError(f"{name}: got {values}, expected at least one coordinate, all of them finite")
    return values


def _check_scheme(step: float, method: str, norm: str) -> None:
    if not (math.isfinite(step) and step > 0):
        raise FinolaError(f"step: got {step}, expected a finite length greater than 0")
    check_choice("method", method, METHODS)
    _norm(norm, EPS)
