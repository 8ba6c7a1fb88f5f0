"""Parameters and multiply-adds of every encoder, decoder, detection head and model, beside the paper's figures.

The paper's figures are the table `PAPER`; all others are counted by running the modules on the meta device
(`finola.evaluation.flops`). Each row is for one input, whose shape (channels x height x width) it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from finola.autoregression import Finola, normalise, step
from finola.errors import FinolaError, near
from finola.evaluation.flops import Count, count
from finola.models.autoencoder import AutoencoderConfig, FinolaAutoencoder
from finola.models.base import ModelConfig, ParametersOnMeta, resolve
from finola.models.classifier import ClassifierConfig, is_vit
from finola.models.decoder import DECODER_WIDTHS, ConvDecoder
from finola.models.encoders import create_encoder
from finola.models.heads import create_head, token_width
from finola.models.masked import MaskedConfig, MaskedFinola
from finola.models.mobileformer import CONFIGS, ENCODER_STRIDE
from finola.registry import MODELS, config_class, list_models, model_config

IMAGE_SIZE, EMBED_DIM = 256, 3072  # what the table's decoders are counted for
PARTS = ("finola.detection.complexity:heads",)  # more to count: functions that give it, imported on first use
DETECTION_SIZE = (800, 1333)  # what the paper counts the multiply-adds of its encoders and detection heads for
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


Cost = tuple[tuple[int, ...], Count]  # the input's shape and what was counted for it


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules and tensors without memory, and modules without random numbers."""
    with torch.device("meta"), ParametersOnMeta():
        yield


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
    measurements = _measurements()
    if name not in measurements:
        raise FinolaError(f"model: unknown name {name!r}{near(name, measurements)} (finola info lists them)")
    paper = PAPER.get(name.partition(" ")[0].removesuffix("_published"), (None, None))
    return _row(name, measurements[name](), paper)


def countable_models() -> list[str]:
    """The registered models; without lightly, those that need none of its parts."""
    needed = {name: config_class(MODELS[name].kind).needs for name in list_models()}
    return [name for name, package in needed.items() if package is None or find_spec(package)]


def all_rows(progress: bool = False) -> list[Row]:
    """Every row; `progress`: show a bar on stderr."""
    return [row(name) for name in tqdm(_measurements(), "counting", unit="row", disable=not progress, leave=False)]


def model_parts(name: str) -> list[Row]:
    """Encoder, pooling, autoregression and decoder of a registered autoencoder, each with its own input; of another
    model none."""
    config = model_config(name)
    return _parts(config) if isinstance(config, AutoencoderConfig) else []


def _parts(config: AutoencoderConfig) -> list[Row]:
    config = config.without_start()  # which sets values, and the meta device has none
    size, (height, width) = config.image_size, (config.map_size, config.map_size)
    with on_meta():
        model = FinolaAutoencoder(config)
        features = torch.empty(1, model.encoder.num_features, *model.pool.size)
        q, z = torch.empty(1, config.embed_dim), torch.empty(1, config.embed_dim, height, width)
        counts = {
            "encoder": ((3, size, size), cost_of_encoder(config.encoder, (size, size))),
            "pooling": (features.shape[1:], count(model.pool, features)),
            "autoregression": ((config.embed_dim,), _cost_of_growth(model.autoregression, q)),
            "decoder": (z.shape[1:], count(model.decoder, z)),
        }
    return [_row(part, measured) for part, measured in counts.items()]


def _row(name: str, measured: Cost, paper: tuple[int | None, int | None] = (None, None)) -> Row:
    shape, counted = measured
    return Row(name, *counted, "x".join(map(str, shape)), *paper)


def _measurements() -> dict[str, Callable[[], Cost]]:
    """What there is to count: name -> a function that gives the input's shape and the counts."""
    encoders: dict[str, Callable[[], Cost]] = {}
    for name, config in CONFIGS.items():
        published_macs = PAPER[name][1] is not None
        size = DETECTION_SIZE if published_macs else (IMAGE_SIZE, IMAGE_SIZE)
        encoders[name] = partial(_measure_encoder, name, size)
        width = int(name.rpartition("w")[2])
        if width != config.out_channels:  # the name's other reading
            encoders[f"{name} (out_channels={width})"] = partial(
                _measure_encoder, name, size, out_channels=width)
    decoders: dict[str, Callable[[], Cost]] = {}
    for scale in sorted(DECODER_WIDTHS):
        decoders[f"decoder_s{scale}"] = partial(_measure_decoder, scale, None)
        decoders[f"decoder_s{scale}_published"] = partial(_measure_decoder, scale, "published")
    parts: dict[str, Callable[[], Cost]] = {}
    for source in PARTS:
        parts |= resolve(source)()
    models = {name: partial(_cost_of_model, name) for name in countable_models()}
    return encoders | decoders | parts | models


def _cost_of_model(name: str) -> Cost:
    config = model_config(name)
    cost: Cost = resolve(type(config).cost)(config)  # not config.cost: a function would be bound to it
    return cost


def _measure_encoder(name: str, size: tuple[int, int], **options: Any) -> Cost:
    return (3, *size), cost_of_encoder(name, size, **options)


@cache
def cost_of_encoder(name: str, size: tuple[int, int], **options: Any) -> Count:
    with on_meta():
        if name in CONFIGS:
            options |= {"strict_img_size": False}
        elif is_vit(name):
            options |= {"img_size": size}
        encoder = create_encoder(name, **options)
        return count(encoder, torch.empty(1, 3, *size))


def _measure_decoder(scale: int, reduce: str | None) -> Cost:
    shape = (EMBED_DIM, IMAGE_SIZE // scale, IMAGE_SIZE // scale)
    with on_meta():
        return shape, count(ConvDecoder(EMBED_DIM, scale, reduce), torch.empty(1, *shape))


def cost_of_classifier(config: ClassifierConfig) -> Cost:
    size = (config.image_size, config.image_size)
    encoder, channels, token_dim = cost_of_encoder(config.encoder, size), *_feature_widths(config.encoder)
    with on_meta():
        features = torch.empty(1, channels, *(side // ENCODER_STRIDE for side in size)), torch.empty(1, token_dim)
        head = create_head(config.head, channels, token_dim, config.num_classes, config.head_width)
        params, macs = count(head, *features)
    return (3, *size), Count(encoder.params + params, encoder.macs + macs)


@cache
def _feature_widths(encoder: str) -> tuple[int, int]:
    """Channels of an encoder's map and of its token."""
    with on_meta():
        model = create_encoder(encoder)
    return model.num_features, token_width(model)


def cost_of_masked(config: MaskedConfig) -> Cost:
    """The mean over all places of the visible block. What a place costs is a sum of two equal functions of its row and
    its column, so the mean over the diagonal is that over all."""
    block, grid = config.block_size, config.grid_size
    encoder = cost_of_encoder(config.encoder, (ENCODER_STRIDE * block, ENCODER_STRIDE * block))
    with on_meta():
        model = config.build()
        features = torch.empty(1, model.encoder.num_features, block, block)
        z = torch.empty(1, grid, grid, model.autoregression.dim)
        places = range(grid - block + 1)
        grown = sum(count(_Growth(model, (place, place)), features).macs for place in places) // len(places)
        decoder = count(model.decoder, z).macs
    params = sum(p.numel() for p in model.parameters())
    return (3, config.image_size, config.image_size), Count(params, encoder.macs + grown + decoder)


def cost_of_forward(config: ModelConfig) -> Cost:
    """One image through a model as it is trained, or the views of one (MoCo)."""
    shape = (3, config.image_size, config.image_size)
    views = shape if config.views == 1 else (config.views, *shape)
    with on_meta():
        return views, count(config.build(), torch.empty(1, *views))


def cost_of_autoencoder(config: AutoencoderConfig) -> Cost:
    parts = _parts(config)
    shape = (3, config.image_size, config.image_size)
    return shape, Count(sum(part.params for part in parts), sum(part.macs for part in parts))


def _cost_of_growth(autoregression: nn.Module, q: Tensor) -> Count:
    """From one step of the law: on each path, every position but the origin takes one."""
    if not isinstance(autoregression, Finola) or not autoregression.directions:
        return count(autoregression, q)
    height, width = autoregression.size
    paths = 2 if autoregression.path == "average" else 1
    params = sum(p.numel() for p in autoregression.parameters())
    return Count(params, paths * (height * width - 1) * count(_Step(autoregression), q).macs)


class _Growth(nn.Module):
    """The part of a masked FINOLA between encoder and decoder, for one place of the visible block."""

    def __init__(self, model: MaskedFinola, corner: tuple[int, int]):
        super().__init__()
        self.model, self.corner = model, corner

    def forward(self, features: Tensor) -> Tensor:
        return self.model.grow(features, self.corner)


class _Step(nn.Module):
    """One step of a law from one position to the next; those in all directions cost the same."""

    def __init__(self, law: Finola):
        super().__init__()
        self.matrix: Tensor = getattr(law, law.directions[0])

    def forward(self, z: Tensor) -> Tensor:
        return step(z, self.matrix, normalise)
