"""What the codec knows about a model's q from training images, stored beside the weights.

    mean, unit   (C,) fp32    the grid of each channel (`finola.codec.quantiser`)
    bit_steps    (8, C) int   grid units of one step with 1 ... 8 bits a number, even
    step         (C,) int     grid units of one step at level 50, in proportion to 1 / sensitivity of the decoder
    parents, weights (C, P)   each channel's prediction from P earlier ones, in 1 / 256
    gain         (C,) int     grid units -> bins of the residual, in 1 / 1024
    thresholds   (K - 1,) int limits of the K activities
    tables       (K, BINS)    frequencies of the residual's bins at each activity, of sum 2^16

All but mean and unit are integers: what entropy coding depends on is stored, not computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from finola import hub
from finola.codec.container import MAX_BITS
from finola.codec.quantiser import Quantiser
from finola.errors import RecipeError, WeightsError
from finola.files import atomic_write
from finola.registry import PRETRAINED_FOLDER
from finola.weights import read_tensors

FORMAT = "finola-codec/1"
BINS, BINS_PER_DEVIATION = 1024, 32  # of a residual: 16 deviations to both sides
GAIN_BITS, WEIGHT_BITS, TABLE_BITS = 10, 8, 16
NO_PARENT = -1
NOISE_AT_50 = 1e-3  # mean squared error of an image in [0, 1] that quantisation adds at level 50: 30 dB
DTYPES = {
    "mean": torch.float32, "unit": torch.float32, "bit_steps": torch.int16, "step": torch.int32,
    "parents": torch.int16, "weights": torch.int16, "gain": torch.int32, "thresholds": torch.int32,
    "tables": torch.uint16,
}


@dataclass(frozen=True)
class Calibration:
    """The tensors of the table above and the hash of the weights they belong to, as numpy arrays."""

    weights_id: str
    mean: np.ndarray
    unit: np.ndarray
    bit_steps: np.ndarray
    step: np.ndarray
    parents: np.ndarray
    weights: np.ndarray
    gain: np.ndarray
    thresholds: np.ndarray
    tables: np.ndarray

    @property
    def channels(self) -> int:
        return len(self.mean)

    @cached_property
    def identity(self) -> bytes:
        """8 bytes that every stream carries: of the weights and of all that decoding takes from here."""
        digest = hashlib.sha256(self.weights_id.encode())
        for name, tensor in self.tensors().items():
            digest.update(name.encode() + tensor.numpy().astype(tensor.numpy().dtype.newbyteorder("<")).tobytes())
        return digest.digest()[:8]

    def quantiser(self, bits: int | None = None, level: int | None = None) -> Quantiser:
        """The one of so many bits, or of a level: 10 more of it halve the squared error that a step makes."""
        if bits is not None:
            return Quantiser.from_bits(bits, self.bit_steps[bits - 1])
        if level is None:
            raise RecipeError("bits, level: got None for both, expected one of them")
        return Quantiser.from_steps(self.step.astype(np.int64) * STEPS[level] >> 12)

    def positions(self, q: Tensor) -> Tensor:
        """q (N, C) -> its position on the grid, real."""
        return (q - self._tensor("mean", q)) / self._tensor("unit", q)

    def vectors(self, positions: Tensor) -> Tensor:
        """Positions (N, C) -> q (N, C) fp32."""
        return positions.float() * self._tensor("unit", positions) + self._tensor("mean", positions)

    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(getattr(self, name)).to(dtype).contiguous() for name, dtype in DTYPES.items()}

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> Path:
        header = {**(metadata or {}), "format": FORMAT, "weights_id": self.weights_id}
        with atomic_write(path) as temporary:
            save_file(self.tensors(), temporary, metadata=header)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Raises WeightsError: no such file, damaged, of another program, misshapen or with values out of range."""
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT or "weights_id" not in metadata:
            raise WeightsError(f"{path}: got format {metadata.get('format')!r}, expected {FORMAT!r} with a weights_id; "
                               "make one with finola calibrate")
        _check(path, tensors)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        integers = {name: array.astype(np.int64) for name, array in arrays.items() if array.dtype.kind in "iu"}
        return cls(metadata["weights_id"], **{**arrays, **integers})

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        return torch.from_numpy(getattr(self, name)).to(like.device)


def model_id(model: nn.Module) -> str:
    """SHA-256 over the model's tensors, in hexadecimal: the same however its file was written."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        array = (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype.name} {array.shape}".encode())
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()


def calibration_path(weights: str | Path) -> Path:
    """Where the calibration of a weights file stands: MODEL.safetensors -> MODEL.codec.safetensors, and
    model.safetensors -> codec.safetensors, their names on the Hub."""
    path = Path(weights)
    return path.with_name(hub.CODEC) if path.name == hub.WEIGHTS else path.with_suffix(".codec.safetensors")


def find_calibration(model: nn.Module, path: str | Path | None = None) -> Calibration:
    """The calibration of `path`, or else of the package, that was made for the weights of `model`.

    Raises:
        WeightsError: there is none, or that of `path` was made for other weights.
    """
    if path is not None and not Path(path).exists():
        raise WeightsError(f"{path}: no such file; finola calibrate makes it for the weights beside it")
    identity = model_id(model)
    paths = sorted(PRETRAINED_FOLDER.glob("*.codec.safetensors")) if path is None else [path]
    found = [Calibration.load(path) for path in paths]
    for calibration in found:
        if calibration.weights_id == identity:
            return calibration
    made_for = ", ".join(calibration.weights_id[:16] for calibration in found) or "none"
    raise WeightsError(f"{path or 'codec'}: no calibration for weights {identity[:16]} (found for: {made_for}); make "
                       "one with finola calibrate")


def _gains() -> list[int]:
    """Step at each level over that at 50, in 1 / 4096: 2^((50 - level) / 20), rounded. The products of the
    rounded root are integers throughout, so that every machine gets the same."""
    root, up, down = round(2 ** (1 / 20) * 2**32), [1 << 44], [1 << 44]
    for _ in range(50):
        up.append(up[-1] * root >> 32)
        down.append((down[-1] << 32) // root)
    return [value >> 32 for value in [*reversed(up[1:]), *down]]


STEPS = _gains()  # by level, 0 ... 100


def _check(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightsError unless shapes, types and ranges are those that coding relies on."""
    if tensors.keys() != DTYPES.keys():
        raise WeightsError(f"{path}: got tensors {sorted(tensors)}, expected {sorted(DTYPES)}")
    channels, parents = len(tensors["mean"]), tensors["parents"].shape[-1]
    activities = len(tensors["tables"])
    shapes = {**dict.fromkeys(("mean", "unit", "step", "gain"), (channels,)), "thresholds": (activities - 1,),
              "tables": (activities, BINS), "bit_steps": (MAX_BITS, channels),
              **dict.fromkeys(("parents", "weights"), (channels, parents))}
    for name, dtype in DTYPES.items():
        got = (tuple(tensors[name].shape), tensors[name].dtype)
        if got != (shapes[name], dtype):
            raise WeightsError(f"{path}: tensor {name} is {got}, expected {(shapes[name], dtype)}")
    earlier = torch.arange(channels).unsqueeze(1)
    sound = {
        "mean": tensors["mean"].isfinite().all(),
        "unit": (tensors["unit"].isfinite() & (tensors["unit"] > 0)).all(),
        "bit_steps": (tensors["bit_steps"] > 0).all() and (tensors["bit_steps"] % 2 == 0).all(),
        "step": (tensors["step"] > 0).all() and (tensors["step"] < 2**24).all(),
        "gain": (tensors["gain"] > 0).all() and (tensors["gain"] < 2**24).all(),
        "parents": ((tensors["parents"] >= NO_PARENT) & (tensors["parents"] < earlier)).all(),
        "tables": (tensors["tables"].long().sum(1) == 1 << TABLE_BITS).all(),
        "thresholds": (tensors["thresholds"].diff() >= 0).all(),
    }
    if faults := [name for name, holds in sound.items() if not holds]:
        raise WeightsError(f"{path}: values of {', '.join(faults)} are out of range; make the file again with "
                           "finola calibrate")
