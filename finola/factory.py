"""`create_model`: a model by name, as in timm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from finola.errors import WeightsError
from finola.models.base import ImageModel, ModelConfig
from finola.registry import DEFAULT_MODEL, list_models, model_config, pretrained_path
from finola.weights import load_weights

if TYPE_CHECKING:
    from finola.models.autoencoder import FinolaAutoencoder

# so that type checkers know what these names make; tests/test_types.py compares them with the registry
AutoencoderName = Literal[
    "finola_mfw720_c768_r8", "finola_mfw720_c768_r16", "finola_mfw720_c768_r32", "finola_mfw720_c3072_r16",
    "finola_mfw1440_c3072_r16", "finola_mfw2880_c64_r16", "finola_mfw2880_c128_r16", "finola_mfw2880_c256_r16",
    "finola_mfw2880_c512_r16", "finola_mfw2880_c1024_r16", "finola_mfw2880_c2048_r16",
    "finola_mfw2880_c3072_r8", "finola_mfw2880_c3072_r16", "finola_mfw2880_c3072_r24",
    "finola_mfw2880_c3072_r32", "finola_mfw2880_c3072_r64", "finola_mfw2880_c3072_r128",
    "finola_mfw2880_c3072_r256", "finola_mfw2880_c4096_r16", "finola_mfw4320_c3072_r16",
    "finola_mfw5760_c3072_r16",
]


@overload
def create_model(
    name: AutoencoderName = DEFAULT_MODEL, pretrained: bool | str | Path = False, **overrides: Any
) -> FinolaAutoencoder: ...


@overload
def create_model(name: str, pretrained: bool | str | Path = False, **overrides: Any) -> ImageModel: ...


def create_model(
    name: str = DEFAULT_MODEL, pretrained: bool | str | Path = False, **overrides: Any
) -> ImageModel:
    """A model by name.

    Args:
        pretrained: False for random weights, True for the ones shipped in the package; or what `finola.load_weights`
            takes, such as `hf-hub:owner/name`. Their configuration must be the one named here.
        overrides: fields of the configuration.

    Raises:
        FinolaError: an unknown name (with near ones) or option.
        WeightsError: no weights are shipped for it, or overrides that change the architecture the weights were
            trained with; see `finola.load_weights`.
    """
    config = model_config(name, **overrides)
    if not pretrained:
        return config.build()
    if pretrained is not True:
        return _of_configuration(config, pretrained)
    path = pretrained_path(name)
    if not path.exists():
        raise WeightsError(f"{name}: no weights are shipped for it; shipped: {', '.join(list_models(pretrained=True))}")
    if overrides:
        raise WeightsError(f"{name}: pretrained weights fit the registered configuration alone, got {list(overrides)}")
    return load_weights(path)


def _of_configuration(config: ModelConfig, source: str | Path) -> ImageModel:
    """The model of a weights file; WeightsError unless it is of this configuration."""
    model = load_weights(source)
    if model.config != config:
        theirs, ours = ({"kind": c.kind, **c.to_dict()} for c in (model.config, config))
        differing = [f"{key} {value} there, {ours.get(key)} here" for key, value in theirs.items()
                     if value != ours.get(key)]
        raise WeightsError(f"{source}: holds another model ({', '.join(differing[:3])}); finola.load_weights takes it"
                           " as it is")
    return model
