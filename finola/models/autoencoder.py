"""The autoencoder: image -> encoder -> pooling -> q -> autoregression -> decoder -> image.

Shapes: x (B, 3, S, S) float RGB in [0, 1]; encoder map (B, W, S/16, S/16); q (B, C); z (B, C, R, R) with
R = `map_size`; the output is on the scale of x, unclamped. The ImageNet normalisation lives inside the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from finola.autoregression import Finola, Repetition
from finola.errors import check_choice
from finola.models.base import IMAGE_KEYS, ExportPart, ImageModel, ModelConfig, divisor_near, wrong, wrong_heads
from finola.models.decoder import ConvDecoder
from finola.models.encoders import check_encoder_name, create_encoder
from finola.models.linear_start import start_as_shifts, start_from_images
from finola.models.mobileformer import ENCODER_STRIDE
from finola.models.pooling import POOLINGS, AttentionPool

AUTOREGRESSIONS = ("norm_linear", "linear", "repeat", "repeat_pos")


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
        decoder_reduce, decoder_widths: see `finola.models.decoder.ConvDecoder`.
        pool_heads: heads of the pooling; C / 64 by default.
        pooling: "positions", or "plain" as the paper prints it (see `finola.models.pooling`).
        start: "random", or "shifts" (see `finola.models.linear_start`).
        gain: scale of the random initial matrices.
    """

    kind: ClassVar[str] = "autoencoder"
    task: ClassVar[str] = "finola.training.tasks.reconstruction:ReconstructionTask"
    recipe_keys: ClassVar[frozenset[str]] = IMAGE_KEYS | {"optim.rate"}
    cost: ClassVar[str] = "finola.evaluation.complexity:cost_of_autoencoder"
    score: ClassVar[str | None] = "reconstruction"

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
    pooling: str = "positions"
    start: str = "random"
    gain: float = 0.1

    def faults(self) -> Iterator[str]:
        sizes = list(self.wrong_image_size(ENCODER_STRIDE))
        yield from sizes
        if not sizes and (self.map_size < 1 or self.image_size % self.map_size):
            yield (f"map_size: got {self.map_size}, expected a divisor of image_size {self.image_size}"
                   f" (--model.map_size {divisor_near(self.image_size, self.map_size)})")
        yield from wrong(check_encoder_name, self.encoder)
        yield from self.below(1, "embed_dim")
        if self.embed_dim > 0 and self.pool_heads is not None:
            yield from wrong_heads("pool_heads", self.pool_heads, "embed_dim", self.embed_dim)
        yield from wrong(check_choice, "pooling", self.pooling, POOLINGS)
        yield from wrong(check_choice, "autoregression", self.autoregression, AUTOREGRESSIONS)
        yield from wrong(check_choice, "start", self.start, ("random", "shifts"))

    def build(self) -> FinolaAutoencoder:
        return FinolaAutoencoder(self)

    def without_start(self) -> AutoencoderConfig:
        return replace(self, start="random")


class FinolaAutoencoder(ImageModel):
    """Image -> one vector -> image (paper, section "FINOLA on Image Reconstruction", Figure 1)."""

    config: AutoencoderConfig
    autoregression: Finola | Repetition

    def __init__(self, config: AutoencoderConfig):
        super().__init__(config)
        grid = config.image_size // ENCODER_STRIDE
        self.encoder = create_encoder(config.encoder)
        self.pool = AttentionPool(self.encoder.num_features, config.embed_dim, (grid, grid), config.pool_heads,
                                  start="cells" if config.start == "shifts" else "random", pooling=config.pooling)
        self.autoregression = _autoregression(config)
        self.decoder = ConvDecoder(config.embed_dim, config.image_size // config.map_size,
                                   config.decoder_reduce, config.decoder_widths)
        if config.start == "shifts":
            start_as_shifts(self)

    def encode(self, x: Tensor) -> Tensor:
        """x (B, 3, S, S) in [0, 1] -> q (B, C)."""
        self.check_image(x)
        q: Tensor = self.pool(self.encoder.forward_features(self.normalise(x)))
        return q

    def grow(self, q: Tensor) -> Tensor:
        """q (B, C) -> the feature map z (B, C, R, R)."""
        z: Tensor = self.autoregression(q)
        return z

    def decode(self, q: Tensor) -> Tensor:
        """q (B, C) -> the image (B, 3, S, S), on the scale of [0, 1], unclamped."""
        return self.decode_map(self.grow(q))

    def decode_map(self, z: Tensor) -> Tensor:
        """z (B, C, h, w) -> the image (B, 3, h S / R, w S / R), on the scale of [0, 1], unclamped."""
        y: Tensor = self.decoder(z)
        return y.float() * self.std + self.mean

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3, S, S) -> its reconstruction, of the same shape."""
        return self.decode(self.encode(x))

    def export_parts(self) -> dict[str, ExportPart]:
        q = self.mean.new_zeros(2, self.config.embed_dim)
        return {"encoder": ExportPart(self.encode, self.example_images(), "image", ("q",),
                                      "Of an image, q is all that is kept."),
                "decoder": ExportPart(self.decode, q, "q", ("image",),
                                      "Reconstructions are on the images' scale and may leave it a little: clip them.")}

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {"pool.position", "pool.query", "autoregression.position"}

    def start_from_images(self, x: Tensor) -> None:
        start_from_images(self, x)

    def take_over(self, donor: ImageModel) -> tuple[str, ...]:
        """Of masked FINOLA with as many channels: the matrices, and the pooling with its keys' positions resampled from
        the block to the whole grid. The block-wise variant has no pooling; its matrices act on the encoder's own
        channels, so q starts as a weighted mean of these, a mean for each head."""
        taken = ("matrices",) if self._take_matrices(getattr(donor, "autoregression", None)) else ()
        pool, reduce = getattr(donor, "pool", None), getattr(donor, "reduce", None)
        if isinstance(pool, AttentionPool):
            return (*taken, "pooling") if self.pool.take_over(pool) else taken
        if taken and isinstance(reduce, nn.Identity | nn.Linear):
            self.pool.start_as_mean(reduce if isinstance(reduce, nn.Linear) else None)
        return taken

    @torch.no_grad()
    def _take_matrices(self, law: object) -> bool:
        """Whether the matrices of another model's law fit this one's; if so, they are copied."""
        if not (isinstance(law, Finola) and isinstance(self.autoregression, Finola)):
            return False
        if law.dim != self.autoregression.dim or not set(self.autoregression.directions) <= set(law.directions):
            return False
        for direction in self.autoregression.directions:
            getattr(self.autoregression, direction).copy_(getattr(law, direction))
        return True


def _autoregression(config: AutoencoderConfig) -> Finola | Repetition:
    size = (config.map_size, config.map_size)
    if config.autoregression in ("repeat", "repeat_pos"):
        return Repetition(config.embed_dim, size, position=config.autoregression == "repeat_pos")
    norm = "none" if config.autoregression == "linear" else config.norm
    return Finola(config.embed_dim, size, config.origin, norm=norm, gain=config.gain)
