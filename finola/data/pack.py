"""Turn a data set into WebDataset shards of smaller images."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from finola.data.datasets import ImageDataset
from finola.data.images import RESAMPLE, resize_shorter
from finola.data.shards import INDEX_JSON, INDEX_NPY
from finola.data.workers import threads
from finola.errors import DataError, RecipeError, check_choice

SUFFIX = {"jpeg": ".jpg", "webp": ".webp"}


@dataclass(frozen=True)
class Encoding:
    """How each image is stored.

    Args:
        size: the shorter side in pixels; an image that is smaller stays as it is.
        format: "jpeg" or "webp".
        quality: 1 to 100.
        resample: "bilinear" or "bicubic" (see `resize_shorter`).

    Raises:
        RecipeError: a value out of range.
    """

    size: int = 256
    format: str = "jpeg"
    quality: int = 90
    resample: str = "bicubic"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise RecipeError(f"size: got {self.size}, expected at least 1")
        check_choice("format", self.format, SUFFIX, RecipeError)
        if not 1 <= self.quality <= 100:
            raise RecipeError(f"quality: got {self.quality}, expected 1 to 100")
        check_choice("resample", self.resample, RESAMPLE, RecipeError)

    def encode(self, image: Image.Image) -> bytes:
        if min(image.size) > self.size:
            image = resize_shorter(image, self.size, self.resample)
        buffer = io.BytesIO()
        image.save(buffer, format=self.format, quality=self.quality)
        return buffer.getvalue()


@dataclass
class PackReport:
    """What was packed: the shards with their sizes, and a message for each image that could not be."""

    out: str
    images: int = 0
    shards: list[dict] = field(default_factory=list)  # {"file", "images", "bytes"}
    bad: list[str] = field(default_factory=list)


def pack(
    dataset: ImageDataset,
    out: str | Path,
    encoding: Encoding,
    *,
    shard_size: int = 1000,
    workers: int = 1,
    progress: bool = True,
) -> PackReport:
    """Write the images of `dataset` as shards OUT/NAME-000000.tar ... with an index; NAME is OUT's last part.

    Sample n is `n`.jpg or `n`.webp with its label in `n`.cls if it has one. An image that cannot be decoded
    or stored is left out and reported. `out` appears whole, at the end, or not at all.

    Args:
        shard_size: images a shard.
        workers: threads that decode and encode.

    Raises:
        DataError: `out` exists and is not an empty folder, or no image at all can be packed.
        RecipeError: `shard_size` or `workers` below 1.
    """
    for name, value in (("shard_size", shard_size), ("workers", workers)):
        if value < 1:
            raise RecipeError(f"{name}: got {value}, expected at least 1")
    out, report = Path(out).resolve(), PackReport(str(out))
    rows: list[tuple[int, ...]] = []  # (shard, offset, size, label) of each image
    with _whole_folder(out) as folder, threads(workers) as pool, _bar(len(dataset), progress) as bar:
        for shard, start in enumerate(range(0, len(dataset), shard_size)):
            indices = range(start, min(start + shard_size, len(dataset)))
            encoded = pool.map(lambda index: _encode(dataset, index, encoding), indices)
            path = folder / f"{out.name}-{shard:06d}.tar"
            good = _only_good(encoded, indices, report, bar)
            samples = _write_shard(path, good, dataset.labels, SUFFIX[encoding.format])
            rows += [(shard, *sample) for sample in samples]
            report.shards.append({"file": path.name, "images": len(samples), "bytes": path.stat().st_size})
        report.images = len(rows)
        if not rows:
            raise DataError(f"none of the {len(dataset)} images can be packed, the first: {report.bad[0]}")
        _write_index(folder, dataset, encoding, report, rows)
    return report


def _encode(dataset: ImageDataset, index: int, encoding: Encoding) -> bytes | DataError:
    try:
        return encoding.encode(dataset.load(index))
    except DataError as error:
        return error
    except (OSError, ValueError) as error:  # more pixels a side than the format can hold
        return DataError(f"{dataset.name(index)}: cannot be stored as {encoding.format} ({error})")


def _only_good(
    encoded: Iterable[bytes | DataError], indices: range, report: PackReport, bar: tqdm
) -> Iterator[tuple[int, bytes]]:
    """(index, bytes) of the images that could be encoded; the others go into the report."""
    for index, data in zip(indices, encoded, strict=True):
        bar.update()
        if isinstance(data, DataError):
            report.bad.append(str(data))
        else:
            yield index, data


def _write_shard(
    path: Path, samples: Iterable[tuple[int, bytes]], labels: np.ndarray, suffix: str
) -> list[tuple[int, int, int]]:
    """Write one tar file; returns (offset, size, label) of each image."""
    written = []
    with open(path, "wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for index, data in samples:
                label = int(labels[index])
                offset = _add(tar, f"{index:09d}{suffix}", data)
                if label >= 0:
                    _add(tar, f"{index:09d}.cls", str(label).encode())
                written.append((offset, len(data), label))
        file.flush()
        os.fsync(file.fileno())
    return written


def _write_index(
    folder: Path, dataset: ImageDataset, encoding: Encoding, report: PackReport, rows: list[tuple[int, ...]]
) -> None:
    np.save(folder / INDEX_NPY, np.array(rows, dtype=np.int64))
    index = {
        "images": report.images,
        "classes": dataset.classes,
        "source": dataset.source,
        "encoding": asdict(encoding),
        "shards": report.shards,
    }
    (folder / INDEX_JSON).write_text(json.dumps(index, indent=1) + "\n")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> int:
    """Add a file; returns the offset of its bytes."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    offset = tar.offset + tarfile.BLOCKSIZE  # one header block: the names are short
    tar.addfile(info, io.BytesIO(data))
    return offset


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, renamed to it on success and removed on any failure."""
    if out.is_dir() and any(out.iterdir()):
        raise DataError(f"{out}: not empty; choose a new folder, so that nothing is overwritten")
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file, expected a new or empty folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bar(total: int, progress: bool) -> tqdm:
    return tqdm(total=total, desc="packing", unit="image", disable=not progress)
