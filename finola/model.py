"""The autoencoder: image -> encoder -> pooling -> q -> autoregression -> decoder -> image.

Shapes: x (B, 3, S, S) float RGB in [0, 1]; encoder map (B, W, S/16, S/16); q (B, C); z (B, C, R, R) with
R = `map_size`; the output is on the scale of x, unclamped. The ImageNet normalisation lives inside the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

import timm
import torch
from torch import Tensor, nn

import finola.encoder  # noqa: F401  (registers the Mobile-Former encoders with timm)
from finola.autoregression import Finola, Repetition
from finola.decoder import ConvDecoder
from finola.errors import FinolaError
from finola.pooling import AttentionPool
from finola.start import start_as_shifts

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ENCODER_STRIDE = 16
AUTOREGRESSIONS = ("norm_linear", "linear", "repeat", "repeat_pos")


def check_encoder_name(name: str) -> None:
    """Raises FinolaError unless timm knows the model; asked first, since timm would fetch one named "hf-hub:..." over
    the network."""
    if not isinstance(name, str) or not timm.is_model(name):
        raise FinolaError(f"encoder: unknown timm model {name!r}; finola's own: "
                          f"{', '.join(timm.list_models('mobileformer*'))}")


@dataclass(frozen=True)
class ModelConfig:
    """What all configurations share: the name of their kind, which stands in weights files, and a plain form."""

    kind: ClassVar[str]

    def to_dict(self) -> dict:
        return asdict(self)

    def check_image_size(self, unit: int) -> None:
        """Raises FinolaError unless `image_size` is a multiple of `unit`."""
        if self.image_size < unit or self.image_size % unit:
            raise FinolaError(f"image_size: got {self.image_size}, expected a multiple of {unit}")


@dataclass(frozen=True)
class AutoencoderConfig(ModelConfig):
    """What defines a model; its fields are the `model:` section of a recipe.

    Attributes:
        encoder: a timm model with stride 16, by name.
        embed_dim: C, the length of q.
        image_size, map_size: S and R in pixels; their ratio chooses the decoder.
        origin: where q stands in the map: "center", "top_left", ... or [y, x].
        autoregression: "norm_linear" (FINOLA), "linear" (no norm), "repeat", "repeat_pos" (Table "Validation
            of the norm+linear model").
        norm: "layer" or "batch", for norm_linear.
        decoder_reduce, decoder_widths: see `finola.decoder.ConvDecoder`.
        pool_heads: heads of the pooling; C / 64 by default.
        start: "random", or "shifts" (see `finola.start`).
        gain: scale of the random initial matrices.
    """

    kind: ClassVar[str] = "autoencoder"

    encoder: str = "mobileformer_w2880"
    embed_dim: int = 3072
    image_size: int = 256
    map_size: int = 16
    origin: str | tuple[int, int] = "center"
    autoregression: str = "norm_linear"
    norm: str = "layer"
    decoder_reduce: str | int | None = None
    decoder_widths: tuple[int, ...] | None = None
    pool_heads: int | None = None
    start: str = "random"
    gain: float = 0.1

    def __post_init__(self):
        self.check_image_size(ENCODER_STRIDE)
        if self.map_size < 1 or self.image_size % self.map_size:
            raise FinolaError(f"map_size: got {self.map_size}, expected a divisor of image_size {self.image_size}")
        check_encoder_name(self.encoder)
        if self.pool_heads is not None and (self.pool_heads < 1 or self.embed_dim % self.pool_heads):
            raise FinolaError(f"pool_heads: got {self.pool_heads}, expected a divisor of embed_dim {self.embed_dim}")
        if self.embed_dim < 1:
            raise FinolaError(f"embed_dim: got {self.embed_dim}, expected at least 1")
        if self.autoregression not in AUTOREGRESSIONS:
            raise FinolaError(f"autoregression: got {self.autoregression!r}, expected one of "
                              f"{', '.join(AUTOREGRESSIONS)}")
        if self.start not in ("random", "shifts"):
            raise FinolaError(f"start: got {self.start!r}, expected 'random' or 'shifts'")


class ImageModel(nn.Module):
    """What all models share: a configuration, images in [0, 1] of one size, and an encoder that may be frozen."""

    encoder: nn.Module

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encoder_frozen = False
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        """x in [0, 1] -> what the encoder takes: ImageNet's mean and deviation removed, channels-last."""
        return ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def check_image(self, x: Tensor) -> None:
        """Raises FinolaError unless x is (B, 3, S, S) of a floating type."""
        size = self.config.image_size
        if not x.is_floating_point():
            raise FinolaError(f"image: got {x.dtype}, expected a floating type with values in [0, 1]; divide by 255")
        if x.ndim != 4 or x.shape[1:] != (3, size, size):
            raise FinolaError(f"image: got shape {tuple(x.shape)}, expected (B, 3, {size}, {size}); "
                              "finola.reconstruct and finola.predict take photographs of any size")

    def freeze_encoder(self) -> None:
        """No gradients for the encoder, and its BatchNorm statistics stay as they are, in training mode too."""
        self.encoder_frozen = True
        self.encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> ImageModel:
        super().train(mode)
        if self.encoder_frozen:
            self.encoder.eval()
        return self


class FinolaAutoencoder(ImageModel):
    """Image -> one vector -> image (paper, section "FINOLA on Image Reconstruction", Figure 1)."""

    def __init__(self, config: AutoencoderConfig):
        super().__init__(config)
        grid = config.image_size // ENCODER_STRIDE
        self.encoder = timm.create_model(config.encoder, num_classes=0)
        self.pool = AttentionPool(self.encoder.num_features, config.embed_dim, (grid, grid), config.pool_heads,
                                  start="cells" if config.start == "shifts" else "random")
        self.autoregression = _autoregression(config)
        self.decoder = ConvDecoder(config.embed_dim, config.image_size // config.map_size,
                                   config.decoder_reduce, config.decoder_widths)
        if config.start == "shifts":
            start_as_shifts(self)

    def encode(self, x: Tensor) -> Tensor:
        """x (B, 3, S, S) in [0, 1] -> q (B, C)."""
        self.check_image(x)
        return self.pool(self.encoder.forward_features(self.normalise(x)))

    def grow(self, q: Tensor) -> Tensor:
        """q (B, C) -> the feature map z (B, C, R, R)."""
        return self.autoregression(q)

    def decode(self, q: Tensor) -> Tensor:
        """q (B, C) -> the image (B, 3, S, S), on the scale of [0, 1], unclamped."""
        return self.decoder(self.grow(q)).float() * self.std + self.mean

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3, S, S) -> its reconstruction, of the same shape."""
        return self.decode(self.encode(x))

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed (biases and norms are left to the optimiser's rule)."""
        names = {f"encoder.{name}" for name in self.encoder.no_weight_decay()}
        return names | {"pool.position", "pool.query", "autoregression.position"}


def _autoregression(config: AutoencoderConfig) -> nn.Module:
    size = (config.map_size, config.map_size)
    if config.autoregression in ("repeat", "repeat_pos"):
        return Repetition(config.embed_dim, size, position=config.autoregression == "repeat_pos")
    norm = "none" if config.autoregression == "linear" else config.norm
    return Finola(config.embed_dim, size, config.origin, norm=norm, gain=config.gain)
