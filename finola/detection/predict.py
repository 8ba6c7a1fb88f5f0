"""The objects on photographs of any size and mode."""

from __future__ import annotations

from typing import Any, overload

import torch

from finola.data.images import ImageLike, SeveralImages, to_tensor, upright_rgb
from finola.detection.detector import THRESHOLD, Detector, class_names, require_detector
from finola.detection.loader import pad_batch, padding_of
from finola.detection.transforms import view_image, whole_view
from finola.errors import FinolaError
from finola.models.base import require_evaluation


@overload
def detect(model: Detector, image: ImageLike, threshold: float = THRESHOLD) -> dict[str, Any]: ...


@overload
def detect(model: Detector, image: SeveralImages, threshold: float = THRESHOLD) -> list[dict[str, Any]]: ...


@torch.no_grad()
def detect(
    model: Detector, image: ImageLike | SeveralImages, threshold: float = THRESHOLD
) -> dict[str, Any] | list[dict[str, Any]]:
    """What a detector finds on a photograph, the highest score first.

    Args:
        model: in evaluation mode, on any device.
        image: a path, a PIL image of any size and mode, an array (H, W, 3) or a tensor (3, H, W); or a list of them,
            for a list of results. Its shorter side is resized to the model's `image_size`, or less if the longer one
            would exceed `max_size`.
        threshold: the least score of an object, 0 to 1; the same as of `finola detect predict`.

    Returns:
        On the CPU: `boxes` (n, 4), left, top, right, bottom in the photograph's pixels (turned upright), `scores` and
        `labels` (n,), `names`, a list of the labels' names, and of a Mask R-CNN `masks` (n, H, W) bool.

    Raises:
        DataError: an image that cannot be decoded or has no pixels.
        WeightsError: a model that is no detector.
        FinolaError: a model in training mode, or a threshold out of range.
    """
    if isinstance(image, list | tuple):
        return [detect(model, one, threshold) for one in image]
    require_detector(model)
    require_evaluation(model)
    if not 0 <= threshold <= 1:
        raise FinolaError(f"threshold: got {threshold}, expected 0 to 1")
    picture, config, device = upright_rgb(image), model.config, model.mean.device
    original = (picture.height, picture.width)
    view = whole_view(original, config.image_size, config.max_size)
    images = pad_batch([to_tensor(view_image(picture, view))]).to(device)  # (1, 3, H, W)
    sizes, originals = (torch.tensor([size], device=device) for size in (view.size, original))
    (found,) = model.detect(images, padding_of(sizes, *images.shape[-2:]), sizes, originals)
    keep = found["scores"] >= threshold
    kept: dict[str, Any] = {name: value[keep].cpu() for name, value in found.items()}
    return kept | {"names": class_names(kept["labels"], config.classes)}
