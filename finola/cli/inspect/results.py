"""The instruments of `finola inspect`: one module each, with `add_parser(subparsers)` and `run(args)`; here, what
several of them share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from finola.cli.images import find_images, refuse_overwriting
from finola.cli.options import add_device, natural, positive
from finola.data.workers import usable_cores
from finola.errors import DataError


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """How the images of --data are read, and where; --json."""
    parser.add_argument("--limit", type=positive, metavar="N", help="take N images of --data, spread evenly over it")
    parser.add_argument("--resample", choices=("bicubic", "bilinear"), default="bicubic", help="(%(default)s)")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images at once (%(default)s)")
    parser.add_argument("--workers", type=natural, default=usable_cores(), metavar="N",
                        help="processes that decode; 0 for none (%(default)s)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, no progress bar")


def choose_pictures(words: list[str], out: Path, limit: int | None) -> list[Path]:
    """The pictures that words mean, at most `limit`, spread evenly over them.

    Raises:
        DataError: a word that leads to none. RecipeError: a result could take the place of a picture.
    """
    from finola.data.datasets import spread

    paths, faults = find_images(words)
    if faults:
        raise DataError(faults[0])
    refuse_overwriting(paths, out)
    return [paths[i] for i in spread(len(paths), limit or len(paths))]


def write_results(out: Path, name: str, result: dict, pictures: dict) -> None:
    """OUT/NAME.json and one PNG for each picture, by its name."""
    from finola.files import atomic_write

    for stem, picture in pictures.items():
        with atomic_write(out / f"{stem}.png") as temporary:
            picture.save(temporary)
    with atomic_write(out / f"{name}.json") as temporary:
        temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
