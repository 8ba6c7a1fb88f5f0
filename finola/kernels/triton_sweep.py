"""A step of a sweep as one kernel in Triton, for GPUs: product, norm, sum and the map's line (docs/operator.md).

The state is held as z = c + m, of mean(c) = 0 over the channels and one number m a row. With P = I - 1 1ᵀ / C,

    W = P A P, a = 1ᵀ A P / C, r = 1 / std(c);    c' = c + r W c,    m' = m + r (a · c)

so the norm is one factor a row, known before the product, and c can be rounded for the product as well as n(z) can.
A step's kernel needs sums over the channels of c, c² and a c; the kernel of the step before has written them, a part
for each of its tiles.

Legend: R rows (L positions of a line x B images), C channels, K steps, T tiles of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from finola.kernels.triton_rows import on_device_of

# rows, channels, and channels that a product takes at a time; channels are multiples of both. cpu: the interpreter
BLOCKS = {"cuda": (64, 128, 64), "cpu": (16, 16, 16)}
WARPS, STAGES = 8, 4


class Centred(NamedTuple):
    """A matrix for centred states: W (C, C) in the product's dtype and a (C) in fp32."""

    matrix: Tensor
    means: Tensor


def centre(matrix: Tensor, dtype: torch.dtype) -> Centred:
    """A (C, C) -> (W, a)."""
    matrix = matrix.float()
    matrix = matrix - matrix.mean(1, keepdim=True)  # A P
    means = matrix.mean(0)
    return Centred((matrix - means).to(dtype), means)


def sweep(start: Tensor, weights: Centred, lines: Sequence[Tensor], mean: bool, eps: float,
          kept: tuple[Tensor, Tensor] | None) -> None:
    """Carry `start` (L, B, C) along K lines and write it into each, as `rows.write_lines` does.

    Args:
        kept: N (K, L, B, C) and rstd (K, L, B, 1) are written there, for backward.
    """
    length, batch, channels = start.shape
    c = start.reshape(-1, channels).float()
    rows = len(c)
    block = BLOCKS[c.device.type]
    grid = triton.cdiv(rows, block[0]), triton.cdiv(channels, block[1])
    m = torch.stack(2 * [c.mean(1)])  # (2, R): read by one step, written for the next, as all pairs here
    c = c - m[0, :, None]
    rounded = torch.stack(2 * [c.to(weights.matrix.dtype)])
    sums = c.new_zeros(2, 3, grid[1], rows)
    sums[0, :, 0] = torch.stack([c.sum(1), c.square().sum(1), c @ weights.means])
    for k, line in enumerate(lines):
        now, then = k % 2, (k + 1) % 2
        normal, rstd = (t[k] for t in kept) if kept else (rounded[now], m[now])
        with on_device_of(c):
            _step[grid](
                c, rounded[now], rounded[then], sums[now], sums[then], m[now], m[then], *weights, normal, rstd,
                line, line.stride(0), line.stride(1), batch, rows, channels, grid[1], eps,
                *block, triton.next_power_of_2(grid[1]), KEEP=kept is not None, MEAN=mean,
                num_warps=WARPS, num_stages=STAGES)


@triton.jit
def _step(c, rounded, next_rounded, sums, next_sums, m, next_m, matrix, means, normal, rstd,
          line, line_stride, image_stride, batch, rows, channels, tiles, eps,
          ROWS: tl.constexpr, CHANNELS: tl.constexpr, INNER: tl.constexpr, TILES: tl.constexpr, KEEP: tl.constexpr,
          MEAN: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = row < rows
    row = tl.minimum(row, rows - 1)  # so that loads need no mask
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)

    tile = tl.arange(0, TILES)
    parts = sums + tile[None, :] * rows + row[:, None]
    there = (tile < tiles)[None, :]
    average = tl.sum(tl.load(parts, mask=there, other=0.0), 1) / channels  # of c: nearly 0
    square = tl.sum(tl.load(parts + tiles * rows, mask=there, other=0.0), 1) / channels
    step = tl.sum(tl.load(parts + 2 * tiles * rows, mask=there, other=0.0), 1)  # a · c
    r = 1.0 / tl.sqrt(square - average * average + eps)
    new_m = tl.load(m + row) + r * step

    product = tl.zeros((ROWS, CHANNELS), tl.float32)  # W c
    inner = tl.arange(0, INNER)
    x_place = rounded + row[:, None] * channels + inner[None, :]
    w_place = matrix + channel[None, :] * channels + inner[:, None]
    for _ in range(0, channels, INNER):
        product = tl.dot(tl.load(x_place), tl.load(w_place), product)
        x_place += INNER
        w_place += INNER

    place = row[:, None] * channels + channel[None, :]
    old = tl.load(c + place)
    if KEEP:
        n = (old - average[:, None]) * r[:, None]
        tl.store(normal + place, n.to(normal.dtype.element_ty), mask=own[:, None])
    new = old + r[:, None] * product
    tl.store(c + place, new, mask=own[:, None])
    tl.store(next_rounded + place, new.to(next_rounded.dtype.element_ty), mask=own[:, None])

    a = tl.load(means + channel)
    part = next_sums + tl.program_id(1) * rows + row
    tl.store(part, tl.sum(new, 1), mask=own)
    tl.store(part + tiles * rows, tl.sum(new * new, 1), mask=own)
    tl.store(part + 2 * tiles * rows, tl.sum(new * a[None, :], 1), mask=own)
    if tl.program_id(1) == 0:
        tl.store(next_m + row, new_m, mask=own)
        if KEEP:
            tl.store(rstd + row, r, mask=own)

    wide = row.to(tl.int64)
    target = line + ((wide // batch) * line_stride + (wide % batch) * image_stride)[:, None] + channel[None, :]
    value = new + new_m[:, None]
    if MEAN:
        value = (value + tl.load(target)) / 2
    tl.store(target, value, mask=own[:, None])
