"""Rate and distortion of our codec and of JPEG, WebP, JPEG 2000 and AVIF (Pillow's), on the same images.

The distortion is that of the 8-bit RGB images the decoders give. The rate is that of whole files, headers and all, or
of their payload, the coded data alone. What two codecs make of one rate is compared in two ways:

    fixed      every image at one setting; rate and PSNR are means over the images. Between the settings just below
               and just above the rate, PSNR is interpolated in the logarithm of the rate. Papers do this.
    per image  each image at the highest setting that stays below the rate: as it is, and interpolated for each image
               between that setting and the next, so that nobody is judged at 0.17 beside somebody at 0.19.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from finola.codec.codec import Codec
from finola.codec.competitors import ImageCodec
from finola.codec.container import OVERHEAD
from finola.codec.literature import Reported
from finola.data.images import to_tensor
from finola.errors import DataError, RecipeError
from finola.evaluation.metrics import image_psnr

MS_SSIM_SIDE = 176  # pixels that its five scales need
RATES = {"file": "bpp", "payload": "payload_bpp"}  # what may be counted: the field of a point that says it
SAMPLE = 6  # images on which a search begins
PAPER_BITS = 4  # for each number of q: the paper's mode


@dataclass(frozen=True)
class Point:
    """One image at one setting. Rates are in bits for each pixel, of the file and of its payload; `ms_ssim` is None for
    images too small for it. Times are in seconds."""

    setting: float
    bpp: float
    payload_bpp: float
    psnr: float
    ms_ssim: float | None
    encoding_time: float
    decoding_time: float


def finola_codecs(codec: Codec, refine: Sequence[int] = ()) -> list[ImageCodec]:
    """Ours: by quality; with the paper's fixed bits, coded and not; and by quality with these steps of refinement."""
    precision = ", in bf16" if codec.fast else ""

    def by_quality(name: str, description: str, refine: int | None = None) -> ImageCodec:
        return ImageCodec(name, description + precision, (10, 25, 40, 50, 60, 75), range(1, 101),
                          lambda image, quality: codec.compress(image, quality=int(quality), refine=refine),
                          codec.decompress, _payload)

    def by_bits(name: str, description: str, entropy: bool) -> ImageCodec:
        return ImageCodec(name, description + precision, range(2, 9), range(1, 9),
                          lambda image, bits: codec.compress(image, bits=int(bits), entropy=entropy), codec.decompress,
                          _payload)

    return [
        by_quality("finola", "unequal steps, entropy coded"),
        by_bits("finola-paper", "equal bits, fixed length", entropy=False),
        by_bits("finola-bits", "equal bits, entropy coded", entropy=True),
        *(by_quality(f"finola-refine{steps}", f"unequal steps, entropy coded, {steps} steps of refinement", steps)
          for steps in refine),
    ]


def _payload(data: bytes) -> int:
    """Bytes of a stream of ours without its container."""
    return len(data) - OVERHEAD


def measure(codec: ImageCodec, image: Image.Image, setting: float) -> Point:
    """Write the image and read it again."""
    return _read(codec, image, setting, *_write(codec, image, setting))


def _write(codec: ImageCodec, image: Image.Image, setting: float) -> tuple[bytes, float]:
    """The bytes of an image, and the seconds they took."""
    start = time.perf_counter()
    data = codec.encode(image, setting)
    return data, time.perf_counter() - start


def _read(codec: ImageCodec, image: Image.Image, setting: float, data: bytes, encoding_time: float) -> Point:
    start = time.perf_counter()
    decoded = codec.decode(data)
    decoding_time = time.perf_counter() - start
    bits = 8 / (image.width * image.height)
    return Point(setting, bits * len(data), bits * codec.payload(data), image_psnr(decoded, image),
                 ms_ssim(decoded, image), encoding_time, decoding_time)


class Trials:
    """A codec on a set of images; each setting is tried on an image once, and remembered.

    Args:
        load: the image of a number from 0 to `images` - 1, RGB.
        count: what a rate counts, "file" or "payload".
        tried: called after each trial, for a progress bar.
    """

    def __init__(self, codec: ImageCodec, load: Callable[[int], Image.Image], images: int, count: str = "file",
                 tried: Callable[[], object] = lambda: None):
        if count not in RATES:
            raise RecipeError(f"count: got {count!r}, expected one of {', '.join(RATES)}")
        self.codec, self.load, self.images, self.tried, self.key = codec, load, images, tried, RATES[count]
        self.size = len if count == "file" else codec.payload
        self._files: dict[tuple[int, float], tuple[bytes, float]] = {}
        self._rates: dict[tuple[int, float], float] = {}
        self._points: dict[tuple[int, float], Point] = {}

    def rate(self, index: int, setting: float) -> float:
        """Bits for each pixel of an image at a setting."""
        if (index, setting) not in self._rates:
            image = self.load(index)
            data, _ = self._files[index, setting] = _write(self.codec, image, setting)
            self._rates[index, setting] = 8 * self.size(data) / (image.width * image.height)
            self.tried()
        return self._rates[index, setting]

    def point(self, index: int, setting: float) -> Point:
        if (index, setting) not in self._points:
            self.rate(index, setting)
            data, seconds = self._files.pop((index, setting))
            self._points[index, setting] = _read(self.codec, self.load(index), setting, data, seconds)
        return self._points[index, setting]

    def mean_rate(self, setting: float, every: int = 1) -> float:
        """Of the images, or of one in so many."""
        indices = range(0, self.images, every)
        return math.fsum(self.rate(index, setting) for index in indices) / len(indices)

    def mean_point(self, setting: float) -> dict[str, Any]:
        return mean_point(self.point(index, setting) for index in range(self.images))

    def fixed(self, bpp: float) -> dict[str, Any]:
        """All images at one setting: PSNR and MS-SSIM at the rate, None where no two settings lie around it, and the
        mean points `below` and `above` it, None where there is none."""
        low = self._fixed_place(bpp)
        below = self.mean_point(self.codec.every[low]) if low >= 0 else None
        above = self.mean_point(self.codec.every[low + 1]) if low + 1 < len(self.codec.every) else None
        return {**self._between(below, above, bpp), "below": below, "above": above}

    def per_image(self, bpp: float) -> dict[str, Any]:
        """Each image by itself: PSNR and MS-SSIM at the rate, and the mean of the points `chosen`, highest below it.

        An image whose smallest file is larger than the rate counts as that file (`above_target` of them), one whose
        largest is smaller as that (`below_target`): neither can be interpolated.
        """
        chosen, between, start = [], [], self._fixed_place(bpp)
        outside = {"above_target": 0, "below_target": 0}
        for index in range(self.images):
            low = highest(self.codec.every, bpp, partial(self.rate, index), start)
            point = self.point(index, self.codec.every[max(low, 0)])
            chosen.append(point)
            if 0 <= low < len(self.codec.every) - 1:
                above = self.point(index, self.codec.every[low + 1])
                between.append(self._between(asdict(point), asdict(above), bpp))
            else:
                outside["above_target" if low < 0 else "below_target"] += 1
                between.append({"psnr": point.psnr, "ms_ssim": point.ms_ssim})
        return {**_mean(between), "chosen": mean_point(chosen), **outside}

    def _fixed_place(self, bpp: float) -> int:
        """Where in all settings the highest stands that takes at most `bpp` on average; looked for on a few images
        first, since some codecs take seconds for each."""
        sample = partial(self.mean_rate, every=max(1, self.images // SAMPLE))
        settings = self.codec.every
        return highest(settings, bpp, self.mean_rate, highest(settings, bpp, sample, len(settings) // 4))

    def _between(self, below: Mapping | None, above: Mapping | None, bpp: float) -> dict[str, float | None]:
        names = ("psnr", "ms_ssim")
        if below is None or above is None:
            return dict.fromkeys(names)
        return {name: interpolate(below, above, bpp, name, self.key) for name in names}


def interpolate(below: Mapping, above: Mapping, bpp: float, name: str, rate: str = "bpp") -> float | None:
    """A score at a rate between two points, linear in the logarithm of the rate; None where a point has no score."""
    if below[name] is None or above[name] is None:
        return None
    low, high = math.log(below[rate]), math.log(above[rate])
    share = (math.log(bpp) - low) / (high - low)
    return float(below[name] + share * (above[name] - below[name]))


def highest(settings: Sequence[float], bpp: float, rate: Callable[[float], float], start: int) -> int:
    """The place of the highest setting that takes at most `bpp`, -1 where none does, as if the rate rose with the
    setting; in any case the next takes more. Strides of 2, 4, 8, ... from the place `start` find two places around it,
    and what lies between them is narrowed down where the logarithm of the rate would reach the target."""
    known: dict[int, float] = {}

    def fits(place: int) -> bool:
        known[place] = math.log(rate(settings[place]))
        return known[place] <= math.log(bpp)

    low, high, stride = -1, len(settings), 2
    place = min(max(start, 0), high - 1)
    while low < place < high:
        if fits(place):
            low, place = place, place + stride
        else:
            high, place = place, place - stride
        stride *= 2
    while high - low > 1:
        if low in known and high in known:
            share = (math.log(bpp) - known[low]) / (known[high] - known[low])
            place = min(max(low + round(share * (high - low)), low + 1), high - 1)
        else:
            place = (low + high) // 2
        low, high = (place, high) if fits(place) else (low, place)
    return low


def mean_point(points: Iterable[Point]) -> dict[str, Any]:
    """The mean of each of the points' fields; None where any is."""
    return _mean([asdict(point) for point in points])


def _mean(rows: Sequence[Mapping]) -> dict[str, Any]:
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


COMPRESSAI = {"setting": "q", "bpp": "bpp", "psnr": "psnr", "ms_ssim": "ms-ssim", "encoding_time": "encoding_time",
              "decoding_time": "decoding_time"}  # fields of a point -> names in CompressAI's results


def to_compressai(codec: ImageCodec, curve: Sequence[dict], record: dict) -> dict:
    """A curve in the form of CompressAI's results, with a record of ours beside it."""
    results = {name: [point[key] for point in curve] for key, name in COMPRESSAI.items() if curve[0][key] is not None}
    return {"name": codec.name, "description": codec.description, "results": results, "record": record}


def from_compressai(results: Mapping[str, Sequence[float]]) -> list[dict]:
    """The points of a curve out of what `to_compressai` calls results; None for what it leaves out."""
    count = len(results["bpp"])
    columns = {key: results.get(name, [None] * count) for key, name in COMPRESSAI.items()}
    return [{key: column[i] for key, column in columns.items()} for i in range(count)]


def plot(curves: dict[str, Sequence[dict]], title: str, path: Path, reported: Sequence[Reported] = ()) -> None:
    """PSNR, and MS-SSIM where there is one, over the rate, as a PNG; what papers report of PSNR stands beside it. The
    rate goes up to 1 bit per pixel, or as far as our codecs do; curves that go on leave the plot at its edge."""
    from matplotlib.figure import Figure

    ours = [point["bpp"] for name, curve in curves.items() if name.startswith("finola") for point in curve]
    top = max([1.0, *ours, *(min(point["bpp"] for point in curve) for curve in curves.values())])
    metrics = {"psnr": "PSNR (dB)", "ms_ssim": "MS-SSIM"}
    shown = [key for key in metrics if all(point[key] is not None for curve in curves.values() for point in curve)]
    figure = Figure(figsize=(6.5 * len(shown), 6.5 if reported else 5), layout="constrained", dpi=120)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, key in zip(panels, shown, strict=True):
        for name, curve in curves.items():
            style = {"linewidth": 2} if name.startswith("finola") else {"linestyle": "--", "alpha": 0.8}
            axes.plot([p["bpp"] for p in curve], [p[key] for p in curve], marker="o", markersize=3, label=name, **style)
        inside = [point[key] for curve in curves.values() for point in curve if point["bpp"] <= top]
        room = 0.05 * (max(inside) - min(inside)) or 1e-3
        axes.set(xlabel="bit per pixel, whole files", ylabel=metrics[key], xlim=(0, 1.02 * top))
        axes.set_ylim(min(inside) - room, max(inside) + room)
        axes.grid(alpha=0.3)
    for i, row in enumerate(reported):
        panels[0].plot(list(row.psnr), list(row.psnr.values()), linestyle=":", linewidth=0.8, marker="xs^v*dD"[i % 7],
                       markersize=4, color=f"C{i % 10}", label=f"{row.name}, reported")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=min(5, len(labels[0])), fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, format="png")


def choose(codecs: Sequence[ImageCodec], names: Sequence[str] | None) -> list[ImageCodec]:
    """Those of some names, all by default; RecipeError for a name there is not."""
    known = {codec.name: codec for codec in codecs}
    if unknown := [name for name in names or () if name not in known]:
        raise RecipeError(f"codecs: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    return [known[name] for name in names or known]


def _by_psnr(curve: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
    """PSNR, rising, and the logarithm of the rate at it."""
    if not curve:
        raise DataError("bd_rate: got a curve without points, expected at least one")
    points = sorted((point["psnr"], math.log(point["bpp"])) for point in curve)
    return np.array([p for p, _ in points]), np.array([r for _, r in points])
