"""Which sweeps make up a map, in which order, and where their lines lie.

A *sweep* runs one or several directions in lockstep, away from the origin, line after line. The first sweeps carry q
along the origin's row and column; the second ones carry these two lines over the whole map.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from finola.kernels.grid import Size, direction_steps

HORIZONTAL, VERTICAL = ("right", "left"), ("down", "up")
Directions = tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What is to be computed, apart from q and the matrices.

    `lockstep`: opposite directions over the whole map make one sweep, which saves launches; else two, which saves
    memory.
    `fused`: a step forward is one kernel (`finola.kernels.triton_sweep`).
    """

    size: Size
    origin: Size
    path: str
    normalised: bool
    eps: float
    product_dtype: torch.dtype
    lockstep: bool
    fused: bool = False

    @cached_property
    def steps(self) -> dict[str, int]:
        return direction_steps(self.size, self.origin)

    @property
    def first(self) -> list[Directions]:
        """The sweep of q along the lines through the origin, if there are any."""
        used = {"row_first": HORIZONTAL, "column_first": VERTICAL}.get(self.path, HORIZONTAL + VERTICAL)
        return self._sweeps([used])

    @property
    def second(self) -> list[Directions]:
        """The sweeps over the whole map: down and up from the row, then right and left from the column."""
        axes: list[Directions] = [VERTICAL, HORIZONTAL]
        if self.path != "average":
            axes = [VERTICAL if self.path == "row_first" else HORIZONTAL]
        return self._sweeps(axes if self.lockstep else [(d,) for axis in axes for d in axis])

    def _sweeps(self, groups: list[Directions]) -> list[Directions]:
        """Of the directions with any steps. The longest come first: those with a k-th step are the first few."""
        used = [[d for d in group if d in self.steps] for group in groups]
        return [tuple(sorted(group, key=lambda d: -self.steps[d])) for group in used if group]

    def count(self, directions: Directions) -> int:
        """Steps of a sweep."""
        return self.steps[directions[0]]

    def active(self, directions: Directions, k: int) -> Directions:
        """The directions of a sweep that take step k = 0, 1, ..., from the k-th line to the next."""
        return tuple(d for d in directions if self.steps[d] > k)

    def length(self, directions: Directions) -> int:
        """Positions of a line of a second sweep."""
        return self.size[1] if directions[0] in VERTICAL else self.size[0]

    @property
    def share(self) -> float:
        """The weight of one path in the map."""
        return 0.5 if self.path == "average" else 1.0

    def line(self, z: Tensor, direction: str, k: int) -> Tensor:
        """The line k steps from the origin in that direction: an (L, B, C) view of z (B, H, W, C).

        z may also be the origin's row (H = 1) or column (W = 1) alone."""
        y = self.origin[0] if z.shape[1] > 1 else 0
        x = self.origin[1] if z.shape[2] > 1 else 0
        if direction in HORIZONTAL:
            return z[:, :, x + k if direction == "right" else x - k].transpose(0, 1)
        return z[:, y + k if direction == "down" else y - k].transpose(0, 1)
