"""Images for people: rows of images with labels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from finola.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def confusion(counts: Tensor, classes: Sequence[str]) -> Image.Image:
    """How often each class is taken for each: rows are the true classes, in percent of the row.

    Args:
        counts: (n, n) images of class i predicted as class j.
        classes: their names; left out where there are more than 50 or none.
    """
    from matplotlib.figure import Figure

    shares = 100 * counts.double() / counts.sum(1, keepdim=True).clamp_min(1)
    few = len(counts) <= 20
    figure = Figure(figsize=(7, 6.2), layout="constrained", dpi=110)
    axes = figure.subplots()
    drawn = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=100)
    axes.set(xlabel="predicted", ylabel="true")
    if classes and len(classes) <= 50:
        names = [name if len(name) <= 24 else f"{name[:22]}..." for name in classes]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=8)
    if few:
        for i, row in enumerate(shares.tolist()):
            for j, share in enumerate(row):
                axes.text(j, i, f"{share:.0f}", ha="center", va="center", fontsize=8,
                          color="white" if share > 50 else "black")
    figure.colorbar(drawn, label="% of the true class")
    return rasterise(figure)


def rasterise(figure: Figure) -> Image.Image:
    """A matplotlib figure as an image."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


def stack(images: Sequence[Image.Image]) -> Image.Image:
    """Images under one another, on white."""
    canvas = Image.new("RGB", (max(p.width for p in images), sum(p.height for p in images)), "white")
    top = 0
    for image in images:
        canvas.paste(image, (0, top))
        top += image.height
    return canvas


PANEL_IMAGES = 8  # of a validation or an evaluation


def to_image(tensor: Tensor) -> Image.Image:
    """(3, H, W) floats, clamped to [0, 1] and rounded to 8 bits, as an RGB PIL image.

    Raises:
        DataError: a value that is not finite.
    """
    tensor = tensor.detach().float().cpu()
    if not torch.isfinite(tensor).all():
        raise DataError("cannot make an image of values that are not finite (NaN or infinity)")
    pixels = tensor.clamp(0, 1).mul(255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
