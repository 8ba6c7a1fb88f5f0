"""Classification heads over an encoder's final map and first token (paper, section "Comparison with masked
encoding methods"): `lin`, one linear layer, and `tran1` and `tran4`, a light transformer of one or four blocks.

A head has two halves, so that what a frozen encoder gives is computed once and kept:

    map (B, W, h, w), token (B, d) --reduce--> tensors worth keeping --classify--> logits (B, classes)

Shapes: B batch, W channels of the map, h and w its rows and columns, d token dimension, D width of a transformer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from finola.errors import FinolaError, check_choice
from finola.models.mobileformer import MobileFormer

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

DEPTHS = {"tran1": 1, "tran4": 4}  # transformer blocks by head
HEADS = ("lin", *DEPTHS)
HEAD_DIM = 64  # channels of an attention head
FLOOR = 0.01  # added to the variances of features by a transformer's BatchNorms
HEAD_WIDTHS = {720: 192, 1440: 384, 2880: 768}  # width of a transformer for a map of so many channels


def create_head(
    kind: str, channels: int, token_dim: int, num_classes: int, width: int | None = None, dropout: float = 0.0
) -> LinearHead | TransformerHead:
    """The head "lin", "tran1" or "tran4"; `width` and `dropout` are of the transformers.

    Raises FinolaError for another kind, a bad width, or a width or dropout given to the linear head."""
    check_choice("head", kind, HEADS)
    if kind in DEPTHS:
        return TransformerHead(channels, token_dim, num_classes, DEPTHS[kind], width, dropout)
    if width is not None or dropout:
        raise FinolaError(f"head 'lin': got width={width} and dropout={dropout}, which only {', '.join(DEPTHS)} have")
    return LinearHead(channels, token_dim, num_classes)


def pool(map: Tensor, token: Tensor) -> Tensor:
    """map (B, W, h, w), token (B, d) -> [mean of the map ; token] (B, W + d), in float32."""
    return torch.cat([map.float().mean((2, 3)), token.float()], dim=1)


class LinearHead(nn.Module):
    """[mean of the map ; token] -> BatchNorm without affine -> linear (paper, appendix "Linear probing").

    With the token the encoder and its head have the 5.8M parameters of the paper's introduction (W720).
    """

    def __init__(self, channels: int, token_dim: int, num_classes: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels + token_dim, affine=False, eps=1e-6)
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh linear layer of `num_classes` outputs."""
        self.fc = _linear(self.norm.num_features, num_classes, std=0.01).to(self.norm.running_mean)

    def reduce(self, map: Tensor, token: Tensor) -> tuple[Tensor]:
        """map (B, W, h, w), token (B, d) -> ((B, W + d),)."""
        return (pool(map, token),)

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, W + d) -> logits (B, classes)."""
        logits: Tensor = self.fc(self.norm(pooled))
        return logits

    def forward(self, map: Tensor, token: Tensor) -> Tensor:
        """map (B, W, h, w), token (B, d) -> logits (B, classes)."""
        return self.classify(*self.reduce(map, token))


class TransformerHead(nn.Module):
    """Pre-norm transformer blocks over the map's positions and one class token, which is classified.

    The map's channels and the encoder's token each pass a BatchNorm without affine, as in the linear head (not in the
    paper; without it what the images have in common, large beside what tells them apart, slows the head down), and a
    linear layer to D channels; the token goes in front as the class token. The encoder supplies the positions, so there
    is no embedding of them. FLOOR is added to the variances: the token of a pre-trained encoder can be nearly the same
    for all images, and blown up to unit variance it makes fine-tuning unstable.

    Args:
        depth: number of blocks, each with D/64 attention heads and an MLP of 4 D.
        width: D, a multiple of 64; by default that of the paper (192, 384, 768 for W720, W1440, W2880 and wider),
            and the ViT's own width for a ViT, whose token is as wide as its map.
        dropout: what the paper's tables call dropout, here the share of values dropped after each linear layer
            of the blocks (not queries, keys and values) and before the classifier.

    Raises:
        FinolaError: a width that is not a positive multiple of 64, or a dropout outside 0 <= p < 1.
    """

    def __init__(
        self, channels: int, token_dim: int, num_classes: int, depth: int, width: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        width = _default_width(channels, token_dim) if width is None else width
        if width < 1 or width % HEAD_DIM:
            raise FinolaError(f"head_width: got {width}, expected a multiple of {HEAD_DIM}")
        if not 0 <= dropout < 1:
            raise FinolaError(f"dropout: got {dropout}, expected 0 <= dropout < 1")
        from timm.models.vision_transformer import Block

        self.map_norm = nn.BatchNorm1d(channels, affine=False, eps=FLOOR)
        self.token_norm = nn.BatchNorm1d(token_dim, affine=False, eps=FLOOR)
        self.map_projection = _linear(channels, width)
        self.token_projection = _linear(token_dim, width)
        self.blocks = nn.Sequential(
            *(Block(width, width // HEAD_DIM, qkv_bias=True, proj_drop=dropout) for _ in range(depth))
        )
        self.blocks.apply(_init_linear)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.reset_classifier(num_classes)

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh linear layer of `num_classes` outputs."""
        self.fc = _linear(self.norm.normalized_shape[0], num_classes).to(self.norm.weight)

    def reduce(self, map: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """map (B, W, h, w), token (B, d) -> the same: every position is needed."""
        return map, token

    def classify(self, map: Tensor, token: Tensor) -> Tensor:
        """map (B, W, h, w), token (B, d) -> logits (B, classes)."""
        positions = self.map_projection(self.map_norm(map.flatten(2)).mT)  # (B, h w, D)
        first = self.token_projection(self.token_norm(token))[:, None]  # (B, 1, D)
        mixed = self.blocks(torch.cat([first, positions], dim=1))  # (B, 1 + h w, D)
        logits: Tensor = self.fc(self.dropout(self.norm(mixed[:, 0])))
        return logits

    def forward(self, map: Tensor, token: Tensor) -> Tensor:
        """map (B, W, h, w), token (B, d) -> logits (B, classes)."""
        return self.classify(*self.reduce(map, token))


def _default_width(channels: int, token_dim: int) -> int:
    if channels == token_dim:
        return channels
    return next((width for limit, width in HEAD_WIDTHS.items() if channels <= limit), max(HEAD_WIDTHS.values()))


def _linear(in_features: int, out_features: int, std: float = 0.02) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    _init_linear(layer, std)
    return layer


def _init_linear(module: nn.Module, std: float = 0.02) -> None:
    """Linear layers: truncated normal weights, zero biases."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=std)
        nn.init.zeros_(module.bias)


def map_and_tokens(encoder: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised images (B, 3, S, S) -> the final map (B, W, h, w) and one token (B, d).

    The token is the first of a Mobile-Former's (the one that steers its dynamic ReLUs), or the class token of one
    of timm's ViTs, where d = W.

    Raises FinolaError for an encoder of another kind."""
    if isinstance(encoder, MobileFormer):
        features, tokens = encoder.forward_map_and_tokens(x)
        return features, tokens[:, 0]
    vit = _vit_with_class_token(encoder)
    tokens = vit.forward_features(x)  # (B, prefix + h w, W)
    positions = tokens[:, vit.num_prefix_tokens :].mT  # (B, W, h w)
    return positions.unflatten(2, vit.patch_embed.grid_size), tokens[:, 0]


def token_width(encoder: nn.Module) -> int:
    """d, the length of the token that `map_and_tokens` gives; the map has `encoder.num_features` channels.

    Raises FinolaError for an encoder of another kind."""
    if isinstance(encoder, MobileFormer):
        return encoder.tokens.shape[-1]
    return _vit_with_class_token(encoder).num_features


def _vit_with_class_token(encoder: nn.Module) -> VisionTransformer:
    from timm.models.vision_transformer import VisionTransformer

    if not (isinstance(encoder, VisionTransformer) and encoder.has_class_token):
        raise FinolaError(
            f"encoder: got {type(encoder).__name__}, expected a Mobile-Former or a timm ViT with a class token"
        )
    return encoder
