"""What an encoder gives for an image: its final map and one token."""

from __future__ import annotations

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from finola.encoder import MobileFormer
from finola.errors import FinolaError


def map_and_tokens(encoder: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised images (B, 3, S, S) -> the final map (B, W, h, w) and one token (B, d).

    The token is the first of a Mobile-Former's (the one that steers its dynamic ReLUs), or the class token of one
    of timm's ViTs, where d = W.

    Raises FinolaError for an encoder of another kind."""
    if isinstance(encoder, MobileFormer):
        features, tokens = encoder.forward_map_and_tokens(x)
        return features, tokens[:, 0]
    _check_vit(encoder)
    tokens = encoder.forward_features(x)  # (B, prefix + h w, W)
    positions = tokens[:, encoder.num_prefix_tokens :].mT  # (B, W, h w)
    return positions.unflatten(2, encoder.patch_embed.grid_size), tokens[:, 0]


def token_width(encoder: nn.Module) -> int:
    """d, the length of the token that `map_and_tokens` gives; the map has `encoder.num_features` channels.

    Raises FinolaError for an encoder of another kind."""
    if isinstance(encoder, MobileFormer):
        return encoder.tokens.shape[-1]
    _check_vit(encoder)
    return encoder.num_features


def _check_vit(encoder: nn.Module) -> None:
    if not (isinstance(encoder, VisionTransformer) and encoder.has_class_token):
        raise FinolaError(
            f"encoder: got {type(encoder).__name__}, expected a Mobile-Former or a timm ViT with a class token"
        )
