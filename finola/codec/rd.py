"""Rate and distortion of our codec and of JPEG, WebP, JPEG 2000 and AVIF (Pillow's), on the same images.

Sizes are those of whole files, headers and all; the distortion is that of the 8-bit RGB images the decoders give.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, features

from finola.codec.codec import Codec
from finola.data.images import to_tensor
from finola.errors import DataError, RecipeError
from finola.evaluation.metrics import image_psnr

MS_SSIM_SIDE = 176  # pixels that its five scales need


@dataclass(frozen=True)
class ImageCodec:
    """A way to write images at a setting, of which a higher one takes more bytes.

    Attributes:
        settings: of its curve. every: all there are, in rising order, for the search of a rate.
        encode: (image, setting) -> bytes. decode: bytes -> RGB image.
    """

    name: str
    description: str
    settings: Sequence[float]
    every: Sequence[float]
    encode: Callable[[Image.Image, float], bytes]
    decode: Callable[[bytes], Image.Image]


@dataclass(frozen=True)
class Point:
    """One image at one setting. `ms_ssim` is None for images too small for it. Times are in seconds."""

    setting: float
    bpp: float
    psnr: float
    ms_ssim: float | None
    encoding_time: float
    decoding_time: float


def classical_codecs() -> list[ImageCodec]:
    """JPEG, WebP, JPEG 2000 and AVIF, those that this Pillow has."""
    coarse, fine = (5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90), range(1, 101)
    rates = tuple(rate / 100 for rate in range(2, 401))  # JPEG 2000 takes the rate itself, as a ratio to 24 bits
    codecs = {
        "jpg": _pillow("jpeg", "JPEG", "4:2:0, optimised Huffman tables", coarse, range(1, 96),
                       lambda quality: {"quality": quality, "subsampling": "4:2:0", "optimize": True}),
        "webp": _pillow("webp", "WEBP", "method 6", (1, *coarse), range(0, 101),
                        lambda quality: {"quality": quality, "method": 6}),
        "jpg_2000": _pillow("jpeg2000", "JPEG2000", "irreversible wavelet, by bits per pixel",
                            (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0), rates,
                            lambda bpp: {"quality_mode": "rates", "quality_layers": [24 / bpp], "irreversible": True}),
        "avif": _pillow("avif", "AVIF", "speed 6", (1, *coarse), fine, lambda quality: {"quality": quality}),
    }
    return [codec for feature, codec in codecs.items() if features.check(feature)]


def finola_codecs(codec: Codec, refine: int = 0) -> list[ImageCodec]:
    """Ours: by quality; with the paper's fixed bits, coded and not; and by quality with so many steps of refinement."""

    def by_quality(name: str, description: str, refine: int = 0) -> ImageCodec:
        return ImageCodec(name, description, (10, 25, 40, 50, 60, 75), range(1, 101),
                          lambda image, quality: codec.compress(image, quality=int(quality), refine=refine),
                          codec.decompress)

    def by_bits(name: str, description: str, entropy: bool) -> ImageCodec:
        return ImageCodec(name, description, range(2, 9), range(1, 9),
                          lambda image, bits: codec.compress(image, bits=int(bits), entropy=entropy), codec.decompress)

    codecs = [
        by_quality("finola", "unequal steps, entropy coded"),
        by_bits("finola-paper", "equal bits, fixed length", entropy=False),
        by_bits("finola-bits", "equal bits, entropy coded", entropy=True),
    ]
    if refine:
        codecs.append(by_quality(f"finola-refine{refine}",
                                 f"unequal steps, entropy coded, {refine} steps of refinement", refine))
    return codecs


def measure(codec: ImageCodec, image: Image.Image, setting: float) -> Point:
    """Write the image and read it again."""
    start = time.perf_counter()
    data = codec.encode(image, setting)
    middle = time.perf_counter()
    decoded = codec.decode(data)
    end = time.perf_counter()
    return Point(setting, 8 * len(data) / (image.width * image.height), image_psnr(decoded, image),
                 ms_ssim(decoded, image), middle - start, end - middle)


def at_most(codec: ImageCodec, image: Image.Image, bpp: float) -> Point:
    """The highest setting whose file takes at most `bpp`; the lowest there is where none does."""
    limit, settings = bpp * image.width * image.height / 8, codec.every
    low, high = 0, len(settings)  # settings[low] fits or is the first, settings[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(codec.encode(image, settings[middle])) <= limit else (low, middle)
    return measure(codec, image, settings[low])


def mean_point(points: Iterable[Point]) -> dict:
    """The mean of each of the points' fields; None where any is."""
    rows = [asdict(point) for point in points]
    return {key: None if any(row[key] is None for row in rows) else math.fsum(row[key] for row in rows) / len(rows)
            for key in rows[0]}


def ms_ssim(a: Image.Image, b: Image.Image) -> float | None:
    """Multi-scale structural similarity of two RGB images, at most 1; None below 176 pixels a side."""
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as similarity

    if min(a.size) < MS_SSIM_SIDE:
        return None
    with torch.no_grad():
        return float(similarity(to_tensor(a)[None], to_tensor(b)[None], data_range=1.0))


def bd_rate(anchor: Sequence[dict], curve: Sequence[dict]) -> float | None:
    """Bjøntegaard's: the mean difference in bytes at equal PSNR, in percent; negative where `curve` takes fewer.

    The logarithm of the rate is interpolated linearly over the PSNR that both curves cover; None where they share
    none.
    """
    (x, log_x), (y, log_y) = _by_psnr(anchor), _by_psnr(curve)
    shared = shared_psnr(anchor, curve)
    if shared is None:
        return None
    grid = np.linspace(*shared, 1000)
    return 100 * (math.exp(np.mean(np.interp(grid, y, log_y) - np.interp(grid, x, log_x))) - 1)


def shared_psnr(anchor: Sequence[dict], curve: Sequence[dict]) -> tuple[float, float] | None:
    """The PSNR that both curves cover, from and to; None where they share none."""
    (x, _), (y, _) = _by_psnr(anchor), _by_psnr(curve)
    low, high = max(x[0], y[0]), min(x[-1], y[-1])
    return (low, high) if low < high else None


def to_compressai(codec: ImageCodec, curve: Sequence[dict], record: dict) -> dict:
    """A curve in the form of CompressAI's results, with a record of ours beside it."""
    names = {"setting": "q", "bpp": "bpp", "psnr": "psnr", "ms_ssim": "ms-ssim", "encoding_time": "encoding_time",
             "decoding_time": "decoding_time"}
    results = {name: [point[key] for point in curve] for key, name in names.items() if curve[0][key] is not None}
    return {"name": codec.name, "description": codec.description, "results": results, "record": record}


def plot(curves: dict[str, Sequence[dict]], title: str, path: Path, top: float = 1.0) -> None:
    """PSNR, and MS-SSIM where there is one, over the rate up to `top` bit per pixel, as a PNG."""
    from matplotlib.figure import Figure

    metrics = {"psnr": "PSNR (dB)", "ms_ssim": "MS-SSIM"}
    shown = [key for key in metrics if all(point[key] is not None for curve in curves.values() for point in curve)]
    figure = Figure(figsize=(6.5 * len(shown), 5), layout="constrained", dpi=120)
    for axes, key in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name, curve in curves.items():
            seen = [point for point in curve if point["bpp"] <= top]
            style = {"linewidth": 2} if name.startswith("finola") else {"linestyle": "--", "alpha": 0.8}
            axes.plot([p["bpp"] for p in seen], [p[key] for p in seen], marker="o", markersize=3, label=name, **style)
        axes.set(xlabel="bit per pixel, whole files", ylabel=metrics[key], xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, format="png")


def choose(codecs: Sequence[ImageCodec], names: Sequence[str] | None) -> list[ImageCodec]:
    """Those of some names, all by default; RecipeError for a name there is not."""
    known = {codec.name: codec for codec in codecs}
    if unknown := [name for name in names or () if name not in known]:
        raise RecipeError(f"codecs: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    return [known[name] for name in names or known]


def _pillow(name: str, form: str, description: str, settings: Sequence[float], every: Sequence[float],
            options: Callable[[float], dict]) -> ImageCodec:
    def encode(image: Image.Image, setting: float) -> bytes:
        file = io.BytesIO()
        image.save(file, form, **options(setting))
        return file.getvalue()

    def decode(data: bytes) -> Image.Image:
        with Image.open(io.BytesIO(data)) as image:
            return image.convert("RGB")

    return ImageCodec(name, f"{form} of Pillow, {description}", settings, every, encode, decode)


def _by_psnr(curve: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
    """PSNR, rising, and the logarithm of the rate at it."""
    if not curve:
        raise DataError("bd_rate: got a curve without points, expected at least one")
    points = sorted((point["psnr"], math.log(point["bpp"])) for point in curve)
    return np.array([p for p, _ in points]), np.array([r for _, r in points])
