"""The kernels as custom operators, so that autograd, torch.compile, torch.export and torch.func know them.

`finola::grow` is the forward pass, `finola::ungrow` the backward pass. Neither is unrolled in a compiled graph. Their
arguments: q (B, C) and a (C, C) matrix for each direction that has steps, in the order of `Plan.steps`; the rest is
`Plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from finola.errors import FinolaError
from finola.kernels import batched
from finola.kernels.grid import Size
from finola.kernels.plan import Plan
from finola.kernels.rows import HAS_TRITON

FUSED = False  # on CUDA a step forward is one kernel; False until a GPU has timed it (benchmarks/fused_step.py)
Grown = tuple[Tensor, list[Tensor], list[Tensor]]  # the map (B, H, W, C), and `batched.Kept`
Gradients = tuple[Tensor, list[Tensor]]  # of q (B, C) and of the matrices


def autoregress_batched(q: Tensor, size: Size, weights: dict[str, Tensor], origin: Size, path: str,
                        normalised: bool, eps: float) -> Tensor:
    """`autoregress` for norm "layer" (normalised) and "none"; arguments as there, already checked."""
    matrices = tuple(weights.values())
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (q, *matrices))
    options = size, origin, path, normalised, eps, _product_dtype(q), keep
    if torch.compiler.is_compiling():  # torch 2.11 does not compile the Function
        z: Tensor = grow(q, matrices, *options)[0]
    else:
        z = _Grow.apply(q, options, *matrices)[0]
    return z.permute(0, 3, 1, 2)  # (B, H, W, C) -> (B, C, H, W), channels-last


def _grow(q: Tensor, matrices: Sequence[Tensor], size: Sequence[int], origin: Sequence[int], path: str,
          normalised: bool, eps: float, product_dtype: torch.dtype, keep: bool) -> Grown:
    """The map, and if it is to be kept, what `ungrow` needs of it."""
    plan = _plan(q, size, origin, path, normalised, eps, product_dtype)
    z, (normals, rstds) = batched.grow(q, _named(plan, matrices), plan, keep)
    return z, normals, rstds


def _ungrow(grad: Tensor, normals: Sequence[Tensor], rstds: Sequence[Tensor], matrices: Sequence[Tensor],
            origin: Sequence[int], path: str, normalised: bool, product_dtype: torch.dtype) -> Gradients:
    """The gradient of the map -> those of q and of each matrix, in their dtypes."""
    plan = _plan(grad, grad.shape[1:3], origin, path, normalised, 0.0, product_dtype)
    grad_q, found = batched.ungrow(grad, (list(normals), list(rstds)), _named(plan, matrices), plan)
    return grad_q.to(grad.dtype), [found[d].to(m.dtype) if d in found else torch.zeros_like(m)
                                   for d, m in _named(plan, matrices).items()]


grow = torch.library.custom_op("finola::grow", _grow, mutates_args=())
ungrow = torch.library.custom_op("finola::ungrow", _ungrow, mutates_args=())
KERNELS: dict[Any, Callable] = {torch.ops.finola.grow.default: _grow, torch.ops.finola.ungrow.default: _ungrow}


@grow.register_fake
def _(q: Tensor, matrices: Sequence[Tensor], size: Sequence[int], origin: Sequence[int], path: str,
      normalised: bool, eps: float, product_dtype: torch.dtype, keep: bool) -> Grown:
    plan = _plan(q, size, origin, path, normalised, eps, product_dtype)
    normals, rstds = batched.empty_kept(q, plan) if keep else ([], [])
    return q.new_empty(q.shape[0], *size, q.shape[1]), normals, rstds


@ungrow.register_fake
def _(grad: Tensor, normals: Sequence[Tensor], rstds: Sequence[Tensor], matrices: Sequence[Tensor],
      *_: object) -> Gradients:
    return grad.new_empty(grad.shape[0], grad.shape[3]), [m.new_empty(m.shape) for m in matrices]


# --- autograd ---


def _save(ctx: Any, inputs: tuple, output: Grown) -> None:
    _, matrices, _, ctx.origin, ctx.path, ctx.normalised, _, ctx.product_dtype, _ = inputs
    _, normals, rstds = output
    ctx.set_materialize_grads(False)  # zeros for what is kept would take as much memory again
    ctx.sweeps = len(normals)
    ctx.save_for_backward(*normals, *rstds, *matrices)


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
    if grad is None:  # the map is not used
        return None, [None] * (len(ctx.saved_tensors) - 2 * ctx.sweeps), *(None,) * 7
    options = ctx.sweeps, ctx.origin, ctx.path, ctx.normalised, ctx.product_dtype
    grad_q, *grad_matrices = _Ungrow.apply(grad, options, *ctx.saved_tensors)
    return grad_q, grad_matrices, *(None,) * 7


def _at_once(x: Tensor) -> bool:
    """Whether nothing traces, transforms or counts the call. Then the kernels run without their operators, the first
    call of which imports torch's compiler: seconds of every process."""
    followed = (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
                or _get_current_dispatch_mode() is not None)
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta and not followed


grow.register_autograd(_backward, setup_context=_save)


class _Grow(torch.autograd.Function):
    """`grow` once more, for torch.func, which does not know the gradients that are registered with an operator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, options: tuple, *matrices: Tensor) -> tuple[Tensor, ...]:
        z, normals, rstds = (_grow if _at_once(q) else grow)(q, matrices, *options)
        return z, *normals, *rstds

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        q, options, *matrices = inputs
        z, kept = output[0], list(output[1:])
        ctx.mark_non_differentiable(*kept)
        n = len(kept) // 2
        _save(ctx, (q, matrices, *options), (z, kept[:n], kept[n:]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        grad_q, grad_matrices = _backward(ctx, grad)[:2]
        return grad_q, None, *grad_matrices

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise _unsupported("forward-mode derivatives")


class _Ungrow(torch.autograd.Function):
    """`ungrow`, which has no gradient itself, and says so."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, options: tuple, *saved: Tensor) -> tuple[Tensor, ...]:
        n, *others = options
        run = _ungrow if _at_once(grad) else ungrow
        grad_q, grad_matrices = run(grad, saved[:n], saved[n : 2 * n], saved[2 * n :], *others)
        return grad_q, *grad_matrices

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise _unsupported("gradients of gradients")

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise _unsupported("gradients of gradients")


def _unsupported(what: str) -> FinolaError:
    return FinolaError(f"finola.autoregress: implementation 'auto' has no {what} for this norm; "
                       "pass implementation='plain'")


# --- torch.func.vmap ---


@grow.register_vmap
def _(info: Any, in_dims: tuple, q: Tensor, matrices: Sequence[Tensor], *plan: Any) -> tuple[Grown, Any]:
    """A larger batch; matrices that differ are taken in turn."""
    if any(dim is not None for dim in in_dims[1]):
        return _in_turn(grow, info.batch_size, in_dims, (q, matrices, *plan))
    parts = (info.batch_size, -1)
    z, *kept = grow(q.movedim(in_dims[0], 0).flatten(0, 1), matrices, *plan)
    normals, rstds = ([t.unflatten(3, parts) for t in tensors] for tensors in kept)
    return (z.unflatten(0, parts), normals, rstds), (0, [3] * len(normals), [3] * len(rstds))


@ungrow.register_vmap
def _(info: Any, in_dims: tuple, *arguments: Any) -> tuple[Gradients, Any]:
    """One after the other: each has a gradient of the matrices of its own."""
    return _in_turn(ungrow, info.batch_size, in_dims, arguments)


def _in_turn(operator: Callable, count: int, in_dims: tuple, arguments: tuple) -> tuple[Any, Any]:
    def choose(value: Any, dim: Any, i: int) -> Any:
        if isinstance(dim, (list, tuple)):
            return [choose(v, d, i) for v, d in zip(value, dim, strict=True)] if isinstance(value[0], Tensor) else value
        return value if dim is None else value.select(dim, i)

    results = [operator(*(choose(v, d, i) for v, d in zip(arguments, in_dims, strict=True)))
               for i in range(count)]
    stacked = [torch.stack(parts) if isinstance(parts[0], Tensor) else list(map(torch.stack, zip(*parts, strict=True)))
               for parts in zip(*results, strict=True)]
    return tuple(stacked), tuple([0] * len(s) if isinstance(s, list) else 0 for s in stacked)


def _plan(q: Tensor, size: Sequence[int], origin: Sequence[int], path: str, normalised: bool, eps: float,
          product_dtype: torch.dtype) -> Plan:
    (height, width), (y, x) = size, origin
    lockstep = q.is_cuda or q.shape[-1] < batched.FEW_CHANNELS
    fused = FUSED and normalised and product_dtype == torch.bfloat16 and q.is_cuda and q.shape[-1] % 128 == 0
    return Plan((height, width), (y, x), path, normalised, eps, product_dtype, lockstep, fused and HAS_TRITON)


def _named(plan: Plan, matrices: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(plan.steps, matrices, strict=True))


def _product_dtype(q: Tensor) -> torch.dtype:
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if not q.is_meta and torch.is_autocast_enabled(kind) else q.dtype
