"""How much memory a piece of work takes beyond Python and the libraries: in a process of its own, since a process only
tells the most it has ever held."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

T = TypeVar("T")


def process_peak() -> int:
    """Most bytes this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def fresh_process(function: Callable[..., T], *args: Any) -> T:
    """What a function of a module gives in a new process. On Linux that starts with the peak of the one that starts it:
    call this before holding anything large."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
