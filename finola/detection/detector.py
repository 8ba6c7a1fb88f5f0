"""What all detectors share: the images and boxes they take and give, and the encoder's maps.

A batch of images of different sizes is padded at the right and the bottom:

    images     (B, 3, H, W) in [0, 1]
    padding    (B, H, W) bool, True where there is no image; None if all fill their places
    sizes      (B, 2) heights and widths of the images within the batch, in pixels
    originals  (B, 2) the same before they were resized

A target or a detection is a dict of `boxes` (n, 4), left, top, right, bottom in pixels, `labels` (n,) from 0,
perhaps `masks` (n, h, w), and for a detection `scores` (n,).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from finola.errors import WeightsError
from finola.models.base import ImageModel, ModelConfig, wrong
from finola.models.encoders import check_encoder_name, create_encoder
from finola.models.mobileformer import MobileFormer, zero_padding

THRESHOLD = 0.5  # the least score of what is shown
SIDE_UNIT = 32  # sides of a batch are multiples of this many pixels


@dataclass(frozen=True)
class DetectorConfig(ModelConfig):
    """What defines a detector; its fields are the `model:` section of a recipe.

    Attributes:
        encoder: a timm model with maps at the strides the head reads, by name.
        image_size, max_size: images are resized to this shorter side, or less if the longer one would exceed
            `max_size`.
        num_classes: of the objects, without "none"; 91 are the numbers COCO gives its 80 classes.
        classes, category_ids: their names and their numbers in COCO-format files, in the order of the labels; or none.
    """

    task: ClassVar[str] = "finola.detection.task:DetectionTask"
    data: ClassVar[str] = "finola.detection.datamodule:DetectionImages"
    score: ClassVar[str | None] = "objects"
    has_classes: ClassVar[bool] = True
    recipe_keys: ClassVar[frozenset[str]] = frozenset({"data.scales", "data.random_crop"})
    masks: ClassVar[bool] = False  # whether it finds the objects' masks too

    encoder: str = "mobileformer_w2880"
    image_size: int = 800
    max_size: int = 1333
    num_classes: int = 91
    classes: tuple[str, ...] = ()
    category_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in ("classes", "category_ids"):
            object.__setattr__(self, key, tuple(getattr(self, key)))  # JSON and YAML give lists
        super().__post_init__()

    def faults(self) -> Iterator[str]:
        yield from wrong(check_encoder_name, self.encoder)
        if self.image_size < SIDE_UNIT:
            yield f"image_size: got {self.image_size}, expected at least {SIDE_UNIT} (--data.image_size {SIDE_UNIT})"
        if self.max_size < self.image_size:
            yield (f"max_size: got {self.max_size}, expected at least image_size, {self.image_size}"
                   f" (--model.max_size {self.image_size})")
        yield from self.below(1, "num_classes")
        for key in ("classes", "category_ids"):
            if len(getattr(self, key)) not in (0, self.num_classes):
                yield (f"{key}: got {len(getattr(self, key))} for num_classes={self.num_classes}; give one "
                       "for each class, or none")


class Detector(ImageModel):
    """Images -> boxes. A subclass says how, and which of the encoder's maps it reads: those at `strides`."""

    config: DetectorConfig
    strides: tuple[int, ...]

    def __init__(self, config: DetectorConfig):
        super().__init__(config)
        self.encoder = create_encoder(config.encoder)

    @property
    def channels(self) -> dict[int, int]:
        """Stride -> channels of all the encoder's maps."""
        return {info["reduction"]: info["num_chs"] for info in self.encoder.feature_info}

    @abstractmethod
    def losses(self, images: Tensor, padding: Tensor | None, sizes: Tensor, targets: list[dict]) -> dict[str, Tensor]:
        """The weighted parts of the loss, scalars; `targets` in pixels of the batch."""

    @abstractmethod
    def detect(self, images: Tensor, padding: Tensor | None, sizes: Tensor, originals: Tensor) -> list[dict]:
        """The objects of each image, in pixels of the original, the highest score first."""

    @abstractmethod
    def reset_outputs(self) -> None:
        """Fresh last layers for `config.num_classes`."""

    def reset_classifier(self, num_classes: int, classes: tuple[str, ...] = (),
                         category_ids: tuple[int, ...] = ()) -> None:
        """Replace the last layers by fresh ones for other classes."""
        self.config = replace(self.config, num_classes=num_classes, classes=classes, category_ids=category_ids)
        self.reset_outputs()

    def maps(self, images: Tensor, padding: Tensor | None) -> dict[int, Tensor]:
        """Images (B, 3, H, W), sides multiples of 32, their padding -> stride -> map (B, C, H / stride, W / stride).

        A Mobile-Former does not see the padding; another encoder sees zeros there."""
        indices = [list(self.channels).index(stride) for stride in self.strides]
        encode = partial(self.encoder.forward_intermediates, indices=indices, intermediates_only=True)
        x = self.normalise(images)
        seeing = isinstance(self.encoder, MobileFormer)
        maps = encode(x, padding=padding) if seeing else encode(zero_padding(x, padding))
        return dict(zip(self.strides, maps, strict=True))

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed (biases and norms are left to the optimiser's rule)."""
        names = super().no_weight_decay() if hasattr(self.encoder, "no_weight_decay") else set()  # timm's ResNets: none
        return names & dict(self.named_parameters()).keys()


def class_names(labels: Tensor, classes: Sequence[str]) -> list[str]:
    """The names of labels (n,); their numbers where the weights hold no names."""
    return [classes[label] if classes else str(label) for label in labels.tolist()]


def require_detector(model: ImageModel, source: str = "model") -> Detector:
    """The model itself; raises WeightsError unless it is a detector. `source` is what the message calls it."""
    if not isinstance(model, Detector):
        raise WeightsError(f"{source}: got a model of kind {model.config.kind!r}, expected a detector; "
                           "finola detect train makes one")
    return model
