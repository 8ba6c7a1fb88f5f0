"""What this CPU can do."""

from __future__ import annotations

from functools import cache

import torch


@cache
def cpu_has(*features: str) -> bool:
    """Whether it has one of these features, by torch's names ("amx_tile"); False where torch is too old to say."""
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(known.get(name) for name in features)
