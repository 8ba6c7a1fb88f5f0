"""Masked FINOLA: the encoder sees one block of the image, and the autoregression grows the rest from it (paper,
section "Masked FINOLA on Self-supervised Pre-training").

    element   block -> encoder -> pooling -> q at the block's centre -> autoregression -> linear -> patches
    block     block -> encoder -> its map, each position predicting three masked ones -> transformer -> patches

The loss is that of the masked patches alone. Shapes: x (B, 3, S, S) float RGB in [0, 1]; the grid has h = w = S/16
positions, one for each 16x16 patch, and the block k x k of them; the encoder's map of the block (B, W, k, k);
z (B, C, h, w); predicted patches (B, h, w, 768) in ImageNet-normalised pixels; mask (B, h, w), True = masked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finola.autoregression import Finola, advance
from finola.errors import check_choice
from finola.kernels.grid import state_dtype
from finola.models.base import ImageModel, ModelConfig, wrong, wrong_heads
from finola.models.encoders import check_encoder_name, create_encoder
from finola.models.masking import SCHEMES, Pair, Run, axis_runs, block_mask, patchify, random_corner, unpatchify
from finola.models.mobileformer import ENCODER_STRIDE
from finola.models.pooling import POOLINGS, AttentionPool

VARIANTS = ("block", "element")
ELEMENT_DIM = 512  # C of the element variant (paper, appendix, table "Comparison between FINOLA and Masked FINOLA")
GRAY = 0.5
PATCH_EPS = 1e-6  # added to a patch's variance under norm_pix_loss
M = TypeVar("M", bound=nn.Module)


class MaskedImageModel(ImageModel, ABC):
    """A model that predicts the masked patches of an image: what is the same for masked FINOLA, MAE and SimMIM.

    Its configuration may have a field `norm_pix_loss`: whether the targets are patches normalised to zero mean
    and unit variance, rather than the ImageNet-normalised pixels themselves.
    """

    patch = ENCODER_STRIDE  # pixels; the ViTs' too

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.norm_pix_loss = getattr(config, "norm_pix_loss", False)

    @abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, 3, S, S) -> predicted patches (B, h, w, 3 p p), mask (B, h, w)."""

    def loss(self, x: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
        """Mean squared error over the masked patches alone."""
        target = self.patches_of(x)
        if self.norm_pix_loss:
            mean, std = _patch_statistics(target)
            target = (target - mean) / std
        return masked_mean(F.mse_loss(patches.float(), target, reduction="none"), mask)

    def paint(self, x: Tensor, patches: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Two images (B, 3, S, S) on the scale of [0, 1], unclamped: x with its masked patches gray, and x with
        the prediction in their place. With `norm_pix_loss` a patch's own mean and deviation are put back."""
        patches = patches.float()
        if self.norm_pix_loss:
            mean, std = _patch_statistics(self.patches_of(x))
            patches = patches * std + mean
        masked = mask.repeat_interleave(self.patch, 1).repeat_interleave(self.patch, 2)[:, None]  # (B, 1, S, S)
        prediction = unpatchify(patches) * self.std + self.mean
        return x.masked_fill(masked, GRAY), torch.where(masked, prediction, x)

    def patches_of(self, x: Tensor) -> Tensor:
        """x (B, 3, S, S) -> its patches (B, h, w, 3 p p) in ImageNet-normalised pixels."""
        return patchify(self.normalise(x), self.patch)


def masked_mean(errors: Tensor, mask: Tensor) -> Tensor:
    """The mean of errors (B, h, w, n) over the masked patches; mask (B, h, w)."""
    return errors.mean(-1).masked_fill(~mask, 0).sum() / mask.sum()


def _patch_statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each patch, (B, h, w, 1) each."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True, correction=0)
    return mean, (variance + PATCH_EPS).sqrt()


@dataclass(frozen=True)
class MaskedConfig(ModelConfig):
    """What defines a masked FINOLA; its fields are the `model:` section of a recipe.

    Attributes:
        encoder: a timm model with stride 16, by name.
        variant: "block" (Masked-FINOLA-B) or "element" (Masked-FINOLA-E).
        image_size: S in pixels.
        block_size: k, the side of the visible block in patches; half the grid in the block variant.
        embed_dim: C. Element: the length of q, 512 by default. Block: the encoder's width by default; a number
            puts a linear layer to this many channels before the autoregression.
        scheme: "outward" or "wrap", who predicts what in the block variant (see `finola.models.masking`).
        decoder_dim, decoder_depth, decoder_heads: channels, blocks and heads of the block variant's transformer.
        norm_pix_loss: each target patch normalised to zero mean and unit variance.
        pool_heads: heads of the element variant's pooling; C / 64 by default.
        pooling: of the element variant, "positions", or "plain" as the paper prints it (see `finola.models.pooling`).
        gain: scale of the random initial matrices.
    """

    kind: ClassVar[str] = "masked"
    task: ClassVar[str] = "finola.training.tasks.pretraining:MaskedPredictionTask"
    cost: ClassVar[str] = "finola.evaluation.complexity:cost_of_masked"
    score: ClassVar[str | None] = "masked"

    encoder: str = "mobileformer_w2880"
    variant: str = "block"
    image_size: int = 256
    block_size: int = 8
    embed_dim: int | None = None
    scheme: str = "outward"
    decoder_dim: int = 512
    decoder_depth: int = 6
    decoder_heads: int = 8
    norm_pix_loss: bool = False
    pool_heads: int | None = None
    pooling: str = "positions"
    gain: float = 0.1

    def faults(self) -> Iterator[str]:
        yield from wrong(check_encoder_name, self.encoder)
        yield from wrong(check_choice, "variant", self.variant, VARIANTS)
        yield from wrong(check_choice, "scheme", self.scheme, SCHEMES)
        yield from wrong(check_choice, "pooling", self.pooling, POOLINGS)
        if self.variant == "block" and self.pooling != "positions":
            yield f"pooling: got {self.pooling!r}, which only the element variant has; leave it out"
        yield from self._wrong_grid()
        yield from self._wrong_widths()

    @property
    def grid_size(self) -> int:
        """h = w, the patches along a side of the image."""
        return self.image_size // ENCODER_STRIDE

    def build(self) -> MaskedFinola:
        return MaskedFinola(self)

    def _wrong_grid(self) -> Iterator[str]:
        # from 3 positions a side, the grid's centre has neighbours in all four directions, each with its matrix
        if sizes := list(self.wrong_image_size(ENCODER_STRIDE, 3)):
            yield from sizes
            return
        grid = f"the {self.grid_size}x{self.grid_size} patches of image_size {self.image_size}"
        if self.variant == "block" and self.grid_size != 2 * self.block_size:
            fitting = f"--model.block_size {self.grid_size // 2}, " if self.grid_size % 2 == 0 else ""
            yield (f"block_size: got {self.block_size} patches, expected half of {grid} ({fitting}--data.image_size "
                   f"{2 * self.block_size * ENCODER_STRIDE} or --model.variant element)")
        elif not 1 <= self.block_size < self.grid_size:
            yield (f"block_size: got {self.block_size} patches, expected from 1 to {self.grid_size - 1}, so "
                   f"that some of {grid} are masked (--model.block_size {self.grid_size // 2})")

    def _wrong_widths(self) -> Iterator[str]:
        if small := list(self.below(1, "embed_dim", "pool_heads", "decoder_dim", "decoder_depth", "decoder_heads")):
            yield from small
            return
        yield from wrong_heads("decoder_heads", self.decoder_heads, "decoder_dim", self.decoder_dim)
        if self.variant == "element" and self.pool_heads:
            yield from wrong_heads("pool_heads", self.pool_heads, "embed_dim", self.embed_dim or ELEMENT_DIM)


class MaskedFinola(MaskedImageModel):
    """One visible block -> the patches around it (paper, Figure "Two Masked FINOLA variants")."""

    config: MaskedConfig
    decoder: nn.Linear | TransformerDecoder

    def __init__(self, config: MaskedConfig):
        super().__init__(config)
        self.grid: Pair = (config.grid_size, config.grid_size)
        self.block: Pair = (config.block_size, config.block_size)
        self.encoder = create_encoder(config.encoder)
        width = self.encoder.num_features
        if config.variant == "element":
            dim = config.embed_dim or ELEMENT_DIM
            self.pool = AttentionPool(width, dim, self.block, config.pool_heads, pooling=config.pooling)
            self.decoder = glorot(nn.Linear(dim, 3 * self.patch**2))
        else:
            dim = config.embed_dim or width
            self.reduce = nn.Identity() if config.embed_dim is None else glorot(nn.Linear(width, dim))
            self.decoder = TransformerDecoder(dim, config.decoder_dim, config.decoder_depth, config.decoder_heads,
                                              3 * self.patch**2)
        self.autoregression = Finola(dim, self.grid, gain=config.gain)

    def forward(self, x: Tensor, corner: Pair | None = None) -> tuple[Tensor, Tensor]:
        """x (B, 3, S, S) -> predicted patches (B, h, w, 768), mask (B, h, w).

        `corner` (y0, x0) in patches is that of the visible block; by default one is drawn for the whole batch
        from torch's global generator. Raises FinolaError for an image of another size or a corner outside.
        """
        corner = random_corner(self.grid, self.block) if corner is None else corner
        mask = block_mask(self.grid, self.block, corner, x.device)
        z = self.grow(self.encode_block(x, corner), corner)
        return self.decoder(z.permute(0, 2, 3, 1)), mask.expand(len(x), -1, -1)

    def encode_block(self, x: Tensor, corner: Pair) -> Tensor:
        """x (B, 3, S, S) -> the encoder's map (B, W, k, k) of the block cut out at `corner`."""
        self.check_image(x)
        rows, columns = (slice(start * self.patch, (start + side) * self.patch)
                         for start, side in zip(corner, self.block, strict=True))
        return self.encoder.forward_features(self.normalise(x[:, :, rows, columns]))

    def grow(self, features: Tensor, corner: Pair) -> Tensor:
        """The block's map (B, W, k, k) -> the whole map z (B, C, h, w), channels-last, in fp32 at least."""
        if self.config.variant == "block":
            return self._grow_from_block(features, corner)
        # as on a whole map, the centre of an even block is the position after the middle
        y, x = (start + side // 2 for start, side in zip(corner, self.block, strict=True))
        q: Tensor = self.pool(features)
        z: Tensor = self.autoregression(q.to(state_dtype(q)), origin=(y, x))
        return z

    def _grow_from_block(self, features: Tensor, corner: Pair) -> Tensor:
        """The block's map in its place, and around it what each of its positions predicts (Eq. 3).

        A group predicts φᵘz, ψᵛz and (ψᵛφᵘz + φᵘψᵛz) / 2. All groups with the same u are advanced together, as
        are those with the same v, and φᵘz and ψᵛz are both predictions and the first halves of the diagonal.
        """
        z: Tensor = self.reduce(features.permute(0, 2, 3, 1))  # (B, k, k, C)
        z = z.to(state_dtype(z))
        matrices = self.autoregression.matrices()
        vertical, horizontal = (
            _Axis(dim, start, axis_runs(side, start, self.config.scheme))
            for dim, start, side in zip((1, 2), corner, self.block, strict=True))
        beside, below = horizontal.predict(z, matrices), vertical.predict(z, matrices)  # (B, k, k, C) each
        diagonal = (vertical.predict(beside, matrices) + horizontal.predict(below, matrices)) / 2
        visible_rows, masked_rows = horizontal.join(z, beside), horizontal.join(below, diagonal)  # (B, k, w, C) each
        return vertical.join(visible_rows, masked_rows).permute(0, 3, 1, 2)  # (B, h, w, C) -> (B, C, h, w)

    def no_weight_decay(self) -> set[str]:
        pooling = {"pool.position", "pool.query"} if self.config.variant == "element" else set()
        return super().no_weight_decay() | pooling


class TransformerDecoder(nn.Module):
    """Linear layer, pre-norm transformer blocks without position embedding, LayerNorm, linear layer to pixels.

    The transformer lets the groups communicate. Its linear layers start as MAE's, with uniform Glorot weights.
    """

    def __init__(self, in_channels: int, dim: int, depth: int, num_heads: int, out_channels: int):
        super().__init__()
        from timm.models.vision_transformer import Block

        self.embed = nn.Linear(in_channels, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads, mlp_ratio=4, qkv_bias=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.predict = nn.Linear(dim, out_channels)
        for module in self.modules():
            glorot(module)

    def forward(self, z: Tensor) -> Tensor:
        """z (B, h, w, C) -> (B, h, w, out_channels)."""
        tokens = self.blocks(self.embed(z.flatten(1, 2)))  # (B, h w, dim)
        patches: Tensor = self.predict(self.norm(tokens)).unflatten(1, z.shape[1:3])
        return patches


class _Axis(NamedTuple):
    """One axis of the block variant: rows (dim 1) or columns (dim 2) of maps (B, h, w, C)."""

    dim: int
    start: int  # of the block, in the grid
    runs: list[Run]

    def predict(self, z: Tensor, matrices: Mapping[str, Tensor]) -> Tensor:
        """Each run of the block's positions advanced by its offset; the result stays in the order of the block."""
        forth, back = ("down", "up") if self.dim == 1 else ("right", "left")
        parts = (advance(part, matrices[forth if run.offset > 0 else back], abs(run.offset))
                 for part, run in zip(self._split(z), self.runs, strict=True))
        return torch.cat(list(parts), self.dim)

    def join(self, block: Tensor, predicted: Tensor) -> Tensor:
        """The block and what `predict` made of it, each in its place: from k positions of the axis to 2k."""
        places = {self.start: block}
        for part, run in zip(self._split(predicted), self.runs, strict=True):
            places[run.positions.start + run.offset] = part
        return torch.cat([places[start] for start in sorted(places)], self.dim)

    def _split(self, z: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = z.split([len(run.positions) for run in self.runs], self.dim)
        return parts


def glorot(module: M) -> M:
    """A linear layer with uniform Glorot weights and no bias; other modules as they are."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    return module
