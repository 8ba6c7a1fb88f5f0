"""What all models share: a configuration, an encoder that may be frozen, and images in [0, 1], squares of one size
but for detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from finola.errors import FinolaError
from finola.models.encoders import Encoder

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES_CROP_PCT = 0.875  # 224 of 256 px: how accuracies on ImageNet are customarily measured
IMAGE_KEYS = frozenset({"data.policy", "data.resident"})  # of a recipe: crops and their augmentation


@dataclass(frozen=True)
class ModelConfig:
    """What all configurations share. A subclass is a kind of model: its fields are the `model:` section of a recipe and
    stand in weights files, and its class attributes tell the rest of the package all it needs to know about it
    (`finola.registry.register_kind` makes one known). `task`, `data` and `cost` are classes and functions, or their
    names in the form "module:name", imported on first use.

    Attributes:
        kind: the name of the kind, which stands in weights files.
        task: the training task, a `finola.training.tasks.base.Task`.
        data: what it trains on, a `finola.training.datamodule.RunData`.
        cost: a function of the configuration that counts parameters and multiply-adds for `finola info`.
        score: what `finola eval` measures: "reconstruction", "masked", "classes" or "objects"
            (by `finola detect eval`); None: its encoder alone.
        crop_pct: how its images are cut in evaluation: the centre crop's share of the resized shorter side.
        has_classes: it has the fields `num_classes` and `classes`, and `reset_classifier`.
        keeps_features: it has `features` and `head.classify`, so that the features of images that are not augmented
            can be computed once while its encoder is frozen.
        views: crops of each image in a training batch.
        recipe_keys: keys of a recipe that only some kinds have, this one among them.
        needs: a package of an extra, without which it cannot be built.
    """

    kind: ClassVar[str]
    task: ClassVar[str | type]
    data: ClassVar[str | type] = "finola.training.datamodule:Images"
    cost: ClassVar[str | Callable] = "finola.evaluation.complexity:cost_of_forward"
    score: ClassVar[str | None] = None
    crop_pct: ClassVar[float] = 1.0
    has_classes: ClassVar[bool] = False
    keeps_features: ClassVar[bool] = False
    views: ClassVar[int] = 1
    recipe_keys: ClassVar[frozenset[str]] = IMAGE_KEYS
    needs: ClassVar[str | None] = None

    @property
    def encoder(self) -> str:
        """The encoder's name."""
        raise AttributeError(f"{type(self).__name__} has no field `encoder`")

    @property
    def image_size(self) -> int:
        """S in pixels."""
        raise AttributeError(f"{type(self).__name__} has no field `image_size`")

    def build(self) -> ImageModel:
        """An untrained model of this configuration."""
        raise AttributeError(f"{type(self).__name__} has no method `build`")

    def without_start(self) -> ModelConfig:
        """The same for a model whose weights will be replaced: without a start that costs time."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __post_init__(self) -> None:
        if faults := list(self.faults()):
            raise FinolaError("; ".join(faults))

    def faults(self) -> Iterator[str]:
        """What is wrong with the fields, a line each; where a recipe's key mends it, with the key and a value."""
        return iter(())

    def wrong_image_size(self, unit: int, least: int = 1) -> Iterator[str]:
        """Unless `image_size` is a multiple of `unit`, and at least so many times."""
        if self.image_size < least * unit or self.image_size % unit:
            fitting = unit * max(least, round(self.image_size / unit))
            limit = f", at least {least * unit}" if least > 1 else ""
            yield (f"image_size: got {self.image_size}, expected a multiple of {unit}{limit}"
                   f" (--data.image_size {fitting})")

    def below(self, least: float, *names: str) -> Iterator[str]:
        """For each of these fields that is less; None is none of them."""
        for name in names:
            if (value := getattr(self, name)) is not None and value < least:
                yield f"{name}: got {value}, expected at least {least}"


def wrong(check: Callable[..., object], *arguments: Any) -> Iterator[str]:
    """The message of the FinolaError that `check(*arguments)` raises, if it does."""
    try:
        check(*arguments)
    except FinolaError as error:
        yield str(error)


def divisor_near(number: int, value: int) -> int:
    """The divisor of `number` that is nearest to `value`."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - value))


def wrong_heads(name: str, heads: int, of: str, channels: int) -> Iterator[str]:
    """Unless the number of heads divides the channels, those of the field `of`."""
    if heads < 1 or channels % heads:
        yield (f"{name}: got {heads}, expected a divisor of {of} {channels}"
               f" (--model.{name} {divisor_near(channels, heads)})")


class ExportPart(NamedTuple):
    """A function of one tensor, (B, ...), that `finola export` writes as an ONNX file."""

    function: Callable[[Tensor], Any]
    example: Tensor  # of its argument, with B = 2
    argument: str
    results: tuple[str, ...]
    meaning: str  # of the results, in sentences


class ImageModel(nn.Module):
    """What all models share: a configuration, the normalisation of images, and an encoder that may be frozen."""

    encoder: Encoder
    mean: Tensor  # (3, 1, 1), of ImageNet's pixels
    std: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder_frozen = False
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        """x in [0, 1] -> what the encoder takes: ImageNet's mean and deviation removed, channels-last."""
        return ((x - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def check_image(self, x: Tensor) -> None:
        """Raises FinolaError unless x is (B, 3, S, S) of a floating type."""
        size = self.config.image_size
        if not x.is_floating_point():
            raise FinolaError(f"image: got {x.dtype}, expected a floating type with values in [0, 1]; divide by 255")
        if x.ndim != 4 or x.shape[1:] != (3, size, size):
            raise FinolaError(f"image: got shape {tuple(x.shape)}, expected (B, 3, {size}, {size}); "
                              "finola.reconstruct and finola.predict take photographs of any size")

    def export_parts(self) -> dict[str, ExportPart]:
        """File name -> what `finola.inference.export` writes into it. Raises FinolaError for a kind that has none."""
        raise FinolaError(f"model: got one of kind {self.config.kind!r}, expected an autoencoder, a classifier or a "
                          "DETR; others cannot be exported")

    def example_images(self) -> Tensor:
        """(2, 3, S, S) images of no content, on the model's device."""
        return self.mean.new_zeros(2, 3, self.config.image_size, self.config.image_size)

    def freeze_encoder(self) -> None:
        """No gradients for the encoder, and its BatchNorm statistics stay as they are, in training mode too."""
        self.encoder_frozen = True
        self.encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.encoder_frozen:
            self.encoder.eval()
        return self

    def no_weight_decay(self) -> set[str]:
        """Names of the embeddings, which are not decayed (biases and norms are left to the optimiser's rule)."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()}

    def start_from_images(self, x: Tensor) -> None:
        """Fit an untrained model to images x (B, 3, S, S), where its kind can (recipe key optim.start_images).

        Raises:
            FinolaError: a kind, or a configuration, that cannot.
        """
        raise FinolaError(f"start_images: needs a model with start 'shifts', got one of kind {self.config.kind!r}")

    def take_over(self, donor: ImageModel) -> tuple[str, ...]:
        """Copy from a model of another kind, whose encoder this one has taken, what else fits: by default nothing.
        Returns the names of what was copied, for the record."""
        return ()


class ParametersOnMeta(TorchFunctionMode):
    """Within it, what torch.empty gives is on the meta device, stays there, and is not filled with random numbers: a
    false configuration costs no memory, a true one no time. Buffers hold their values."""

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        if func is Tensor.to and args[0].is_meta:
            types_asked = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
            return args[0].to(*types_asked) if types_asked else args[0]
        return func(*args, **kwargs)


def resolve(value: Any) -> Any:
    """What a name "module:name" stands for, imported; anything but a string is itself."""
    return resolve_name(value) if isinstance(value, str) else value


def require_evaluation(model: nn.Module, why: str = "") -> None:
    """Raises FinolaError for a model in training mode; `why` says what would go wrong."""
    if model.training:
        raise FinolaError(f"model: is in training mode{why and f', {why}'}; call model.eval() first")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards the model is in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
