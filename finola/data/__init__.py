"""Pictures in, batches out: strict decoding, folders and shards, and loaders that resume exactly."""

from finola.data.folder import Concat, ImageFolder, check_same_classes
from finola.data.images import center_crop, decode_image, resize_shorter, to_image, to_tensor
from finola.data.loader import build_loader
from finola.data.resident import ResidentImages, ResidentLoader
from finola.data.shards import Shards, open_data

__all__ = [
    "Concat",
    "ImageFolder",
    "ResidentImages",
    "ResidentLoader",
    "Shards",
    "build_loader",
    "center_crop",
    "check_same_classes",
    "decode_image",
    "open_data",
    "resize_shorter",
    "to_image",
    "to_tensor",
]
