"""First stages of latent diffusion, as diffusers stores them, and FINOLA beside them: what a code is worth, and costs.

A first stage makes a short code of an image and an image of the code (the paper's Table "Comparing FINOLA with
baselines" (a)). Images are float RGB in [0, 1], (B, 3, S, S), here and there: the scale of [-1, 1] that diffusers'
models take is inside. A distribution is represented by its mode, so that nothing is drawn at random.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finola.errors import RecipeError, WeightsError, near
from finola.evaluation.flops import count
from finola.evaluation.speed import timed
from finola.models.autoencoder import FinolaAutoencoder

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"  # a folder of diffusers
BITS_OF_REAL = 16  # a number that is not quantised counts as one of half precision


class FirstStage(nn.Module, ABC):
    """Images -> code -> images.

    Attributes:
        name: of the folder or the weights. factor: the sides of images must be multiples of it, in pixels.
        bits_a_number: of the code.
    """

    name: str
    factor: int
    bits_a_number: float = BITS_OF_REAL

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Images (B, 3, S, S) -> their code, (B, ...)."""

    @abstractmethod
    def decode(self, code: Tensor) -> Tensor:
        """A code -> images (B, 3, S, S), unclamped."""

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def check_size(self, size: int) -> None:
        """RecipeError unless images of `size` pixels a side go in."""
        if size % self.factor:
            raise RecipeError(f"size: {self.name} takes images whose sides are multiples of {self.factor} pixels, got "
                              f"{size}; choose another --size")


class DiffusersStage(FirstStage):
    """A model of diffusers, by the name of its class: see `MODELS`."""

    def __init__(self, model: Any, name: str):
        super().__init__()
        self.model, self.name = model, name
        kind = MODELS[type(model).__name__]
        self.factor = 2 ** (len(model.config[kind.widths]) - 1)
        self._encode, self._decode = kind.encode, kind.decode
        if kind.codebook:
            self.bits_a_number = math.log2(model.config[kind.codebook])

    def encode(self, x: Tensor) -> Tensor:
        return self._encode(self.model, 2 * x - 1)

    def decode(self, code: Tensor) -> Tensor:
        return self._decode(self.model, code) / 2 + 0.5


class FinolaStage(FirstStage):
    """An autoencoder of this package; larger images are cut into squares of its size, a vector each.

    The code is (B, squares, C).
    """

    def __init__(self, model: FinolaAutoencoder, name: str):
        super().__init__()
        self.model, self.name, self.factor = model, name, model.config.image_size

    def encode(self, x: Tensor) -> Tensor:
        side = self.factor
        across = x.shape[-1] // side
        squares = x.unfold(2, side, side).unfold(3, side, side)  # (B, 3, n, n, side, side)
        squares = squares.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, side, side)
        q: Tensor = self.model.encode(squares)
        return q.view(len(x), across * across, -1)

    def decode(self, code: Tensor) -> Tensor:
        across, side = math.isqrt(code.shape[1]), self.factor
        squares = self.model.decode(code.flatten(0, 1)).view(len(code), across, across, 3, side, side)
        return squares.permute(0, 3, 1, 4, 2, 5).reshape(len(code), 3, across * side, across * side)


class Cost(NamedTuple):
    """Of one image. numbers, bits: length of the code; macs: multiply-adds."""

    numbers: int
    bits: int
    params: int
    encode_macs: int
    decode_macs: int


class Latency(NamedTuple):
    """Seconds of one image."""

    encode: float
    decode: float

    @property
    def both(self) -> float:
        return self.encode + self.decode


def cost(stage: FirstStage, size: int) -> Cost:
    """Length of the code, parameters and multiply-adds for one image of size x size; counted on the meta device."""
    stage.check_size(size)
    x = torch.empty(1, 3, size, size, device="meta")
    encoding, decoding = _OnMeta(_Half(stage, "encode")), _OnMeta(_Half(stage, "decode"))
    encode_macs, code = count(encoding, x).macs, encoding.result
    numbers = code.numel()
    return Cost(numbers, round(numbers * stage.bits_a_number), sum(p.numel() for p in stage.parameters()), encode_macs,
                count(decoding, code).macs)


@torch.no_grad()
def latencies(stages: Mapping[str, FirstStage], x: Tensor, turns: int,
              done: Callable[[], object] = lambda: None) -> dict[str, list[Latency]]:
    """Each stage in each turn, after one that is not counted; `done` is called after each stage."""
    times: dict[str, list[Latency]] = {name: [] for name in stages}
    for turn in range(turns + 1):
        for name, stage in stages.items():
            code, encode = timed(stage.encode, x)
            _, decode = timed(stage.decode, code)
            if turn:
                times[name].append(Latency(encode, decode))
            done()
    return times


def open_first_stage(folder: str | Path) -> DiffusersStage:
    """The first stage in a folder as diffusers' `save_pretrained` writes it, on the CPU in fp32, for evaluation.

    Nothing is fetched from a network, and no pickle is opened.

    Raises:
        WeightsError: no such folder, no first stage in it, of another class, not for RGB, or with weights that are
            missing, damaged, of another shape or not finite.
    """
    folder = Path(folder)
    name = _read_class(folder)
    import diffusers

    diffusers.utils.logging.set_verbosity_error()  # what it would say of the weights is checked here
    try:
        model, found = getattr(diffusers, name).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, low_cpu_mem_usage=False, output_loading_info=True)
    except Exception as error:  # of many kinds, for a configuration or weights that do not fit
        raise WeightsError(f"{folder}: {name} cannot be read ({type(error).__name__}: {_line(error)}); save it again "
                           "with diffusers' save_pretrained") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := found[what]:
            raise WeightsError(f"{folder}: {len(keys)} {what.replace('_keys', '')} tensors, first {keys[0]}; the "
                               f"weights are not those of its {CONFIG}")
    for tensor, values in model.state_dict().items():
        if not torch.isfinite(values).all():
            raise WeightsError(f"{folder}: tensor {tensor} has values that are not finite; save it again")
    return DiffusersStage(model.float().eval().requires_grad_(False), folder.resolve().name)


def _read_class(folder: Path) -> str:
    """The class that a folder's configuration names, once it is sure that the folder can be read."""
    want = f"expected one with {CONFIG} and {WEIGHTS}, as diffusers' save_pretrained writes it"
    if not folder.is_dir():
        raise WeightsError(f"{folder}: {'is not a folder' if folder.exists() else 'no such folder'}; {want}")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise WeightsError(f"{folder}: no first stage, {file} is missing; {want}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        name = config["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / CONFIG}: no configuration of diffusers ({_line(error)}); {want}") from error
    if name not in MODELS:
        raise WeightsError(f"{folder}: got a {name}{near(str(name), MODELS)}, expected one of {', '.join(MODELS)}")
    channels = config.get("in_channels", 3), config.get("out_channels", 3)
    if channels != (3, 3):
        raise WeightsError(f"{folder}: got {channels[0]} channels in and {channels[1]} out, expected 3 and 3, RGB")
    return str(name)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# --- the models of diffusers -------------------------------------------------------------------------------


class Kind(NamedTuple):
    """widths: the entry of the configuration with a width for each scale. codebook: the one with the number of vectors,
    where the code is of indices."""

    widths: str
    encode: Callable[[Any, Tensor], Tensor]
    decode: Callable[[Any, Tensor], Tensor]
    codebook: str | None = None


def _encode_kl(model: Any, x: Tensor) -> Tensor:
    mode: Tensor = model.encode(x).latent_dist.mode()
    return mode


def _decode_sample(model: Any, code: Tensor) -> Tensor:
    sample: Tensor = model.decode(code).sample
    return sample


def _encode_indices(model: Any, x: Tensor) -> Tensor:
    """Indices into the codebook, (B, h, w)."""
    latents = model.encode(x).latents
    indices: Tensor = model.quantize(latents)[2][2]
    return indices.view(len(x), *latents.shape[-2:])


def _decode_indices(model: Any, indices: Tensor) -> Tensor:
    vectors = model.quantize.get_codebook_entry(indices.flatten(), (*indices.shape, -1))  # (B, d, h, w)
    sample: Tensor = model.decode(vectors, force_not_quantize=True).sample
    return sample


def _encode_dc(model: Any, x: Tensor) -> Tensor:
    latent: Tensor = model.encode(x).latent
    return latent


def _encode_tiny(model: Any, x: Tensor) -> Tensor:
    latents: Tensor = model.encode(x).latents
    return latents


MODELS = {
    "AutoencoderKL": Kind("block_out_channels", _encode_kl, _decode_sample),
    "VQModel": Kind("block_out_channels", _encode_indices, _decode_indices, "num_vq_embeddings"),
    "AutoencoderDC": Kind("encoder_block_out_channels", _encode_dc, _decode_sample),
    "AutoencoderTiny": Kind("encoder_block_out_channels", _encode_tiny, _decode_sample),
}


class _Half(nn.Module):
    """The encoder or the decoder of a stage, as a module."""

    def __init__(self, stage: FirstStage, name: str):
        super().__init__()
        self.stage, self.name = stage, name

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = getattr(self.stage, self.name)(x)
        return result


class _OnMeta(nn.Module):
    """A half of a stage as if its parameters were on the meta device: shapes, and no work. `result` is the last one."""

    def __init__(self, part: _Half):
        super().__init__()
        self.part, self.result = part, torch.empty(0)

    def forward(self, x: Tensor) -> None:
        tensors = {**dict(self.part.named_parameters()), **dict(self.part.named_buffers())}
        on_meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self.result = torch.func.functional_call(self.part, on_meta, (x,))
