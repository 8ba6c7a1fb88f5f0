"""Three photographs that come with the package, for a first look when no image is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

EXAMPLES_FOLDER = Path(__file__).parents[1] / "photographs"  # SOURCE.md there says where they come from


def example_paths() -> dict[str, Path]:
    """Name -> file: caps, lighthouse, parrots. Imports no torch."""
    return {path.stem: path for path in sorted(EXAMPLES_FOLDER.glob("*.jpg"))}


def example_images() -> dict[str, Image.Image]:
    """Name -> 256x256 RGB image."""
    from finola.data.images import decode_image

    return {name: decode_image(path) for name, path in example_paths().items()}
