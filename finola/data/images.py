"""Strict decoding: any image becomes one defined RGB image, or a DataError that names the file.

How each Pillow mode becomes 8-bit RGB:

| mode                               | conversion                                                         |
|------------------------------------|--------------------------------------------------------------------|
| RGB                                | as it is (Pillow keeps the high byte of 16-bit RGB PNG)            |
| 1, L                               | grey repeated in the three channels                                |
| P without transparency             | palette looked up                                                  |
| RGBA, LA, PA, P with transparency, | composited over white                                              |
| L and RGB with a transparent colour|                                                                    |
| CMYK, YCbCr, HSV                   | Pillow's own conversion (no colour profile is applied)             |
| I;16, I (16-bit values)            | divided by 257 and rounded; values outside 0 .. 65535 are refused  |
| F                                  | multiplied by 255 and rounded; values outside 0 .. 1 are refused   |
| animated GIF, WebP, PNG; TIFF pages| the first frame                                                    |
| any, with an EXIF orientation      | turned upright                                                     |
"""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from finola.errors import DataError, RecipeError, check_choice

ImageLike: TypeAlias = Image.Image | str | Path | np.ndarray | Tensor  # what `upright_rgb` takes
SeveralImages: TypeAlias = list[Any] | tuple[Any, ...]  # of ImageLike: a list of paths is no list of this union

MAX_PIXELS = 89_478_485  # a quarter of a GiB of RGB; from here on Pillow warns, and we refuse
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".ppm")
RESAMPLE = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def decode_image(
    source: str | Path | bytes | BinaryIO,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    draft: int | None = None,
) -> Image.Image:
    """Decode one image to an upright RGB PIL image.

    Args:
        source: a path, the bytes of a file, or an open binary file.
        name: what an error calls the image (default: its path).
        max_pixels: images whose header declares more pixels are refused before any pixel is allocated.
            Beyond 178,956,970 pixels Pillow itself refuses, unless PIL.Image.MAX_IMAGE_PIXELS is raised.
        draft: a shorter side in pixels; a much larger JPEG may be decoded at 1/2, 1/4 or 1/8 of its size
            (several times faster) as long as both sides stay at least twice this.

    Raises:
        DataError: a missing, empty, unreadable, truncated or oversized file, or one that is no image.
    """
    name = name or _name_of(source)
    if not isinstance(source, str | Path | bytes) and not hasattr(source, "read"):
        raise DataError(f"image: got {type(source).__name__}, expected a path, a file or a PIL image")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            _check_pixels(image, name, max_pixels)
            if draft:
                image.draft(None, (2 * draft, 2 * draft))
            image.load()
            return to_rgb(ImageOps.exif_transpose(image), name)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(f"{name}: far more than {MAX_PIXELS:,} pixels; resize the image") from error
    except FileNotFoundError as error:
        what = "is a link to a file that is not there" if os.path.islink(name) else "no such file"
        raise DataError(f"{name}: {what}; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{name}: is a directory, expected an image file") from error
    except PermissionError as error:
        raise DataError(f"{name}: no permission to read it; check the file's mode") from error
    except UnidentifiedImageError as error:
        what = "is empty" if _is_empty(source) else "is not an image that can be read"
        raise DataError(f"{name}: {what}; expected one of {' '.join(SUFFIXES)}") from error
    except Exception as error:  # a damaged body makes Pillow's decoders raise almost anything
        message = f"{name}: damaged image ({type(error).__name__}: {error}); replace or remove the file"
        raise DataError(" ".join(message.split())) from error


def lost(source: str | Path) -> list[str]:
    """What of an image file does not survive decoding to one upright 8-bit RGB image, in words; often nothing.

    Raises:
        DataError: as `decode_image`.
    """
    decode_image(source)  # names what is wrong with the file
    with Image.open(source) as image, open(source, "rb") as file:
        head = file.read(25)
        frames, deep_png = getattr(image, "n_frames", 1), head[:8] == b"\x89PNG\r\n\x1a\n" and head[24] == 16
        words = {
            f"the first of {frames} frames is kept": frames > 1,
            "rounded to 8 bits": deep_png or image.mode in ("I", "F") or image.mode.startswith("I;16"),
            "transparency is laid over white": image.has_transparency_data,
        }
    return [word for word, holds in words.items() if holds]


def to_rgb(image: Image.Image, name: str = "image") -> Image.Image:
    """Convert a decoded PIL image of any mode to RGB as the table above says."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _scale_to_8_bit(image, name)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB PIL image as (3, H, W) float32 in [0, 1]."""
    return to_uint8(image).float().div_(255)


def to_uint8(image: Image.Image) -> Tensor:
    """An RGB PIL image as (3, H, W) uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def resize_shorter(image: Image.Image, size: int, resample: str = "bicubic") -> Image.Image:
    """Resize so that the shorter side is `size`, larger or smaller than it was; antialiased.

    Args:
        resample: "bilinear" or "bicubic". Bicubic keeps more of the fine structure, which is the hardest to
            reconstruct: PSNR on its images is about 0.9 dB lower, so the two must not be compared.

    Raises:
        RecipeError: another `resample`.
    """
    check_choice("resample", resample, RESAMPLE, RecipeError)
    width, height = image.size
    shorter = min(width, height)
    target = (max(size, round(width * size / shorter)), max(size, round(height * size / shorter)))
    return image if target == image.size else image.resize(target, RESAMPLE[resample])


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """The centre `size` x `size` of an image no smaller than that."""
    x, y = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((x, y, x + size, y + size))


def random_square(image: Image.Image, size: int, rng: random.Random) -> Image.Image:
    """`size` x `size` at a random place of an image no smaller than that."""
    x, y = rng.randrange(image.width - size + 1), rng.randrange(image.height - size + 1)
    return image.crop((x, y, x + size, y + size))


def shorter_side(size: int, crop_pct: float) -> int:
    """What an image's shorter side is resized to, in pixels, before its centre `size` x `size` is taken.

    Args:
        crop_pct: the share of the resized shorter side that the crop keeps, named as in timm: 0.875 makes 256 of 224,
            rounded down as there.

    Raises:
        RecipeError: a share outside 0 < crop_pct <= 1.
    """
    if not 0 < crop_pct <= 1:
        raise RecipeError(f"crop_pct: got {crop_pct}, expected 0 < crop_pct <= 1")
    return int(size / crop_pct)


def center_square(image: Image.Image, size: int, crop_pct: float = 1.0, resample: str = "bicubic") -> Image.Image:
    """The shorter side resized to `shorter_side(size, crop_pct)`, and of that the centre `size` x `size`."""
    return center_crop(resize_shorter(image, shorter_side(size, crop_pct), resample), size)


def cut_long(image: Image.Image, longest: int) -> Image.Image:
    """The centre of an image, each side of which becomes `longest` at most."""
    width, height = min(image.width, longest), min(image.height, longest)
    x, y = (image.width - width) // 2, (image.height - height) // 2
    return image if (width, height) == image.size else image.crop((x, y, x + width, y + height))


def _check_pixels(image: Image.Image, name: str, max_pixels: int) -> None:
    if image.width * image.height > max_pixels:
        raise DataError(
            f"{name}: {image.width}x{image.height} is more than the limit of {max_pixels:,} pixels; resize the image"
        )


def _scale_to_8_bit(image: Image.Image, name: str) -> Image.Image:
    values = np.asarray(image, dtype=np.float64)
    top = 1.0 if image.mode == "F" else 65535.0
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= top):
        raise DataError(
            f"{name}: mode {image.mode} with values from {values.min():g} to {values.max():g}, "
            f"expected 0 to {top:g}; rescale the image"
        )
    return Image.fromarray(np.rint(values * (255 / top)).astype(np.uint8)).convert("RGB")


def _name_of(source: str | Path | bytes | BinaryIO) -> str:
    if isinstance(source, bytes):
        return f"image of {len(source)} bytes"
    return str(source if isinstance(source, str | Path) else getattr(source, "name", "image"))


def _is_empty(source: str | Path | bytes | BinaryIO) -> bool:
    if isinstance(source, str | Path):
        return os.path.getsize(source) == 0
    return len(source) == 0 if isinstance(source, bytes) else source.seek(0, os.SEEK_END) == 0


LONGEST_FITTED = 4  # sides of an image before it is fitted, in shorter sides; what lies beyond is cropped anyway


def upright_rgb(image: ImageLike) -> Image.Image:
    """An image, or the one in a file, upright RGB.

    Args:
        image: a path, a PIL image of any size and mode, an array (H, W, 3) or (H, W), or a tensor (3, H, W) or
            (1, H, W); arrays and tensors hold 8-bit integers, or floating-point numbers from 0 to 1, which are rounded
            to 8 bits.

    Raises:
        DataError: cannot be decoded, has no pixels, or is an array or tensor of another shape, type or range.
    """
    if isinstance(image, Tensor):
        if image.ndim != 3 or image.shape[0] not in (1, 3):
            raise DataError(f"image: got a tensor of shape {tuple(image.shape)}, expected (3, H, W); of a batch, give "
                            "list(batch)")
        image = image.detach().cpu().permute(1, 2, 0).numpy()  # (H, W, 3)
    if isinstance(image, np.ndarray):
        image = _from_array(image)
    if not isinstance(image, Image.Image):
        return decode_image(image)
    if 0 in image.size:
        raise DataError(f"image: got {image.width}x{image.height} pixels, expected at least 1x1")
    return to_rgb(ImageOps.exif_transpose(image))


def _from_array(pixels: np.ndarray) -> Image.Image:
    """An array (H, W), (H, W, 1) or (H, W, 3) of 8-bit integers or of numbers from 0 to 1."""
    if pixels.ndim not in (2, 3) or pixels.shape[2:] not in ((), (1,), (3,)):
        raise DataError(f"image: got an array of shape {pixels.shape}, expected (H, W, 3)")
    if 0 in pixels.shape:
        raise DataError(f"image: got {pixels.shape[1]}x{pixels.shape[0]} pixels, expected at least 1x1")
    if pixels.dtype.kind == "f":
        if not (pixels.min() >= 0 and pixels.max() <= 1):  # nor NaN
            raise DataError(f"image: got values from {pixels.min():g} to {pixels.max():g}, expected 0 to 1, or 8-bit "
                            "integers")
        pixels = np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    if pixels.dtype != np.uint8:
        raise DataError(f"image: got an array of {pixels.dtype}, expected 8-bit integers or numbers from 0 to 1")
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def fit(image: Image.Image, size: int, crop_pct: float = 1.0) -> Image.Image:
    """`center_square` of an image of any shape, in bounded memory; as in `finola eval`."""
    return center_square(cut_long(image, LONGEST_FITTED * min(image.size)), size, crop_pct)


def load_square(image: ImageLike, size: int, crop_pct: float = 1.0) -> Tensor:
    """The centre square of a photograph, (3, size, size) in [0, 1]; see `shorter_side` for `crop_pct`. DataError where
    it cannot be decoded."""
    return to_tensor(fit(upright_rgb(image), size, crop_pct))
