"""Images named on the command line, and the files that are made of them."""

from __future__ import annotations

import glob
from pathlib import Path

from finola.errors import RecipeError
from finola.files import check_folder


def find_images(words: list[str]) -> tuple[list[Path], list[str]]:
    """The images that words mean: files, folders (all images below) and patterns; each image once.

    Returns:
        The paths, and a message for each word that leads to none.
    """
    from finola.data.images import SUFFIXES

    found: dict[Path, Path] = {}  # absolute -> as named
    faults = []
    for word in words:
        paths = [Path(word)]
        if paths[0].is_dir():
            below = (path for path in sorted(paths[0].rglob("*")) if path.suffix.lower() in SUFFIXES)
            paths = [path for path in below if not any(part.startswith(".") for part in path.relative_to(word).parts)]
        elif glob.has_magic(word) and not paths[0].exists():
            paths = [Path(match) for match in sorted(glob.glob(word, recursive=True))]
        if not paths:
            faults.append(f"{word}: no image there; expected files ending in {' '.join(SUFFIXES)}")
        found |= {path.absolute(): path for path in paths}
    return list(found.values()), faults


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


def refuse_overwriting(paths: list[Path], out: Path) -> None:
    """Raise RecipeError if one of the images lies in the folder of the results."""
    for path in paths:
        if path.parent.resolve() == out.resolve():
            raise RecipeError(
                f"--out: {out} holds the image {path.name}; choose another folder, so that no image is overwritten"
            )
