"""Images as first-order norm+linear autoregression (FINOLA). The public names, imported on first use.

To add one: its import for type checkers, its name in `__all__`, and its module in `HOMES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; HOMES below says the same, for first use
    from finola import analysis, autoregression, codec, data, detection, kernels, pde
    from finola.autoregression import Finola, autoregress
    from finola.detection.detr import Detr, DetrConfig
    from finola.detection.mask_rcnn import MaskRcnn, MaskRcnnConfig
    from finola.detection.predict import detect
    from finola.errors import BitstreamError, DataError, FinolaError, RecipeError, WeightsError
    from finola.evaluation.metrics import psnr
    from finola.factory import create_model
    from finola.inference.classify import Prediction, predict
    from finola.inference.reconstruct import Reconstruction, reconstruct
    from finola.models import decoder, heads, masking
    from finola.models import mobileformer as encoder
    from finola.models.autoencoder import AutoencoderConfig, FinolaAutoencoder
    from finola.models.classifier import Classifier, ClassifierConfig
    from finola.models.masked import MaskedConfig, MaskedFinola
    from finola.registry import list_models
    from finola.weights import load_weights, save_weights

__all__ = [
    "AutoencoderConfig",
    "BitstreamError",
    "Classifier",
    "ClassifierConfig",
    "DataError",
    "Detr",
    "DetrConfig",
    "Finola",
    "FinolaAutoencoder",
    "FinolaError",
    "MaskRcnn",
    "MaskRcnnConfig",
    "MaskedConfig",
    "MaskedFinola",
    "Prediction",
    "RecipeError",
    "Reconstruction",
    "WeightsError",
    "analysis",
    "autoregress",
    "autoregression",
    "codec",
    "create_model",
    "data",
    "decoder",
    "detect",
    "detection",
    "encoder",
    "heads",
    "kernels",
    "list_models",
    "load_weights",
    "masking",
    "pde",
    "predict",
    "psnr",
    "reconstruct",
    "save_weights",
]

HOMES = {  # name -> the module that has it
    **dict.fromkeys(("autoregress", "Finola"), "autoregression"),
    **dict.fromkeys(("FinolaAutoencoder", "AutoencoderConfig"), "models.autoencoder"),
    **dict.fromkeys(("MaskedFinola", "MaskedConfig"), "models.masked"),
    **dict.fromkeys(("Classifier", "ClassifierConfig"), "models.classifier"),
    "create_model": "factory",
    "list_models": "registry",
    **dict.fromkeys(("load_weights", "save_weights"), "weights"),
    "psnr": "evaluation.metrics",
    **dict.fromkeys(("reconstruct", "Reconstruction"), "inference.reconstruct"),
    **dict.fromkeys(("predict", "Prediction"), "inference.classify"),
    "detect": "detection.predict",
    **dict.fromkeys(("Detr", "DetrConfig"), "detection.detr"),
    **dict.fromkeys(("MaskRcnn", "MaskRcnnConfig"), "detection.mask_rcnn"),
    **dict.fromkeys(("FinolaError", "DataError", "RecipeError", "WeightsError", "BitstreamError"), "errors"),
}
MODULES = {
    "analysis": "analysis", "autoregression": "autoregression", "codec": "codec", "data": "data",
    "decoder": "models.decoder", "detection": "detection", "encoder": "models.mobileformer", "heads": "models.heads",
    "kernels": "kernels", "masking": "models.masking", "pde": "pde",
}


if not TYPE_CHECKING:  # for a type checker, a name that is not imported above is no name of the package

    def __getattr__(name: str) -> Any:
        if name in HOMES:
            return getattr(import_module(f"finola.{HOMES[name]}"), name)
        if name in MODULES:
            return import_module(f"finola.{MODULES[name]}")
        raise AttributeError(f"module 'finola' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
