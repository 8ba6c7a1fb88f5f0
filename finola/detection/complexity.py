"""Parameters and multiply-adds of the detection heads and the detectors, for an image of the paper's size."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from finola.detection.detector import Detector
from finola.detection.detr import Detr, DetrConfig
from finola.detection.heads import BLOCKS, DIM
from finola.detection.mask_rcnn import BOX_CELLS, MASK_CELLS, MaskRcnnConfig
from finola.evaluation.complexity import DETECTION_SIZE, Cost, cost_of_encoder, on_meta
from finola.evaluation.flops import Count, count

DETECTION_WIDTHS = (720, 1440, 2880)  # of the encoders under its detection heads


def heads() -> dict[str, Callable[[], Cost]]:
    """Name -> what counts a detection head on the maps of an encoder."""
    return {f"{head}_w{width}": partial(_cost_of_head, head, f"mobileformer_w{width}")
            for head in BLOCKS for width in DETECTION_WIDTHS}


def _cost_of_head(name: str, encoder: str) -> Cost:
    """A detection head on the maps of an encoder, with the layers that give its queries classes and boxes."""
    return _sum_of_parts(_head_and_outputs(DetrConfig(encoder, head=name)))


def cost_of_detr(config: DetrConfig) -> Cost:
    return _sum_of_parts((cost_of_encoder(config.encoder, DETECTION_SIZE), *_head_and_outputs(config)))


def _head_and_outputs(config: DetrConfig) -> tuple[Count, Count]:
    with on_meta():
        model = Detr(config)
        return count(model.head, _maps(model)), count(model.outputs, torch.empty(1, config.num_queries, DIM))


def cost_of_mask_rcnn(config: MaskRcnnConfig) -> Cost:
    """With as many proposals and objects as an image can have."""
    encoder, width = cost_of_encoder(config.encoder, DETECTION_SIZE), config.pyramid_channels
    with on_meta():
        model = config.build()
        model.eval()  # in training there are more proposals
        maps, rpn, heads = _maps(model), model.rpn, model.roi_heads
        levels = list(model.pyramid(maps).values())
        boxes = torch.empty(rpn.post_nms_top_n(), width, BOX_CELLS, BOX_CELLS)
        masks = torch.empty(config.detections, width, MASK_CELLS, MASK_CELLS)
        return _sum_of_parts((
            encoder, count(model.pyramid, maps), count(rpn.head, levels),
            count(nn.Sequential(heads.box_head, heads.box_predictor), boxes),
            count(nn.Sequential(heads.mask_head, heads.mask_predictor), masks)))


def _maps(model: Detector) -> dict[int, Tensor]:
    """The maps a detector reads, for an image of DETECTION_SIZE."""
    return {stride: torch.empty(1, model.channels[stride], *(math.ceil(side / stride) for side in DETECTION_SIZE))
            for stride in model.strides}


def _sum_of_parts(parts: tuple[Count, ...]) -> Cost:
    return (3, *DETECTION_SIZE), Count(sum(part.params for part in parts), sum(part.macs for part in parts))
