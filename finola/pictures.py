"""Pictures for people: rows of images with labels."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from finola.data.images import to_image

GAP, LABEL_HEIGHT = 4, 18


def panel(rows: Sequence[Tensor], labels: Sequence[str], captions: Sequence[Sequence[str]] | None = None,
          max_columns: int = 8) -> Image.Image:
    """Rows of images under one another, each row with its label above.

    Args:
        rows: tensors (N, 3, H, W) on the scale of [0, 1]; clamped.
        labels: one string for each row.
        captions: for each row, N short strings written under its images.
        max_columns: images beyond this number are left out.
    """
    columns = min(max(len(row) for row in rows), max_columns)
    height, width = rows[0].shape[-2:]
    below = LABEL_HEIGHT if captions else 0
    row_height = LABEL_HEIGHT + height + below + GAP
    canvas = Image.new("RGB", (GAP + columns * (width + GAP), GAP + len(rows) * row_height), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=12)
    for r, (row, label) in enumerate(zip(rows, labels, strict=True)):
        top = GAP + r * row_height
        draw.text((GAP, top), label, fill="black", font=font)
        for c, image in enumerate(row[:columns]):
            left = GAP + c * (width + GAP)
            canvas.paste(to_image(image), (left, top + LABEL_HEIGHT))
            if captions:
                draw.text((left, top + LABEL_HEIGHT + height), captions[r][c], fill="black", font=font)
    return canvas
