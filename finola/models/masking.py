"""Geometry of masked FINOLA: one visible block on a grid of patches, and who predicts what (paper, section
"Masked FINOLA on Self-supervised Pre-training", Figure "Two Masked FINOLA variants").

All patches but one block are masked. The block floats over the grid, one position for each batch. In the
block-wise variant it has half the grid's height and width, and each of its positions predicts three masked
ones: v rows away, u columns away, and both. Positions with the same (v, u) form a *group*. With scheme
"outward", the default, each part of the block predicts towards its own side; here on a 4x4 grid, with capitals
for the visible positions and small letters for those that the group of this letter predicts:

    corner (0, 0)      edge (0, 1)        middle (1, 1)
    1 group            2 groups           4 groups
    A A a a            a A B b            a a b b
    A A a a            a A B b            a A B b
    a a a a            a a b b            c C D d
    a a a a            a a b b            c c d d

The offsets of rows and columns are independent of each other. Along an axis whose block of k positions starts
at s, "outward" sends the first s of them by -s to [0, s), and the others by k - s to [s + k, 2k). Scheme "wrap"
sends each by k or -k, whichever stays on the grid. Either way every masked position is predicted exactly once.

Legend: grid (h, w) and block (kh, kw) in patches; corner (y0, x0) = the block's top left position.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor

from finola.errors import FinolaError, check_choice

SCHEMES = ("outward", "wrap")

Pair = tuple[int, int]


class Run(NamedTuple):
    """Consecutive visible positions of one axis that share an offset: they predict positions + offset."""

    positions: range
    offset: int


@dataclass(frozen=True)
class Group:
    """Visible positions with shared offsets: the rectangle rows x columns predicts itself + (v, 0), (0, u), (v, u).

    Attributes:
        offset: (v, u), down and to the right; negative is up and to the left.
        rows, columns: of the rectangle, in the grid.
    """

    offset: Pair
    rows: range
    columns: range

    @property
    def sources(self) -> Tensor:
        """(n, 2) int64, the rectangle's positions (y, x) in the grid."""
        rows, columns = (torch.tensor(axis, device="cpu") for axis in (self.rows, self.columns))
        return torch.cartesian_prod(rows, columns)


def block_corners(grid: Pair, block: Pair) -> list[Pair]:
    """Every (y0, x0) at which the block lies inside the grid, (h - kh + 1) (w - kw + 1) of them."""
    rows, columns = _corner_counts(grid, block)
    return [(y, x) for y in range(rows) for x in range(columns)]


def random_corner(grid: Pair, block: Pair) -> Pair:
    """One of `block_corners`, uniformly, from torch's global CPU generator."""
    rows, columns = _corner_counts(grid, block)
    y, x = (int(torch.randint(count, (), device="cpu")) for count in (rows, columns))
    return y, x


def block_mask(grid: Pair, block: Pair, corner: Pair, device: torch.device | str | None = None) -> Tensor:
    """(h, w) bool, True = masked. Raises FinolaError where the block does not lie inside the grid."""
    _check_corner(grid, block, corner)
    (y, x), (height, width) = corner, block
    mask = torch.ones(grid, dtype=torch.bool, device=device)
    mask[y : y + height, x : x + width] = False
    return mask


def axis_runs(block: int, start: int, scheme: str = "outward") -> list[Run]:
    """The one or two runs, in order, of an axis of 2 * block positions whose visible ones start at `start`."""
    check_choice("scheme", scheme, SCHEMES)
    if scheme == "outward":
        first, second = Run(range(start, 2 * start), -start), Run(range(2 * start, start + block), block - start)
    else:
        first, second = Run(range(start, block), block), Run(range(block, start + block), -block)
    return [run for run in (first, second) if run.positions]


def block_assignment(grid: Pair = (16, 16), block: Pair = (8, 8), corner: Pair = (0, 0),
                     scheme: str = "outward") -> list[Group]:
    """The groups of the block-wise variant: 1, 2 or 4 with the block at a corner, at an edge, in the middle.

    Each masked position is in sources + (v, 0), + (0, u) or + (v, u) of exactly one group.

    Raises:
        FinolaError: a grid that is not twice the block, a corner outside, an unknown scheme.
    """
    _check_corner(grid, block, corner)
    if tuple(grid) != (2 * block[0], 2 * block[1]):
        raise FinolaError(f"grid: got {grid[0]}x{grid[1]} patches for a block of {block[0]}x{block[1]}, expected twice "
                          "the block in each axis; choose a block of half the grid, or the element variant")
    rows, columns = (axis_runs(size, start, scheme) for size, start in zip(block, corner, strict=True))
    return [Group((row.offset, column.offset), row.positions, column.positions) for row in rows for column in columns]


def patchify(x: Tensor, patch: int) -> Tensor:
    """x (B, 3, h p, w p) -> its p x p patches (B, h, w, 3 p p), each in the order of channel, row, column."""
    height, width = x.shape[-2:]
    if height % patch or width % patch:
        raise FinolaError(f"patch: {patch} does not divide the {height}x{width} image; resize or crop the image")
    x = x.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, 3, h, p, w, p)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3)


def unpatchify(patches: Tensor) -> Tensor:
    """The inverse of `patchify`: (B, h, w, 3 p p) -> (B, 3, h p, w p)."""
    patch = isqrt(patches.shape[-1] // 3)
    if patches.ndim != 4 or patches.shape[-1] != 3 * patch * patch:
        raise FinolaError(f"patches: got shape {tuple(patches.shape)}, expected (B, h, w, 3 p p)")
    x: Tensor = patches.unflatten(3, (3, patch, patch))  # (B, h, w, 3, p, p)
    x = x.permute(0, 3, 1, 4, 2, 5)  # (B, 3, h, p, w, p)
    return x.flatten(4).flatten(2, 3)


def _corner_counts(grid: Pair, block: Pair) -> Pair:
    """In how many rows and columns the block's corner can stand."""
    rows, columns = (whole - part + 1 for whole, part in zip(grid, block, strict=True))
    if min(block) < 1 or min(rows, columns) < 1:
        raise FinolaError(f"block: got {block[0]}x{block[1]} patches on a grid of {grid[0]}x{grid[1]}, expected at "
                          "least 1x1 and at most the grid; choose a smaller block or a larger image")
    return rows, columns


def _check_corner(grid: Pair, block: Pair, corner: Pair) -> None:
    rows, columns = _corner_counts(grid, block)
    if not (0 <= corner[0] < rows and 0 <= corner[1] < columns):
        raise FinolaError(f"corner: (y0, x0) = ({corner[0]}, {corner[1]}) puts the {block[0]}x{block[1]} block outside "
                          f"the {grid[0]}x{grid[1]} grid; expected at most ({rows - 1}, {columns - 1})")
