"""A data set in COCO's format small enough for a test, and recipes of detectors for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

COLOURS = {3: "red", 7: "green", 90: "blue"}  # category id -> name, which is the colour of its rectangles
PLACES = ((2, 4, 40, 44), (30, 20, 60, 60), (10, 30, 50, 62))  # of the first, second, third category, more or less
PICTURES = 10
SIZES = ((64, 64), (64, 80), (90, 60))  # heights and widths, in turn

DETR = """
model: {name: detr_mf_dec_211_mfw720, num_queries: 8, max_size: 96}
data: {image_size: 64, num_workers: 0, hflip: false}
optim: {base_lr: 6.4e-2, batch_size: 4, epochs: 2, warmup_epochs: 0, clip_grad: 0.1}
trainer: {precision: 32-true, accelerator: cpu, checkpoint_minutes: null}
"""
MASK_RCNN = """
model: {name: mask_rcnn_mfw720, max_size: 96, anchor_sizes: [8, 16, 32, 64, 128], pyramid_channels: 16,
        box_head_width: 32, mask_head_width: 16, rpn_batch: 32, roi_batch: 16, detections: 5}
data: {image_size: 64, num_workers: 0, hflip: false}
optim: {base_lr: 0.32, batch_size: 4, epochs: 2, warmup_epochs: 0}
trainer: {precision: 32-true, accelerator: cpu, checkpoint_minutes: null}
"""
RECIPES = {"detr": DETR, "mask_rcnn": MASK_RCNN}


def make_coco(folder: Path, split: str = "train", colours: dict[int, str] = COLOURS, pictures: int = PICTURES) -> Path:
    """`folder`/annotations/instances_`split`.json and `folder`/`split` with its images; returns the former.

    The first image has a crowd beside its objects, the last one nothing at all.
    """
    generator = np.random.default_rng(len(split))
    images, annotations = [], []
    for number in range(1, pictures + 1):
        height, width = SIZES[number % len(SIZES)]
        objects = [] if number == pictures else generator.choice(len(colours), size=2, replace=False).tolist()
        picture = Image.new("RGB", (width, height), "grey")
        for label in objects:
            left, top, right, bottom = np.array(PLACES[label]) + generator.integers(-2, 3, 4)
            category, colour = sorted(colours.items())[label]
            ImageDraw.Draw(picture).rectangle((left, top, right - 1, bottom - 1), fill=colour)
            annotations.append(annotation(len(annotations) + 1, 100 * number, category, (left, top, right, bottom)))
        if number == 1:
            crowd = annotation(len(annotations) + 1, 100 * number, category, (50, 0, 64, 10))
            annotations.append(crowd | {"iscrowd": 1})
        path = folder / split / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        images.append({"id": 100 * number, "file_name": path.name, "height": height, "width": width})
    categories = [{"id": key, "name": name} for key, name in colours.items()]
    path = folder / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": annotations}))
    return path


def annotation(key: int, image_id: int, category: int, box: tuple[int, int, int, int]) -> dict:
    """Of a rectangle (left, top, right, bottom)."""
    left, top, right, bottom = map(int, box)
    return {"id": key, "image_id": image_id, "category_id": int(category), "iscrowd": 0,
            "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top),
            "segmentation": [[left, top, right, top, right, bottom, left, bottom]]}


def padded_pair() -> torch.Tensor:
    """Two images as a detector takes them, (2, 3, 64, 96): one of 64x96, one of 40x33 and its padding."""
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    images[1, :, 40:], images[1, :, :, 33:] = 0, 0
    return images
