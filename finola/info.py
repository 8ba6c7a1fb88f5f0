"""Parameters and multiply-adds of every encoder, decoder, detection head and model, beside the paper's figures.

The paper's figures are the table `PAPER`; all others are counted by running the modules on the meta device
(`finola.flops`). Each row is for one input, whose shape (channels x height x width) it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from typing import NamedTuple

import timm
import torch
from timm.models import is_model_in_modules
from torch import Tensor, nn

from finola.autoregression import Finola, autoregress_lines, normalise, resolve_origin
from finola.classifier import ENCODER_MODULES
from finola.decoder import WIDTHS, ConvDecoder
from finola.detection.detr import Detr, DetrConfig
from finola.detection.heads import BLOCKS, DIM
from finola.detection.mask_rcnn import BOX_CELLS, MASK_CELLS
from finola.encoder import CONFIGS
from finola.errors import FinolaError
from finola.features import token_width
from finola.flops import Count, count
from finola.heads import create_head
from finola.model import ENCODER_STRIDE, FinolaAutoencoder
from finola.registry import CONFIGURATIONS, build_model, list_models

IMAGE_SIZE, EMBED_DIM = 256, 3072  # what the table's decoders are counted for
DETECTION_SIZE = (800, 1333)  # what the paper counts the multiply-adds of its encoders and detection heads for
DETECTION_WIDTHS = (720, 1440, 2880)  # of the encoders under its detection heads

# Parameters and multiply-adds as the paper prints them, rounded; None where it gives none.
PAPER = {
    # Table "COCO object detection results" (frozen backbone)
    "mobileformer_w720": (4_900_000, 5_600_000_000),
    "mobileformer_w1440": (11_700_000, 20_400_000_000),
    "mobileformer_w2880": (25_000_000, 77_500_000_000),
    # Table "ablation" (b)
    "mobileformer_w4320": (43_500_000, None),
    "mobileformer_w5760": (67_600_000, None),
    # Section "Introduction"; the table of linear probing rounds it to 6M
    "mobileformer_w720+lin": (5_800_000, 285_000_000),
    # Table "Comparison with masked encoding methods"
    "mobileformer_w1440+lin": (14_000_000, None),
    "mobileformer_w2880+lin": (28_000_000, None),
    "vit_tiny_patch16_224+lin": (6_000_000, None),
    "vit_small_patch16_224+lin": (22_000_000, None),
    "vit_base_patch16_224+lin": (86_000_000, None),
    # Table "Comparison with previous self-supervised methods" on fine-tuning
    "mobileformer_w720+tran4": (7_000_000, 700_000_000),
    "mobileformer_w1440+tran4": (20_000_000, 2_600_000_000),
    "mobileformer_w2880+tran4": (57_000_000, 9_900_000_000),
    # Table "Decoder specifications"
    "decoder_s32": (25_300_000, None),
    "decoder_s16": (18_500_000, None),
    "decoder_s8": (9_600_000, None),
    "decoder_s4": (7_900_000, None),
    "decoder_s2": (1_700_000, None),
    "decoder_s1": (1_200_000, None),
    # Table "COCO object detection results" (frozen backbone)
    "mf_dec_522_w720": (18_200_000, 31_100_000_000),
    "mf_dec_522_w1440": (18_600_000, 32_300_000_000),
    "mf_dec_522_w2880": (19_400_000, 34_600_000_000),
    "mf_dec_211_w720": (8_000_000, 12_200_000_000),
    "mf_dec_211_w1440": (8_400_000, 13_400_000_000),
    "mf_dec_211_w2880": (9_200_000, 15_700_000_000),
    # Table "Comparison with DETR-based models"
    "detr_mf_dec_522_mfw2880": (44_000_000, 112_000_000_000),
}


Measured = tuple[tuple[int, ...], Count]  # the input's shape and what was counted for it


class Row(NamedTuple):
    """One counted module; `macs` are for one input of the shape `input`."""

    name: str
    params: int
    macs: int
    input: str
    paper_params: int | None
    paper_macs: int | None


@cache
def row(name: str) -> Row:
    """The row of an encoder, an encoder with head, a decoder, a detection head or a model; FinolaError for an unknown
    name."""
    measure = _measurements().get(name)
    if measure is None:
        near = get_close_matches(name, _measurements(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise FinolaError(f"model: unknown name {name!r}{hint} (finola info lists them)")
    paper = PAPER.get(name.partition(" ")[0].removesuffix("_published"), (None, None))
    return _row(name, measure(), paper)


def countable_models() -> list[str]:
    """The registered models; without lightly, those that need none of its parts."""
    names = list_models()
    if find_spec("lightly"):
        return names
    return [name for name in names if CONFIGURATIONS[name].kind not in ("mae", "simmim", "moco")]


def all_rows() -> list[Row]:
    return [row(name) for name in _measurements()]


def model_parts(name: str) -> list[Row]:
    """Encoder, pooling, autoregression and decoder of a registered model, each with its own input."""
    config = replace(CONFIGURATIONS[name], start="random")  # a start sets values, which the meta device lacks
    size, (height, width) = config.image_size, (config.map_size, config.map_size)
    with torch.device("meta"):
        model = FinolaAutoencoder(config)
        features = torch.empty(1, model.encoder.num_features, *model.pool.size)
        q, z = torch.empty(1, config.embed_dim), torch.empty(1, config.embed_dim, height, width)
        counts = {
            "encoder": ((3, size, size), _encoder(config.encoder, (size, size))),
            "pooling": (features.shape[1:], count(model.pool, features)),
            "autoregression": ((config.embed_dim,), count(_countable(model.autoregression), q)),
            "decoder": (z.shape[1:], count(model.decoder, z)),
        }
    return [_row(part, measured) for part, measured in counts.items()]


def _row(name: str, measured: Measured, paper: tuple[int | None, int | None] = (None, None)) -> Row:
    shape, counted = measured
    return Row(name, *counted, "x".join(map(str, shape)), *paper)


@cache
def _measurements() -> dict[str, Callable[[], Measured]]:
    """What there is to count: name -> a function that gives the input's shape and the counts."""
    encoders = {}
    for name, config in CONFIGS.items():
        published_macs = PAPER[name][1] is not None
        size = DETECTION_SIZE if published_macs else (IMAGE_SIZE, IMAGE_SIZE)
        encoders[name] = partial(_measure_encoder, name, size)
        width = int(name.rpartition("w")[2])
        if width != config.out_channels:  # the name's other reading
            encoders[f"{name} (out_channels={width})"] = partial(
                _measure_encoder, name, size, out_channels=width)
    decoders = {}
    for scale in sorted(WIDTHS):
        decoders[f"decoder_s{scale}"] = partial(_measure_decoder, scale, None)
        decoders[f"decoder_s{scale}_published"] = partial(_measure_decoder, scale, "published")
    heads = {f"{head}_w{width}": partial(_measure_detection_head, head, f"mobileformer_w{width}")
             for head in BLOCKS for width in DETECTION_WIDTHS}
    kinds = {"classifier": _measure_classifier, "autoencoder": _measure_autoencoder, "masked": _measure_masked,
             "detr": _measure_detr, "mask_rcnn": _measure_mask_rcnn}
    measures = {name: kinds.get(CONFIGURATIONS[name].kind, _measure_baseline) for name in countable_models()}
    models = {name: partial(measure, name) for name, measure in measures.items()}
    return encoders | decoders | heads | models


def _measure_encoder(name: str, size: tuple[int, int], **options) -> Measured:
    return (3, *size), _encoder(name, size, **options)


@cache
def _encoder(name: str, size: tuple[int, int], **options) -> Count:
    with torch.device("meta"):
        if name in CONFIGS:
            options |= {"strict_img_size": False}
        elif is_model_in_modules(name, ENCODER_MODULES):  # a ViT
            options |= {"img_size": size}
        encoder = timm.create_model(name, num_classes=0, **options)
        return count(encoder, torch.empty(1, 3, *size))


def _measure_decoder(scale: int, reduce: str | None) -> Measured:
    shape = (EMBED_DIM, IMAGE_SIZE // scale, IMAGE_SIZE // scale)
    with torch.device("meta"):
        return shape, count(ConvDecoder(EMBED_DIM, scale, reduce), torch.empty(1, *shape))


def _measure_detection_head(name: str, encoder: str) -> Measured:
    """A detection head on the maps of an encoder, with the layers that give its queries classes and boxes."""
    return _sum_of_parts(_head_and_outputs(DetrConfig(encoder, head=name)))


def _measure_detr(name: str) -> Measured:
    config = CONFIGURATIONS[name]
    return _sum_of_parts((_encoder(config.encoder, DETECTION_SIZE), *_head_and_outputs(config)))


def _head_and_outputs(config: DetrConfig) -> tuple[Count, Count]:
    with torch.device("meta"):
        model = Detr(config)
        return count(model.head, _maps(model)), count(model.outputs, torch.empty(1, config.num_queries, DIM))


def _measure_mask_rcnn(name: str) -> Measured:
    """With as many proposals and objects as a picture can have."""
    config = CONFIGURATIONS[name]
    encoder, width = _encoder(config.encoder, DETECTION_SIZE), config.pyramid_channels
    with torch.device("meta"):
        model = build_model(config).eval()  # in training there are more proposals
        maps, rpn, heads = _maps(model), model.rpn, model.roi_heads
        levels = list(model.pyramid(maps).values())
        boxes = torch.empty(rpn.post_nms_top_n(), width, BOX_CELLS, BOX_CELLS)
        masks = torch.empty(config.detections, width, MASK_CELLS, MASK_CELLS)
        return _sum_of_parts((
            encoder, count(model.pyramid, maps), count(rpn.head, levels),
            count(nn.Sequential(heads.box_head, heads.box_predictor), boxes),
            count(nn.Sequential(heads.mask_head, heads.mask_predictor), masks)))


def _maps(model: nn.Module) -> dict[int, Tensor]:
    """The maps a detector reads, for a picture of DETECTION_SIZE."""
    return {stride: torch.empty(1, model.channels[stride], *(math.ceil(side / stride) for side in DETECTION_SIZE))
            for stride in model.strides}


def _sum_of_parts(parts: Sequence[Count]) -> Measured:
    return (3, *DETECTION_SIZE), Count(sum(part.params for part in parts), sum(part.macs for part in parts))


def _measure_classifier(name: str) -> Measured:
    config = CONFIGURATIONS[name]
    size = (config.image_size, config.image_size)
    encoder, channels, token_dim = _encoder(config.encoder, size), *_feature_widths(config.encoder)
    with torch.device("meta"):
        features = torch.empty(1, channels, *(side // ENCODER_STRIDE for side in size)), torch.empty(1, token_dim)
        head = create_head(config.head, channels, token_dim, config.num_classes, config.head_width)
        params, macs = count(head, *features)
    return (3, *size), Count(encoder.params + params, encoder.macs + macs)


@cache
def _feature_widths(encoder: str) -> tuple[int, int]:
    """Channels of an encoder's map and of its token."""
    with torch.device("meta"):
        model = timm.create_model(encoder, num_classes=0)
    return model.num_features, token_width(model)


def _measure_masked(name: str) -> Measured:
    """The mean over all places of the visible block. What a place costs is a sum of two equal functions of its row and
    its column, so the mean over the diagonal is that over all."""
    config = CONFIGURATIONS[name]
    block, grid = config.block_size, config.grid_size
    encoder = _encoder(config.encoder, (ENCODER_STRIDE * block, ENCODER_STRIDE * block))
    with torch.device("meta"):
        model = build_model(config)
        features = torch.empty(1, model.encoder.num_features, block, block)
        z = torch.empty(1, grid, grid, model.autoregression.dim)
        places = range(grid - block + 1)
        grown = sum(count(_Growth(model, (place, place)), features).macs for place in places) // len(places)
        decoder = count(model.decoder, z).macs
    params = sum(p.numel() for p in model.parameters())
    return (3, config.image_size, config.image_size), Count(params, encoder.macs + grown + decoder)


def _measure_baseline(name: str) -> Measured:
    """MAE and SimMIM: one image; MoCo: two views of one."""
    config = CONFIGURATIONS[name]
    shape = (3, config.image_size, config.image_size)
    views = (2, *shape) if config.kind == "moco" else shape
    return views, _forward(name, (1, *views))


def _forward(name: str, shape: tuple[int, ...]) -> Count:
    with torch.device("meta"):
        return count(build_model(CONFIGURATIONS[name]), torch.empty(shape))


def _measure_autoencoder(name: str) -> Measured:
    size, parts = CONFIGURATIONS[name].image_size, model_parts(name)
    return (3, size, size), Count(sum(part.params for part in parts), sum(part.macs for part in parts))


def _countable(autoregression: nn.Module) -> nn.Module:
    return _LineByLine(autoregression) if isinstance(autoregression, Finola) else autoregression


class _Growth(nn.Module):
    """The part of a masked FINOLA between encoder and decoder, for one place of the visible block."""

    def __init__(self, model: nn.Module, corner: tuple[int, int]):
        super().__init__()
        self.model, self.corner = model, corner

    def forward(self, features: Tensor) -> Tensor:
        return self.model.grow(features, self.corner)


class _LineByLine(nn.Module):
    """The operator in its plain form, which runs on the meta device. It makes the products of the fast one,
    2 (H W - 1) C² multiply-adds: each position but the origin takes one step on each of the two paths."""

    def __init__(self, finola: Finola):
        super().__init__()
        self.finola = finola

    def forward(self, q: Tensor) -> Tensor:
        finola = self.finola
        weights = {direction: getattr(finola, direction) for direction in finola.directions}
        norms = dict.fromkeys(weights, normalise)
        origin = resolve_origin(finola.origin, finola.size)
        return autoregress_lines(q, finola.size, weights, norms, origin, finola.path)
