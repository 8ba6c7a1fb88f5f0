"""`create_model`: a model by name, as in timm."""

from __future__ import annotations

from typing import Any

from finola.errors import WeightsError
from finola.models.base import ImageModel
from finola.registry import DEFAULT_MODEL, list_models, model_config, pretrained_path
from finola.weights import load_weights


def create_model(name: str = DEFAULT_MODEL, pretrained: bool = False, **overrides: Any) -> ImageModel:
    """A model by name, with random weights or, with `pretrained`, the ones shipped in the package.

    Raises:
        FinolaError: an unknown name (with near ones) or option. WeightsError: no weights are shipped for it, or
            overrides that change the architecture the weights were trained with.
    """
    config = model_config(name, **overrides)
    if not pretrained:
        return config.build()
    path = pretrained_path(name)
    if not path.exists():
        raise WeightsError(f"{name}: no weights are shipped for it; shipped: {', '.join(list_models(pretrained=True))}")
    if overrides:
        raise WeightsError(f"{name}: pretrained weights fit the registered configuration alone, got {list(overrides)}")
    return load_weights(path)
