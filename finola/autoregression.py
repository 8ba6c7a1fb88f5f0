"""First-order norm+linear autoregression (FINOLA): a feature map grown out of one vector.

The law (Eq. 1 of the paper), the same four matrices for every image and every position:

    z(x+1, y) = z(x, y) + A  n(z(x, y))        A  = right
    z(x-1, y) = z(x, y) + A₋ n(z(x, y))        A₋ = left
    z(x, y+1) = z(x, y) + B  n(z(x, y))        B  = down
    z(x, y-1) = z(x, y) + B₋ n(z(x, y))        B₋ = up

with n(z) = (z - mean) / std over the C channels of one position. One step to the right is φ, one step down
is ψ. A position u columns and v rows away from the origin is reached along two paths, and takes their mean
(Eq. 3): z = (φᵘψᵛ q + ψᵛφᵘ q) / 2.

    row first                 column first
    . . . . .                 . . | . .
    | | | | |                 - - | - -
    - - q - -                 - - q - -        the origin's row (column) is swept first, position by
    | | | | |                 - - | - -        position; then every column (row) at once, line by line
    . . . . .                 . . | . .

Shapes: B images, C channels, H rows, W columns; q is (B, C), z is (B, C, H, W) in channels-last memory.
`autoregress_literal` states the recursion position by position; `autoregress_lines` is the paper's parallel
implementation in plain autograd; `finola.kernels` computes the same faster and in less memory, and is what
`autoregress` and `Finola` use wherever it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finola.errors import FinolaError, check_choice
from finola.kernels.grid import Origin, Size, direction_steps, resolve_origin, state_dtype
from finola.kernels.operators import autoregress_batched

PATHS = ("average", "row_first", "column_first")
IMPLEMENTATIONS = ("auto", "plain")
EPS = 1e-5  # q itself is not normalised, so it must stay far below q's variance
Norm = Callable[[Tensor], Tensor]  # (..., C) -> (..., C)


def normalise(z: Tensor, eps: float = EPS) -> Tensor:
    """n(z): zero mean and unit (biased) variance over the last dimension, the channels; no affine part."""
    return F.layer_norm(z, z.shape[-1:], eps=eps)


def batch_normalise(z: Tensor, eps: float = EPS) -> Tensor:
    """Zero mean and unit variance of each channel over everything else: the images and the line's positions."""
    return F.batch_norm(z.flatten(0, -2), None, None, training=True, eps=eps).view_as(z)


NORMS: dict[str, Callable[[Tensor, float], Tensor]] = {  # name -> (z (..., C), eps) -> n(z)
    "layer": normalise,
    "batch": batch_normalise,
    "none": lambda z, eps: z,
}
FAST_NORMS = ("layer", "none")  # those that finola.kernels knows; others run line by line


def step(z: Tensor, matrix: Tensor, norm: Norm = normalise) -> Tensor:
    """One step of the law: z + matrix · n(z), for z of shape (..., C) and a (C, C) matrix."""
    # z and its statistics stay in z's precision; under autocast the product alone runs in lower precision
    return z + F.linear(norm(z).to(matrix.dtype), matrix).to(z.dtype)


def advance(z: Tensor, matrix: Tensor, steps: int, norm: Norm = normalise) -> Tensor:
    """φᵘ z for u = `steps`: that many steps of the law from each of the vectors z (..., C), in plain autograd."""
    for _ in range(steps):
        z = step(z, matrix, norm)
    return z


def autoregress(
    q: Tensor,
    size: Size | int,
    *,
    right: Tensor | None = None,
    left: Tensor | None = None,
    down: Tensor | None = None,
    up: Tensor | None = None,
    origin: Origin = "center",
    path: str = "average",
    norm: str = "layer",
    eps: float = EPS,
    implementation: str = "auto",
) -> Tensor:
    """Grow the (B, C, H, W) feature map z out of the vector q (B, C); Eq. 1-3 and Figure 3 of the paper.

    Args:
        q: (B, C) floating point, placed at `origin`.
        size: (H, W) of the map; one number for a square.
        right, left, down, up: the (C, C) matrices A, A₋, B, B₋. Only the directions that the origin leaves
            room for are needed: from "top_left" right and down, from "center" all four.
        origin: (y, x), or "center", "top_left", "top_right", "bottom_left", "bottom_right".
        path: "average" of both paths, or "row_first" (along the row, then along columns) or "column_first".
        norm: "layer" (the paper's), "batch" (statistics of each line over batch and positions) or "none".
        eps: added to the variance before its root.
        implementation: "auto" is the fast one wherever there is one: two custom operators, which torch.compile,
            torch.export and torch.func's grad, vmap and jacrev know. "plain" is made of PyTorch's own operations, line
            by line: for ONNX, for forward-mode derivatives and for gradients of gradients.

    Returns:
        z in q's dtype, channels-last. It is computed in fp32 at least; under autocast the matrix products
        alone run in the lower precision.

    Raises:
        FinolaError: an unknown name, a missing matrix or one of another shape, an origin outside the map, a q that is
            no tensor or of integers; with "auto", forward-mode derivatives and gradients of gradients.
    """
    size = _both_sides(size)
    origin = resolve_origin(origin, size)
    given = {"right": right, "left": left, "down": down, "up": up}
    weights = _checked(q, {name: given[name] for name in direction_steps(size, origin)}, path, norm)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "plain" or norm not in FAST_NORMS:
        norms: dict[str, Norm] = dict.fromkeys(weights, lambda z: NORMS[norm](z, eps))
        return autoregress_lines(q, size, weights, norms, origin, path)
    return autoregress_batched(q, size, weights, origin, path, normalised=norm == "layer", eps=eps)


def autoregress_lines(
    q: Tensor,
    size: Size,
    weights: Mapping[str, Tensor],
    norms: Mapping[str, Norm],
    origin: Size,
    path: str = "average",
) -> Tensor:
    """The paper's parallel implementation: one line at a time, in plain autograd, with any normalisation.

    `weights` and `norms` hold a matrix and a function (..., C) -> (..., C) for each direction in use.
    Returns (B, C, H, W) in q's dtype.
    """
    z = q.to(state_dtype(q))
    steps = direction_steps(size, origin)

    def line(start: Tensor, back: str, forth: str) -> Tensor:
        """start (..., C) -> (steps back + 1 + steps forth, ..., C), in the order of the positions."""
        sides = {}
        for direction in (back, forth):
            sides[direction] = side = [start]
            for _ in range(steps.get(direction, 0)):
                side.append(step(side[-1], weights[direction], norms[direction]))
        return torch.stack(sides[back][:0:-1] + sides[forth])

    maps = []
    if path != "column_first":
        row = line(z, "left", "right")  # (W, B, C)
        maps.append(line(row, "up", "down").permute(2, 0, 1, 3))  # (H, W, B, C) -> (B, H, W, C)
    if path != "row_first":
        column = line(z, "up", "down")  # (H, B, C)
        maps.append(line(column, "left", "right").permute(2, 1, 0, 3))  # (W, H, B, C) -> (B, H, W, C)
    mean = maps[0] if len(maps) == 1 else (maps[0] + maps[1]) / 2
    return mean.to(q.dtype).contiguous().permute(0, 3, 1, 2)  # channels-last


def autoregress_literal(
    q: Tensor,
    size: Size,
    weights: Mapping[str, Tensor],
    origin: Size,
    path: str = "average",
    norm: Norm = normalise,
) -> Tensor:
    """The recursion as Eq. 1-3 state it, one position after the other: the reference for every other path."""
    (oy, ox), start = origin, q.to(state_dtype(q))

    @cache
    def row_first(y: int, x: int) -> Tensor:
        return vertical(row_first, y, x) if y != oy else horizontal(row_first, y, x) if x != ox else start

    @cache
    def column_first(y: int, x: int) -> Tensor:
        return horizontal(column_first, y, x) if x != ox else vertical(column_first, y, x) if y != oy else start

    def horizontal(z: Callable[[int, int], Tensor], y: int, x: int) -> Tensor:
        return step(z(y, x - 1), weights["right"], norm) if x > ox else step(z(y, x + 1), weights["left"], norm)

    def vertical(z: Callable[[int, int], Tensor], y: int, x: int) -> Tensor:
        return step(z(y - 1, x), weights["down"], norm) if y > oy else step(z(y + 1, x), weights["up"], norm)

    def position(y: int, x: int) -> Tensor:
        paths = {"row_first": [row_first], "column_first": [column_first]}.get(path, [row_first, column_first])
        first, *others = (z(y, x) for z in paths)
        return sum(others, first) / len(paths)

    height, width = size
    rows = [torch.stack([position(y, x) for x in range(width)], dim=-1) for y in range(height)]
    return torch.stack(rows, dim=-2).to(q.dtype)  # (B, C, H, W)


class Finola(nn.Module):
    """`autoregress` with learned matrices: q (B, C) -> z (B, C, H, W).

    Only the matrices that `origin` can use are created. They start as independent N(0, gain²/C), not tied
    to each other; the normalisation keeps the map's growth linear in the distance from the origin.
    With norm="batch" each direction has one `BatchNorm1d` without affine part, shared by all its steps.

    Args:
        dim: C.
        size: (H, W) of the map; one number for a square.
        origin, path, norm, implementation: as for `autoregress`.
        gain: scale of the initial matrices.
    """

    def __init__(self, dim: int, size: Size | int, origin: Origin = "center", path: str = "average",
                 norm: str = "layer", gain: float = 0.1, implementation: str = "auto"):
        super().__init__()
        check_choice("norm", norm, NORMS)
        self.implementation = implementation
        size = _both_sides(size)
        self.directions = tuple(direction_steps(size, resolve_origin(origin, size)))
        height, width = size
        self.dim, self.size, self.origin, self.path, self.norm = dim, (height, width), origin, path, norm
        for direction in self.directions:
            matrix = nn.init.normal_(torch.empty(dim, dim), std=gain / dim**0.5)
            setattr(self, direction, nn.Parameter(matrix))
        if norm == "batch":
            self.norms = nn.ModuleDict({d: nn.BatchNorm1d(dim, affine=False) for d in self.directions})

    def matrices(self) -> dict[str, Tensor]:
        """Each direction's (C, C) matrix, all views of one stack: where a call does not use a matrix, its gradient
        is zero rather than missing, which training on several devices needs."""
        stack = torch.stack([getattr(self, direction) for direction in self.directions])
        return dict(zip(self.directions, stack.unbind(), strict=True))

    def forward(self, q: Tensor, size: Size | int | None = None, origin: Origin | None = None) -> Tensor:
        """q (B, C) -> z (B, C, H, W). `size` and `origin` replace the module's own for this call."""
        if origin is None:
            origin, weights = self.origin, {direction: getattr(self, direction) for direction in self.directions}
        else:
            weights = self.matrices()
        size = self.size if size is None else _both_sides(size)
        if self.norm != "batch":
            return autoregress(q, size, **weights, origin=origin, path=self.path, norm=self.norm,
                               implementation=self.implementation)
        origin = resolve_origin(origin, size)
        weights = _checked(q, {d: weights.get(d) for d in direction_steps(size, origin)}, self.path, self.norm)
        norms = {d: _over_lines(self.norms[d]) for d in weights}
        return autoregress_lines(q, size, weights, norms, origin, self.path)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, size={self.size}, origin={self.origin!r}, path={self.path!r}, norm={self.norm!r}"


class Repetition(nn.Module):
    """The paper's baseline without a law: q at every position, optionally plus a learned position embedding."""

    def __init__(self, dim: int, size: Size, position: bool = False):
        super().__init__()
        self.dim, self.size = dim, size
        self.position = nn.Parameter(nn.init.trunc_normal_(torch.zeros(dim, *size), std=0.02)) if position else None

    def forward(self, q: Tensor) -> Tensor:
        z = q[:, :, None, None].expand(*q.shape, *self.size)
        z = z if self.position is None else z + self.position
        return z.contiguous(memory_format=torch.channels_last)


def _over_lines(norm: nn.Module) -> Norm:
    """A batch norm of (N, C), over every dimension but the last: (..., C) -> (..., C). The module itself stays one of
    torch's, which is exchanged for one over all processes where there are several."""
    return lambda z: norm(z.reshape(-1, z.shape[-1])).view_as(z)


def _both_sides(size: Size | int) -> Size:
    """(H, W); one number stands for both, as in torch's own layers."""
    return (size, size) if isinstance(size, int) else size


def _checked(q: Tensor, weights: Mapping[str, Tensor | None], path: str, norm: str) -> dict[str, Tensor]:
    """The matrices, none of which is missing."""
    if not isinstance(q, Tensor):
        raise FinolaError(f"q: got {type(q).__name__}, expected a tensor (B, C); torch.as_tensor makes one")
    if not q.is_floating_point():
        raise FinolaError(f"q: got {q.dtype}, expected floating-point numbers; take q.float()")
    if q.ndim != 2:
        raise FinolaError(f"q: got shape {tuple(q.shape)}, expected (B, C)")
    check_choice("path", path, PATHS)
    check_choice("norm", norm, NORMS)
    channels = q.shape[1]
    return {name: checked_matrix(name, matrix, channels, "this origin leaves room") for name, matrix in weights.items()}


def checked_matrix(name: str, matrix: Tensor | None, channels: int, why: str) -> Tensor:
    """A direction's matrix. FinolaError where it is missing, `why` being what needs it, or not (C, C)."""
    if matrix is None:
        raise FinolaError(f"{name}: {why} in that direction, so a {channels}x{channels} matrix is needed")
    if matrix.shape != (channels, channels):
        raise FinolaError(f"{name}: got shape {tuple(matrix.shape)}, expected ({channels}, {channels}) for {channels} "
                          "channels")
    return matrix
