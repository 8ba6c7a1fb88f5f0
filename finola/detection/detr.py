"""DETR: an encoder, a head of queries, and for each query a class and a box (paper, appendix "Decoders for object
detection").

    images (B, 3, H, W) -> encoder -> maps -> head -> queries (B, N, 256) -> logits (B, N, K + 1), boxes (B, N, 4)

The head is MF-Dec-522 or MF-Dec-211, or DETR's own transformer (`finola.detection.heads`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert

from finola.detection.detector import SIDE_UNIT, Detector, DetectorConfig
from finola.detection.heads import DIM, DetrTransformer, MFDec, check_head, create_detection_head
from finola.detection.matcher import set_losses
from finola.models.base import ExportPart, wrong


@dataclass(frozen=True)
class DetrConfig(DetectorConfig):
    """What defines a DETR; see `DetectorConfig`.

    Attributes:
        head: "mf_dec_522", "mf_dec_211" or "transformer".
        num_queries: N, the objects found in an image at most.
        dropout: in the head.
        aux_loss: train the queries after every block of the head, not those after the last alone.
    """

    kind: ClassVar[str] = "detr"
    cost: ClassVar[str] = "finola.detection.complexity:cost_of_detr"

    head: str = "mf_dec_522"
    num_queries: int = 100
    dropout: float = 0.1
    aux_loss: bool = True

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        yield from wrong(check_head, self.head, self.num_queries, self.dropout)

    def build(self) -> Detr:
        return Detr(self)


class Outputs(nn.Module):
    """Queries (..., 256) -> logits (..., K + 1) and boxes (..., 4), centre and sides in parts of the image's."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.classify = nn.Linear(DIM, num_classes + 1)
        self.box = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM), nn.ReLU(),
                                 nn.Linear(DIM, 4))

    def forward(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        return self.classify(queries), self.box(queries).float().sigmoid()


class Detr(Detector):
    """Images -> at most N objects each, without anchors and without suppression."""

    config: DetrConfig
    head: MFDec | DetrTransformer

    def __init__(self, config: DetrConfig):
        super().__init__(config)
        self.head = create_detection_head(config.head, self.channels, config.num_queries, config.dropout)
        self.strides = self.head.strides
        self.outputs = Outputs(config.num_classes)

    def forward(self, images: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Images and their padding (see `finola.detection.detector`) -> logits (L, B, N, K + 1) and boxes
        (L, B, N, 4), after each of the head's L blocks; in evaluation, or without `aux_loss`, after the last alone."""
        queries = self.head(self.maps(images, padding), padding)
        if not (self.training and self.config.aux_loss):
            queries = queries[-1:]
        outputs: tuple[Tensor, Tensor] = self.outputs(torch.stack(queries))
        return outputs

    def losses(self, images: Tensor, padding: Tensor | None, sizes: Tensor, targets: list[dict]) -> dict[str, Tensor]:
        """Parts "class", "l1" and "giou" (see `finola.detection.matcher.set_losses`)."""
        relative = [{"labels": target["labels"],
                     "boxes": box_convert(target["boxes"] / _scale(size), "xyxy", "cxcywh")}
                    for target, size in zip(targets, sizes, strict=True)]
        logits, boxes = self(images, padding)
        return set_losses(logits, boxes, relative)

    @torch.no_grad()
    def detect(self, images: Tensor, padding: Tensor | None, sizes: Tensor, originals: Tensor) -> list[dict]:
        """For each image `boxes` (N, 4), `scores` and `labels` (N,): the class of highest score of every query."""
        logits, boxes = (output[-1] for output in self(images, padding))
        scores, labels = logits.float().softmax(-1)[..., :-1].max(-1)  # (B, N) each
        order = scores.argsort(dim=1, descending=True)
        boxes = box_convert(boxes, "cxcywh", "xyxy").clamp(0, 1) * torch.stack([_scale(s) for s in originals])[:, None]
        return [{"boxes": b[o], "scores": s[o], "labels": k[o]}
                for b, s, k, o in zip(boxes, scores, labels, order, strict=True)]

    def export_parts(self) -> dict[str, ExportPart]:
        """For squares of `image_size`, rounded down to a multiple of 32."""
        side = self.config.image_size // SIDE_UNIT * SIDE_UNIT
        example = self.mean.new_zeros(2, 3, side, side)
        meaning = (f"Each of the {self.config.num_queries} queries has a score from 0 to 1 for each class, and one box:"
                   " left, top, right and bottom in parts of the square's sides. Leave out what scores below 0.5."
                   " `finola detect predict` shows the model whole images, this file sees a square.")
        return {"detector": ExportPart(self._scores_and_boxes, example, "image", ("scores", "boxes"), meaning)}

    def _scores_and_boxes(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) -> for each query the scores of the classes (B, N, K), and left, top, right, bottom in parts of
        the image's sides (B, N, 4)."""
        logits, boxes = (output[-1] for output in self(images))
        return logits.float().softmax(-1)[..., :-1], box_convert(boxes, "cxcywh", "xyxy").clamp(0, 1)

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings of encoder and head, which are not decayed."""
        return super().no_weight_decay() | {f"head.{name}" for name in self.head.no_weight_decay()}

    def reset_outputs(self) -> None:
        fresh = nn.Linear(DIM, self.config.num_classes + 1)
        self.outputs.classify = fresh.to(self.outputs.classify.weight)


def _scale(size: Tensor) -> Tensor:
    """(height, width) -> (width, height, width, height), what relative boxes are multiplied with."""
    return size.flip(0).repeat(2).float()
