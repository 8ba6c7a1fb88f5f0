"""Object detection and instance segmentation with the encoders (paper, appendices "Robust Task Agnostic Encoders" and
"Fine-tuning on COCO").

    heads         MF-Dec-522, MF-Dec-211 and DETR's own transformer: the encoder's maps -> object queries
    detr          an encoder with one of these heads, trained end to end by matching queries to objects
    mask_rcnn     torchvision's Mask R-CNN on the encoders
    coco          data sets in COCO's format
    scores        COCO's average precision, results in COCO's format
    evaluation    of a detector on a data set; predict: on photographs
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "CocoDetection": "finola.detection.coco",
    "create_detection_head": "finola.detection.heads",
    "detect": "finola.detection.predict",
    "evaluate": "finola.detection.evaluation",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'finola.detection' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
