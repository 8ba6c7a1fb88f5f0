"""What happens to the rows of a step beside the product: the norm forward, and its derivative backward.

In plain torch, for rows of any layout; on CUDA in Triton, wherever torch comes with it, in one pass over memory.
Legend: n directions, L positions of a line, B images, C channels.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def normalise_rows(z: Tensor, normal: Tensor, rstd: Tensor, eps: float) -> None:
    """z (n, L, B, C) -> n(z) in `normal`, of its own dtype, and 1 / std in `rstd` (n, L, B, 1)."""
    if z.is_cuda and HAS_TRITON:
        from finola.kernels import triton_rows

        return triton_rows.normalise_rows(z, normal, rstd, eps)
    centred = torch.sub(z, z.mean(-1, keepdim=True), out=normal if normal.dtype == z.dtype else torch.empty_like(z))
    variance = (centred * centred).sum(-1, keepdim=True).div_(z.shape[-1])
    rstd.copy_(variance.add_(eps).rsqrt_())
    centred.mul_(rstd)
    if centred is not normal:
        normal.copy_(centred)


def ungrow_rows(gradient: Tensor, inward: Tensor, normal: Tensor, rstd: Tensor) -> None:
    """The norm's derivative: `gradient` (n, L, B, C) += rstd (D - mean D - N mean(D N)); D is `inward`, N `normal`."""
    if gradient.is_cuda and HAS_TRITON:
        from finola.kernels import triton_rows

        return triton_rows.ungrow_rows(gradient, inward, normal, rstd)
    inward, normal = inward.to(gradient.dtype), normal.to(gradient.dtype)
    slope = (inward * normal).sum(-1, keepdim=True).div_(-normal.shape[-1])
    gradient.addcmul_(inward, rstd).addcmul_(normal, slope.mul_(rstd)).sub_(inward.mean(-1, keepdim=True).mul_(rstd))
