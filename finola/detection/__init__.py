"""Object detection and instance segmentation with the encoders (paper, appendices "Robust Task Agnostic Encoders" and
"Fine-tuning on COCO").

    heads         MF-Dec-522, MF-Dec-211 and DETR's own transformer: the encoder's maps -> object queries
    detr          an encoder with one of these heads, trained end to end by matching queries to objects
    mask_rcnn     torchvision's Mask R-CNN on the encoders
    coco          data sets in COCO's format
    scores        COCO's average precision, results in COCO's format
    evaluation    of a detector on a data set; predict: on photographs
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finola.detection.coco import CocoDetection
    from finola.detection.evaluation import evaluate
    from finola.detection.heads import create_detection_head
    from finola.detection.predict import detect

__all__ = ["CocoDetection", "create_detection_head", "detect", "evaluate"]

HOMES = {  # name -> the module that has it, imported on first use
    "CocoDetection": "coco",
    "create_detection_head": "heads",
    "detect": "predict",
    "evaluate": "evaluation",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in HOMES:
            return getattr(import_module(f"finola.detection.{HOMES[name]}"), name)
        raise AttributeError(f"module 'finola.detection' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
