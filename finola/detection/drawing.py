"""Images with the objects found on them."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.utils import draw_segmentation_masks

from finola.data.images import to_uint8
from finola.detection.detector import THRESHOLD, class_names
from finola.detection.transforms import View, view_boxes, view_image, view_masks
from finola.drawing import GAP, LABEL_HEIGHT

PAIR_WIDTH = 300  # pixels of each image of `beside_truth`
GOLDEN = 0.618034  # of a turn from one class's hue to the next


def draw(image: Image.Image, found: dict[str, Tensor], classes: Sequence[str],
         threshold: float = THRESHOLD) -> Image.Image:
    """A copy of an RGB image with boxes, names, scores and, where there are any, masks.

    Args:
        found: `boxes` (n, 4) in the image's pixels, `labels` and `scores` (n,), perhaps `masks` (n, H, W) bool, as
            detectors give them; without `scores`, as in annotations, all are drawn.
        classes: names by label; the numbers where there are none.
        threshold: the least score drawn.
    """
    scores = found.get("scores")
    keep = list(range(len(found["labels"]))) if scores is None else (scores >= threshold).nonzero()[:, 0].tolist()
    names = class_names(found["labels"], classes)
    colours = [_colour(int(found["labels"][i])) for i in keep]
    if "masks" in found and keep:
        pixels = to_uint8(image)
        for i, colour in zip(keep, colours, strict=True):  # one by one: together, torchvision blackens what they share
            pixels = draw_segmentation_masks(pixels, found["masks"][i].cpu().bool(), alpha=0.4, colors=colour)
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image = image.copy()
    pen, unit = ImageDraw.Draw(image), math.sqrt(image.width * image.height) / 550  # 1 for 640x480
    font = _font(max(10, round(13 * unit)))
    for i, colour in reversed(list(zip(keep, colours, strict=True))):  # the highest score last, on top
        left, top, right, bottom = found["boxes"][i].tolist()
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=max(1, round(2.5 * unit)))
        text = names[i] if scores is None else f"{names[i]} {scores[i]:.2f}"
        place = (max(0, min(left, image.width - font.getlength(text))), max(0, top - font.size - 2))
        pen.rectangle(pen.textbbox(place, text, font=font), fill=colour)
        pen.text(place, text, fill="black", font=font)
    return image


def draw_small(image: Image.Image, found: dict[str, Tensor], classes: Sequence[str], width: int = 320) -> Image.Image:
    """As `draw`, on the image made `width` pixels wide: with names that can be read, for a `grid`."""
    height = max(1, round(image.height * width / image.width))
    view = View((0, 0, image.width, image.height), (height, width))
    seen = {**found, "boxes": view_boxes(found["boxes"], view)}
    if "masks" in found:
        seen["masks"] = view_masks(found["masks"], view)
    return draw(view_image(image, view), seen, classes)


def beside_truth(image: Image.Image, truth: dict[str, Tensor], found: dict[str, Tensor], classes: Sequence[str],
                 threshold: float = THRESHOLD) -> Image.Image:
    """The annotated objects of an image | those found on it, both as by `draw_small`, each with a caption."""
    pair = [draw_small(image, objects, classes, PAIR_WIDTH) for objects in (truth, found)]
    count = len(truth["labels"])
    captions = [f"truth: {count} object{'s' * (count != 1)}", f"found: {told(found, classes, threshold)}"]
    canvas = Image.new("RGB", (2 * PAIR_WIDTH + GAP, LABEL_HEIGHT + pair[0].height), "white")
    pen, font = ImageDraw.Draw(canvas), _font(11)
    for left, small, caption in zip((0, PAIR_WIDTH + GAP), pair, captions, strict=True):
        pen.text((left, 1), caption, fill="black", font=font)
        canvas.paste(small, (left, LABEL_HEIGHT))
    return canvas


def told(found: dict[str, Tensor], classes: Sequence[str], threshold: float) -> str:
    """How many objects reach the threshold; where none does, the highest score below it."""
    count = int((found["scores"] >= threshold).sum())
    if count or not len(found["scores"]):
        return f"{count or 'nothing'} with a score of {threshold:g} or more"
    best = int(found["scores"].argmax())
    name = class_names(found["labels"], classes)[best]
    return f"nothing of {threshold:g} or more, at best {name} {found['scores'][best]:.2f}"


def listed(names: Sequence[str], scores: Sequence[float]) -> str:
    """What was found, best first, as a line: one object "dog 0.91", several of a class "9 x dog 0.91 ... 0.50"."""
    of_class: dict[str, list[float]] = {}
    for name, score in sorted(zip(names, scores, strict=True), key=lambda found: -found[1]):
        of_class.setdefault(name, []).append(score)
    return ", ".join(f"{name} {found[0]:.2f}" if len(found) == 1 else
                     f"{len(found)} x {name} {found[0]:.2f} ... {found[-1]:.2f}" for name, found in of_class.items())


def grid(small: Sequence[Image.Image], columns: int = 4) -> Image.Image:
    """Images of one width side by side, in rows as high as their highest."""
    width = small[0].width
    rows = [small[i : i + columns] for i in range(0, len(small), columns)]
    heights = [max(p.height for p in row) + GAP for row in rows]
    canvas = Image.new("RGB", (min(columns, len(small)) * (width + GAP) + GAP, sum(heights) + GAP), "white")
    for r, row in enumerate(rows):
        for c, p in enumerate(row):
            canvas.paste(p, (GAP + c * (width + GAP), GAP + sum(heights[:r])))
    return canvas


def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans of matplotlib: Pillow's built-in font has only the letters of English."""
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), size)


def _colour(label: int) -> tuple[int, int, int]:
    """One bright colour for each class."""
    red, green, blue = colorsys.hsv_to_rgb(label * GOLDEN % 1, 0.75, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
