"""The encoders that models are built on: our Mobile-Formers, and timm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from finola.errors import FinolaError
from finola.models.mobileformer import CONFIGS, MobileFormer


class Encoder(nn.Module):
    """What models ask of an encoder: ours and timm's have it, whatever their class.

    Attributes:
        num_features: W, channels of the final map.
        head_hidden_size: numbers that a linear classifier on it reads.
        feature_info: stride ("reduction") and channels ("num_chs") of each map that `forward_intermediates` can give.
        forward_features: normalised images (B, 3, H, W) -> the final map (B, W, H/16, W/16); of a ViT its tokens
            (B, L, W).
        forward_intermediates: normalised images -> the maps of `indices`, (B, C, H/stride, W/stride) each.
        no_weight_decay: names of the embeddings, which are not decayed.
        group_matcher: which parameter belongs to which layer, as timm's layer decay takes it.
    """

    num_features: int
    head_hidden_size: int
    feature_info: list[dict[str, Any]]
    forward_features: Callable[[Tensor], Tensor]
    forward_intermediates: Callable[..., list[Tensor]]
    no_weight_decay: Callable[[], set[str]]
    group_matcher: Callable[..., dict[str, Any]]


def create_encoder(name: str, **options: Any) -> Encoder:
    """An encoder without a classifier: one of our Mobile-Formers, or a model of timm's."""
    if name in CONFIGS:
        return cast(Encoder, MobileFormer(CONFIGS[name], num_classes=0, **options))
    import timm

    return cast(Encoder, timm.create_model(name, num_classes=0, **options))


def check_encoder_name(name: str) -> None:
    """Raises FinolaError unless it is the name of a Mobile-Former or timm knows the model; asked first, since timm
    would fetch one named "hf-hub:..." over the network."""
    if name in CONFIGS:
        return
    import timm

    if not isinstance(name, str) or not timm.is_model(name):
        raise FinolaError(f"encoder: unknown timm model {name!r}; finola's own: {', '.join(sorted(CONFIGS))}")
