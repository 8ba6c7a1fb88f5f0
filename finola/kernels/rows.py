"""What happens to the rows of a step beside the product: the norm and the map's lines, forward and backward.

In plain torch, for rows of any layout; on CUDA in Triton, wherever torch comes with it, in one pass over memory.
Legend: n directions, L positions of a line, B images, C channels; a line of the map is an (L, B, C) view of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def normalise_rows(z: Tensor, normal: Tensor, rstd: Tensor, eps: float, lines: Sequence[Tensor], mean: bool) -> None:
    """z (n, L, B, C) -> n(z) in `normal`, of its own dtype, and 1 / std in `rstd` (n, L, B, 1); z itself goes into
    `lines`, n of them or none, as in `write_lines`."""
    if z.is_cuda and HAS_TRITON:
        from finola.kernels import triton_rows

        return triton_rows.normalise_rows(z, normal, rstd, eps, lines, mean)
    write_lines(z, lines, mean)
    if z.is_contiguous():
        values, _, scale = torch.native_layer_norm(z, z.shape[-1:], None, None, eps)
        normal.copy_(values)
        rstd.copy_(scale)
        return
    centred = torch.sub(z, z.mean(-1, keepdim=True), out=normal if normal.dtype == z.dtype else torch.empty_like(z))
    variance = (centred * centred).sum(-1, keepdim=True).div_(z.shape[-1])
    rstd.copy_(variance.add_(eps).rsqrt_())
    centred.mul_(rstd)
    if centred is not normal:
        normal.copy_(centred)


def ungrow_rows(gradient: Tensor, inward: Tensor, normal: Tensor, rstd: Tensor, lines: Sequence[Tensor],
                share: float) -> None:
    """The norm's derivative: `gradient` (n, L, B, C) += rstd (D - mean D - N mean(D N)) + share * line;
    D is `inward`, N `normal`; n lines or none."""
    if gradient.is_cuda and HAS_TRITON:
        from finola.kernels import triton_rows

        return triton_rows.ungrow_rows(gradient, inward, normal, rstd, lines, share)
    inward, normal = inward.to(gradient.dtype), normal.to(gradient.dtype)
    slope = (inward * normal).sum(-1, keepdim=True).div_(-normal.shape[-1])
    gradient.addcmul_(inward, rstd).addcmul_(normal, slope.mul_(rstd)).sub_(inward.mean(-1, keepdim=True).mul_(rstd))
    add_lines(gradient, lines, share)


def write_lines(z: Tensor, lines: Sequence[Tensor], mean: bool) -> None:
    """Write the states of z (n, L, B, C) into lines, or their mean with what the first path has written there."""
    for state, line in zip(z, lines, strict=False):
        rows = state.flatten(0, 1).contiguous().view_as(state)  # transposed at once, where channels come first
        line.lerp_(rows, 0.5) if mean else line.copy_(rows)


def add_lines(gradient: Tensor, lines: Sequence[Tensor], share: float) -> None:
    """`gradient` (n, L, B, C) += share * lines."""
    for own, line in zip(gradient, lines, strict=False):
        own.add_(line, alpha=share)
