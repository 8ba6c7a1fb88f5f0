"""WebDataset shards (tar files of KEY.jpg + KEY.cls) as a random-access data set.

The offset of each image in its tar file is known, so shards shuffle, resume and split among processes like a
folder of files. Shards written by `finola pack` come with index.json and index.npy, which hold the classes
and the offsets; any other shards are scanned once when they are opened.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from finola.data.datasets import Concat, ImageFolder
from finola.data.fingerprint import named_sizes
from finola.data.images import SUFFIXES, decode_image
from finola.errors import DataError

INDEX_JSON, INDEX_NPY = "index.json", "index.npy"
MOST_CLASSES = 1_000_000  # larger numbers are taken for names
LABEL_SUFFIXES = (".cls", ".txt")  # an integer or a class name; .cls comes first if a sample has both


class Shards:
    """The images of one tar file, or of all tar files in a folder in the order of their names.

    Labels are read from KEY.cls or KEY.txt: integers as they are, anything else as class names, numbered in
    alphabetical order.

    Raises:
        DataError: no tar file, a damaged or truncated one, an index that does not match, or no image.
    """

    def __init__(self, root: str | Path):
        self.root, self.source = Path(root), str(root)
        self.files = [self.root] if self.root.is_file() else sorted(self.root.glob("*.tar"))
        if not self.files:
            raise DataError(f"{self.root}: no shard; expected a .tar file or a folder of them")
        indexed = self.root.is_dir() and (self.root / INDEX_JSON).exists()
        # samples: (N, 4) int64, each image's file, offset, size and label
        samples, self.classes = self._read_index() if indexed else self._scan()
        if len(samples) == 0:
            raise DataError(f"{self.root}: {len(self.files)} shards, 0 images; expected {' '.join(SUFFIXES)}")
        self._file, self._offset, self._size, self.labels = samples.T.copy()

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, draft: int | None = None) -> Image.Image:
        try:
            with open(self.files[self._file[index]], "rb") as file:
                file.seek(self._offset[index])
                data = file.read(self._size[index])
        except OSError as error:
            raise DataError(f"{self.name(index)}: {error.strerror}") from error
        return decode_image(data, name=self.name(index), draft=draft)

    def name(self, index: int) -> str:
        return f"{self.files[self._file[index]]}, byte {self._offset[index]}"

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        """Those of the tar files."""
        return named_sizes(self.root if self.root.is_dir() else self.root.parent, self.files)

    def _scan(self) -> tuple[np.ndarray, list[str]]:
        rows, texts = [], []
        for number, path in enumerate(self.files):
            for offset, size, text in scan_tar(path):
                rows.append((number, offset, size, -1))
                texts.append(text)
        samples = np.array(rows, dtype=np.int64).reshape(-1, 4)
        samples[:, 3], classes = _number_labels(texts)
        return samples, classes

    def _read_index(self) -> tuple[np.ndarray, list[str]]:
        index_file = self.root / INDEX_JSON
        try:
            index = json.loads(index_file.read_text())
            expected = {shard["file"]: shard["bytes"] for shard in index["shards"]}
            classes, count = list(index["classes"]), index["images"]
            samples = np.load(self.root / INDEX_NPY, allow_pickle=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{index_file}: damaged index ({error}); pack the images again") from error
        found = {path.name: path.stat().st_size for path in self.files}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise DataError(
                    f"{self.root / name}: {found.get(name, 'no')} bytes, {INDEX_JSON} says "
                    f"{expected.get(name, 'no')}; copy the shard again"
                )
        if samples.shape != (count, 4) or not _plausible(samples, list(found.values()), len(classes)):
            raise DataError(f"{self.root / INDEX_NPY}: damaged, or of other shards; pack the images again")
        return samples.astype(np.int64), classes


def scan_tar(path: Path) -> list[tuple[int, int, str | None]]:
    """Offset, size and label text (None without one) of each image of a tar file, in the file's order.

    Raises:
        DataError: not a tar file, or one that is damaged or cut short.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, dict[str, str]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, suffix = _split(member.name)
                if not member.isfile():
                    continue
                if suffix in SUFFIXES:
                    images[key] = (member.offset_data, member.size)
                elif suffix in LABEL_SUFFIXES and (file := tar.extractfile(member)):
                    labels.setdefault(key, {})[suffix] = file.read().decode().strip()
            end = tar.offset  # where the next header would be
        with open(path, "rb") as whole:
            whole.seek(end)
            complete = whole.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    except (tarfile.TarError, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged tar file ({error}); copy or pack it again") from error
    if not complete:  # tarfile itself takes a broken header for the end
        raise DataError(f"{path}: damaged or cut short at byte {end}, no end mark; copy or pack it again")
    return [(*images[key], _label_text(labels.get(key, {}))) for key in images]


def open_data(roots: Sequence[str | Path]) -> ImageFolder | Shards | Concat:
    """One data set from one or several folders of images, folders of shards, or tar files.

    Raises:
        DataError: a root that is neither, or holds no image.
    """
    datasets = [open_one(Path(root)) for root in roots]
    return datasets[0] if len(datasets) == 1 else Concat(datasets)


def open_one(root: Path) -> ImageFolder | Shards:
    is_shards = root.is_file() or (root.is_dir() and any(root.glob("*.tar")))
    return Shards(root) if is_shards else ImageFolder(root)


def _plausible(samples: np.ndarray, file_sizes: list[int], classes: int) -> bool:
    """Whether every row (file, offset, size, label) lies within its file and the classes."""
    if not np.issubdtype(samples.dtype, np.integer) or samples[:, :3].min(initial=0) < 0:
        return False
    file, offset, size, label = samples.T
    if file.max(initial=0) >= len(file_sizes):
        return False
    if label.min(initial=-1) < -1 or label.max(initial=-1) >= classes:
        return False
    sizes = np.array(file_sizes)[file]
    return bool(((size <= sizes) & (offset <= sizes - size)).all())


def _split(name: str) -> tuple[str, str]:
    """Key and suffix of a member, split at the first dot of its file name as WebDataset does."""
    folder, _, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return f"{folder}/{stem}", (dot + suffix).lower()


def _label_text(texts: dict[str, str]) -> str | None:
    return next((texts[suffix] for suffix in LABEL_SUFFIXES if suffix in texts), None)


def _number_labels(texts: list[str | None]) -> tuple[np.ndarray, list[str]]:
    """Labels (N,) int64, -1 for None, and the class names."""
    names = sorted({text for text in texts if text is not None})
    if all(name.isdecimal() and int(name) < MOST_CLASSES for name in names):
        numbers = {name: int(name) for name in names}
        names = [str(number) for number in range(max(numbers.values(), default=-1) + 1)]
    else:
        numbers = {name: number for number, name in enumerate(names)}
    return np.array([-1 if text is None else numbers[text] for text in texts], dtype=np.int64), names
