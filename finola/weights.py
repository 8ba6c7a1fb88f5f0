"""Weights in safetensors, with the model's configuration in the file's metadata: a file is a whole model."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from finola import hub
from finola.errors import FinolaError, WeightsError, near
from finola.files import atomic_write
from finola.models.base import ImageModel, ModelConfig, ParametersOnMeta
from finola.registry import KINDS, config_class, list_models, pretrained_path

FORMAT = re.compile(r"finola-(\w+)/1")  # with the kind of the model
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|module)\.")  # parts of names, left by torch.compile and by DDP


def save_weights(model: ImageModel, path: str | Path, metadata: Mapping[str, str] | None = None,
                 dtype: torch.dtype | None = None) -> Path:
    """Write the model's weights and configuration to one safetensors file, whole or not at all.

    Args:
        metadata: further strings for the file's header (recipe, data, licence, ...).
        dtype: store floating-point tensors in this type (torch.float16 halves the file); they are read as fp32.
    """
    tensors = {name: _stored(tensor, dtype) for name, tensor in model.state_dict().items()}
    config = model.config
    header = {**(metadata or {}), "format": f"finola-{config.kind}/1", "config": json.dumps(config.to_dict())}
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=header)
    return Path(path)


def find_weights(source: str | Path) -> Path:
    """The file that "weights" mean, wherever they are asked for: a path, a run's folder, a shipped model's name, or
    `hf-hub:owner/name[@revision]`, which is fetched (`finola.hub.download`).

    Raises:
        WeightsError: neither a file nor such a name; the message has near names. What keeps a file from being fetched.
    """
    if str(source).startswith(hub.PREFIX):
        folder = hub.download(str(source))
        stated = json.loads((folder / hub.CONFIG).read_bytes())
        if stated != stated | description(folder / hub.WEIGHTS):
            raise WeightsError(f"{source}: {hub.CONFIG} is not that of {hub.WEIGHTS}; push both again with finola push")
        return folder / hub.WEIGHTS
    of_run = Path(source) / "weights.safetensors"
    for path in (Path(source), of_run):
        if path.is_file():
            return path
    shipped = list_models(pretrained=True)
    if str(source) in shipped:
        return pretrained_path(str(source))
    if Path(source).is_dir():
        raise WeightsError(f"{source}: holds no {of_run.name}, which a run writes at its end; name a weights file, or"
                           " resume the run")
    raise WeightsError(f"{source}: no such file, and no model with shipped weights has that name"
                       f"{near(str(source), shipped)} (shipped: {', '.join(shipped)})")


def description(path: str | Path) -> dict[str, Any]:
    """The format and the configuration in the header of a weights file, which config.json says again on the Hub.
    WeightsError where they cannot be read."""
    metadata = read_metadata(path)
    try:
        return {"format": metadata["format"], "config": json.loads(metadata["config"])}
    except (KeyError, json.JSONDecodeError) as error:
        raise WeightsError(f"{path}: no configuration in its header; not written by finola.save_weights") from error


def load_weights(source: str | Path) -> ImageModel:
    """The model in a file written by `save_weights`, of whatever kind, on the CPU in fp32.

    Args:
        source: the file, or the folder of a run that holds it; the name of a model whose weights are shipped
            (`finola.list_models(pretrained=True)`); `hf-hub:owner/name` or `hf-hub:owner/name@revision`.

    Raises:
        WeightsError: no such file or name, nothing that can be fetched, not a safetensors file (pickles are never
            opened), damaged or cut short, of another program, with missing, unexpected, misshapen or non-finite
            tensors; the message names the file and the tensor.
    """
    path = find_weights(source)
    tensors, metadata = read_tensors(path)
    known = FORMAT.fullmatch(metadata.get("format", ""))
    if known is None or known[1] not in KINDS:
        formats = ", ".join(f"finola-{kind}/1" for kind in KINDS)
        raise WeightsError(f"{path}: got format {metadata.get('format')!r}, expected one of {formats}; "
                           "it was not written by finola.save_weights of this version")
    config = _read_config(path, metadata.get("config", ""), config_class(known[1]))
    model = _build(path, config)
    state = check_state(model, tensors, path)
    if any(buffer.is_meta for name, buffer in model.named_buffers() if name not in state):
        model = config.without_start().build()  # with values of its own that no file holds
        model.config = config
    model.load_state_dict(state, assign=True)
    return model


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of a safetensors file; WeightsError where it cannot be read."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"{path}: no such file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (safetensors.SafetensorError, struct.error, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error}); pickled checkpoints are not opened: "
                           "export one with finola.save_weights") from error


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata alone of a safetensors file; WeightsError where it cannot be read."""
    if not Path(path).is_file():
        raise WeightsError(f"{path}: no such file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (safetensors.SafetensorError, struct.error, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: not a whole safetensors file ({error})") from error


def load_state(model: nn.Module, tensors: Mapping[str, Tensor], source: str | Path) -> None:
    """Load tensors into a model strictly; every fault is named. Prefixes of torch.compile and DDP are removed."""
    model.load_state_dict(check_state(model, tensors, source))


def check_state(model: nn.Module, tensors: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """The tensors under the model's own names and in its precision; WeightsError unless they are all, and finite."""
    plain = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    expected = model.state_dict()
    _require(len(plain) == len(tensors), source, "ambiguous", tensors.keys() - plain.keys())
    _require(not (missing := expected.keys() - plain.keys()), source, "missing", missing)
    _require(not (extra := plain.keys() - expected.keys()), source, "unexpected", extra)
    for name, tensor in plain.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(f"{source}: tensor {name} has shape {tuple(tensor.shape)}, the model expects "
                               f"{tuple(expected[name].shape)}: weights of another architecture")
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise WeightsError(f"{source}: tensor {name} is {tensor.dtype}, the model expects "
                               f"{expected[name].dtype}: weights of another architecture")
        plain[name] = tensor = tensor.to(expected[name].dtype)
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():  # a NaN is both
            raise WeightsError(f"{source}: tensor {name} holds values that are not finite; the run that wrote it "
                               "did not converge")
    return plain


def weights_hash(path: str | Path) -> str:
    """SHA-256 of the file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stored(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    converted = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return converted.detach().cpu().contiguous()


def _require(holds: bool, source: str | Path, kind: str, names: Set[str]) -> None:
    if not holds:
        shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
        raise WeightsError(f"{source}: {len(names)} {kind} tensors ({shown}): weights of another architecture")


def _read_config(path: str | Path, text: str, config_class: type[ModelConfig]) -> ModelConfig:
    try:
        values = json.loads(text)
        known = {field.name for field in fields(config_class)}
        if unknown := sorted(set(values) - known):
            raise WeightsError(f"{path}: unknown fields {unknown} in its configuration; written by a newer finola?")
        return config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except WeightsError:
        raise
    except (json.JSONDecodeError, TypeError, AttributeError, FinolaError) as error:
        raise WeightsError(f"{path}: its configuration cannot be read ({error})") from error


def _build(path: str | Path, config: ModelConfig) -> ImageModel:
    """A model whose parameters hold nothing: weights take their place."""
    try:
        with ParametersOnMeta():
            model = config.without_start().build()
    except (FinolaError, TypeError, AttributeError, RuntimeError) as error:
        raise WeightsError(f"{path}: no model can be built from its configuration ({error})") from error
    model.config = config
    return model
