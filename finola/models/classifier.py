"""An encoder with a classification head: linear probing, `tran-1` probing and fine-tuning train this model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from finola.errors import check_choice
from finola.models.base import CLASSES_CROP_PCT, IMAGE_KEYS, ExportPart, ImageModel, ModelConfig, wrong
from finola.models.encoders import Encoder, create_encoder
from finola.models.heads import HEADS, create_head, map_and_tokens, token_width
from finola.models.mobileformer import CONFIGS, ENCODER_STRIDE

VIT_MODULES = ("vision_transformer", "deit")  # where timm has its plain ViTs


@dataclass(frozen=True)
class ClassifierConfig(ModelConfig):
    """What defines a classifier; its fields are the `model:` section of a recipe.

    Attributes:
        encoder: a Mobile-Former, or a ViT of timm's with a class token, by name.
        image_size: S in pixels; the paper classifies at 224.
        head: "lin", "tran1" or "tran4" (see `finola.models.heads`).
        num_classes: length of the logits.
        classes: names of the classes in the order of the labels, or none.
        head_width: width of a transformer head, by default that of the paper.
        dropout: of a transformer head.
    """

    kind: ClassVar[str] = "classifier"
    task: ClassVar[str] = "finola.training.tasks.classification:ClassificationTask"
    cost: ClassVar[str] = "finola.evaluation.complexity:cost_of_classifier"
    score: ClassVar[str | None] = "classes"
    crop_pct: ClassVar[float] = CLASSES_CROP_PCT
    has_classes: ClassVar[bool] = True
    keeps_features: ClassVar[bool] = True
    recipe_keys: ClassVar[frozenset[str]] = IMAGE_KEYS | {
        "optim.layer_decay", "optim.label_smoothing", "optim.mixup", "optim.cutmix", "optim.random_erasing"}

    encoder: str = "mobileformer_w720"
    image_size: int = 224
    head: str = "lin"
    num_classes: int = 1000
    classes: tuple[str, ...] = ()
    head_width: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))  # JSON and YAML give lists
        super().__post_init__()

    def faults(self) -> Iterator[str]:
        if self.encoder not in CONFIGS and not is_vit(self.encoder):
            yield (f"encoder: got {self.encoder!r}, expected one of {', '.join(CONFIGS)}, "
                   "or a ViT of timm's such as vit_small_patch16_224")
        yield from self.wrong_image_size(ENCODER_STRIDE)
        yield from wrong(check_choice, "head", self.head, HEADS)
        yield from self.below(1, "num_classes")
        if self.classes and len(self.classes) != self.num_classes:
            yield (f"classes: got {len(self.classes)} names for num_classes={self.num_classes}; "
                   "give one name for each class, or none")

    def build(self) -> Classifier:
        return Classifier(self)


class Classifier(ImageModel):
    """Image -> encoder -> head -> logits."""

    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig):
        super().__init__(config)
        self.encoder = _create_encoder(config)
        self.head = create_head(config.head, self.encoder.num_features, token_width(self.encoder),
                                config.num_classes, config.head_width, config.dropout)

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        """x (B, 3, S, S) in [0, 1] -> the tensors that `head.classify` takes."""
        self.check_image(x)
        return self.head.reduce(*map_and_tokens(self.encoder, self.normalise(x)))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 3, S, S) in [0, 1] -> logits (B, num_classes)."""
        return self.head.classify(*self.features(x))

    def export_parts(self) -> dict[str, ExportPart]:
        return {"classifier": ExportPart(self.forward, self.example_images(), "image", ("logits",),
                                         "Of logits, one for each class, the softmax makes probabilities.")}

    def reset_classifier(self, num_classes: int, classes: tuple[str, ...] = ()) -> None:
        """Replace the last linear layer by a fresh one of `num_classes` outputs, named `classes` if given."""
        self.config = replace(self.config, num_classes=num_classes, classes=classes)
        self.head.reset_classifier(num_classes)

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed (biases and norms are left to the optimiser's rule)."""
        known = dict(self.encoder.named_parameters())
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay() if name in known}

    def layer_scales(self, decay: float) -> dict[str, float]:
        """Layer-wise decay of the learning rate: parameter name -> factor.

        1 for the head, `decay` for the encoder's last block, decay² for the one below, down to the stem: of the
        Mobile-Formers' twelve blocks the first has decay^12, and the stem decay^13."""
        from timm.models import group_parameters

        layers = group_parameters(self.encoder, self.encoder.group_matcher(), reverse=True)  # name -> 0 (stem) ...
        top = max(layers.values()) + 1
        scales = {f"encoder.{name}": decay ** (top - layer) for name, layer in layers.items()}
        return scales | {f"head.{name}": 1.0 for name, _ in self.head.named_parameters()}


def _create_encoder(config: ClassifierConfig) -> Encoder:
    """The timm encoder without a classifier; a ViT's position embedding is for one image size."""
    size = {} if config.encoder in CONFIGS else {"img_size": config.image_size}
    return create_encoder(config.encoder, **size)


def is_vit(name: str) -> bool:
    """Whether timm has a plain ViT of this name; asked first, since timm would fetch one named "hf-hub:..." over the
    network."""
    from timm.models import is_model_in_modules

    return isinstance(name, str) and is_model_in_modules(name, VIT_MODULES)
