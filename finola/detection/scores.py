"""COCO's average precision, and detections in COCO's results format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torchmetrics.detection import MeanAveragePrecision

# COCO's name for a score -> torchmetrics'
NAMES = {
    "ap": "map",
    "ap50": "map_50",
    "ap75": "map_75",
    "ap_small": "map_small",
    "ap_medium": "map_medium",
    "ap_large": "map_large",
    "ar_1": "mar_1",
    "ar_10": "mar_10",
    "ar_100": "mar_100",
}
DETECTION_KEYS = ("boxes", "scores", "labels", "masks")
TARGET_KEYS = ("boxes", "labels", "area", "iscrowd", "masks")


Scores = dict[str, float | None | dict[str, float | None]]  # by name, and for each class


class CocoScores(MeanAveragePrecision):
    """COCO's scores of boxes and, if asked, masks, over all images of all processes; a torchmetrics `Metric`.

    Agrees with pycocotools: crowds count neither as found nor as missed, the annotations' areas tell small (below
    32^2 pixels), medium (below 96^2) and large ones, and of an image only the 100 detections of highest score count.

    Args:
        masks: score masks as well as boxes.
        classes: names of the labels; with them, there is a score for each class too.
    """

    def __init__(self, masks: bool = False, classes: tuple[str, ...] = ()):
        import faster_coco_eval  # noqa: F401  (where it is missing, the error that names it)

        super().__init__(
            iou_type=("bbox", "segm") if masks else "bbox",
            backend="faster_coco_eval",
            class_metrics=bool(classes),
            # COCO's own in float64: torchmetrics' defaults are rounded to float32, and a recall of just 0.1 misses
            # a threshold of 0.1000000015, which costs up to 0.007 of a class's average precision
            iou_thresholds=np.linspace(0.5, 0.95, 10).tolist(),
            rec_thresholds=np.linspace(0, 1, 101).tolist(),
        )
        self.prefixes = {"box": "bbox_", "mask": "segm_"} if masks else {"box": ""}
        self.classes = tuple(classes)

    def update(self, detections: list[dict[str, Tensor]], targets: list[dict[str, Tensor]]) -> None:
        """Take in what was found in some images, and what is there (`CocoDetection.target`).

        detections: boxes (n, 4), scores (n,), labels (n,) and with `masks` masks (n, H, W) bool.
        targets: boxes, labels, area, iscrowd and with `masks` masks (n, H, W) uint8.
        """
        found = [_on_cpu(of_image, DETECTION_KEYS) for of_image in detections]
        there = [_on_cpu(of_image, TARGET_KEYS) for of_image in targets]
        for of_image in there:
            of_image["iscrowd"] = of_image["iscrowd"].long()
        super().update(found, there)

    def compute(self) -> Scores:
        """box_ap, box_ap50, ... (see NAMES) and with `masks` mask_ap, ...: 0 to 1, or None without any object (no
        crowd) of the kind. With `classes` also box_ap_per_class, mask_ap_per_class: the AP of each name."""
        found = super().compute()
        scores: Scores = {
            f"{kind}_{name}": _or_none(found[prefix + key])
            for kind, prefix in self.prefixes.items()
            for name, key in NAMES.items()
        }
        if self.classes:
            labels = found["classes"].tolist()
            for kind, prefix in self.prefixes.items():
                of_label = dict(zip(labels, map(_or_none, found[f"{prefix}map_per_class"]), strict=True))
                scores[f"{kind}_ap_per_class"] = {name: of_label.get(i) for i, name in enumerate(self.classes)}
        return scores

    def _sync_dist(self, dist_sync_fn: Callable | None = None, process_group: Any | None = None) -> None:
        # torchmetrics gathers one image's tensors after the other, which never ends where processes have seen
        # different numbers of images, as in the last batch; here each process sends all it has at once
        own = {name: getattr(self, name) for name in self._defaults}
        group = process_group or self.process_group
        everyone: list[dict[str, list]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
        for name in own:
            setattr(self, name, [of_image for states in everyone for of_image in states[name]])


def coco_results(detections: dict[str, Tensor], image_id: int, category_ids: tuple[int, ...]) -> list[dict]:
    """What was found in one image as COCO's results format has it, one dict an object.

    Args:
        detections: boxes (n, 4) left, top, right, bottom in the file's pixels, scores (n,), labels (n,), and
            perhaps masks (n, H, W) bool.
        category_ids: the data set's category id of each label.
    """
    boxes = detections["boxes"].detach().double().cpu()
    boxes[:, 2:] -= boxes[:, :2]
    results = [
        {
            "image_id": image_id,
            "category_id": category_ids[label],
            "bbox": [round(value, 3) for value in box],
            "score": round(score, 6),
        }
        for box, label, score in zip(
            boxes.tolist(), detections["labels"].tolist(), detections["scores"].tolist(), strict=True
        )
    ]
    if "masks" in detections:
        for result, run_lengths in zip(results, _encode(detections["masks"]), strict=True):
            result["segmentation"] = run_lengths
    return results


def _encode(masks: Tensor) -> list[dict]:
    """Masks (n, H, W) bool -> compressed run lengths with text, which JSON can hold."""
    from faster_coco_eval.core import mask

    encoded = mask.encode(np.asfortranarray(masks.byte().permute(1, 2, 0).cpu().numpy()))
    return [{"size": list(each["size"]), "counts": each["counts"].decode("ascii")} for each in encoded]


def _on_cpu(of_image: dict[str, Tensor], keys: tuple[str, ...]) -> dict[str, Tensor]:
    return {key: of_image[key].detach().cpu() for key in keys if key in of_image}


def _or_none(value: Tensor) -> float | None:
    """COCO says -1 where there is nothing to score."""
    return value.item() if value.item() >= 0 else None
