"""What several analyses of `finola inspect` share: which images they take, and where their results go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.images import find_images, refuse_overwriting
from finola.errors import DataError

if TYPE_CHECKING:
    from PIL import Image


def choose_images(words: list[str], out: Path, limit: int | None) -> list[Path]:
    """The images that words mean, at most `limit`, spread evenly over them.

    Raises:
        DataError: a word that leads to none. RecipeError: a result could take the place of an image.
    """
    from finola.data.datasets import spread

    paths, faults = find_images(words)
    if faults:
        raise DataError(faults[0])
    refuse_overwriting(paths, out)
    return [paths[i] for i in spread(len(paths), limit or len(paths))]


def write_results(out: Path, name: str, result: dict, images: dict[str, Image.Image]) -> None:
    """OUT/NAME.json and one PNG for each image, by its name."""
    from finola.files import atomic_write, write_json

    for stem, image in images.items():
        with atomic_write(out / f"{stem}.png") as temporary:
            image.save(temporary)
    write_json(out / f"{name}.json", result, indent=2)
