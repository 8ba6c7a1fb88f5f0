"""Detection heads: from the encoder's maps to object queries (paper, appendix "Network architectures", Table
"Mobile-Former decoder specifications for COCO object detection").

MF-Dec carries a map from coarse to fine past 100 queries; in every block each reads the other:

    maps of the encoder                   pixels (B, h w, 256)                queries (B, 100, 256)
    1/16 (B, W, H/16, W/16) -- down-conv --> 1/32   5 (2) blocks M-F+         content and position, learned
                                              |                          <-+->
    1/16 ------------------ lateral --> + up-conv   1/16   2 (1) blocks M-F-   |
                                              |                          <-+->
    1/8 (B, C, H/8, W/8) -- lateral --> + up-conv   1/8    2 (1) blocks M-F-   |
                                                                         <-+->  -> class and box layers

A block runs Mobile->Former (the queries read the map), Former (a transformer layer over the queries), a pixel
operation on the map, Former->Mobile (the map reads the queries). The pixel operation of M-F+ is a transformer layer
too, that of M-F- a lite bottleneck. The last block of all has only its first two steps. MF-Dec-522 and MF-Dec-211
differ in their number of blocks. The laterals are not in the paper's table; its parameter counts require them.

`DetrTransformer` is DETR's own (Carion et al., ECCV 2020): six encoder layers over the map at 1/32, six decoder layers.

Shapes: B batch, N positions of a map (h w) or queries, D = 256 channels. Padding (B, H, W) is True where a pixel lies
outside its image; no attention reads such positions. Maps run fastest in `torch.channels_last`, where `pixels` is
a view of them.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from finola.errors import FinolaError
from finola.models.mobileformer import DynamicReLU, depthwise_bn, pointwise_bn, zero_padding

DIM = 256  # channels of queries and maps
NUM_HEADS = 8
BLOCKS = {"mf_dec_522": (5, 2, 2), "mf_dec_211": (2, 1, 1)}  # blocks at 1/32, 1/16, 1/8
HEADS = (*BLOCKS, "transformer")


def create_detection_head(
    name: str, channels: dict[int, int], num_queries: int = 100, dropout: float = 0.1
) -> MFDec | DetrTransformer:
    """The head "mf_dec_522", "mf_dec_211" or "transformer".

    Args:
        channels: of the encoder's maps, by stride; `head.strides` names those that the head reads.
        num_queries: objects an image can have at most.
        dropout: share dropped of attention weights and of what each layer adds, as in DETR.

    Raises FinolaError for a stride the encoder lacks, and as `check_head`.
    """
    check_head(name, num_queries, dropout)
    head = DetrTransformer if name == "transformer" else MFDec
    missing = [stride for stride in head.strides if stride not in channels]
    if missing:
        raise FinolaError(f"head {name!r}: reads maps at strides {head.strides}, got an encoder with strides "
                          f"{tuple(channels)}; choose another head or encoder")
    if name == "transformer":
        return DetrTransformer(channels, num_queries, dropout)
    return MFDec(channels, BLOCKS[name], num_queries, dropout)


def check_head(name: str, num_queries: int, dropout: float) -> None:
    """Raises FinolaError for a name that is not in HEADS, no queries, or a dropout outside 0 <= p < 1."""
    if name not in HEADS:
        raise FinolaError(f"head: got {name!r}, expected one of {', '.join(HEADS)}")
    if num_queries < 1:
        raise FinolaError(f"num_queries: got {num_queries}, expected at least 1")
    if not 0 <= dropout < 1:
        raise FinolaError(f"dropout: got {dropout}, expected 0 <= dropout < 1")


class Tokens(NamedTuple):
    """Queries, or the positions of a map: what attention works on.

    values (B, N, D); position (B or 1, N, D), added to them in the attention's queries and keys; visible (B, 1, 1, N),
    False at padding, None without; size (h, w) of a map."""

    values: Tensor
    position: Tensor
    visible: Tensor | None = None
    size: tuple[int, int] | None = None

    def replaced(self, values: Tensor) -> Tokens:
        return self._replace(values=values)


def padding_of_map(padding: Tensor, size: tuple[int, int]) -> Tensor:
    """Padding (B, H, W) of the images -> (B, h, w), that of a map of this size.

    A position is padding if the pixel it is centred on is: with strided 3x3 convolutions that is the first of its
    cell, so that every image keeps a position, however small it is."""
    return F.interpolate(padding[:, None].float(), size, mode="nearest")[:, 0].bool()


def size_of(x: Tensor) -> tuple[int, int]:
    """Height and width of a map (B, D, h, w)."""
    height, width = x.shape[-2:]
    return height, width


def map_tokens(x: Tensor, padding: Tensor | None) -> Tokens:
    """Map (B, D, h, w), padding (B, H, W) of the images or None -> its positions."""
    height, width = size = size_of(x)
    if padding is None:
        visible = None
        rows, columns = (torch.full((1,), length, device=x.device) for length in size)
    else:
        inside = ~padding_of_map(padding, size)
        visible = inside.flatten(1)[:, None, None]
        rows, columns = inside.any(2).sum(1), inside.any(1).sum(1)
    position = torch.cat([
        _waves(height, rows)[:, :, None].expand(-1, -1, width, -1),
        _waves(width, columns)[:, None].expand(-1, height, -1, -1),
    ], dim=3)  # (B or 1, h, w, D)
    return Tokens(x.flatten(2).mT, position.flatten(1, 2).to(x.dtype), visible, size)


def tokens_map(x: Tokens) -> Tensor:
    """The positions of a map -> the map (B, D, h, w), channels-last, zero in the padding."""
    values = x.values if x.visible is None else x.values * x.visible[:, 0].mT.to(x.values.dtype)
    grid: Tensor = values.mT.unflatten(2, x.size)
    return grid


def _waves(length: int, extent: Tensor) -> Tensor:
    """Sines and cosines of the places 0 ... length - 1, `extent` (B,) of which are one turn -> (B, length, D/2)."""
    count = DIM // 4
    places = torch.arange(length, device=extent.device, dtype=torch.float32)
    turns = (places + 0.5) / extent[:, None].float()  # (B, length)
    frequencies = 10000 ** (-torch.arange(count, device=extent.device, dtype=torch.float32) / count)
    angles = 2 * math.pi * turns[:, :, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=2)


class Attention(nn.Module):
    """Multi-head attention by which x reads source; with `gated`, x scales what it reads by 2 hardsigmoid(linear(x)).

    The keys have no bias: it would add one number to all logits of a query, which the softmax ignores.
    """

    def __init__(self, dropout: float, gated: bool = False):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM, DIM) if gated else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tokens, source: Tokens) -> Tensor:
        """-> (B, N of x, D)."""
        query, key, value = (
            t.unflatten(2, (NUM_HEADS, -1)).transpose(1, 2)  # (B, heads, N, D / heads)
            for t in (
                self.query(x.values + x.position),
                self.key(source.values + source.position),
                self.value(source.values),
            )
        )
        dropout = self.dropout.p if self.training else 0.0
        # torch's fused backward is slow on CPUs: without it a training step takes about 0.8 of the time
        with sdpa_kernel(SDPBackend.MATH) if query.device.type == "cpu" else nullcontext():
            read = F.scaled_dot_product_attention(query, key, value, source.visible, dropout)
        read = read.transpose(1, 2).flatten(2)
        if self.gate is not None:
            read = read * (2 * F.hardsigmoid(self.gate(x.values)))
        out: Tensor = self.dropout(self.out(read))
        return out


class AttentionLayer(nn.Module):
    """Attention, shortcut, LayerNorm."""

    def __init__(self, dropout: float, gated: bool = False):
        super().__init__()
        self.attention = Attention(dropout, gated)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tokens, source: Tokens) -> Tokens:
        return x.replaced(self.norm(x.values + self.attention(x, source)))


class FeedForward(nn.Module):
    """Two linear layers, shortcut, LayerNorm."""

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.fc1 = nn.Linear(DIM, hidden)
        self.fc2 = nn.Linear(hidden, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tokens) -> Tokens:
        hidden = self.dropout(F.relu(self.fc1(x.values)))
        return x.replaced(self.norm(x.values + self.dropout(self.fc2(hidden))))


class EncoderLayer(nn.Module):
    """Post-norm transformer layer: self-attention, feed-forward. As Former and as the pixel operation of M-F+ too."""

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.self_attention = AttentionLayer(dropout)
        self.feed_forward = FeedForward(hidden, dropout)

    def forward(self, x: Tokens) -> Tokens:
        out: Tokens = self.feed_forward(self.self_attention(x, x))
        return out


class DecoderLayer(nn.Module):
    """Post-norm transformer layer over the queries: self-attention, reading the map, feed-forward."""

    def __init__(self, hidden: int, dropout: float):
        super().__init__()
        self.self_attention = AttentionLayer(dropout)
        self.cross_attention = AttentionLayer(dropout)
        self.feed_forward = FeedForward(hidden, dropout)

    def forward(self, queries: Tokens, pixels: Tokens) -> Tokens:
        queries = self.self_attention(queries, queries)
        out: Tokens = self.feed_forward(self.cross_attention(queries, pixels))
        return out


class LiteBottleneck(nn.Module):
    """Pixel operation of M-F-: depthwise 3x3 to 1024 channels, dynamic ReLU, 1x1 back, shortcut."""

    def __init__(self, expansion: int = 4):
        super().__init__()
        self.expand = nn.Sequential(*depthwise_bn(DIM, expansion * DIM))
        self.act = DynamicReLU(expansion * DIM, DIM)
        self.project = nn.Sequential(*pointwise_bn(expansion * DIM, DIM))

    def forward(self, pixels: Tokens, token: Tensor) -> Tokens:
        """token (B, D) gives the slopes of the dynamic ReLU."""
        y = self.project(self.act(self.expand(tokens_map(pixels)), token))
        return pixels.replaced(pixels.values + y.flatten(2).mT)


class QueryBlock(nn.Module):
    """Mobile->Former and Former: the queries read the map, then each other. All that the last block has."""

    def __init__(self, dropout: float):
        super().__init__()
        self.mobile_to_former = AttentionLayer(dropout, gated=True)
        self.former = EncoderLayer(4 * DIM, dropout)

    def forward(self, queries: Tokens, pixels: Tokens) -> tuple[Tokens, Tokens]:
        """-> queries and pixels, of the same shapes."""
        return self.former(self.mobile_to_former(queries, pixels)), pixels


class MFBlock(QueryBlock):
    """Mobile->Former, Former, pixel operation, Former->Mobile; "M-F+" if `transformer`, else "M-F-"."""

    def __init__(self, dropout: float, transformer: bool):
        super().__init__(dropout)
        self.pixel = EncoderLayer(4 * DIM, dropout) if transformer else LiteBottleneck()
        self.former_to_mobile = Attention(dropout)

    def forward(self, queries: Tokens, pixels: Tokens) -> tuple[Tokens, Tokens]:
        queries, pixels = super().forward(queries, pixels)
        if isinstance(self.pixel, LiteBottleneck):
            pixels = self.pixel(pixels, queries.values[:, 0])
        else:
            pixels = self.pixel(pixels)
        return queries, pixels.replaced(pixels.values + self.former_to_mobile(pixels, queries))


class Blocks(nn.ModuleList):
    """The blocks at one scale."""

    def forward(self, queries: Tokens, x: Tensor, padding: Tensor | None) -> tuple[list[Tokens], Tensor]:
        """queries, map (B, D, h, w) -> the queries after each block, the map after the last."""
        pixels, outputs = map_tokens(x, padding), []
        for block in self:
            queries, pixels = block(queries, pixels)
            outputs.append(queries)
        return outputs, tokens_map(pixels)


def enlarge(x: Tensor, size: tuple[int, int], padding: Tensor | None) -> Tensor:
    """Map (B, D, h, w), zero in the padding -> (B, D, *size), bilinear and zero there too.

    Only positions inside the image are averaged, next to the padding as next to the map's own border."""
    y = F.interpolate(x, size, mode="bilinear")
    if padding is None:
        return y
    inside = ~padding_of_map(padding, size_of(x))
    share = F.interpolate(inside[:, None].to(x.dtype), size, mode="bilinear")  # of what was averaged: 9/16 or more
    return zero_padding(y / share.clamp_min(0.5), padding_of_map(padding, size))


class UpMap(nn.Module):
    """A coarse map brought to a finer one's size and added to it: bilinear, depthwise 3x3, 1x1; lateral 1x1."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Sequential(*depthwise_bn(DIM, DIM), *pointwise_bn(DIM, DIM))
        self.lateral = nn.Sequential(*pointwise_bn(channels, DIM))

    def forward(self, x: Tensor, fine: Tensor, padding: Tensor | None = None) -> Tensor:
        """x (B, D, h, w), fine (B, channels, h', w'), padding (B, H, W) of the images -> (B, D, h', w')."""
        out: Tensor = self.conv(enlarge(x, size_of(fine), padding)) + self.lateral(fine)
        return out


class MFDec(nn.Module):
    """MF-Dec-522 and MF-Dec-211: Mobile-Former blocks at 1/32, 1/16 and 1/8, past the same queries.

    Args:
        channels: of the encoder's maps at strides 8 and 16.
        blocks: number of blocks at 1/32, 1/16, 1/8.
    """

    strides = (8, 16)

    def __init__(self, channels: dict[int, int], blocks: tuple[int, int, int], num_queries: int, dropout: float):
        super().__init__()
        self.query_content = nn.Parameter(torch.empty(1, num_queries, DIM))
        self.query_position = nn.Parameter(torch.empty(1, num_queries, DIM))
        self.down = nn.Sequential(*depthwise_bn(channels[16], channels[16], stride=2), *pointwise_bn(channels[16], DIM))
        self.blocks32 = Blocks(MFBlock(dropout, transformer=True) for _ in range(blocks[0]))
        self.up16 = UpMap(channels[16])
        self.blocks16 = Blocks(MFBlock(dropout, transformer=False) for _ in range(blocks[1]))
        self.up8 = UpMap(channels[8])
        self.blocks8 = Blocks(MFBlock(dropout, transformer=False) for _ in range(blocks[2] - 1))
        self.blocks8.append(QueryBlock(dropout))
        self.apply(_init_weights)
        nn.init.normal_(self.query_content)
        nn.init.normal_(self.query_position)

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed."""
        return {"query_content", "query_position"}

    def forward(self, maps: dict[int, Tensor], padding: Tensor | None = None) -> list[Tensor]:
        """Maps at strides 8 and 16, zero in the padding (B, H, W) of the encoder's input -> the queries
        (B, num_queries, D) after each block, the last one final."""
        queries = Tokens(self.query_content.expand(maps[16].shape[0], -1, -1), self.query_position)
        at32, x = self.blocks32(queries, self.down(maps[16]), padding)
        at16, x = self.blocks16(at32[-1], self.up16(x, maps[16], padding), padding)
        at8, _ = self.blocks8(at16[-1], self.up8(x, maps[8], padding), padding)
        return [queries.values for queries in at32 + at16 + at8]


class DetrTransformer(nn.Module):
    """DETR's transformer: the map at 1/32 projected to 256 channels, encoder layers over its positions, decoder layers
    over queries that start at zero. One LayerNorm follows the queries of every decoder layer on their way out.

    The first decoder layer's self-attention mixes zeros, so of it only biases and `out` are ever trained, as in DETR.
    """

    strides = (32,)

    def __init__(self, channels: dict[int, int], num_queries: int, dropout: float, depth: int = 6, hidden: int = 2048):
        super().__init__()
        self.query_position = nn.Parameter(torch.empty(1, num_queries, DIM))
        self.project = nn.Conv2d(channels[32], DIM, 1)
        self.encoder = nn.Sequential(*(EncoderLayer(hidden, dropout) for _ in range(depth)))
        self.decoder = nn.ModuleList(DecoderLayer(hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.apply(_init_weights)
        nn.init.normal_(self.query_position)

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed."""
        return {"query_position"}

    def forward(self, maps: dict[int, Tensor], padding: Tensor | None = None) -> list[Tensor]:
        """The map at stride 32, padding (B, H, W) of the encoder's input -> the queries (B, num_queries, D) after each
        decoder layer, the last one final."""
        pixels = self.encoder(map_tokens(self.project(maps[32]), padding))
        queries = Tokens(torch.zeros_like(self.query_position).expand(maps[32].shape[0], -1, -1), self.query_position)
        outputs = []
        for layer in self.decoder:
            queries = layer(queries, pixels)
            outputs.append(self.norm(queries.values))
        return outputs


def _init_weights(module: nn.Module) -> None:
    """Linear layers: Xavier, bias 0, with which every gate starts at 1 and every dynamic ReLU near ReLU. Convolutions:
    normal, variance 1 / fan-in."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)
