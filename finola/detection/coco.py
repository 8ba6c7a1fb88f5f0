"""Data sets in COCO's format: a JSON file of images, categories and annotations, and a folder of images.

Category ids may have gaps: label k, 0 ... len(classes) - 1, is the category with the k-th smallest id. Boxes are
(left, top, right, bottom) in pixels, float32; the file itself holds (left, top, width, height).
"""

from __future__ import annotations

import json
import math
import os
import pickle
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from finola.data.datasets import spread
from finola.data.fingerprint import named_sizes
from finola.data.images import MAX_PIXELS, decode_image
from finola.errors import DataError, RecipeError

Target = dict[str, Tensor]


class CocoDetection:
    """The images of a COCO-format file, with or without annotations.

    A box with no area inside its image (zero, inverted, not finite, outside) is dropped, counted in `dropped` and
    reported in one warning; one that is partly outside is clipped. An annotation without an area above 0 takes its
    box's; `iscrowd` is 0 where it is not given. Without the section "annotations" no image has any.

    Args:
        annotations: the JSON file.
        images: the folder that its file names start from. By default ROOT/X for ROOT/annotations/instances_X.json,
            and the JSON's own folder where there is no such folder.
        limit: take so many images, spread evenly over the file's.

    Attributes:
        source: the JSON's path, as text.
        classes: category names, in the order of the labels.
        category_ids: the file's ids of the same.
        image_ids: the file's id of each image.
        sizes: (len, 2) int64, heights and widths.
        dropped: boxes left out.
        objects: boxes kept, crowds aside.

    Raises:
        DataError: the file cannot be read, an entry is not as COCO's format has it, or images are missing.
    """

    _segmentations: list[bytes]
    _masks_checked: bool

    def __init__(self, annotations: str | Path, images: str | Path | None = None, limit: int | None = None):
        self.source = str(annotations)
        data = _read_json(Path(annotations))
        categories = _section(data, "categories", self.source)
        entries = _section(data, "images", self.source)
        chosen = range(len(entries)) if limit is None else spread(len(entries), limit).tolist()
        place_of = {index: place for place, index in enumerate(chosen)}
        image_of = {entry["id"]: place_of.get(i, len(entries)) for i, (_, entry) in enumerate(entries)}
        entries = [entries[index] for index in chosen]
        names = {entry["id"]: _text(entry, "name", where) for where, entry in categories}
        self.category_ids = tuple(sorted(names))
        self.classes = tuple(names[key] for key in self.category_ids)
        self.image_ids = tuple(entry["id"] for _, entry in entries)
        self.sizes = np.array([_size(entry, where) for where, entry in entries], dtype=np.int64)
        self.files = [_file_name(where, entry) for where, entry in entries]
        self.folder = _folder_of(self.files, Path(annotations), images)
        self._read_annotations(_section(data, "annotations", self.source, required=False), image_of)

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return os.path.join(self.folder, self.files[index])

    def file_sizes(self) -> Iterable[tuple[str, int]]:
        """The annotation file, then the images."""
        annotations = Path(self.source)
        return chain(named_sizes(annotations.parent, [annotations]),
                     named_sizes(self.folder, [self.name(index) for index in range(len(self))]))

    def load(self, index: int) -> Image.Image:
        """The image in RGB. Raises DataError if it cannot be decoded or its size is not that in the JSON."""
        image = decode_image(self.name(index))
        height, width = self.sizes[index]
        if image.size != (width, height):
            raise DataError(
                f"{self.name(index)}: the image is {image.width}x{image.height}, {self.source} says "
                f"{width}x{height}; the boxes would be wrong, correct the one that is"
            )
        return image

    def target(self, index: int, masks: bool = False) -> Target:
        """The annotations of an image in its own pixels, in the file's order:

        boxes (n, 4) float32, labels (n,) int64, area (n,) float32, iscrowd (n,) bool, and with `masks`
        masks (n, H, W) uint8. Raises DataError if a mask is asked for that is not there or is malformed.
        """
        these = slice(self._first[index], self._first[index + 1])
        target = {
            "boxes": torch.from_numpy(self._boxes[these]),
            "labels": torch.from_numpy(self._labels[these]),
            "area": torch.from_numpy(self._areas[these]),
            "iscrowd": torch.from_numpy(self._crowds[these]),
        }
        target = {key: value.clone() for key, value in target.items()}
        if masks:
            target["masks"] = torch.from_numpy(self._masks(index, self._ids[these]))
        return target

    def require_masks(self) -> None:
        """Raise DataError unless every annotation has a segmentation in one of COCO's forms. The check is
        made once: every loader asks for it, and for COCO it takes seconds."""
        if self._masks_checked:
            return
        if self._without_masks:
            raise DataError(
                f"{self.source}: {len(self._without_masks)} of {len(self._ids)} annotations have no segmentation, the "
                f"first is annotation {self._without_masks[0]}; masks need polygons or RLE, train on boxes alone"
            )
        for index, (height, width) in enumerate(self.sizes.tolist()):
            ids = self._ids[self._first[index] : self._first[index + 1]]
            for key, segmentation in zip(ids, pickle.loads(self._segmentations[index]), strict=True):
                check_segmentation(segmentation, height, width, f"{self.source}: annotation {key}")
        self._masks_checked = True

    def _read_annotations(self, entries: list, image_of: dict[int, int]) -> None:
        images = [image_of[_known(entry, "image_id", image_of, "images", where)] for where, entry in entries]
        entries = [entry for entry, image in zip(entries, images, strict=True) if image < len(self)]  # of `limit`
        places = np.array([image for image in images if image < len(self)], dtype=np.int64)
        label_of = {key: i for i, key in enumerate(self.category_ids)}
        labels = [label_of[_known(entry, "category_id", label_of, "categories", where)] for where, entry in entries]
        crowds = [_crowd(entry, where) for where, entry in entries]
        boxes = np.array([_box(entry, where) for where, entry in entries], dtype=np.float64).reshape(-1, 4)
        areas = np.array([_area(entry, where) for where, entry in entries], dtype=np.float64)

        boxes, areas, kept = _corners(boxes, areas, self.sizes[places])
        self._report_dropped(kept)
        order = np.argsort(places, kind="stable")  # annotations of an image side by side, in the file's order
        order = order[kept[order]]
        self._first = np.searchsorted(places[order], np.arange(len(self) + 1))
        self._boxes, self._areas = boxes[order], areas[order]
        self._labels = np.array(labels, dtype=np.int64)[order]
        self._crowds = np.array(crowds, dtype=bool)[order]
        self.objects = int((~self._crowds).sum())
        self._ids = [entries[i][1]["id"] for i in order]
        self._keep_segmentations([entries[i][1].get("segmentation") for i in order])

    def _report_dropped(self, kept: np.ndarray) -> None:
        self.dropped = int((~kept).sum())
        if self.dropped:
            warnings.warn(
                f"{self.source}: {self.dropped} of {len(kept)} boxes left out: no area inside their images",
                stacklevel=4,
            )

    def _keep_segmentations(self, segmentations: list) -> None:
        """One string of bytes an image: worker processes share them, while touching millions of small Python
        objects would copy their memory into each."""
        self._without_masks = [key for key, value in zip(self._ids, segmentations, strict=True) if not value]
        spans = zip(self._first[:-1], self._first[1:], strict=True)
        self._masks_checked = False
        self._segmentations = [pickle.dumps(segmentations[first:last]) for first, last in spans]

    def _masks(self, index: int, ids: list[int]) -> np.ndarray:
        """(n, H, W) uint8."""
        height, width = (int(side) for side in self.sizes[index])
        masks = np.zeros((len(ids), height, width), dtype=np.uint8)
        for i, segmentation in enumerate(pickle.loads(self._segmentations[index])):
            masks[i] = decode_mask(segmentation, height, width, f"{self.source}: annotation {ids[i]}")
        return masks


def _corners(boxes: np.ndarray, areas: np.ndarray, sizes: np.ndarray) -> tuple:
    """Boxes (n, 4), left, top, width, height, in images of sizes (n, 2), height and width -> their corners inside the
    images (n, 4) float32, areas (n,) float32, and which have any area there (n,) bool."""
    finite = np.isfinite(boxes).all(axis=1)
    boxes = np.where(finite[:, None], boxes, 0)
    corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    corners = np.clip(corners, 0, sizes[:, [1, 0, 1, 0]]).astype(np.float32)
    sides = corners[:, 2:] - corners[:, :2]
    areas = np.where(areas > 0, areas, sides.prod(axis=1)).astype(np.float32)
    return corners, areas, finite & (sides > 0).all(axis=1)


def open_coco(words: Sequence[str | Path], option: str = "--data", limit: int | None = None) -> CocoDetection:
    """The data set that the words of an option name: an annotation file, and perhaps the folder of its images."""
    if not 1 <= len(words) <= 2:
        raise RecipeError(f"{option}: got {len(words)} words, expected an annotation file and perhaps the folder of its"
                          " images")
    annotations, *folder = words
    return CocoDetection(annotations, folder[0] if folder else None, limit)


def decode_mask(segmentation: list | dict, height: int, width: int, name: str) -> np.ndarray:
    """The mask (H, W) uint8 of COCO's "segmentation": polygons, or run lengths as numbers or as compressed text.

    Raises:
        DataError: it is neither, or run lengths of another size; `name` is what the message calls it.
    """
    from faster_coco_eval.core import mask

    check_segmentation(segmentation, height, width, name)
    try:
        decoded: np.ndarray = mask.decode(mask.segmToRle(segmentation, width, height))
        return decoded
    except (RuntimeError, ValueError) as error:
        what = " ".join(str(error).split())[:100]
        raise _bad_segmentation(height, width, name, f"what cannot be decoded ({what})") from error


def check_segmentation(segmentation: list | dict, height: int, width: int, name: str) -> None:
    """Raise DataError unless it has the form of polygons or of run lengths for an image of this size."""
    if isinstance(segmentation, dict):
        if segmentation.get("size") != [height, width] or not isinstance(segmentation.get("counts"), list | str):
            raise _bad_segmentation(height, width, name, f"size {segmentation.get('size')}")
    elif not _are_polygons(segmentation):
        raise _bad_segmentation(height, width, name, str(segmentation)[:60])


def _bad_segmentation(height: int, width: int, name: str, got: str) -> DataError:
    return DataError(f"{name}: segmentation: expected polygons of 3 or more points, or run lengths of {height}x{width},"
                     f" got {got}; correct the annotation")


def _are_polygons(segmentation: object) -> bool:
    return (
        isinstance(segmentation, list)
        and len(segmentation) > 0
        and all(isinstance(points, list) and len(points) >= 6 and len(points) % 2 == 0 for points in segmentation)
        and all(_is_number(value) and math.isfinite(value) for points in segmentation for value in points)
    )


def _read_json(path: Path) -> dict:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; expected COCO annotations (JSON)") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); expected COCO annotations (JSON)") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise DataError(f"{path}: not JSON ({error}); expected COCO annotations") from error
    if not isinstance(data, dict):
        raise DataError(
            f"{path}: got a JSON {type(data).__name__}, expected an object with images, categories and annotations "
            "(a list may be a file of results)"
        )
    return data


def _section(data: dict, key: str, source: str, required: bool = True) -> list[tuple[str, dict]]:
    """(what messages call it, the entry) for each entry of a section; the ids are there and differ."""
    if key not in data and not required:
        return []
    entries = data.get(key)
    if not isinstance(entries, list) or (required and not entries):
        got = f"a {type(entries).__name__}" if key in data else "none"
        got = "an empty one" if entries == [] else got
        raise DataError(f"{source}: section {key!r}: got {got}, expected a list; not a file of COCO annotations")
    named = []
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise DataError(f"{source}: {key}[{i}]: got a {type(entry).__name__}, expected an object; correct it")
        named.append((f"{source}: {key}[{i}] (id {entry.get('id')})", entry))
    ids = set()
    for where, entry in named:
        number = _integer(entry, "id", where)
        if number in ids:
            raise DataError(f"{where}: another one before it has the same id; give each its own")
        ids.add(number)
    return named


def _integer(entry: dict, key: str, where: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{where}: {key}: got {value!r}, expected a whole number; correct the entry")
    return value


def _text(entry: dict, key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {key}: got {value!r}, expected text; correct the entry")
    return value


def _size(entry: dict, where: str) -> tuple[int, int]:
    height, width = _integer(entry, "height", where), _integer(entry, "width", where)
    if min(height, width) < 1 or height * width > MAX_PIXELS:
        raise DataError(f"{where}: got {width}x{height}, expected 1 to {MAX_PIXELS:,} pixels; correct the entry")
    return height, width


def _file_name(where: str, entry: dict) -> str:
    name = _text(entry, "file_name", where)
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DataError(f"{where}: file_name: {name} leaves the folder of the images; expected a path inside it")
    return name


def _known(entry: dict, key: str, known: dict[int, int], section: str, where: str) -> int:
    value = _integer(entry, key, where)
    if value not in known:
        raise DataError(f"{where}: {key}: {value} is not among the {len(known)} {section}; correct the entry")
    return value


def _crowd(entry: dict, where: str) -> bool:
    value = entry.get("iscrowd", 0)
    if value not in (0, 1):
        raise DataError(f"{where}: iscrowd: got {value!r}, expected 0 or 1; correct the entry")
    return bool(value)


def _box(entry: dict, where: str) -> list[float]:
    value = entry.get("bbox")
    if not isinstance(value, list) or len(value) != 4 or not all(map(_is_number, value)):
        raise DataError(f"{where}: bbox: got {value!r}, expected [left, top, width, height]; correct the entry")
    return value


def _area(entry: dict, where: str) -> float:
    """The area in square pixels, or 0 where none is given."""
    value = entry.get("area") or 0
    if not _is_number(value):
        raise DataError(f"{where}: area: got {value!r}, expected a number; correct the entry")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _folder_of(names: list[str], annotations: Path, images: str | Path | None) -> Path:
    """The folder of the images; DataError if any is not there."""
    tried = [Path(images)] if images is not None else _default_folders(annotations)
    folder = next((path for path in tried if path.is_dir()), tried[-1])
    missing = _missing(folder, names)
    if missing:
        raise DataError(
            f"{annotations}: {len(missing)} of {len(names)} images are missing, the first is "
            f"{folder / missing[0]}; folders tried: {', '.join(map(str, tried))}; name the folder of the images"
        )
    return folder


def _default_folders(annotations: Path) -> list[Path]:
    own = annotations.parent
    if own.name == "annotations" and annotations.stem.startswith("instances_"):
        return [own.parent / annotations.stem.removeprefix("instances_"), own]
    return [own]


def _missing(folder: Path, names: list[str]) -> list[str]:
    """Those not in the folder. Each folder is listed once, which is far quicker than a look at every file."""
    listed: dict[str, set[str]] = {}
    missing = []
    for name in names:
        below, base = os.path.split(name)
        if below not in listed:
            listed[below] = _listing(folder / below)
        if base not in listed[below]:
            missing.append(name)
    return missing


def _listing(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()  # no such folder: none of its files is there
