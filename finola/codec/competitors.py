"""JPEG, WebP, JPEG 2000 and AVIF as Pillow writes them, each with its best ordinary options.

What was tried, and what each choice costs at two rates: `python benchmarks/codec_options.py`, results/rd/options.json.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, features

FEATURES = {"jpeg": "jpg", "webp": "webp", "jpeg2000": "jpg_2000", "avif": "avif"}  # as Pillow names its own parts


@dataclass(frozen=True)
class ImageCodec:
    """A way to write images at a setting, of which a higher one takes more bytes.

    Attributes:
        settings: of its curve. every: all there are, in rising order, for the search of a rate.
        encode: (image, setting) -> bytes. decode: bytes -> RGB image.
        payload: bytes -> how many of them are coded image data, headers and tables aside.
    """

    name: str
    description: str
    settings: Sequence[float]
    every: Sequence[float]
    encode: Callable[[Image.Image, float], bytes]
    decode: Callable[[bytes], Image.Image]
    payload: Callable[[bytes], int]


def classical_codecs() -> list[ImageCodec]:
    """JPEG, WebP, JPEG 2000 and AVIF, those that this Pillow has."""
    return [make() for name, make in MAKERS.items() if features.check(FEATURES[name])]


def jpeg(**options: Any) -> ImageCodec:
    options = {"subsampling": "4:2:0", "optimize": True} | options
    return _pillow("jpeg", "JPEG", options, lambda quality: {"quality": quality}, jpeg_payload,
                   (3, 5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90), range(1, 96))


def webp(**options: Any) -> ImageCodec:
    return _pillow("webp", "WEBP", {"method": 6} | options, lambda quality: {"quality": quality}, webp_payload,
                   (0, 2, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90), range(0, 101))


def jpeg2000(**options: Any) -> ImageCodec:
    """By the rate itself, which it takes as a ratio to 24 bits. Without the colour transform (`mct=0`, which is
    Pillow's default) it loses 2 dB."""
    options = {"quality_mode": "rates", "irreversible": True, "mct": 1, "no_jp2": True} | options
    return _pillow("jpeg2000", "JPEG2000", options, lambda bpp: {"quality_layers": [24 / bpp]}, jpeg2000_payload,
                   (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0), [rate / 100 for rate in range(2, 401)])


def avif(**options: Any) -> ImageCodec:
    return _pillow("avif", "AVIF", {"speed": 2, "subsampling": "4:2:0"} | options,
                   lambda quality: {"quality": quality}, avif_payload,
                   (1, 10, 20, 30, 40, 50, 60, 70), range(1, 101))


MAKERS: dict[str, Callable[..., ImageCodec]] = {"jpeg": jpeg, "webp": webp, "jpeg2000": jpeg2000, "avif": avif}


def jpeg_payload(data: bytes) -> int:
    """The scans, without the segments before them: sizes, quantisation and Huffman tables."""
    place, total = 2, 0
    while place < len(data) - 2:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        place += 2 + length
        if marker == 0xDA:  # a scan follows: to the next marker that is neither stuffing nor a restart
            start = place
            while data[place] != 0xFF or data[place + 1] == 0 or 0xD0 <= data[place + 1] <= 0xD7:
                place += 1
            total += place - start
    return total


def webp_payload(data: bytes) -> int:
    """The chunk of the frame, without its header."""
    return _chunk(data, b"VP8 ", 12, "little", size_first=False)


def jpeg2000_payload(data: bytes) -> int:
    """What stands between the start of the tile's data and the end of the codestream."""
    return len(data) - data.index(b"\xff\x93") - 2 - 2


def avif_payload(data: bytes) -> int:
    """The box of the media data, without its header."""
    return _chunk(data, b"mdat", 0, "big", size_first=True)


def _chunk(data: bytes, name: bytes, place: int, order: Any, size_first: bool) -> int:
    """Bytes in the chunk of that name: RIFF has the name before the size and pads to even sizes; in ISO's boxes the
    size stands first and counts the header too."""
    while place + 8 <= len(data):
        head, tail = data[place : place + 4], data[place + 4 : place + 8]
        kind, size = (tail, int.from_bytes(head, order)) if size_first else (head, int.from_bytes(tail, order))
        if kind == name:
            return size - 8 if size_first else size
        place += size if size_first else 8 + size + size % 2
    raise ValueError(f"no chunk {name!r}")


def _pillow(name: str, form: str, options: Mapping[str, Any], by_setting: Callable[[float], dict[str, Any]],
            payload: Callable[[bytes], int], settings: Sequence[float], every: Sequence[float]) -> ImageCodec:
    def encode(image: Image.Image, setting: float) -> bytes:
        file = io.BytesIO()
        image.save(file, form, **options, **by_setting(setting))
        return file.getvalue()

    def decode(data: bytes) -> Image.Image:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")

    words = ", ".join(f"{key}={value}" for key, value in options.items())
    return ImageCodec(name, f"{form} of Pillow, {words}", settings, every, encode, decode, payload)
