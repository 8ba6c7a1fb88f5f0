"""Data sets of image files: what every one of them has (`ImageDataset`), folders, and parts and sums of data sets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from finola.data.fingerprint import named_sizes
from finola.data.images import SUFFIXES, decode_image, fit
from finola.errors import DataError


class Dataset(Protocol):
    """What every data set has, of images or of images with objects.

    Attributes:
        classes: names of the classes, none without labels.
        source: the path or paths it was read from, as text.
    """

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def source(self) -> str: ...

    def __len__(self) -> int:
        """The number of images."""
        ...

    def name(self, index: int) -> str:
        """What messages call an image."""
        ...

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        """Name and bytes of each file that it is read from, in a fixed order (see `finola.data.fingerprint`)."""
        ...


class ImageDataset(Dataset, Protocol):
    """What a data set of images has: those of this package, and one of your own.

    Attributes:
        labels: (N,) int64, -1 where an image has no label.
    """

    @property
    def labels(self) -> np.ndarray: ...

    def load(self, index: int, draft: int | None = None) -> Image.Image:
        """An image, upright RGB; `draft`: see `finola.data.images.decode_image`. DataError if it cannot be decoded."""
        ...


class ImageFolder:
    """The images below a folder, sorted by path.

    A folder that holds images itself is flat: all images below it, without labels. Otherwise each of its
    sub-folders is a class, named after it, with all the images below it. Hidden files and folders are
    skipped.

    Raises:
        DataError: no such folder, no image in it, or a class folder without one.
    """

    def __init__(self, root: str | Path):
        self.root, self.source = Path(root), str(root)
        if not self.root.is_dir():
            what = "is not a folder" if self.root.exists() else "no such folder"
            raise DataError(f"{self.root}: {what}; expected a folder of images or of class folders")
        entries = sorted(entry for entry in self.root.iterdir() if not entry.name.startswith("."))
        folders = [entry for entry in entries if entry.is_dir()]
        if any(_is_image(entry.name) for entry in entries if not entry.is_dir()):
            self.classes, files = [], [(path, -1) for path in _images_below(self.root)]
        else:
            self.classes = [folder.name for folder in folders]
            files = [(path, i) for i, folder in enumerate(folders) for path in _images_below(folder)]
        if not files:
            raise DataError(
                f"{self.root}: 0 images in {len(folders)} sub-folders; "
                f"expected files ending in {' '.join(SUFFIXES)}"
            )
        self.paths = [path for path, _ in files]
        self.labels = np.array([label for _, label in files], dtype=np.int64)
        self._check_no_empty_class()

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, index: int, draft: int | None = None) -> Image.Image:
        return decode_image(self.paths[index], draft=draft)

    def name(self, index: int) -> str:
        return self.paths[index]

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        return named_sizes(self.root, self.paths)

    def _check_no_empty_class(self) -> None:
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes))
        empty = [name for name, count in zip(self.classes, counts, strict=True) if count == 0]
        if empty:
            raise DataError(
                f"{self.root}: {len(empty)} of {len(self.classes)} class folders hold no image "
                f"({_some(empty)}); fill or remove them"
            )


class Concat:
    """Several data sets one after the other; the classes are the union of theirs, sorted by name."""

    def __init__(self, datasets: Sequence[ImageDataset]):
        self.datasets = list(datasets)
        self.source = ", ".join(data.source for data in self.datasets)
        self.classes = sorted({name for data in self.datasets for name in data.classes})
        self.labels = np.concatenate([self._relabel(data) for data in self.datasets])
        self._ends = np.cumsum([len(data) for data in self.datasets])

    def __len__(self) -> int:
        return len(self.labels)

    def load(self, index: int, draft: int | None = None) -> Image.Image:
        data, local = self._find(index)
        return data.load(local, draft)

    def name(self, index: int) -> str:
        data, local = self._find(index)
        return data.name(local)

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        return chain.from_iterable(data.file_sizes() for data in self.datasets)

    def _relabel(self, data: ImageDataset) -> np.ndarray:
        table = np.array([self.classes.index(name) for name in data.classes] + [-1], dtype=np.int64)
        labels: np.ndarray = table[data.labels]  # label -1 reads the last entry, -1
        return labels

    def _find(self, index: int) -> tuple[ImageDataset, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.datasets[which], index - (int(self._ends[which - 1]) if which else 0)


def check_same_classes(a: Dataset, b: Dataset) -> None:
    """Raise DataError unless two data sets (say, for training and validation) have the same class names."""
    if a.classes == b.classes:
        return
    only_a, only_b = sorted(set(a.classes) - set(b.classes)), sorted(set(b.classes) - set(a.classes))
    raise DataError(
        f"different classes: {len(a.classes)} in {a.source}, {len(b.classes)} in {b.source}; "
        f"only in the first: {_some(only_a)}; only in the second: {_some(only_b)}"
    )


def _images_below(folder: Path) -> list[str]:
    found = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(parent, name)]
        found += [os.path.join(parent, name) for name in names if _is_image(name)]
    return sorted(found)


def _leads_back(parent: str, name: str) -> bool:
    """Whether a folder is a link to one that contains it: following it would never end."""
    here, there = os.path.realpath(parent), os.path.realpath(os.path.join(parent, name))
    return os.path.commonpath([here, there]) == there


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


class Subset:
    """`count` images of a data set, spread evenly over it."""

    def __init__(self, dataset: ImageDataset, count: int):
        self.dataset, self.indices = dataset, spread(len(dataset), count)
        self.classes, self.source = dataset.classes, dataset.source
        self.labels = dataset.labels[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def load(self, index: int, draft: int | None = None) -> Image.Image:
        return self.dataset.load(int(self.indices[index]), draft)

    def name(self, index: int) -> str:
        return self.dataset.name(int(self.indices[index]))

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        """Those of the whole data set."""
        return self.dataset.file_sizes()


class Squares:
    """The images of a data set as squares of `size` pixels, fitted as `finola eval` does (`finola.data.images.fit`)."""

    def __init__(self, dataset: ImageDataset, size: int):
        self.dataset, self.size = dataset, size
        self.classes, self.source, self.labels = dataset.classes, dataset.source, dataset.labels

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, draft: int | None = None) -> Image.Image:
        return fit(self.dataset.load(index, draft), self.size)

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        """Those of the whole images."""
        return self.dataset.file_sizes()

    def name(self, index: int) -> str:
        return self.dataset.name(index)


def spread(length: int, count: int) -> np.ndarray:
    """`count` of the numbers 0 ... length - 1, evenly spread; all of them if there are no more."""
    return np.arange(min(count, length)) * length // min(count, length)


def require_labels(dataset: ImageDataset) -> None:
    """Raise DataError if an image has no class."""
    missing = int((dataset.labels < 0).sum())
    if missing:
        raise DataError(f"{dataset.source}: {missing} of {len(dataset)} images have no class; expected one folder for "
                        "each class, or shards with labels")
