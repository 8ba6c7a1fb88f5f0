"""Images in, batches out: strict decoding, folders and shards, and loaders that resume exactly."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finola.data.crops import Augment
    from finola.data.datasets import Concat, ImageFolder, check_same_classes
    from finola.data.examples import example_images
    from finola.data.images import center_crop, decode_image, load_square, resize_shorter, to_tensor
    from finola.data.in_memory import ResidentImages, ResidentLoader
    from finola.data.loader import Batches, build_loader
    from finola.data.shards import Shards, open_data
    from finola.drawing import to_image

__all__ = [
    "Augment",
    "Batches",
    "Concat",
    "ImageFolder",
    "ResidentImages",
    "ResidentLoader",
    "Shards",
    "build_loader",
    "center_crop",
    "check_same_classes",
    "decode_image",
    "example_images",
    "load_square",
    "open_data",
    "resize_shorter",
    "to_image",
    "to_tensor",
]

HOMES = {  # name -> the module that has it, imported on first use: the command line asks for `workers` without torch
    "Augment": "finola.data.crops",
    **dict.fromkeys(("Concat", "ImageFolder", "check_same_classes"), "finola.data.datasets"),
    "example_images": "finola.data.examples",
    **dict.fromkeys(("center_crop", "decode_image", "load_square", "resize_shorter", "to_tensor"),
                    "finola.data.images"),
    **dict.fromkeys(("ResidentImages", "ResidentLoader"), "finola.data.in_memory"),
    **dict.fromkeys(("Batches", "build_loader"), "finola.data.loader"),
    **dict.fromkeys(("Shards", "open_data"), "finola.data.shards"),
    "to_image": "finola.drawing",
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in HOMES:
            return getattr(import_module(HOMES[name]), name)
        raise AttributeError(f"module 'finola.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
