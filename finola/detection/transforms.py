"""How images and their objects are resized, flipped and cropped (DETR's augmentation).

A training view is drawn from (seed, epoch, index) alone, as all random numbers of `finola.data.crops` are, so
the number of workers and a resume change nothing. It is one part of the image, not rounded to pixels, resized
once: the crop between two resizings of DETR's branch is carried back to the image's own pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from finola.data.crops import uniforms
from finola.errors import RecipeError

# DETR's crop, for images whose largest shorter side is REFERENCE; other sizes in proportion
REFERENCE = 800
CROP_FROM = (400, 500, 600)  # shorter sides of the image that is cropped
CROP_SIDES = (384, 600)  # least and most of a crop's sides
DRAWS = 8  # random numbers of a view


@dataclass(frozen=True)
class ViewPolicy:
    """What training views are drawn from.

    Attributes:
        scales: shorter sides, one of which is picked; the crops are in proportion to the last one.
        max_size: limit of the longer side.
        hflip: mirror half of the images.
        crop: crop half of the images, as DETR does.

    Raises:
        RecipeError: no scale, one below 1, or a scale above `max_size`.
    """

    scales: tuple[int, ...]
    max_size: int
    hflip: bool = True
    crop: bool = False

    def __post_init__(self) -> None:
        if not self.scales or min(self.scales) < 1 or max(self.scales) > self.max_size:
            raise RecipeError(
                f"scales: got {tuple(self.scales)}, expected one or more shorter sides from 1 to max_size "
                f"({self.max_size})"
            )


@dataclass(frozen=True)
class View:
    """A part of an image, resized, then mirrored or not."""

    box: tuple[float, float, float, float]  # left, top, right, bottom in the image's pixels
    size: tuple[int, int]  # height and width of the result
    flip: bool = False


def resized(height: int, width: int, shorter: int, longest: int) -> tuple[int, int]:
    """(height, width) with the shorter side `shorter`, or less where the longer one would exceed `longest`."""
    short, long = min(height, width), max(height, width)
    if long * shorter <= longest * short:
        short, long = shorter, long * shorter // short
    else:
        short, long = max(1, round(longest * short / long)), longest
    return (short, long) if height <= width else (long, short)


def whole_view(size: tuple[int, int], shorter: int, longest: int) -> View:
    """The evaluation's view of an image of `size` (height, width): all of it."""
    height, width = size
    return View((0, 0, width, height), resized(height, width, shorter, longest))


def random_view(size: tuple[int, int], index: int, *, seed: int, epoch: int, policy: ViewPolicy) -> View:
    """The training's view of image `index`, of `size` (height, width), in an epoch."""
    flip, branch, scale, *crop = uniforms(seed, epoch, np.array([index]), DRAWS)[0]
    height, width = size
    box = (0, 0, width, height)
    if policy.crop and branch < 0.5:
        box, height, width = _random_crop(height, width, crop, policy.scales[-1] / REFERENCE)
    shorter = policy.scales[int(scale * len(policy.scales))]
    return View(box, resized(height, width, shorter, policy.max_size), bool(policy.hflip and flip < 0.5))


def view_image(image: Image.Image, view: View) -> Image.Image:
    """The view of an image (antialiased bilinear)."""
    height, width = view.size
    image = image.resize((width, height), Image.Resampling.BILINEAR, box=view.box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.flip else image


def view_boxes(boxes: Tensor, view: View) -> Tensor:
    """Boxes (n, 4), left, top, right, bottom in the image's pixels -> in the view's, clipped to it. Those outside
    have no area left."""
    left, top, right, bottom = view.box
    height, width = view.size
    scale = boxes.new_tensor([width / (right - left), height / (bottom - top)]).repeat(2)
    boxes = (boxes - boxes.new_tensor([left, top, left, top])) * scale
    boxes = boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))
    if view.flip:
        x1, y1, x2, y2 = boxes.unbind(1)
        boxes = torch.stack([width - x2, y1, width - x1, y2], dim=1)
    return boxes


def view_masks(masks: Tensor, view: View) -> Tensor:
    """Masks (n, H, W) -> (n, h, w) of the view; each pixel takes the nearest one's value."""
    left, top, right, bottom = view.box
    height, width = view.size
    rows = (top + (torch.arange(height) + 0.5) * ((bottom - top) / height)).long().clamp(max=masks.shape[1] - 1)
    columns = (left + (torch.arange(width) + 0.5) * ((right - left) / width)).long().clamp(max=masks.shape[2] - 1)
    return masks[:, rows][:, :, columns.flip(0) if view.flip else columns]


def view_target(target: dict[str, Tensor], view: View) -> dict[str, Tensor]:
    """The objects of a training image in its view: boxes, labels and, where given, masks. Crowds and objects
    outside the view are left out."""
    boxes = view_boxes(target["boxes"], view)
    kept = ~target["iscrowd"] & (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    seen = {"boxes": boxes[kept], "labels": target["labels"][kept]}
    if "masks" in target:
        seen["masks"] = view_masks(target["masks"][kept], view)
    return seen


def _random_crop(height: int, width: int, draws: list[float], factor: float) -> tuple[tuple, int, int]:
    """Resize to one of CROP_FROM, cut out a rectangle of sides in CROP_SIDES at a whole pixel, all times `factor`.
    Returns the rectangle (left, top, right, bottom) in the image's own pixels, and the height and width cut out."""
    pick, *draws = draws
    ratio = round(CROP_FROM[int(pick * len(CROP_FROM))] * factor) / min(height, width)
    low, high = (round(side * factor) for side in CROP_SIDES)
    spans, cuts = [], []
    for length, side, place in zip((width, height), draws[:2], draws[2:], strict=True):
        whole = round(length * ratio)
        cut = _between(low, min(high, whole), side)
        start = _between(0, whole - cut, place)
        spans.append((start * length / whole, (start + cut) * length / whole))
        cuts.append(cut)
    (left, right), (top, bottom) = spans
    return (left, top, right, bottom), cuts[1], cuts[0]


def _between(low: int, high: int, draw: float) -> int:
    """A whole number from `low` to `high` inclusive, for a draw in [0, 1)."""
    return low + int(draw * (high - low + 1))
