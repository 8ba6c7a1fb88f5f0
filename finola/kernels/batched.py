"""The operator in few large products, forward and backward (docs/operator.md has the equations).

Forward, each sweep holds one state z, in fp32 (fp64 for fp64 input), and takes its steps in place:

    N[k] = n(z), rstd[k] = 1 / std(z);    z += N[k] Aᵀ

N[k], in the dtype of the product, and rstd[k] are what backward keeps. It walks the sweep from its end with
g = dL/dz, and keeps g in the product's dtype too, so that a matrix's gradient is one product:

    O[k] = g;    D = O[k] A;    g += rstd[k] (D - mean D - N[k] mean(D N[k])) + dL/dmap of line k;    dA = Σ O[k]ᵀ N[k]

Legend: B images, C channels, H, W map; n directions of a sweep, K its steps; L positions of a line. Rows of a
product are ordered (L, B). On a CPU many channels lie one after the other in memory (`_empty`): products are faster so,
but on those with AMX, where the norm and the map's lines are what is faster, in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from finola.kernels.cpu import cpu_has
from finola.kernels.grid import state_dtype
from finola.kernels.plan import HORIZONTAL, VERTICAL, Directions, Plan
from finola.kernels.rows import add_lines, normalise_rows, ungrow_rows, write_lines

FEW_CHANNELS = 256  # with fewer, a step on a CPU takes less time than Python needs to start it
AMX = "amx_tile"
PIECES = 4  # a long sweep's weight gradient is formed in as many products at most, to keep fewer O[k] at a time
CPU_ROWS, CUDA_ROWS = 384, 16384  # that a product for a weight gradient has at least, where the sweep has as many

Weights = Mapping[str, Tensor]
Kept = tuple[list[Tensor], list[Tensor]]  # for each sweep: N (n, K, L, B, C) and rstd (n, K, L, B, 1)


def grow(q: Tensor, weights: Weights, plan: Plan, keep: bool) -> tuple[Tensor, Kept]:
    """q (B, C) -> the map (B, H, W, C) in q's dtype, and what backward needs, if it is to be kept."""
    batch, channels = q.shape
    start = q.to(state_dtype(q))
    kept = empty_kept(start, plan) if keep else ([], [])
    kept_sweeps = iter(zip(*kept, strict=True))
    carry = _fused(weights, plan) if plan.fused else _in_products(weights, plan)

    def sweep(z: Tensor, directions: Directions, target: Weights, mean: bool) -> None:
        own = next(kept_sweeps) if keep else None
        for normal, direction in zip(own[0], directions, strict=True) if own else ():
            normal[plan.steps[direction] :] = 0  # steps that it does not take
        carry(z, directions, target, mean, own)

    row = start.new_empty(batch, 1, plan.size[1], channels)  # the origin's
    column = start.new_empty(batch, plan.size[0], 1, channels)
    for line, direction in ((row, "right"), (column, "down")):
        plan.line(line, direction, 0)[0] = start
    lines = dict.fromkeys(HORIZONTAL, row) | dict.fromkeys(VERTICAL, column)
    for directions in plan.first:
        sweep(start.expand(len(directions), 1, batch, channels), directions, lines, False)

    z = start.new_empty(batch, *plan.size, channels)
    for path, axis, line in (("row_first", VERTICAL, row), ("column_first", HORIZONTAL, column)):
        if plan.path not in ("average", path):
            continue
        mean = plan.path == "average" and axis == HORIZONTAL
        origin = plan.line(line, axis[0], 0)  # (L, B, C)
        write_lines(origin[None], [plan.line(z, axis[0], 0)], mean)
        for directions in plan.second:
            if directions[0] in axis:
                sweep(origin.expand(len(directions), *origin.shape), directions, dict.fromkeys(axis, z), mean)
    return z.to(q.dtype), kept


def _in_products(weights: Weights, plan: Plan) -> Callable[..., None]:
    """A function that carries a sweep along, in products and operations on rows."""
    weights = {d: matrix.to(plan.product_dtype) for d, matrix in weights.items()}
    return partial(_sweep, plan, weights)


def _fused(weights: Weights, plan: Plan) -> Callable[..., None]:
    """The same, a kernel a step and direction."""
    from finola.kernels import triton_sweep

    centred = {d: triton_sweep.centre(matrix, plan.product_dtype) for d, matrix in weights.items()}

    def carry(start: Tensor, directions: Directions, target: Weights, mean: bool,
              kept: tuple[Tensor, Tensor] | None) -> None:
        for i, direction in enumerate(directions):
            lines = [plan.line(target[direction], direction, k + 1) for k in range(plan.steps[direction])]
            own = (kept[0][i], kept[1][i]) if kept else None
            triton_sweep.sweep(start[i], centred[direction], lines, mean, plan.eps, own)

    return carry


def _sweep(plan: Plan, weights: Weights, start: Tensor, directions: Directions, target: Weights, mean: bool,
           kept: tuple[Tensor, Tensor] | None) -> None:
    """Carry `start` (n, L, B, C) along, and write its lines into each direction's map in `target`."""
    z = _empty(start.shape, start.dtype, start.device).copy_(start)
    matrices = _stack(directions, weights, z)
    if kept is None:
        normals, rstds = (t.expand(-1, plan.count(directions), -1, -1, -1)
                          for t in _empty_kept(z.shape, 1, z, plan.product_dtype))
    else:
        normals, rstds = kept
    lines: list[Tensor] = []  # that z has reached
    for k in range(plan.count(directions)):
        active = plan.active(directions, k)
        n = len(active)
        write_lines(z[n:], lines[n:], mean)  # of directions at their end
        if plan.normalised:
            normalise_rows(z[:n], normals[:n, k], rstds[:n, k], plan.eps, lines[:n], mean)
        else:
            write_lines(z, lines[:n], mean)
            normals[:n, k] = z[:n]
        _add_step(z[:n], normals[:n, k], matrices)
        lines = [plan.line(target[direction], direction, k + 1) for direction in active]
    write_lines(z, lines, mean)


def ungrow(grad: Tensor, kept: Kept, weights: Weights, plan: Plan) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the map (B, H, W, C) -> that of q (B, C), in fp32 at least, and of each matrix (C, C), in the
    product's dtype."""
    grad = grad if grad.stride(3) == 1 else grad.contiguous()  # channels last, which a loss may not give
    y, x = plan.origin
    dtype = state_dtype(grad)
    weights = {d: _for_backward(matrix, plan.product_dtype) for d, matrix in weights.items()}
    grad_weights: dict[str, Tensor] = {}
    used = {"row_first": (plan.share, 0.0), "column_first": (0.0, plan.share)}.get(plan.path, (0.5, 0.5))
    row, column = grad[:, y : y + 1].to(dtype) * used[0], grad[:, :, x : x + 1].to(dtype) * used[1]
    lines = dict.fromkeys(HORIZONTAL, row) | dict.fromkeys(VERTICAL, column)
    sweeps = list(zip(plan.first + plan.second, *kept, strict=True))
    for directions, normals, rstds in sweeps[len(plan.first) :]:
        axis = VERTICAL if directions[0] in VERTICAL else HORIZONTAL
        starts = _unsweep(dict.fromkeys(axis, grad), plan.share, directions, normals, rstds, plan, weights,
                          grad_weights)
        line = plan.line(row if axis == VERTICAL else column, directions[0], 0)
        for start in starts:
            line += start
    total = (row[:, 0, x] + column[:, y, 0]).to(dtype)
    for directions, normals, rstds in sweeps[: len(plan.first)]:
        starts = _unsweep(lines, 1.0, directions, normals, rstds, plan, weights, grad_weights)
        total += starts.sum((0, 1))
    return total, grad_weights


def _unsweep(incoming: Weights, share: float, directions: Directions, normals: Tensor, rstds: Tensor, plan: Plan,
             weights: Weights, grad_weights: dict[str, Tensor]) -> Tensor:
    """The gradient of a sweep's start (n, L, B, C); the matrices' gradients are added to `grad_weights`.

    `incoming` holds, for each direction, the map whose lines carry the gradient from outside, `share` its factor."""
    n, count, length, batch, channels = normals.shape
    dtype = state_dtype(rstds)
    gradient = _empty((n, length, batch, channels), dtype, normals.device)
    least = (CUDA_ROWS if normals.is_cuda else CPU_ROWS) // (length * batch)
    held = min(count, max(least, -(-count // PIECES)))
    outer = _empty_kept(gradient.shape, held, gradient, plan.product_dtype)[0]
    matrices = _stack(directions, weights, gradient)
    for k in reversed(range(count)):
        active = plan.active(directions, k)
        for own, direction in zip(gradient, active, strict=False):
            if plan.steps[direction] == k + 1:
                own.copy_(plan.line(incoming[direction], direction, k + 1)).mul_(share)
        g, slot = gradient[: len(active)], k % held
        outer[: len(active), slot] = g
        inward = _product(outer[: len(active), slot], matrices, transpose=False)
        lines = [plan.line(incoming[direction], direction, k) for direction in active if k]
        if plan.normalised:
            ungrow_rows(g, inward, normals[: len(active), k], rstds[: len(active), k], lines, share)
        else:
            add_lines(g.add_(inward), lines, share)
        if slot == 0:
            for i, direction in enumerate(active):
                steps = min(held, plan.steps[direction] - k)
                _add_weight_gradient(grad_weights, direction, outer[i, :steps], normals[i, k : k + steps])
    return gradient


def _add_weight_gradient(grad_weights: dict[str, Tensor], direction: str, outer: Tensor, normal: Tensor) -> None:
    """Add the product Oᵀ N of (steps, L, B, C) each to the direction's (C, C) gradient."""
    outer, normal = outer.flatten(0, 2), normal.flatten(0, 2)
    if direction in grad_weights:
        grad_weights[direction].addmm_(outer.T, normal)
    else:
        grad_weights[direction] = outer.T @ normal


def _stack(directions: Directions, weights: Weights, like: Tensor) -> Tensor | list[Tensor]:
    """A sweep's matrices: for a GPU one (n, C, C) tensor and a batched product, elsewhere one product after the other,
    which needs no copy."""
    matrices = [weights[d] for d in directions]
    return torch.stack(matrices) if like.is_cuda else matrices


def _product(x: Tensor, matrices: Tensor | list[Tensor], transpose: bool) -> Tensor:
    """x (n, L, B, C) times the first n of the matrices (C, C), or their transposes, in the layout of x."""
    if isinstance(matrices, Tensor):
        matrices = matrices[: len(x)]
        return torch.bmm(x.flatten(1, 2), matrices.mT if transpose else matrices).view_as(x)
    out = _empty(x.shape, x.dtype, x.device)
    for target, rows, matrix in zip(out, x, matrices, strict=False):
        torch.mm(rows.flatten(0, 1), matrix.T if transpose else matrix, out=target.flatten(0, 1))
    return out


def _for_backward(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in the product's dtype. On a CPU products of half precision are much faster with a transposed copy."""
    half = dtype in (torch.bfloat16, torch.float16) and not matrix.is_cuda
    return torch.empty_like(matrix, dtype=dtype).copy_(matrix.T).T if half else matrix.to(dtype)


def _add_step(z: Tensor, normal: Tensor, matrices: Tensor | list[Tensor]) -> None:
    """z += N Aᵀ, (n, L, B, C) each, in z's precision."""
    if isinstance(matrices, Tensor):
        matrices = matrices[: len(z)].mT
        rows, z = normal.flatten(1, 2), z.flatten(1, 2)
        if z.dtype == rows.dtype:
            z.baddbmm_(rows, matrices)
        else:  # CUDA has products of half precision with a sum in fp32
            torch.baddbmm(z, rows, matrices, out_dtype=z.dtype, out=z)
    elif z.dtype == normal.dtype:
        for state, rows, matrix in zip(z, normal, matrices, strict=False):
            state.flatten(0, 1).addmm_(rows.flatten(0, 1), matrix.T)
    else:
        z += _product(normal, matrices, transpose=True)


def empty_kept(q: Tensor, plan: Plan) -> Kept:
    """What `grow` keeps of each sweep, unwritten."""
    shapes = [(len(d), 1, *q.shape) for d in plan.first] + [(len(d), plan.length(d), *q.shape) for d in plan.second]
    pairs = [_empty_kept(shape, plan.count(directions), q, plan.product_dtype)
             for directions, shape in zip(plan.first + plan.second, shapes, strict=True)]
    return [normal for normal, _ in pairs], [rstd for _, rstd in pairs]


def _empty_kept(shape: Sequence[int], count: int, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """N (n, count, L, B, C) and rstd (n, count, L, B, 1), in which the rows of all steps make one matrix."""
    n, length, batch, channels = shape
    normal = _empty((n, count * length, batch, channels), dtype, like.device).unflatten(1, (count, length))
    return normal, like.new_zeros(n, count, length, batch, 1, dtype=state_dtype(like))


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n, L, B, C), unwritten: channel after channel on a CPU without AMX, if there are many, else row after row."""
    n, length, batch, channels = shape
    if device.type == "cuda" or channels < FEW_CHANNELS or cpu_has(AMX):
        return torch.empty(n, length, batch, channels, dtype=dtype, device=device)
    return torch.empty(n, channels, length, batch, dtype=dtype, device=device).permute(0, 2, 3, 1)
