"""Parameters and multiply-adds of every encoder, decoder and model, beside the paper's figures.

The paper's figures are the table `PAPER`; all others are counted by running the modules on the meta device
(`finola.flops`). Each row is for one input, whose shape (channels x height x width) it names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from typing import NamedTuple

import timm
import torch
from torch import Tensor, nn

from finola.autoregression import Finola, autoregress_lines, normalise, resolve_origin
from finola.decoder import WIDTHS, ConvDecoder
from finola.encoder import CONFIGS
from finola.errors import FinolaError
from finola.flops import Count, count
from finola.model import FinolaAutoencoder
from finola.registry import CONFIGURATIONS, list_models

IMAGE_SIZE, EMBED_DIM = 256, 3072  # what the table's decoders are counted for
DETECTION_SIZE = (800, 1333)  # what the paper counts the multiply-adds of its encoders for

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
    # Table "Decoder specifications"
    "decoder_s32": (25_300_000, None),
    "decoder_s16": (18_500_000, None),
    "decoder_s8": (9_600_000, None),
    "decoder_s4": (7_900_000, None),
    "decoder_s2": (1_700_000, None),
    "decoder_s1": (1_200_000, None),
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
    """The row of an encoder, an encoder with head, a decoder or a model; FinolaError for an unknown name."""
    measure = _measurements().get(name)
    if measure is None:
        near = get_close_matches(name, _measurements(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise FinolaError(f"model: unknown name {name!r}{hint} (finola info lists them)")
    paper = PAPER.get(name.partition(" ")[0].removesuffix("_published"), (None, None))
    return _row(name, measure(), paper)


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
    encoders, heads = {}, {}
    for name, config in CONFIGS.items():
        published_macs = PAPER[name][1] is not None
        size = DETECTION_SIZE if published_macs else (IMAGE_SIZE, IMAGE_SIZE)
        encoders[name] = partial(_measure_encoder, name, size)
        heads[f"{name}+lin"] = partial(_measure_encoder, name, (224, 224), num_classes=1000)
        width = int(name.rpartition("w")[2])
        if width != config.out_channels:  # the name's other reading
            encoders[f"{name} (out_channels={width})"] = partial(
                _measure_encoder, name, size, out_channels=width)
    decoders = {}
    for scale in sorted(WIDTHS):
        decoders[f"decoder_s{scale}"] = partial(_measure_decoder, scale, None)
        decoders[f"decoder_s{scale}_published"] = partial(_measure_decoder, scale, "published")
    models = {name: partial(_measure_model, name) for name in list_models()}
    return encoders | heads | decoders | models


def _measure_encoder(name: str, size: tuple[int, int], **options) -> Measured:
    return (3, *size), _encoder(name, size, **options)


@cache
def _encoder(name: str, size: tuple[int, int], num_classes: int = 0, **options) -> Count:
    with torch.device("meta"):
        encoder = timm.create_model(name, num_classes=num_classes, strict_img_size=False, **options)
        return count(encoder, torch.empty(1, 3, *size))


def _measure_decoder(scale: int, reduce: str | None) -> Measured:
    shape = (EMBED_DIM, IMAGE_SIZE // scale, IMAGE_SIZE // scale)
    with torch.device("meta"):
        return shape, count(ConvDecoder(EMBED_DIM, scale, reduce), torch.empty(1, *shape))


def _measure_model(name: str) -> Measured:
    size, parts = CONFIGURATIONS[name].image_size, model_parts(name)
    return (3, size, size), Count(sum(part.params for part in parts), sum(part.macs for part in parts))


def _countable(autoregression: nn.Module) -> nn.Module:
    return _LineByLine(autoregression) if isinstance(autoregression, Finola) else autoregression


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
