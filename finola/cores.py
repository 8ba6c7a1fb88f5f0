"""The processor's cores."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use: fewer than there are under taskset, cpusets or SLURM."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
