"""The objects on photographs of any size and mode."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from finola.data.images import to_tensor, upright_rgb
from finola.detection.detector import Detector, require_detector
from finola.detection.loader import pad_batch, padding_of
from finola.detection.transforms import view_image, whole_view
from finola.models.base import require_evaluation


@torch.no_grad()
def detect(model: Detector, image: Image.Image | str | Path) -> dict[str, Tensor]:
    """What a detector finds on a photograph, the highest score first.

    Args:
        model: in evaluation mode, on any device.
        image: a path, or a PIL image of any size and mode; its shorter side is resized to the model's `image_size`,
            or less if the longer one would exceed `max_size`.

    Returns:
        On the CPU: `boxes` (n, 4), left, top, right, bottom in the photograph's pixels (turned upright), `scores` and
        `labels` (n,), and of a Mask R-CNN `masks` (n, H, W) bool.

    Raises:
        DataError: an image that cannot be decoded or has no pixels. WeightsError: a model that is no detector.
        FinolaError: a model in training mode.
    """
    require_detector(model)
    require_evaluation(model)
    picture, config, device = upright_rgb(image), model.config, model.mean.device
    original = (picture.height, picture.width)
    view = whole_view(original, config.image_size, config.max_size)
    images = pad_batch([to_tensor(view_image(picture, view))]).to(device)  # (1, 3, H, W)
    sizes, originals = (torch.tensor([size], device=device) for size in (view.size, original))
    (found,) = model.detect(images, padding_of(sizes, *images.shape[-2:]), sizes, originals)
    return {name: value.cpu() for name, value in found.items()}
