"""Decoders: the feature map (B, C, H, W) -> pixels (B, 3, sH, sW) (paper, Table "Decoder specifications").

A decoder is chosen by its upsampling factor s = image size / map size; s = 32, 16, 8, 4, 2, 1 are the table's
columns 8² ... 256². Read as printed (`reduce=None`), the published parameter counts come out for no column;
with a 1x1 convolution in front that first reduces C (`reduce="published"`) all six do within 5 %. The printed
layers are the default, the other reading is inferred from the counts (docs/paper-map.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finola.errors import FinolaError

# output channels of the residual block at each distance (image size / block size) from the image
WIDTHS = {32: 512, 16: 512, 8: 256, 4: 256, 2: 128, 1: 128}


class ConvDecoder(nn.Module):
    """res-conv, then up-conv and res-conv for each doubling, then a 3x3 convolution to RGB.

    Args:
        in_channels: C.
        scale: s, one of 1, 2, 4, 8, 16, 32.
        reduce: None, a number of channels, or "published" (1024 for s >= 4, else 256): 1x1 convolution in front.
        width: factor on every width of the table, for models smaller than the paper's.
    """

    def __init__(self, in_channels: int, scale: int, reduce: int | str | None = None, width: float = 1.0):
        super().__init__()
        if scale not in WIDTHS:
            raise FinolaError(f"image size / map size: got {scale}, expected one of {sorted(WIDTHS)}")
        reduced = {"published": 1024 if scale >= 4 else 256, None: in_channels}.get(reduce, reduce)
        if not isinstance(reduced, int) or reduced < 1:
            raise FinolaError(f"decoder_reduce: got {reduce!r}, expected None, 'published' or a number of channels")
        layers: list[nn.Module] = [] if reduce is None else [nn.Conv2d(in_channels, reduced, 1, bias=False)]
        channels = reduced
        while scale >= 1:
            out = max(8, round(WIDTHS[scale] * width / 8) * 8)
            layers.append(ResConv(channels, out))
            if scale > 1:
                layers.append(UpConv(out))
            channels, scale = out, scale // 2
        self.layers = nn.Sequential(*layers)
        self.to_rgb = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.to_rgb(self.layers(z))


class ResConv(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut, 1x1 where the channels change (He et al., option B)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        same = in_channels == out_channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class UpConv(nn.Module):
    """Bilinear upsampling by two, then a 3x3 convolution with BatchNorm."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return F.relu(self.norm(self.conv(x)))


def parameter_count(decoder: ConvDecoder) -> int:
    """The convolutions' weights alone, as the paper's table counts them."""
    return sum(m.weight.numel() for m in decoder.modules() if isinstance(m, nn.Conv2d))


def with_standard_start(decoder: ConvDecoder) -> ConvDecoder:
    """Kaiming weights, in place; returns the decoder."""
    for module in decoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
    nn.init.normal_(decoder.to_rgb.weight, std=0.01)
    nn.init.zeros_(decoder.to_rgb.bias)
    return decoder
