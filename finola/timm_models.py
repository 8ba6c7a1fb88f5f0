"""Registers the Mobile-Former encoders with timm:

    import timm, finola.timm_models
    timm.create_model("mobileformer_w720", features_only=True)

They take images (B, 3, H, W) of any H and W that are multiples of 16; pad or resize others, such as 225x317, first.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from finola.models.base import IMAGENET_MEAN, IMAGENET_STD
from finola.models.mobileformer import CONFIGS, MobileFormer


class TimmMobileFormer(MobileFormer):
    """A Mobile-Former under timm's contract, by which `forward_head` needs what `forward_features` gives and nothing
    else: the first token, which the classifier reads beside the mean of the map, stands beside the map, as channels
    that are the same everywhere. The map alone: `forward_intermediates`, or `features_only=True`."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.num_features = self.head_hidden_size

    def forward_features(self, x: Tensor) -> Tensor:
        """Image (B, in_chans, H, W) -> map and first token (B, out_channels + d, H/16, W/16)."""
        final, tokens = self.forward_map_and_tokens(x)
        token = tokens[:, 0, :, None, None].expand(-1, -1, final.shape[2], final.shape[3])
        return torch.cat([final, token], dim=1)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map and first token -> logits (B, num_classes), or their means (B, out_channels + d)."""
        if not self.global_pool:
            return x
        features = x.mean((2, 3))
        return features if pre_logits else self.head(features)

    def forward(self, x: Tensor) -> Tensor:
        """Image -> logits (B, num_classes); features (B, out_channels + d) without head; all of it without pool."""
        return self.forward_head(self.forward_features(x))


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    return build_model_with_cfg(
        TimmMobileFormer,
        variant,
        pretrained,
        model_cfg=CONFIGS[variant],
        feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
        **kwargs,
    )


default_cfgs = generate_default_cfgs(
    {
        name: {
            "num_classes": 1000,
            "input_size": (3, 224, 224),
            "pool_size": (14, 14),
            "crop_pct": 0.875,
            "interpolation": "bicubic",
            "mean": IMAGENET_MEAN,
            "std": IMAGENET_STD,
            "first_conv": "stem.0",
            "classifier": "head",
        }
        for name in CONFIGS
    }
)


@register_model
def mobileformer_w720(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Mobile-Former W720: 4.9M parameters, 0.28G multiply-adds at 224 pixels."""
    return _create("mobileformer_w720", pretrained, **kwargs)


@register_model
def mobileformer_w1440(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Mobile-Former W1440: half the channels of W2880."""
    return _create("mobileformer_w1440", pretrained, **kwargs)


@register_model
def mobileformer_w2880(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Mobile-Former W2880, the paper's default encoder."""
    return _create("mobileformer_w2880", pretrained, **kwargs)


@register_model
def mobileformer_w4320(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """W2880 with all channels times 1.5, but a final map of 2880 channels as before.

    With out_channels=4320 the parameters are 2.6 % more than the paper's 43.5M, with 2880 they meet it."""
    return _create("mobileformer_w4320", pretrained, **kwargs)


@register_model
def mobileformer_w5760(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """W2880 with all channels times 2, but a final map of 2880 channels as before.

    With out_channels=5760 the parameters are 4.1 % more than the paper's 67.6M, with 2880 they meet it."""
    return _create("mobileformer_w5760", pretrained, **kwargs)
