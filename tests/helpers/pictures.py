"""Images for the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def photo(width: int = 48, height: int = 40, seed: int = 0) -> Image.Image:
    """A smooth random RGB image."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def good_and_bad(folder: Path) -> Path:
    """good.png and other.jpg, and three that cannot be read: cut.png, empty.png, text.jpg."""
    folder.mkdir()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    for name in ("cut.png", "good.png", "other.jpg"):
        noise.save(folder / name)
    (folder / "cut.png").write_bytes((folder / "cut.png").read_bytes()[:2000])
    (folder / "empty.png").touch()
    (folder / "text.jpg").write_text("no image")
    return folder
