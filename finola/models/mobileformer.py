"""Mobile-Former encoders W720 ... W5760: from the image to the feature map that pooling turns into q.

A Mobile-Former (Chen et al., CVPR 2022) runs two branches side by side: *Mobile*, a MobileNet that carries
the feature map, and *Former*, a transformer over six learned tokens. In every block each branch reads the
other by a light cross-attention. FINOLA's encoder ends at stride 16 (paper, "Mobile-Former encoders"):

    image (B, 3, H, W)                          tokens (B, 6, d)
      | stem                        stride 2       |
      | stage 0: lite block         stride 2       |
      | stage 1: 2 blocks           stride 4     <-+->
      | stage 2: 3 blocks           stride 8     <-+->
      | stage 3: 6 blocks           stride 16    <-+->
      | tail: 1x1 convolution       stride 16      |
    map (B, width, H/16, W/16)                  tokens (B, 6, d)

`finola.timm_models` registers the encoders with timm.

Shapes: B batch, C channels, H and W rows and columns of a map, N = H*W, T tokens, d token dimension.
Maps run fastest in `torch.channels_last`, where the attentions read them in place.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from finola.errors import FinolaError

__all__ = ["MobileFormer", "MobileFormerConfig"]

ENCODER_STRIDE = 16  # image pixels per position of the final map


@dataclass(frozen=True)
class MobileFormerConfig:
    """Widths of one encoder (paper, table "Specification of Mobile-Former encoders").

    stem: channels of the stem and of stage 0.
    stages: for stages 1, 2, 3 the (expansion, out) channels of each block; the first block halves the map.
    out_channels: channels of the final map.
    """

    stem: int
    stages: tuple[tuple[tuple[int, int], ...], ...]
    out_channels: int
    token_dim: int = 256
    num_tokens: int = 6

    def scaled(self, factor: float) -> "MobileFormerConfig":
        """All map channels times `factor`; the tokens stay as they are."""
        stages = tuple(tuple((int(e * factor), int(o * factor)) for e, o in stage) for stage in self.stages)
        return replace(
            self, stem=int(self.stem * factor), stages=stages, out_channels=int(self.out_channels * factor)
        )


W720 = MobileFormerConfig(
    stem=16,
    stages=(
        ((96, 28), (84, 28)),
        ((168, 48), (144, 48), (144, 48)),
        ((240, 80), (320, 88), (480, 88), (528, 120), (720, 120), (720, 120)),
    ),
    out_channels=720,
    token_dim=192,
)
W2880 = MobileFormerConfig(
    stem=64,
    stages=(
        ((384, 112), (336, 112)),
        ((672, 192), (576, 192), (576, 192)),
        ((1152, 352), (1408, 352), (1408, 352), (2112, 480), (2880, 480), (2880, 480)),
    ),
    out_channels=2880,
)
CONFIGS = {
    "mobileformer_w720": W720,
    "mobileformer_w1440": W2880.scaled(0.5),
    "mobileformer_w2880": W2880,
    "mobileformer_w4320": replace(W2880.scaled(1.5), out_channels=W2880.out_channels),
    "mobileformer_w5760": replace(W2880.scaled(2), out_channels=W2880.out_channels),
}


class DepthwiseConv(nn.Conv2d):
    """3x3 convolution of each channel alone, into out_channels / in_channels = m channels each; no bias.

    On a CPU only m = 1 has a fast kernel, so at stride 1 a larger m runs as m such convolutions, interleaved.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__(in_channels, out_channels, 3, stride, padding=1, groups=in_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, m * C, H / stride, W / stride)."""
        if self.out_channels == self.in_channels or self.stride != (1, 1):
            return super().forward(x)
        return _multiply_channels(x, self.weight)


@torch.fx.wrap
def _multiply_channels(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of `DepthwiseConv` at stride 1: x (B, C, H, W), weight (m * C, 1, 3, 3) -> (B, m * C, H, W)."""
    channels = x.shape[1]
    if not x.is_cpu:
        return F.conv2d(x, weight, padding=1, groups=channels)
    weights = weight.unflatten(0, (channels, -1)).unbind(1)  # m of (C, 1, 3, 3)
    maps = [F.conv2d(x, w, padding=1, groups=channels).permute(0, 2, 3, 1) for w in weights]
    return torch.stack(maps, dim=4).flatten(3).permute(0, 3, 1, 2)


def depthwise_bn(in_channels: int, out_channels: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Depthwise 3x3 convolution and its BatchNorm, two modules to unpack."""
    return DepthwiseConv(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels)


def pointwise_bn(in_channels: int, out_channels: int) -> tuple[nn.Module, nn.Module]:
    """1x1 convolution without bias and its BatchNorm, two modules to unpack."""
    return nn.Conv2d(in_channels, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)


def conv_of(layers: nn.Sequential) -> nn.Conv2d:
    """The convolution of such a pair, or of a sequence that begins with one."""
    return cast(nn.Conv2d, layers[0])


def norm_of(layers: nn.Sequential) -> nn.BatchNorm2d:
    """The BatchNorm of such a pair, or of a sequence that begins with one."""
    return cast(nn.BatchNorm2d, layers[1])


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Map (B, C, H, W), zero where `padding` (B, H, W) is True: what a convolution reads beyond an image's border."""
    return x if padding is None else x * _inside(padding, x)


def zero_padding_(x: Tensor, padding: Tensor | None) -> Tensor:
    """The same in place, for a map that nothing else needs (not the output of an in-place activation)."""
    return x if padding is None else x.mul_(_inside(padding, x))


def _inside(padding: Tensor, x: Tensor) -> Tensor:
    """(B, 1, H, W): 0 in the padding, else 1. On a CPU a product with it takes an eighth of masked_fill's time."""
    return (~padding[:, None]).to(x.dtype)


def downsample_padding(padding: Tensor | None) -> Tensor | None:
    """Padding (B, H, W) of a map -> that of the map which a 3x3 convolution of stride 2 makes of it."""
    return None if padding is None else padding[:, ::2, ::2]


def heads_of(x: Tensor, num_heads: int, dim: int) -> list[Tensor]:
    """Each head's part of `dim`, views of x. (By index: a traced tensor cannot be iterated over.)"""
    parts = x.chunk(num_heads, dim)
    return [parts[i] for i in range(num_heads)]


def map_heads(x: Tensor, num_heads: int) -> list[Tensor]:
    """Map (B, C, H, W) -> each head's (B, C / num_heads, N), views of a channels-last map."""
    return [head.flatten(2) for head in heads_of(x, num_heads, 1)]


class _TwoSlopes(torch.autograd.Function):
    """low * x + rise * relu(x): slope `low` below zero and `low + rise` above; keeps x alone for backward.

    x (B, C, H, W); low, rise (B, C, 1, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, rise: Tensor) -> Tensor:
        ctx.save_for_backward(x, low, rise)
        y = x.relu().mul_(rise)
        if torch.compiler.is_compiling():  # torch 2.11 compiles an output written in place without its gradients
            return torch.addcmul(y, x, low)
        return y.addcmul_(x, low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, low, rise = ctx.saved_tensors
        above = torch.ops.aten.threshold_backward(grad, x, 0)  # grad where x > 0, else 0
        grad_low = (grad * x).sum((2, 3), keepdim=True)
        grad_rise = (above * x).sum((2, 3), keepdim=True)
        return (grad * low).addcmul_(above, rise), grad_low, grad_rise


@torch.fx.wrap
def two_slopes(x: Tensor, low: Tensor, rise: Tensor) -> Tensor:
    """low * x + rise * relu(x): x (B, C, H, W); low, rise (B, C, 1, 1)."""
    y: Tensor = _TwoSlopes.apply(x, low, rise)
    return y


class DynamicReLU(nn.Module):
    """max(a1 * x, a2 * x) with slopes a1 in [0, 2], a2 in [-1, 1] for each image and channel, from token 0.

    a1 = 2 * hardsigmoid(s1) and a2 = 2 * hardsigmoid(s2) - 1, where (s1, s2) is the output of a two-layer
    hypernetwork. It starts with small weights and a bias such that a1 = 1, a2 = 1/2 (see `_init_weights`).
    """

    def __init__(self, channels: int, token_dim: int):
        super().__init__()
        self.hidden = nn.Linear(token_dim, token_dim // 4)
        self.slopes = nn.Linear(token_dim // 4, 2 * channels)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """x (B, C, H, W), token (B, d) -> (B, C, H, W)."""
        slopes = 2 * F.hardsigmoid(self.slopes(F.relu(self.hidden(token))))
        a1, a2 = slopes[..., None, None].chunk(2, dim=1)  # (B, C, 1, 1) each
        a2 = a2 - 1
        low = torch.minimum(a1, a2)  # the larger product takes the smaller slope where x < 0
        return two_slopes(x, low, torch.maximum(a1, a2) - low)


class Bottleneck(nn.Module):
    """Mobile at stride 1: 1x1 expand, dynamic ReLU, depthwise 3x3, dynamic ReLU, 1x1 project; shortcut."""

    def __init__(self, in_channels: int, expansion: int, out_channels: int, token_dim: int):
        super().__init__()
        self.expand = nn.Sequential(*pointwise_bn(in_channels, expansion))
        self.act1 = DynamicReLU(expansion, token_dim)
        self.depthwise = nn.Sequential(*depthwise_bn(expansion, expansion))
        self.act2 = DynamicReLU(expansion, token_dim)
        self.project = nn.Sequential(*pointwise_bn(expansion, out_channels))
        self.shortcut = in_channels == out_channels

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """x (B, C_in, H, W), token (B, d), padding (B, H, W) -> (B, C_out, H, W)."""
        y: Tensor = zero_padding_(self.act1(self.expand(x), token), padding)
        y = self.act2(self.depthwise(y), token)
        y = self.project(y)
        return x + y if self.shortcut else y


class DownBottleneck(nn.Module):
    """Mobile at stride 2: two lite bottlenecks (depthwise 3x3 expand, dynamic ReLU, 1x1 project).

    The second has a shortcut and expands fourfold; the paper's table does not say so, its counts require it.
    """

    def __init__(self, in_channels: int, expansion: int, out_channels: int, token_dim: int):
        super().__init__()
        self.expand1 = nn.Sequential(*depthwise_bn(in_channels, expansion, stride=2))
        self.act1 = DynamicReLU(expansion, token_dim)
        self.project1 = nn.Sequential(*pointwise_bn(expansion, out_channels))
        self.expand2 = nn.Sequential(*depthwise_bn(out_channels, 4 * out_channels))
        self.act2 = DynamicReLU(4 * out_channels, token_dim)
        self.project2 = nn.Sequential(*pointwise_bn(4 * out_channels, out_channels))

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """x (B, C_in, H, W), token (B, d), padding (B, H/2, W/2) -> (B, C_out, H/2, W/2)."""
        y: Tensor = zero_padding_(self.project1(self.act1(self.expand1(x), token)), padding)
        y = y + self.project2(self.act2(self.expand2(y), token))
        return y


class MobileToFormer(nn.Module):
    """The tokens read the map: gated cross-attention with the raw map as keys and values, LayerNorm."""

    def __init__(self, channels: int, token_dim: int, num_heads: int = 2):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(token_dim, channels)
        self.gate = nn.Linear(token_dim, channels)
        self.out = nn.Linear(channels, token_dim)
        self.norm = nn.LayerNorm(token_dim)

    def forward(self, x: Tensor, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """x (B, C, H, W), tokens (B, T, d), padding (B, H, W), which is not read -> tokens (B, T, d)."""
        hidden = None if padding is None else padding.flatten(1)[:, None]  # (B, 1, N)
        query = self.query(tokens) * (x.shape[1] // self.num_heads) ** -0.5
        reads = []
        for q, pixels in zip(heads_of(query, self.num_heads, 2), map_heads(x, self.num_heads), strict=True):
            logits = q @ pixels  # (B, T, N)
            if hidden is not None:
                logits = logits.masked_fill(hidden, float("-inf"))
            weights = logits.softmax(dim=2)  # over positions
            reads.append(weights @ pixels.mT)  # (B, T, C / heads)
        read = torch.cat(reads, dim=2) * (2 * F.hardsigmoid(self.gate(tokens)))
        tokens = self.norm(tokens + self.out(read))
        return tokens


class Former(nn.Module):
    """A post-norm transformer block over the tokens; the attention has no key and value projections."""

    def __init__(self, token_dim: int, num_heads: int = 4):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(token_dim, token_dim)
        self.out = nn.Linear(token_dim, token_dim)
        self.norm1 = nn.LayerNorm(token_dim)
        self.fc1 = nn.Linear(token_dim, 2 * token_dim)
        self.fc2 = nn.Linear(2 * token_dim, token_dim)
        self.norm2 = nn.LayerNorm(token_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T, d) -> (B, T, d)."""
        query, keys = (
            t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (self.query(tokens), tokens)
        )  # (B, heads, T, d / heads)
        weights = (query @ keys.mT * keys.shape[-1] ** -0.5).softmax(dim=-1)
        mixed = (weights @ keys).transpose(1, 2).flatten(2)
        tokens = self.norm1(tokens + self.out(mixed))
        tokens = self.norm2(tokens + self.fc2(F.gelu(self.fc1(tokens))))
        return tokens


class FormerToMobile(nn.Module):
    """The map reads the tokens: cross-attention whose queries are the raw map, added to the map.

    The keys have no bias: it would add one number to all T logits of a position, which the softmax ignores.
    """

    def __init__(self, channels: int, token_dim: int, num_heads: int = 2):
        super().__init__()
        self.num_heads = num_heads
        self.key = nn.Linear(token_dim, channels, bias=False)
        self.value = nn.Linear(token_dim, channels)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x (B, C, H, W), tokens (B, T, d) -> (B, C, H, W)."""
        heads = self.num_heads
        key = self.key(tokens) * (x.shape[1] // heads) ** -0.5
        value = self.value(tokens)
        reads = []
        for pixels, k, v in zip(map_heads(x, heads), heads_of(key, heads, 2), heads_of(value, heads, 2), strict=True):
            weights = (k @ pixels).softmax(dim=1)  # (B, T, N), over tokens
            reads.append(weights.mT @ v)  # (B, N, C / heads)
        return x + torch.cat(reads, dim=2).mT.reshape(x.shape)


@torch.fx.wrap
def check_image_size(x: Tensor) -> None:
    """Raises FinolaError for images (B, C, H, W) whose height or width 16 does not divide."""
    height, width = x.shape[-2:]
    if height % ENCODER_STRIDE or width % ENCODER_STRIDE:
        raise FinolaError(
            f"image size: got {height}x{width}, expected a height and a width divisible by {ENCODER_STRIDE}; "
            "resize, crop or pad the image"
        )


class LiteBlock(nn.Module):
    """Stage 0: depthwise 3x3 to twice the channels, ReLU6, 1x1 back, shortcut. The tokens pass untouched."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            *depthwise_bn(channels, 2 * channels),
            nn.ReLU6(inplace=True),
            *pointwise_bn(2 * channels, channels),
        )

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (B, C, H, W), tokens (B, T, d), padding (B, H, W) -> the same shapes."""
        return zero_padding_(x + self.layers(x), padding), tokens, padding


class MobileFormerBlock(nn.Module):
    """Mobile->Former, Former, Mobile, Former->Mobile, in this order. Maps are zero in the padding before and after."""

    def __init__(self, in_channels: int, expansion: int, out_channels: int, stride: int, token_dim: int):
        super().__init__()
        mobile = DownBottleneck if stride == 2 else Bottleneck
        self.stride = stride
        self.mobile_to_former = MobileToFormer(in_channels, token_dim)
        self.former = Former(token_dim)
        self.mobile = mobile(in_channels, expansion, out_channels, token_dim)
        self.former_to_mobile = FormerToMobile(out_channels, token_dim)

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (B, C_in, H, W), tokens (B, T, d), padding (B, H, W) -> map (B, C_out, H/stride, W/stride), tokens, and
        the map's padding."""
        tokens = self.former(self.mobile_to_former(x, tokens, padding))
        padding = downsample_padding(padding) if self.stride == 2 else padding
        x = self.mobile(x, tokens[:, 0], padding)
        return zero_padding_(self.former_to_mobile(x, tokens), padding), tokens, padding


class MobileFormer(nn.Module):
    """Mobile-Former encoder with an optional linear classifier on [mean of the map ; token 0].

    Args:
        cfg: widths.
        num_classes: classes of the head; 0 leaves the features as they are.
        in_chans: channels of the image.
        global_pool: "avg", or "" (with num_classes=0) to return the map itself from `forward`.
        out_channels: channels of the final map, if not the config's.
        strict_img_size: reject heights and widths that 16 does not divide. False rounds the map's size up, as
            the paper's multiply-adds at 800x1333 do.
    """

    head: nn.Module
    num_classes: int
    global_pool: str

    def __init__(
        self,
        cfg: MobileFormerConfig,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "avg",
        out_channels: int | None = None,
        strict_img_size: bool = True,
    ):
        super().__init__()
        out_channels = out_channels or cfg.out_channels
        self.in_chans = in_chans
        self.strict_img_size = strict_img_size
        self.grad_checkpointing = False
        self.num_features = out_channels
        self.head_hidden_size = out_channels + cfg.token_dim

        self.tokens = nn.Parameter(torch.empty(1, cfg.num_tokens, cfg.token_dim))
        self.stem = nn.Sequential(
            nn.Conv2d(in_chans, cfg.stem, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(cfg.stem),
            nn.ReLU6(inplace=True),
        )
        self.stages = nn.ModuleList([nn.ModuleList([LiteBlock(cfg.stem)])])
        channels = cfg.stem
        for rows in cfg.stages:
            stage = nn.ModuleList()
            for i, (expansion, out) in enumerate(rows):
                stage.append(MobileFormerBlock(channels, expansion, out, 2 if i == 0 else 1, cfg.token_dim))
                channels = out
            self.stages.append(stage)
        self.tail = nn.Sequential(*pointwise_bn(channels, out_channels), nn.ReLU6(inplace=True))

        widths = (cfg.stem, *(rows[-1][1] for rows in cfg.stages[:-1]), out_channels)
        modules = ("stages.0", "stages.1", "stages.2", "tail")
        self.feature_info = [
            {"num_chs": width, "reduction": 2 ** (i + 1), "module": module}
            for i, (width, module) in enumerate(zip(widths, modules, strict=True))
        ]
        self.apply(_init_weights)
        nn.init.normal_(self.tokens)
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a fresh one of `num_classes` outputs (0: none), and the pooling if given.

        Raises FinolaError for a pooling other than "avg" and "", and for "" with a classifier."""
        global_pool = self.global_pool if global_pool is None else global_pool
        if global_pool not in ("avg", "") or (num_classes and not global_pool):
            raise FinolaError(
                f"global_pool: got {global_pool!r} with num_classes={num_classes}, expected 'avg', "
                "or '' with num_classes=0; choose one of these"
            )
        self.num_classes, self.global_pool = num_classes, global_pool
        self.head = nn.Linear(self.head_hidden_size, num_classes) if num_classes else nn.Identity()
        _init_weights(self.head)
        self.head.to(self.tokens)

    def get_classifier(self) -> nn.Module:
        return self.head

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in backward instead of storing what is inside it."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        return {"tokens"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's parameter groups for layer decay: stem and tokens, each block (coarse: stage), head."""
        from timm.models._manipulate import MATCH_PREV_GROUP

        blocks = r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)"
        return {"stem": r"^stem|^tokens", "blocks": [(blocks, None), (r"^tail", MATCH_PREV_GROUP)]}

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        padding: Tensor | None = None,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps at strides 2, 4, 8, 16 (the last one after the tail), in timm's convention.

        indices: the last n, a selection, or all (None). Returns the list, or (final map, list) unless
        `intermediates_only`. `norm` changes nothing: the encoder has no final norm to apply to a map.

        padding: (B, H, W) bool, True right of and below images smaller than the batch's. With it each image's
        part of the maps is what the image alone would give, whatever finite numbers the padding holds; the rest is
        zero."""
        if output_fmt != "NCHW":
            raise FinolaError(f"output_fmt: got {output_fmt!r}, expected 'NCHW'; permute the maps yourself")
        take, last = self._take(indices)
        intermediates = []
        stages = last + 1 if stop_early else len(self.stages)
        for i, (final, _) in enumerate(self._stage_maps(x, stages, padding)):
            if i in take:
                intermediates.append(final)
        return intermediates if intermediates_only else (final, intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the maps of `indices` do not need (features_only); returns the indices, none negative."""
        take, last = self._take(indices)
        if last + 1 < len(self.stages):
            self.tail = nn.Sequential()  # passes a map on
        self.stages = self.stages[: last + 1]
        if prune_head:
            self.reset_classifier(0)
        return take

    def forward_map_and_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Image (B, in_chans, H, W) -> final map (B, out_channels, H/16, W/16) and tokens (B, T, d).

        Raises FinolaError if 16 does not divide H and W."""
        for stage in self._stage_maps(x, len(self.stages)):
            final = stage
        return final

    def forward_features(self, x: Tensor) -> Tensor:
        """Image (B, in_chans, H, W) -> final map (B, out_channels, H/16, W/16)."""
        return self.forward_map_and_tokens(x)[0]

    def forward(self, x: Tensor) -> Tensor:
        """Image -> logits (B, num_classes); features (B, out_channels + d) without head; map without pool."""
        final, tokens = self.forward_map_and_tokens(x)
        if not self.global_pool:
            return final
        logits: Tensor = self.head(torch.cat([final.mean((2, 3)), tokens[:, 0]], dim=1))
        return logits

    def _take(self, indices: int | Sequence[int] | None) -> tuple[list[int], int]:
        """The places of the maps that `indices` names, none negative, and the last of them."""
        from timm.models._features import feature_take_indices

        return feature_take_indices(len(self.feature_info), indices)  # type: ignore[arg-type]  # any sequence will do

    def _stage_maps(
        self, x: Tensor, num_stages: int, padding: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Map and tokens after each of the first `num_stages` stages, the tail being part of the last."""
        if self.strict_img_size:
            check_image_size(x)
        x = self.stem(zero_padding(x, padding))
        padding = downsample_padding(padding)
        x = zero_padding(x, padding)
        tokens = self.tokens.expand(x.shape[0], -1, -1)
        for i, stage in enumerate(self.stages[:num_stages]):
            for block in stage.children():
                x, tokens, padding = self._run_block(block, x, tokens, padding)
            if i == len(self.feature_info) - 1:
                x = zero_padding(self.tail(x), padding)
            yield x, tokens

    def _run_block(
        self, block: nn.Module, x: Tensor, tokens: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        result: tuple[Tensor, Tensor, Tensor | None]
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            result = block(x, tokens, padding)
        elif torch.compiler.is_compiling():
            # A compiled graph updates the statistics once, whatever it recomputes.
            result = checkpoint(block, x, tokens, padding, use_reentrant=False)
        else:
            contexts = (nullcontext(), _FrozenStatistics(block))
            result = checkpoint(block, x, tokens, padding, use_reentrant=False, context_fn=lambda: contexts)
        return result


class _FrozenStatistics(AbstractContextManager):
    """Leave BatchNorm's running statistics alone, so that recomputing a block does not count it twice."""

    def __init__(self, module: nn.Module):
        self.norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]

    def __enter__(self) -> None:
        self.saved = [(norm.momentum, norm.num_batches_tracked) for norm in self.norms]
        for norm in self.norms:
            norm.momentum, norm.num_batches_tracked = 0.0, None

    def __exit__(self, *exception: object) -> None:
        for norm, saved in zip(self.norms, self.saved, strict=True):
            norm.momentum, norm.num_batches_tracked = saved


def _init_weights(module: nn.Module) -> None:
    """Convolutions: normal, variance 2 / (fan-out of a group); linear layers: truncated normal 0.02, bias 0.

    The network starts almost as a chain of its strided convolutions, through which images pass best: the last
    BatchNorm of a residual branch starts at 0.1, what tokens write into the map at a tenth, and every dynamic ReLU
    at slope 1/2 below zero. (An autoencoder that starts so learns twice as fast from its first steps.)
    """
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=(2 / fan_out) ** 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, DynamicReLU):
        nn.init.constant_(module.slopes.bias.chunk(2)[1], 1.5)  # a2 = 2 * hardsigmoid(1.5) - 1 = 1/2
    elif isinstance(module, FormerToMobile):
        nn.init.trunc_normal_(module.value.weight, std=0.002)
    elif isinstance(module, Bottleneck) and module.shortcut:
        nn.init.constant_(norm_of(module.project).weight, 0.1)
    elif isinstance(module, DownBottleneck):
        nn.init.constant_(norm_of(module.project2).weight, 0.1)


