"""The row kernels of `finola.kernels.rows` in Triton: one program a row, each value read and written once.

The tensors lie row after row; slices of a sweep's directions or steps will do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def normalise_rows(z: Tensor, normal: Tensor, rstd: Tensor, eps: float) -> None:
    """As `rows.normalise_rows`."""
    n, rows, channels = len(z), z[0, ..., 0].numel(), z.shape[-1]
    _check(z, normal, rstd)
    with _device(z):
        _normalise[(rows, n)](z, normal, rstd, z.stride(0), normal.stride(0), rstd.stride(0), channels, eps,
                              BLOCK=triton.next_power_of_2(channels), num_warps=8)


def ungrow_rows(gradient: Tensor, inward: Tensor, normal: Tensor, rstd: Tensor) -> None:
    """As `rows.ungrow_rows`."""
    n, rows, channels = len(gradient), gradient[0, ..., 0].numel(), gradient.shape[-1]
    _check(gradient, inward, normal, rstd)
    with _device(gradient):
        _ungrow[(rows, n)](gradient, inward, normal, rstd, gradient.stride(0), inward.stride(0), normal.stride(0),
                           rstd.stride(0), channels, BLOCK=triton.next_power_of_2(channels), num_warps=8)


@triton.jit
def _normalise(z, normal, rstd, z_stride, normal_stride, rstd_stride, channels, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    x = tl.load(z + i * z_stride + row * channels + channel, mask=inside, other=0.0)
    centred = tl.where(inside, x - tl.sum(x, 0) / channels, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / channels + eps)
    tl.store(rstd + i * rstd_stride + row, r)
    tl.store(normal + i * normal_stride + row * channels + channel,
             (centred * r).to(normal.dtype.element_ty), mask=inside)


@triton.jit
def _ungrow(gradient, inward, normal, rstd, gradient_stride, inward_stride, normal_stride, rstd_stride, channels,
            BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    own = gradient + i * gradient_stride + row * channels + channel
    g = tl.load(own, mask=inside, other=0.0)
    d = tl.load(inward + i * inward_stride + row * channels + channel, mask=inside, other=0.0).to(g.dtype)
    n = tl.load(normal + i * normal_stride + row * channels + channel, mask=inside, other=0.0).to(g.dtype)
    r = tl.load(rstd + i * rstd_stride + row)
    g += r * (d - tl.sum(d, 0) / channels - n * (tl.sum(d * n, 0) / channels))
    tl.store(own, g, mask=inside)


def _check(*tensors: Tensor) -> None:
    assert all(t[0].is_contiguous() for t in tensors), "rows must follow one another"


def _device(t: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, which need not be the tensor's. On a CPU there is none."""
    return torch.cuda.device(t.device if t.is_cuda else -1)
