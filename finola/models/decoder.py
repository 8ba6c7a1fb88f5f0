"""Decoders: the feature map (B, C, H, W) -> pixels (B, 3, sH, sW) (paper, Table "Decoder specifications").

A decoder is chosen by its upsampling factor s = image size / map size; s = 32, 16, 8, 4, 2, 1 are the table's
columns 8² ... 256². Read as printed (`reduce=None`), the published parameter counts come out for no column;
with a 1x1 convolution in front that first reduces C (`reduce="published"`) all six do within 5 %. The printed
layers are the default, the other reading is inferred from the counts (docs/paper-map.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from finola.errors import FinolaError

# output channels of the residual block at each distance (image size / block size) from the image
DECODER_WIDTHS = {32: 512, 16: 512, 8: 256, 4: 256, 2: 128, 1: 128}


class ConvDecoder(nn.Module):
    """res-conv, then up-conv and res-conv for each doubling, then a 3x3 convolution to RGB.

    Args:
        in_channels: C.
        scale: s, one of 1, 2, 4, 8, 16, 32.
        reduce: None, a number of channels, or "published" (1024 for s >= 4, else 256): 1x1 convolution in front.
        widths: channels of the residual blocks from the map to the image, 1 + log2(s) of them, for models smaller
            than the paper's; None for the table's.
    """

    def __init__(self, in_channels: int, scale: int, reduce: int | str | None = None,
                 widths: Sequence[int] | None = None):
        super().__init__()
        if scale not in DECODER_WIDTHS:
            raise FinolaError(f"image size / map size: got {scale}, expected one of {sorted(DECODER_WIDTHS)}")
        reduced = in_channels if reduce is None else reduce
        if reduced == "published":
            reduced = 1024 if scale >= 4 else 256
        if not isinstance(reduced, int) or reduced < 1:
            raise FinolaError(f"decoder_reduce: got {reduce!r}, expected None, 'published' or a number of channels")
        scales = [s for s in DECODER_WIDTHS if s <= scale]
        widths = [DECODER_WIDTHS[s] for s in scales] if widths is None else widths
        if len(widths) != len(scales):
            raise FinolaError(f"decoder_widths: got {len(widths)} numbers, expected {len(scales)} for an upsampling "
                              f"factor of {scale} (image_size / map_size); change map_size with image_size, or "
                              "decoder_widths with both")
        layers: list[nn.Module] = [] if reduce is None else [nn.Conv2d(in_channels, reduced, 1, bias=False)]
        channels = reduced
        for width in widths:
            if layers and isinstance(layers[-1], ResConv):
                layers.append(UpConv(channels))
            layers.append(ResConv(channels, width))
            channels = width
        self.layers = nn.Sequential(*layers)
        self.to_rgb = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """z (B, C, H, W) -> x (B, 3, s H, s W), ImageNet-normalised."""
        x: Tensor = self.to_rgb(self.layers(z))
        return x

    def first_convolutions(self) -> list[nn.Conv2d]:
        """The convolutions that read the map itself."""
        first = self.layers[0]
        layers = [first.conv1, first.shortcut] if isinstance(first, ResConv) else [first]
        return [layer for layer in layers if isinstance(layer, nn.Conv2d)]


class ResConv(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut, 1x1 where the channels change (He et al., option B)."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        same = in_channels == out_channels
        self.shortcut: nn.Identity | nn.Conv2d = (
            nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1, bias=False))

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
