"""What a data set was read from: one hash over the names and sizes of its files. No file is opened, so that a million
images take seconds; an image that was replaced by one of the same name and size is not noticed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finola.data.datasets import Dataset

THREADS, CHUNK = 16, 2048  # a network's file systems answer many questions at once
MISSING = -1  # the size of a file that is listed but not there, such as a link to nowhere


def fingerprint(dataset: Dataset) -> tuple[int, str]:
    """The number of a data set's files, and the SHA-256, in hexadecimal, of their names and sizes in its order.

    Names are relative to the folder or file that was opened: a copy elsewhere has the same hash.
    """
    digest, count = hashlib.sha256(), 0
    for name, size in dataset.file_sizes():
        digest.update(f"{name}\0{size}\n".encode(errors="surrogateescape"))
        count += 1
    return count, digest.hexdigest()


def named_sizes(root: str | Path, paths: Sequence[str | Path]) -> Iterable[tuple[str, int]]:
    """(name below `root`, bytes) of each file; its path where it lies elsewhere."""
    prefix = os.path.join(root, "")
    names = (os.fspath(path).removeprefix(prefix).replace(os.sep, "/") for path in paths)
    return zip(names, _sizes(paths), strict=True)


def _sizes(paths: Sequence[str | Path]) -> Iterable[int]:
    chunks = [paths[first : first + CHUNK] for first in range(0, len(paths), CHUNK)]
    with ThreadPoolExecutor(THREADS) as pool:
        for sizes in pool.map(lambda chunk: [_size(path) for path in chunk], chunks):
            yield from sizes


def _size(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return MISSING
