"""Files named on the command line, and the files that are made of them."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from finola.errors import DataError, FinolaError, RecipeError
from finola.files import check_folder

T = TypeVar("T")


def find_images(words: list[str]) -> tuple[list[Path], list[str]]:
    """The images that words mean: files, folders (all images below) and patterns; each image once.

    Returns:
        The paths, and a message for each word that leads to none.
    """
    from finola.data.images import SUFFIXES

    found, faults = find_files(words, SUFFIXES, "image")
    return list(found), faults


def find_files(words: list[str], suffixes: Sequence[str], what: str) -> tuple[dict[Path, Path], list[str]]:
    """The files that words mean: files as named, all below a folder with one of the suffixes, and patterns.

    Returns:
        File -> its place below the folder that was named, or its name alone; each file once. And a message for each
        word that leads to no `what`.
    """
    found: dict[Path, tuple[Path, Path]] = {}  # absolute -> as named, place
    faults = []
    for word in words:
        top = Path(word)
        places = {top: Path(top.name)}
        if top.is_dir():
            below = {path: path.relative_to(top) for path in sorted(top.rglob("*")) if path.suffix.lower() in suffixes}
            places = {path: place for path, place in below.items() if not any(p.startswith(".") for p in place.parts)}
        elif glob.has_magic(word) and not top.exists():
            places = {Path(match): Path(Path(match).name) for match in sorted(glob.glob(word, recursive=True))}
        if not places:
            faults.append(f"{word}: no {what} there; expected files ending in {' '.join(suffixes)}")
        for path, place in places.items():
            found.setdefault(path.absolute(), (path, place))
    return dict(found.values()), faults


def name_panels(paths: list[Path], out: Path) -> dict[Path, Path]:
    """Image -> panel, OUT/STEM.png; equal stems are numbered: STEM.png, STEM-2.png, ...

    Raises:
        RecipeError: a panel would take the place of an image.
    """
    check_folder(out)
    refuse_overwriting(paths, out)
    panels, taken = {}, set()
    for path in paths:
        name, number = path.stem, 1
        while name.lower() in taken:  # file systems may take a.png and A.png for one
            number += 1
            name = f"{path.stem}-{number}"
        taken.add(name.lower())
        panels[path] = out / f"{name}.png"
    return panels


def name_results(found: Mapping[Path, Path], out: Path, suffix: str) -> dict[Path, Path]:
    """File -> result: OUT/PLACE with another suffix, so that subfolders stay as they are. `found`: by `find_files`.

    Raises:
        RecipeError: two files would become one, or a result could take the place of a file.
    """
    check_folder(out)
    results: dict[Path, Path] = {}
    first: dict[str, Path] = {}
    for path, place in found.items():
        result = out / place.with_suffix(suffix)
        other = first.setdefault(str(result).lower(), path)  # file systems may take a.png and A.png for one
        if other is not path:
            raise RecipeError(f"--out: {other} and {path} would both become {result}; rename one, or give each a folder"
                              " of its own")
        results[path] = result
    for folder in {result.parent for result in results.values()}:
        refuse_overwriting(found, folder)
    return results


def refuse_overwriting(paths: Iterable[Path], out: Path) -> None:
    """Raise RecipeError if one of the files lies in the folder of the results."""
    for path in paths:
        if path.parent.resolve() == out.resolve():
            raise RecipeError(f"--out: {out} holds {path.name}; choose another folder, so that nothing is overwritten")


def go_through(
    results: Mapping[Path, Path], work: Callable[[Path, Path], T], faults: list[str], show: bool
) -> tuple[list[T], list[FinolaError]]:
    """`work(file, result)` for one file after another, past those that fail.

    Args:
        faults: messages of `find_files`, which count as failures.
        show: a progress bar.

    Returns:
        What `work` returned, and the errors.
    """
    from tqdm import tqdm

    done: list[T] = []
    total = len(results) + len(faults)
    errors = as_errors(faults, total)
    for path, result in tqdm(results.items(), "files", unit="file", disable=not show):
        try:
            done.append(work(path, result))
        except FinolaError as error:
            errors.append(tell(error, total))
    return done, errors


def as_errors(faults: list[str], total: int) -> list[FinolaError]:
    """The messages of `find_files` as errors, each told."""
    return [tell(DataError(fault), total) for fault in faults]


def tell(error: FinolaError, total: int) -> FinolaError:
    """A line on stderr for one of `total` files that failed; of a single one, `raise_worst` has the only line."""
    from tqdm import tqdm

    if total > 1:
        tqdm.write(f"failed: {error}", file=sys.stderr)
    return error


def raise_worst(errors: list[FinolaError], done: int) -> NoReturn:
    """One error for all: that with the highest exit code says how many failed, and the first. A single one as it is."""
    if done + len(errors) == 1:
        raise errors[0]
    worst = max(errors, key=lambda error: error.exit_code)
    raise type(worst)(f"{len(errors)} of {done + len(errors)} failed; the first: {errors[0]}")
