"""The row kernels of `finola.kernels.rows` in Triton: one program a row, each value read and written once.

They are launched direction by direction. Rows follow one another in memory, except in the map's lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8


def normalise_rows(z: Tensor, normal: Tensor, rstd: Tensor, eps: float, lines: Sequence[Tensor], mean: bool) -> None:
    """As `rows.normalise_rows`."""
    for i, state in enumerate(z):
        line = lines[i] if lines else state
        length, batch, channels = _checked(line, state, normal[i], rstd[i])
        with on_device_of(z):
            _normalise[(length * batch,)](
                state, normal[i], rstd[i], line, line.stride(0), line.stride(1), batch, channels, eps,
                BLOCK=triton.next_power_of_2(channels), LINE=bool(lines), MEAN=mean, num_warps=WARPS)


def ungrow_rows(gradient: Tensor, inward: Tensor, normal: Tensor, rstd: Tensor, lines: Sequence[Tensor],
                share: float) -> None:
    """As `rows.ungrow_rows`."""
    for i, own in enumerate(gradient):
        line = lines[i] if lines else own
        length, batch, channels = _checked(line, own, inward[i], normal[i], rstd[i])
        with on_device_of(gradient):
            _ungrow[(length * batch,)](
                own, inward[i], normal[i], rstd[i], line, line.stride(0), line.stride(1), batch, channels, share,
                BLOCK=triton.next_power_of_2(channels), LINE=bool(lines), num_warps=WARPS)


@triton.jit
def _normalise(z, normal, rstd, line, line_stride, image_stride, batch, channels, eps, BLOCK: tl.constexpr,
               LINE: tl.constexpr, MEAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    x = tl.load(z + row * channels + channel, mask=inside, other=0.0)
    centred = tl.where(inside, x - tl.sum(x, 0) / channels, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / channels + eps)
    tl.store(rstd + row, r)
    tl.store(normal + row * channels + channel, (centred * r).to(normal.dtype.element_ty), mask=inside)
    if LINE:
        target = line + (row // batch) * line_stride + (row % batch) * image_stride + channel
        if MEAN:
            x = (x + tl.load(target, mask=inside, other=0.0)) / 2
        tl.store(target, x, mask=inside)


@triton.jit
def _ungrow(gradient, inward, normal, rstd, line, line_stride, image_stride, batch, channels, share,
            BLOCK: tl.constexpr, LINE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < channels
    own = gradient + row * channels + channel
    g = tl.load(own, mask=inside, other=0.0)
    d = tl.load(inward + row * channels + channel, mask=inside, other=0.0).to(g.dtype)
    n = tl.load(normal + row * channels + channel, mask=inside, other=0.0).to(g.dtype)
    g += tl.load(rstd + row) * (d - tl.sum(d, 0) / channels - n * (tl.sum(d * n, 0) / channels))
    if LINE:
        source = line + (row // batch) * line_stride + (row % batch) * image_stride + channel
        g += share * tl.load(source, mask=inside, other=0.0).to(g.dtype)
    tl.store(own, g, mask=inside)


def _checked(line: Tensor, *tensors: Tensor) -> tuple[int, int, int]:
    """(L, B, C) of tensors that the kernels can address."""
    assert line.stride(2) == 1 and all(t.is_contiguous() for t in tensors), "channels must follow one another"
    length, batch, channels = line.shape
    return length, batch, channels


def on_device_of(t: Tensor) -> torch.cuda.device:
    """Triton launches on the current device, which need not be the tensor's. On a CPU there is none."""
    return torch.cuda.device(t.device if t.is_cuda else -1)
