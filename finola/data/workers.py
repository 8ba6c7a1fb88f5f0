"""A pool of threads for images: Pillow decodes, resizes and encodes without the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def threads(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that cancels what has not begun on leaving it, so that Ctrl-C and errors end at once."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def usable_cores() -> int:
    """Cores that this process may use: fewer than there are under taskset, cpusets or SLURM."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
