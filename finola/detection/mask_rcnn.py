"""Mask R-CNN (He et al., ICCV 2017) on the encoders: boxes and masks (paper, table "Comparisons with MoCo-v2").

    images (B, 3, H, W) -> encoder -> maps at strides 4, 8, 16 -> pyramid at strides 4 ... 64 -> proposals (the region
    proposal network, RPN) -> for each its part of the pyramid -> class, box (7x7), mask (14x14 -> 28x28)

Pyramid, RPN and heads are torchvision's and have no norms. Inside them class 0 is the background.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import expand_boxes, expand_masks
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, clip_boxes_to_image
from torchvision.ops.poolers import initLevelMapper

from finola.detection.detector import Detector, DetectorConfig
from finola.errors import FinolaError

PYRAMID_STRIDES = (4, 8, 16, 32, 64)
POOLED_STRIDES = (4, 8, 16, 32)  # of the maps that classes, boxes and masks are read from; 64 is for proposals alone
ASPECT_RATIOS = (0.5, 1.0, 2.0)  # height / width
BOX_CELLS, MASK_CELLS = 7, 14
MASK_CONVS = 4
PASTED_PIXELS = 2**22  # of all masks that are pasted at once: 16 MiB in float32, needed three times


@dataclass(frozen=True)
class MaskRcnnConfig(DetectorConfig):
    """What defines a Mask R-CNN; see `DetectorConfig`.

    Attributes:
        anchor_sizes: sides of the square anchors in pixels, one for each stride of the pyramid: 4, 8, 16, 32, 64.
        pyramid_channels: of every map of the pyramid.
        box_head_width: of the two layers before class and box.
        mask_head_width: of the four convolutions before the mask.
        rpn_batch, roi_batch: anchors and proposals of an image that a training step learns from.
        detections: objects found in an image at most.
    """

    kind: ClassVar[str] = "mask_rcnn"
    cost: ClassVar[str] = "finola.detection.complexity:cost_of_mask_rcnn"
    masks: ClassVar[bool] = True

    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    pyramid_channels: int = 256
    box_head_width: int = 1024
    mask_head_width: int = 256
    rpn_batch: int = 256
    roi_batch: int = 512
    detections: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchor_sizes", tuple(self.anchor_sizes))
        super().__post_init__()

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if len(self.anchor_sizes) != len(PYRAMID_STRIDES) or min(self.anchor_sizes) < 1:
            yield (f"anchor_sizes: got {self.anchor_sizes}, expected {len(PYRAMID_STRIDES)} positive "
                   f"numbers, one for each of the strides {', '.join(map(str, PYRAMID_STRIDES))}")
        yield from self.below(1, "pyramid_channels", "box_head_width", "mask_head_width", "rpn_batch", "roi_batch",
                              "detections")

    def build(self) -> MaskRcnn:
        return MaskRcnn(self)


class Pyramid(FeaturePyramidNetwork):
    """The encoder's maps -> maps of `out_channels` at `PYRAMID_STRIDES`, those beyond stride 16 subsampled from it."""

    def __init__(self, in_channels: list[int], out_channels: int):
        super().__init__(in_channels, out_channels)
        self.out_channels = out_channels

    def forward(self, maps: dict[int, Tensor]) -> dict[str, Tensor]:
        """Stride -> map (B, C, H / stride, W / stride); the result's keys are strings, as torchvision's pooling
        wants them."""
        maps = super().forward(maps)
        for stride in PYRAMID_STRIDES[len(maps):]:
            maps[stride] = F.max_pool2d(maps[stride // 2], 1, stride=2)
        return {str(stride): level for stride, level in maps.items()}


class Anchors(AnchorGenerator):
    """Anchors at the pyramid's strides, in float32 whatever the maps are in.

    torchvision's own divides the image's side by the map's, which is 61 at stride 64 and side 800."""

    def forward(self, images: ImageList, maps: list[Tensor]) -> list[Tensor]:
        """For each image (N, 4), in pixels."""
        self.set_cell_anchors(torch.float32, maps[0].device)
        strides = [(stride, stride) for stride in PYRAMID_STRIDES]
        anchors = torch.cat(self.grid_anchors([level.shape[-2:] for level in maps], strides))
        return [anchors] * len(images.image_sizes)


class RoiPool(MultiScaleRoIAlign):
    """`cells` x `cells` parts of the pyramid at `POOLED_STRIDES`.

    torchvision's own guesses the strides from the first images it sees, wrongly where much of them is padding."""

    def __init__(self, cells: int):
        super().__init__([str(stride) for stride in POOLED_STRIDES], cells, sampling_ratio=2)
        self.scales = [1 / stride for stride in POOLED_STRIDES]
        self.map_levels = initLevelMapper(2, 5)  # the logarithms of the first and the last stride


class MaskRcnn(Detector):
    """Images -> objects with masks, through proposals. `sizes` keep these out of the padding.

    The convolutions after the encoder see the padding, as in torchvision, a few positions deep."""

    config: MaskRcnnConfig
    strides = (4, 8, 16)

    def __init__(self, config: MaskRcnnConfig):
        super().__init__(config)
        if missing := [stride for stride in self.strides if stride not in self.channels]:
            raise FinolaError(f"encoder: {config.encoder} has no maps at strides {missing}; Mask R-CNN reads those at "
                              f"{self.strides}, which the Mobile-Formers and ResNets have")
        channels = config.pyramid_channels
        self.pyramid = Pyramid([self.channels[stride] for stride in self.strides], channels)
        anchors = Anchors(tuple((size,) for size in config.anchor_sizes), (ASPECT_RATIOS,) * len(PYRAMID_STRIDES))
        parts = MaskRCNN(
            self.pyramid,
            rpn_anchor_generator=anchors,
            rpn_head=_in_float32(RPNHead(channels, len(ASPECT_RATIOS))),
            rpn_batch_size_per_image=config.rpn_batch,
            box_roi_pool=RoiPool(BOX_CELLS),
            box_head=TwoMLPHead(channels * BOX_CELLS**2, config.box_head_width),
            box_predictor=_box_predictor(config),
            box_batch_size_per_image=config.roi_batch,
            box_detections_per_img=config.detections,
            mask_roi_pool=RoiPool(MASK_CELLS),
            mask_head=MaskRCNNHeads(channels, (config.mask_head_width,) * MASK_CONVS, dilation=1),
            mask_predictor=_mask_predictor(config),
        )
        self.rpn, self.roi_heads = parts.rpn, parts.roi_heads

    def losses(self, images: Tensor, padding: Tensor | None, sizes: Tensor, targets: list[dict]) -> dict[str, Tensor]:
        """Parts "objectness" and "rpn_box_reg" of the proposals, "classifier", "box_reg" and "mask" of the objects.

        In training mode; `targets` with `masks` (n, h, w) in {0, 1}, of the image's size without padding."""
        pictures, maps = self._pyramid(images, padding, sizes)
        targets = [target | {"labels": target["labels"] + 1} for target in targets]
        proposals, rpn_losses = self.rpn(pictures, maps, targets)
        _, losses = self.roi_heads(maps, proposals, pictures.image_sizes, targets)
        return {name.removeprefix("loss_"): loss for name, loss in (rpn_losses | losses).items()}

    @torch.no_grad()
    def detect(self, images: Tensor, padding: Tensor | None, sizes: Tensor, originals: Tensor) -> list[dict]:
        """For each image `boxes` (n, 4), `scores`, `labels` (n,) and `masks` (n, height, width) bool of the
        original's size, n at most `detections`. In evaluation mode."""
        pictures, maps = self._pyramid(images, padding, sizes)
        proposals, _ = self.rpn(pictures, maps)
        found, _ = self.roi_heads(maps, proposals, pictures.image_sizes)
        return [_in_original(objects, size, original)
                for objects, size, original in zip(found, sizes.tolist(), originals.tolist(), strict=True)]

    def reset_outputs(self) -> None:
        device = self.mean.device
        self.roi_heads.box_predictor = _box_predictor(self.config).to(device)
        self.roi_heads.mask_predictor = _mask_predictor(self.config).to(device)

    def _pyramid(self, images: Tensor, padding: Tensor | None, sizes: Tensor) -> tuple[ImageList, dict[str, Tensor]]:
        """What torchvision's parts take: the images with their sizes, and the maps."""
        return ImageList(images, [tuple(size) for size in sizes.tolist()]), self.pyramid(self.maps(images, padding))


def _box_predictor(config: MaskRcnnConfig) -> nn.Module:
    return _in_float32(FastRCNNPredictor(config.box_head_width, config.num_classes + 1))


def _mask_predictor(config: MaskRcnnConfig) -> nn.Module:
    return _in_float32(MaskRCNNPredictor(config.mask_head_width, config.mask_head_width, config.num_classes + 1))


def _in_float32(module: nn.Module) -> nn.Module:
    """The module with float32 outputs under autocast too: bfloat16 would round a box's coordinates near 1333 pixels to
    multiples of 8."""
    module.register_forward_hook(_cast)
    return module


def _cast(module: nn.Module, inputs: tuple, outputs: Any) -> Any:
    return tree_map(Tensor.float, outputs)


def _in_original(objects: dict[str, Tensor], size: list[int], original: list[int]) -> dict[str, Tensor]:
    """What `roi_heads` found in an image of `size` (height, width) -> in the original of size `original`."""
    (height, width), (full_height, full_width) = size, original
    scale = objects["boxes"].new_tensor([full_width / width, full_height / height] * 2)
    boxes = clip_boxes_to_image(objects["boxes"] * scale, (full_height, full_width))
    masks = paste_masks(objects["masks"][:, 0], boxes, full_height, full_width)
    return {"boxes": boxes, "scores": objects["scores"], "labels": objects["labels"] - 1, "masks": masks}


def paste_masks(masks: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Where an image holds the objects: the masks, resized to their boxes (bilinear), are above one half.

    As torchvision's `paste_masks_in_image` says, but for rounding where the resized mask is one half; that one goes
    object by object and waits for their sizes. Here the host waits for nothing, and memory is bounded.

    Args:
        masks: (n, M, M) float32, each over its box.
        boxes: (n, 4) float32: left, top, right, bottom in pixels.

    Returns:
        (n, height, width) bool.
    """
    masks, scale = expand_masks(masks, padding=1)  # (n, M + 2, M + 2)
    left, top, right, bottom = expand_boxes(boxes, scale).to(torch.int64).unbind(1)  # (n,) each
    pasted = torch.empty(len(masks), height, width, dtype=torch.bool, device=masks.device)
    at_once = max(1, PASTED_PIXELS // (height * width))
    for start in range(0, len(masks), at_once):
        some = slice(start, start + at_once)
        lines = _resize(masks[some].mT, left[some], right[some], width).mT  # (k, M + 2, width)
        torch.gt(_resize(lines, top[some], bottom[some], height), 0.5, out=pasted[some])
    return pasted


def _resize(lines: Tensor, first: Tensor, last: Tensor, length: int) -> Tensor:
    """(n, M, W) with rows over the pixels `first` ... `last` (n,) -> (n, length, W): bilinear as in `F.interpolate`,
    zero beyond."""
    cells, objects = lines.shape[1], torch.arange(len(lines), device=lines.device)[:, None]
    pixels = last - first + 1  # (n,)
    step = torch.full_like(pixels, cells, dtype=torch.float32) / pixels
    where = torch.arange(length, device=lines.device) - first[:, None]  # (n, length), pixels from the box's first
    inside = (where >= 0) & (where < pixels[:, None])
    source = (step[:, None] * (where + 0.5) - 0.5).clamp(0, cells - 1)  # (n, length), in cells
    low = source.to(torch.int64)
    share = source - low
    after = lines[objects, (low + 1).clamp(max=cells - 1)]  # (n, length, W)
    return after.mul_((inside * share)[:, :, None]).addcmul_(lines[objects, low], (inside * (1 - share))[:, :, None])
