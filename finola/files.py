"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finola.errors import RecipeError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it to disk and rename it to `path`,
    on any failure remove it and leave what stood at `path` untouched. Makes the parent folder.

    Raises:
        RecipeError: nothing can be written there.
    """
    path = Path(path)
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder, expected the name of a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # the suffix stays, since Pillow and others choose the format by it
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any, indent: int | None = 1) -> None:
    """`value` as a JSON file, by `atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")


def check_folder(path: str | Path, option: str = "--out") -> Path:
    """Before the work begins: raise RecipeError unless a folder, which need not be there yet, can take its results."""
    path = Path(path)
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise RecipeError(f"{option}: {path if there == path.absolute() else there} is a file, expected a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RecipeError(f"{option}: {there} cannot be written to; choose another folder")
    return path


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value
