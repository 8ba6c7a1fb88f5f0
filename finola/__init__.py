"""Images as first-order norm+linear autoregression (FINOLA). The public names, imported on first use."""

from importlib import import_module

_HOMES = {
    "autoregress": "finola.autoregression",
    "Finola": "finola.autoregression",
    "FinolaAutoencoder": "finola.model",
    "AutoencoderConfig": "finola.model",
    "MaskedFinola": "finola.masked",
    "MaskedConfig": "finola.masked",
    "Classifier": "finola.classifier",
    "ClassifierConfig": "finola.classifier",
    "create_model": "finola.registry",
    "list_models": "finola.registry",
    "load_weights": "finola.weights",
    "save_weights": "finola.weights",
    "psnr": "finola.metrics",
    "reconstruct": "finola.photographs",
    "Reconstruction": "finola.photographs",
    "predict": "finola.classify",
    "Prediction": "finola.classify",
    "detect": "finola.detection.predict",
    "Detr": "finola.detection.detr",
    "DetrConfig": "finola.detection.detr",
    "MaskRcnn": "finola.detection.mask_rcnn",
    "MaskRcnnConfig": "finola.detection.mask_rcnn",
    "FinolaError": "finola.errors",
    "DataError": "finola.errors",
    "RecipeError": "finola.errors",
    "WeightsError": "finola.errors",
    "BitstreamError": "finola.errors",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in ("encoder", "decoder", "kernels", "data", "masking", "heads", "codec", "detection", "pde"):
        return import_module(f"finola.{name}")
    raise AttributeError(f"module 'finola' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
