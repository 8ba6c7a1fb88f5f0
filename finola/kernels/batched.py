"""The operator in few large products, with a backward pass that keeps z alone.

A *sweep* runs several directions in lockstep. Its states are stored step-major, (steps + 1, n, rows, C) for n
directions of `rows` positions each, so that a step reads one contiguous block and writes the next: no copies,
no allocation that outlives the step. A 16x16 map from its centre takes two sweeps of 8 steps: first q along the
origin's row and column (n = 4, rows = B), then these two lines over the whole map (n = 4, rows = 16 B).

Backward walks each sweep from its end. It recomputes the normalised values, and collects them and the gradients
of a few steps at a time, so that a weight gradient is formed in products of at least `GRADIENT_ROWS` rows.
z, its statistics and its gradient are fp32 (fp64 for fp64 input); the products run in the autocast dtype.

Legend: B images, C channels, H, W map; n directions in a sweep; L positions of a line; rows = B * L.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from finola.kernels.grid import DIRECTIONS, Size, direction_steps, state_dtype

GRADIENT_ROWS = 256
HAS_ONEDNN = torch.backends.mkldnn.is_available()
ONEDNN_CHANNELS = 768  # from which its products are faster, for all the time it takes to call it
HORIZONTAL, VERTICAL = ("right", "left"), ("down", "up")


def autoregress_batched(q: Tensor, size: Size, weights: Mapping[str, Tensor], origin: Size, path: str,
                        normalised: bool, eps: float) -> Tensor:
    """`autoregress` for norm "layer" (normalised) and "none"; arguments as there, already checked."""
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, *weights.values()))
    plan = Plan(size, origin, path, normalised, eps, _product_dtype(q), q.is_cuda, keep)
    z: Tensor = _Autoregress.apply(q, plan, *(weights.get(direction) for direction in DIRECTIONS))
    return z.permute(0, 3, 1, 2)  # (B, H, W, C) -> (B, C, H, W), channels-last


@dataclass(frozen=True)
class Plan:
    """What is to be computed, apart from q and the matrices.

    `lockstep` puts both axes of a square map into one sweep: half the launches, for twice the scratch memory.
    `keep` the states for backward.
    """

    size: Size
    origin: Size
    path: str
    normalised: bool
    eps: float
    product_dtype: torch.dtype
    lockstep: bool
    keep: bool

    @property
    def steps(self) -> dict[str, int]:
        return direction_steps(self.size, self.origin)

    @property
    def first(self) -> tuple[str, ...]:
        """Directions of the first sweep, along the lines through the origin."""
        return self._longest_first({"row_first": HORIZONTAL, "column_first": VERTICAL}.get(self.path, DIRECTIONS))

    @property
    def second(self) -> list[tuple[str, ...]]:
        """Directions of each sweep over the whole map: down and up from the row, right and left from the column."""
        axes: list[tuple[str, ...]] = [VERTICAL, HORIZONTAL]
        if self.path != "average":
            axes = [VERTICAL if self.path == "row_first" else HORIZONTAL]
        if self.lockstep and self.size[0] == self.size[1]:
            axes = [tuple(chain(*axes))]
        return [directions for axis in axes if (directions := self._longest_first(axis))]

    @property
    def share(self) -> float:
        """The weight of one path in the map."""
        return 0.5 if self.path == "average" else 1.0

    def _longest_first(self, directions: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted((d for d in directions if d in self.steps), key=lambda d: -self.steps[d]))

    def line(self, z: Tensor, direction: str, k: int) -> Tensor:
        """The line k steps from the origin in that direction: a (B, L, C) view of z (B, H, W, C).

        z may also be the origin's row (H = 1) or column (W = 1) alone."""
        y = self.origin[0] if z.shape[1] > 1 else 0
        x = self.origin[1] if z.shape[2] > 1 else 0
        if direction in HORIZONTAL:
            return z[:, :, x + k if direction == "right" else x - k]
        return z[:, y + k if direction == "down" else y - k]


class _Autoregress(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, plan: Plan, *matrices: Tensor | None) -> Tensor:
        ctx.plan, ctx.q_dtype = plan, q.dtype
        first, seconds, z = _grow(q.to(state_dtype(q)), plan, _cast(matrices, plan))
        ctx.save_for_backward(first, *seconds, *matrices)
        return z.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, *rest = ctx.saved_tensors
        count = len(ctx.plan.second)
        seconds, matrices = rest[:count], rest[count:]
        grad_q, grad_weights = _ungrow(grad, first, seconds, ctx.plan, _cast(matrices, ctx.plan))
        grads = [grad_weights[d].to(m.dtype) if d in grad_weights else None
                 for d, m in zip(DIRECTIONS, matrices, strict=True)]
        return grad_q.to(ctx.q_dtype), None, *grads


def _grow(q: Tensor, plan: Plan, weights: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """q (B, C) -> the states of the first sweep, those of each second sweep if they are kept, and the map (B, H, W, C):
    the mean of both paths, or the only path."""
    batch, channels = q.shape
    first = _sweep(q.expand(len(plan.first), batch, channels), plan.first, plan, weights)  # n = 4 at most, rows = B
    row, column = _origin_lines(q, first, plan)
    z = q.new_empty(batch, *plan.size, channels)
    states: dict[tuple[str, ...], Tensor] = {}
    written = False
    for axis, line, path in ((VERTICAL, row, "row_first"), (HORIZONTAL, column, "column_first")):
        if plan.path not in ("average", path):
            continue
        reached = [(plan.line(z, axis[0], 0), line)]  # lines of the map, and what this path has there
        for directions in plan.second:
            if set(directions) & set(axis):
                if directions not in states:
                    starts = [(row if d in VERTICAL else column).flatten(0, 2) for d in directions]  # (B L, C) each
                    states[directions] = _sweep(torch.stack(starts), directions, plan, weights)
                reached += _lines(z, axis, directions, states[directions], plan)
        for target, value in reached:
            target.lerp_(value.view_as(target), 0.5) if written else target.copy_(value.view_as(target))
        written = True
        if not plan.keep and not plan.lockstep:  # the next axis takes this one's memory
            states, reached = {}, []
    return first, [states[directions] for directions in plan.second if plan.keep], z


def _lines(z: Tensor, axis: tuple[str, str], directions: tuple[str, ...], states: Tensor,
           plan: Plan) -> list[tuple[Tensor, Tensor]]:
    """Each line of the map z that a sweep reaches along an axis, with its state (B L, C)."""
    return [(plan.line(z, direction, k), states[k, i]) for i, direction in enumerate(directions)
            if direction in axis for k in range(1, plan.steps[direction] + 1)]


def _sweep(start: Tensor, directions: tuple[str, ...], plan: Plan, weights: dict[str, Tensor]) -> Tensor:
    """start (n, rows, C) -> its states after 0, 1, ... steps, (steps + 1, n, rows, C); the directions are the
    longest first, and the states of one past its last step are not written."""
    steps = [plan.steps[d] for d in directions]
    matrices = _stack(directions, plan, weights)
    states = start.new_empty(max(steps, default=0) + 1, *start.shape)
    states[0] = start
    product = torch.empty_like(states[0], dtype=plan.product_dtype)
    for k in range(len(states) - 1):
        n = sum(count > k for count in steps)
        normal = _normalise(states[k, :n], plan)[0].to(plan.product_dtype)
        _product(normal, matrices, transpose=True, out=product[:n])
        torch.add(states[k, :n], product[:n], out=states[k + 1, :n])
    return states


def _origin_lines(q: Tensor, first: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The origin's row (B, 1, W, C) and column (B, H, 1, C) out of the first sweep's states.

    A path that does not sweep one of them leaves it unwritten, and does not use it."""
    batch, channels = q.shape
    row = q.new_empty(batch, 1, plan.size[1], channels)
    column = q.new_empty(batch, plan.size[0], 1, channels)
    plan.line(row, "right", 0).copy_(q[:, None])
    plan.line(column, "down", 0).copy_(q[:, None])
    for i, direction in enumerate(plan.first):
        line = row if direction in HORIZONTAL else column
        for k in range(1, plan.steps[direction] + 1):
            plan.line(line, direction, k).copy_(first[k, i][:, None])
    return row, column


def _ungrow(grad: Tensor, first: Tensor, seconds: list[Tensor], plan: Plan,
            weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the map (B, H, W, C) -> that of q (B, C) and of each matrix in use (C, C)."""
    y, x = plan.origin
    row = (plan.share * grad[:, y : y + 1]).to(first.dtype)  # (B, 1, W, C)
    column = (plan.share * grad[:, :, x : x + 1]).to(first.dtype)  # (B, H, 1, C)
    row = row if plan.path != "column_first" else torch.zeros_like(row)
    column = column if plan.path != "row_first" else torch.zeros_like(column)
    grad_weights: dict[str, Tensor] = {}
    for directions, states in zip(plan.second, seconds, strict=True):
        incoming = {d: (grad, plan.share) for d in directions}
        starts = _unsweep(states, directions, incoming, plan, weights, grad_weights)
        for direction, start in zip(directions, starts, strict=True):
            line = row if direction in VERTICAL else column
            line += start.view_as(line)
    incoming = {d: (row if d in HORIZONTAL else column, 1.0) for d in plan.first}
    starts = _unsweep(first, plan.first, incoming, plan, weights, grad_weights)
    return starts.sum(0) + row[:, 0, x] + column[:, y, 0], grad_weights


def _unsweep(states: Tensor, directions: tuple[str, ...], incoming: dict[str, tuple[Tensor, float]], plan: Plan,
             weights: dict[str, Tensor], grad_weights: dict[str, Tensor]) -> Tensor:
    """The gradient of a sweep's start (n, rows, C); the matrices' gradients are added to `grad_weights`.

    `incoming` holds, for each direction, the map whose lines carry the gradient from outside, and its factor."""
    steps = [plan.steps[d] for d in directions]
    matrices = _stack(directions, plan, weights)
    count, _, rows, channels = states.shape
    total = torch.zeros_like(states[0])  # the gradient of the states at the current step
    held = max(1, min(count - 1, GRADIENT_ROWS // rows))  # steps whose weight gradient is formed together
    outer = states.new_zeros(len(directions), held, rows, channels, dtype=plan.product_dtype)
    inner = torch.zeros_like(outer)
    product = torch.empty_like(total, dtype=plan.product_dtype)
    for k in reversed(range(count - 1)):
        n = sum(s > k for s in steps)
        for gradient, direction in zip(total[:n], directions, strict=False):
            outside, factor = incoming[direction]
            line = plan.line(outside, direction, k + 1)
            gradient.view(line.shape).add_(line, alpha=factor)
        normal, *statistics = _normalise(states[k, :n], plan)
        slot = k % held
        outer[:n, slot], inner[:n, slot] = total[:n], normal
        inward = _product(outer[:n, slot], matrices, transpose=False, out=product[:n])
        total[:n] += _normalise_backward(inward, states[k, :n], statistics, plan)
        if slot == 0:
            _add_weight_gradients(grad_weights, directions, outer, inner)
    return total


def _add_weight_gradients(grad_weights: dict[str, Tensor], directions: tuple[str, ...], outer: Tensor,
                          inner: Tensor) -> None:
    """Add to each direction's (C, C) gradient the product of the collected (steps, rows, C); empty them."""
    for direction, left, right in zip(directions, outer.flatten(1, 2), inner.flatten(1, 2), strict=True):
        known = grad_weights.get(direction)
        if known is None:
            grad_weights[direction] = (left.T @ right).to(state_dtype(left))
        elif known.dtype == left.dtype:
            known.addmm_(left.T, right)
        else:
            known += left.T @ right
    outer.zero_()
    inner.zero_()


def _normalise(z: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    """n(z) and what its backward needs; the identity, without the norm."""
    return torch.native_layer_norm(z, z.shape[-1:], None, None, plan.eps) if plan.normalised else (z,)


def _normalise_backward(grad: Tensor, z: Tensor, statistics: list[Tensor], plan: Plan) -> Tensor:
    grad = grad.to(z.dtype)
    if not plan.normalised:
        return grad
    mask = [True, False, False]
    inward: Tensor
    inward, *_ = torch.ops.aten.native_layer_norm_backward(grad, z, z.shape[-1:], *statistics, None, None, mask)
    return inward


def _cast(matrices: tuple[Tensor | None, ...], plan: Plan) -> dict[str, Tensor]:
    return {d: m.to(plan.product_dtype) for d, m in zip(DIRECTIONS, matrices, strict=True) if m is not None}


def _stack(directions: tuple[str, ...], plan: Plan, weights: dict[str, Tensor]) -> Tensor | list[Tensor]:
    """A sweep's matrices: one (n, C, C) tensor for a batched product, or a list for one product after the other,
    which costs no copy and no time where starting a product is cheap."""
    matrices = [weights[d] for d in directions]
    return torch.stack(matrices) if plan.lockstep and matrices else matrices


def _product(x: Tensor, matrices: Tensor | list[Tensor], transpose: bool, out: Tensor) -> Tensor:
    """x (n, rows, C) times its matrices, the first n, or their transposes, into `out`."""
    if isinstance(matrices, Tensor):
        matrices = matrices[: len(x)]
        return torch.bmm(x, matrices.mT if transpose else matrices, out=out)
    for source, matrix, target in zip(x, matrices, out, strict=False):
        _multiply(source, matrix.T if transpose else matrix, target)
    return out


def _multiply(x: Tensor, matrix: Tensor, out: Tensor) -> None:
    """x (rows, C) times a matrix, into `out`.

    Large fp32 products on a CPU go to oneDNN, which torch by itself uses for bf16 alone: where torch's BLAS library is
    tuned for processors of another make, oneDNN takes two thirds of its time."""
    if x.dtype == torch.float32 and len(matrix) >= ONEDNN_CHANNELS and x.device.type == "cpu" and HAS_ONEDNN:
        out.copy_(torch.ops.mkldnn._linear_pointwise(x, matrix.T, None, "none", [], ""))
    else:
        torch.mm(x, matrix, out=out)


def _product_dtype(q: Tensor) -> torch.dtype:
    kind = q.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else q.dtype
