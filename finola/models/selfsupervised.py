"""The self-supervised baselines of the paper: MAE and SimMIM on a ViT, MoCo-v2 on Mobile-Former.

They stand in tables "Comparison with masked encoding methods" and "Comparisons with MoCo-v2". The ViT is timm's; masks,
masked token sequences, MAE's decoder, MoCo's projection, loss and queue are lightly's (`pip install 'finola[ssl]'`).

    MAE      x -> visible patches -> ViT -> + mask tokens -> transformer decoder -> pixels
    SimMIM   x -> all patches, the masked ones replaced by a mask token -> ViT -> linear -> pixels
    MoCo     two views -> encoder and its slow copy -> two vectors, to be alike and unlike a queue of earlier ones

Shapes: x (B, 3, S, S) float RGB in [0, 1]; h = w = S / 16 patches of 16x16 pixels, L = 1 + h*w tokens with the class
token first; mask (B, h, w), True = masked; predicted patches (B, h, w, 768).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available

from finola.errors import FinolaError, check_choice
from finola.models.base import ImageModel, ModelConfig, wrong
from finola.models.encoders import check_encoder_name, create_encoder
from finola.models.masked import MaskedImageModel, glorot, masked_mean

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

VITS = tuple(f"vit_{size}_patch16_224" for size in ("tiny", "small", "base", "large"))
PATCH = MaskedImageModel.patch  # pixels, of all four


@dataclass(frozen=True)
class MaeConfig(ModelConfig):
    """MAE (He et al., 2022).

    Attributes:
        encoder: one of `VITS`.
        image_size: S in pixels, a multiple of 16.
        mask_ratio: share of the patches that is masked.
        decoder_dim, decoder_depth, decoder_heads: channels, blocks and heads of the transformer decoder.
        norm_pix_loss: each target patch normalised to zero mean and unit variance.
    """

    kind: ClassVar[str] = "mae"
    task: ClassVar[str] = "finola.training.tasks.pretraining:MaskedPredictionTask"
    score: ClassVar[str | None] = "masked"
    needs: ClassVar[str | None] = "lightly"

    encoder: str = "vit_base_patch16_224"
    image_size: int = 224
    mask_ratio: float = 0.75
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    norm_pix_loss: bool = True

    def faults(self) -> Iterator[str]:
        yield from wrong(check_choice, "encoder", self.encoder, VITS)
        yield from _wrong_mask(self, PATCH, self.mask_ratio)
        if small := list(self.below(1, "decoder_dim", "decoder_depth", "decoder_heads")):
            yield from small
        elif self.decoder_dim % self.decoder_heads or self.decoder_dim % 4:
            unit = math.lcm(4, self.decoder_heads)
            fitting = unit * max(1, self.decoder_dim // unit)
            yield (f"decoder_dim: got {self.decoder_dim}, expected a multiple of decoder_heads ({self.decoder_heads}) "
                   f"and of 4, two sines and two cosines (--model.decoder_dim {fitting})")

    def build(self) -> Mae:
        return Mae(self)


@dataclass(frozen=True)
class SimmimConfig(ModelConfig):
    """SimMIM (Xie et al., 2022); its paper trains at 192 pixels.

    Attributes:
        encoder: one of `VITS`.
        image_size: S in pixels, a multiple of `mask_patch`.
        mask_ratio: share of the squares that is masked.
        mask_patch: side of the masked squares in pixels, a multiple of 16.
    """

    kind: ClassVar[str] = "simmim"
    task: ClassVar[str] = "finola.training.tasks.pretraining:MaskedPredictionTask"
    score: ClassVar[str | None] = "masked"
    needs: ClassVar[str | None] = "lightly"

    encoder: str = "vit_base_patch16_224"
    image_size: int = 224
    mask_ratio: float = 0.6
    mask_patch: int = 32

    def faults(self) -> Iterator[str]:
        yield from wrong(check_choice, "encoder", self.encoder, VITS)
        if self.mask_patch < PATCH or self.mask_patch % PATCH:
            yield (f"mask_patch: got {self.mask_patch}, expected a multiple of {PATCH}, the ViT's patch"
                   f" (--model.mask_patch {max(PATCH, self.mask_patch // PATCH * PATCH)})")
        else:
            yield from _wrong_mask(self, self.mask_patch, self.mask_ratio)

    def build(self) -> Simmim:
        return Simmim(self)


@dataclass(frozen=True)
class MocoConfig(ModelConfig):
    """MoCo-v2 (Chen et al., 2020).

    Attributes:
        encoder: a timm model, by name.
        image_size: S in pixels, a multiple of 16.
        dim, hidden_dim: channels of the compared vectors, and of the hidden layer before them.
        queue: number of earlier keys kept as negatives.
        momentum: share that the slow copy keeps of itself at each step.
        temperature: divisor of the cosine similarities.
    """

    kind: ClassVar[str] = "moco"
    task: ClassVar[str] = "finola.training.tasks.pretraining:ContrastTask"
    views: ClassVar[int] = 2
    needs: ClassVar[str | None] = "lightly"

    encoder: str = "mobileformer_w720"
    image_size: int = 224
    dim: int = 128
    hidden_dim: int = 2048
    queue: int = 65536
    momentum: float = 0.999
    temperature: float = 0.2

    def faults(self) -> Iterator[str]:
        yield from wrong(check_encoder_name, self.encoder)
        yield from self.wrong_image_size(PATCH)
        yield from self.below(1, "dim", "hidden_dim", "queue")
        if self.temperature <= 0:
            yield f"temperature: got {self.temperature}, expected more than 0"
        if not 0 <= self.momentum < 1:
            yield f"momentum: got {self.momentum}, expected at least 0 and less than 1"

    def build(self) -> Moco:
        return Moco(self)


class MaskedVit(MaskedImageModel):
    """What MAE and SimMIM share: timm's ViT inside lightly's masked one, and random masks of whole squares.

    The position embedding is the fixed sine-cosine one of MAE.

    Args:
        config: a MaeConfig or SimmimConfig.
        unit: side of the masked squares, in patches.
    """

    config: MaeConfig | SimmimConfig

    def __init__(self, config: MaeConfig | SimmimConfig, unit: int):
        super().__init__(config)
        from lightly.models.modules import MaskedVisionTransformerTIMM

        self.unit = unit
        vit = create_encoder(config.encoder, img_size=config.image_size)
        self.masked_encoder = MaskedVisionTransformerTIMM(vit)
        # a second name for masked_encoder.vit, which must not be registered, nor stand in the state_dict, twice
        object.__setattr__(self, "encoder", vit)

    @property
    def vit(self) -> VisionTransformer:
        """The encoder, by its type."""
        vit: VisionTransformer = self.masked_encoder.vit
        return vit

    def draw_mask(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A random mask for each image of x, from torch's generator.

        Returns the kept tokens (B, K), the class token first, and the masked ones (B, L - K), both as positions in
        the sequence, and the mask (B, h, w). Raises FinolaError for images of another size."""
        from lightly.models.utils import random_grid_token_mask

        self.check_image(x)
        size = (len(x), self.masked_encoder.sequence_length)
        kept, masked = random_grid_token_mask(size, self.config.mask_ratio, self.unit, device=x.device)
        mask = torch.zeros(size, dtype=torch.bool, device=x.device).scatter(1, masked, True)
        return kept, masked, self.as_grid(mask)

    def as_grid(self, tokens: Tensor) -> Tensor:
        """Tokens (B, L, ...) -> those of the patches in their places, (B, h, w, ...)."""
        patches: Tensor = tokens[:, 1:].unflatten(1, self.vit.patch_embed.grid_size)
        return patches

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed (biases and norms are left to the optimiser's rule)."""
        return {name for name, _ in self.named_parameters() if name.endswith(("_token", "pos_embed"))}


class Mae(MaskedVit):
    """MAE: the ViT sees the visible patches alone, a transformer decoder predicts the others."""

    def __init__(self, config: MaeConfig):
        super().__init__(config, unit=1)
        from lightly.models.modules import MaskedVisionTransformerDecoderTIMM

        self.masked_encoder.mask_token = None  # MAE has mask tokens in its decoder only
        self.embed = glorot(nn.Linear(self.vit.embed_dim, config.decoder_dim))
        self.decoder = MaskedVisionTransformerDecoderTIMM(
            self.vit.patch_embed.num_patches, config.decoder_dim, config.decoder_depth, config.decoder_heads)
        self.predict = glorot(nn.Linear(config.decoder_dim, 3 * PATCH**2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, 3, S, S) -> predicted patches (B, h, w, 768), mask (B, h, w)."""
        from lightly.models.utils import repeat_token, set_at_index

        kept, _, mask = self.draw_mask(x)
        visible = self.embed(self.masked_encoder.encode(self.normalise(x), idx_keep=kept))  # (B, K, decoder_dim)
        size = (len(x), self.decoder.sequence_length)
        tokens = repeat_token(self.decoder.mask_token.to(visible.dtype), size)
        tokens = self.decoder(set_at_index(tokens, kept, visible))
        return self.predict(self.as_grid(tokens)), mask


class Simmim(MaskedVit):
    """SimMIM: the ViT sees mask tokens in the place of masked patches, one linear layer predicts the pixels."""

    def __init__(self, config: SimmimConfig):
        super().__init__(config, unit=config.mask_patch // PATCH)
        nn.init.normal_(self.masked_encoder.mask_token, std=0.02)
        self.predict = glorot(nn.Linear(self.vit.embed_dim, 3 * PATCH**2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, 3, S, S) -> predicted patches (B, h, w, 768), mask (B, h, w)."""
        _, masked, mask = self.draw_mask(x)
        tokens = self.masked_encoder.encode(self.normalise(x), idx_mask=masked)
        return self.predict(self.as_grid(tokens)), mask

    def loss(self, x: Tensor, patches: Tensor, mask: Tensor) -> Tensor:
        """Mean absolute error over the masked patches, in ImageNet-normalised pixels."""
        return masked_mean(F.l1_loss(patches.float(), self.patches_of(x), reduction="none"), mask)


class Moco(ImageModel):
    """MoCo-v2: a query, the key of another view of the same image, and a queue of keys of earlier images.

    The features are the classifier's: for Mobile-Former [mean of the map ; token 0]. Before each training step call
    `update_momentum_encoder`. The slow copies and the queue are part of the state_dict, so that a run resumes exactly.

    On many devices the keys of all of them enter the queue, and images are not shuffled between devices: MoCo does that
    because each device's BatchNorm would mark its own images, but here training synchronises BatchNorm.
    """

    config: MocoConfig

    def __init__(self, config: MocoConfig):
        super().__init__(config)
        from lightly.loss import NTXentLoss
        from lightly.models.modules import MoCoProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        self.encoder = create_encoder(config.encoder)
        self.projection = MoCoProjectionHead(self.encoder.head_hidden_size, config.hidden_dim, config.dim)
        self.momentum_encoder = copy.deepcopy(self.encoder)
        self.momentum_projection = copy.deepcopy(self.projection)
        deactivate_requires_grad(self.momentum_encoder)
        deactivate_requires_grad(self.momentum_projection)
        self.contrast = NTXentLoss(config.temperature, (config.queue, config.dim),
                                   gather_distributed=torch.distributed.is_available())
        bank = self.contrast.memory_bank
        for name in ("bank", "bank_ptr"):  # lightly leaves the queue and its position out of the state_dict
            bank.register_buffer(name, getattr(bank, name), persistent=True)

    def forward(self, views: Tensor) -> Tensor:
        """views (B, 2, 3, S, S) in [0, 1], two of each image -> the loss. In training the keys enter the queue."""
        size = self.config.image_size
        if views.ndim != 5 or views.shape[1:] != (2, 3, size, size):
            raise FinolaError(f"views: got shape {tuple(views.shape)}, expected (B, 2, 3, {size}, {size}); "
                              "MoCo compares two views of each image")
        query = self.projection(self.encoder(self.normalise(views[:, 0])))
        with torch.no_grad():
            key = self.momentum_projection(self.momentum_encoder(self.normalise(views[:, 1])))
        if not self.training:
            query = query.detach()  # lightly's queue advances when the query has a gradient
        with _full_precision(views.device.type):  # similarities / 0.2 in bf16 would be steps of 0.03
            loss: Tensor = self.contrast(query.float(), key.float())
        return loss

    def update_momentum_encoder(self) -> None:
        """slow = momentum * slow + (1 - momentum) * trained, for each parameter of encoder and projection."""
        from lightly.models.utils import update_momentum

        update_momentum(self.encoder, self.momentum_encoder, self.config.momentum)
        update_momentum(self.projection, self.momentum_projection, self.config.momentum)

    def take_over(self, donor: ImageModel) -> tuple[str, ...]:
        """The slow copy starts as the encoder does."""
        self.momentum_encoder.load_state_dict(self.encoder.state_dict())
        return ()


def _full_precision(device_type: str) -> AbstractContextManager:
    """Autocast off, where there is such a thing: the meta device, on which models are counted, has none."""
    return torch.autocast(device_type, enabled=False) if is_autocast_available(device_type) else nullcontext()


def _wrong_mask(config: ModelConfig, unit: int, ratio: float) -> Iterator[str]:
    """Squares of `unit` pixels must tile the image, and at least one be masked and one visible."""
    if sizes := list(config.wrong_image_size(unit)):
        yield from sizes
        return
    squares = (config.image_size // unit) ** 2
    if not 1 <= int(squares * (1 - ratio)) < squares:
        yield (f"mask_ratio: got {ratio}, expected one that masks some of the {squares} squares and leaves "
               f"at least one; choose it from above 0 to {1 - 1 / squares:.3g}")
