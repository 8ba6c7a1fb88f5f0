"""The map as a grid: its size, the place of q in it, and the directions that lead away from there."""

from __future__ import annotations

import torch
from torch import Tensor

from finola.errors import FinolaError

DIRECTIONS = ("right", "left", "down", "up")
Size = tuple[int, int]
Origin = str | tuple[int, int]


def resolve_origin(origin: Origin, size: Size) -> Size:
    """(y, x) of the position that holds q: a name or a position -> 0-based row and column.

    "center" is (H // 2, W // 2), so that an even map has one step more to the left and up (paper: W/2, H/2).
    """
    try:
        height, width = size
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1 or isinstance(height, float) or isinstance(width, float):
        raise FinolaError(f"size: got {size}, expected a height and a width of at least 1")
    named = {
        "center": (height // 2, width // 2),
        "top_left": (0, 0),
        "top_right": (0, width - 1),
        "bottom_left": (height - 1, 0),
        "bottom_right": (height - 1, width - 1),
    }
    if isinstance(origin, str):
        if origin not in named:
            raise FinolaError(f"origin: got {origin!r}, expected (y, x) or one of {', '.join(named)}")
        return named[origin]
    y, x = origin
    if not (0 <= y < height and 0 <= x < width):
        raise FinolaError(f"origin: (y, x) = ({y}, {x}) lies outside the {height}x{width} map")
    return y, x


def direction_steps(size: Size, origin: Size) -> dict[str, int]:
    """How many steps lead from the origin to the map's edge in each direction, of those that have any."""
    (height, width), (y, x) = size, origin
    steps = {"right": width - 1 - x, "left": x, "down": height - 1 - y, "up": y}
    return {direction: count for direction, count in steps.items() if count}


def state_dtype(q: Tensor) -> torch.dtype:
    """The precision of z while it grows: up to hundreds of steps follow one another, so fp32 at least."""
    return torch.promote_types(q.dtype, torch.float32)
