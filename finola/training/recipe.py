"""Recipes: one YAML file names one training run, typed, checked, and small because it builds on a base.

A recipe has the sections of `Recipe` below. `base: other.yaml` (relative to the file) is read first and this
file's keys are laid over it. Dotted overrides come last:

    load_recipe("imagenet/default", ["--optim.epochs", "5"])

    model:   {name: finola_mfw2880_c3072_r16, embed_dim: 512}   # a registry name, and changes to its fields
    data:    {image_size: 256}
    optim:   {base_lr: 1.5e-4, batch_size: 128, epochs: 100}
    trainer: {precision: bf16-mixed}
    paper:   {table: resolution (a), row: 16x16, psnr: 25.8}

Listing recipes does not import torch; loading one does, since the model checks its own section.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from finola.errors import FinolaError, RecipeError, near

if TYPE_CHECKING:
    from finola.models.base import ModelConfig

RECIPE_FOLDER = Path(__file__).parents[1] / "recipes"
# keys that only some kinds of models have (`ModelConfig.recipe_keys`) -> what is wrong with others
SPECIAL_KEYS = {
    **dict.fromkeys(("optim.layer_decay", "optim.label_smoothing", "optim.mixup", "optim.cutmix",
                     "optim.random_erasing"), "which only classifiers have"),
    **dict.fromkeys(("data.scales", "data.random_crop"), "which only detectors have"),
    **dict.fromkeys(("data.policy", "data.resident"), "which detectors do not have"),
}


Precision = Literal["bf16-mixed", "32-true", "64-true"]


def _option(default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None,
            choices: tuple[str, ...] | None = None) -> Any:
    """A field with its range: `low` <= value <= `high`, value > `above`, value in `choices`."""
    limits = {"low": low, "above": above, "high": high, "choices": choices}
    return field(default=default, metadata={k: v for k, v in limits.items() if v is not None})


@dataclass(frozen=True)
class ModelSection:
    """A name of `finola.list_models()`, which decides the kind of model and of task, and changes to its fields."""

    name: str = "finola_mfw2880_c3072_r16"
    overrides: dict = field(default_factory=dict)


@dataclass(frozen=True)
class DataSection:
    """Crops: a random part of the image, between `crop_scale` of its area, resized to `image_size` pixels. Probing and
    fine-tuning customarily start at 0.08, pre-training here at 0.2.

    Evaluation: the shorter side resized to `image_size` / `crop_pct`, then the centre crop. By default 0.875 (256 for
    224) for classifiers and for the k-NN accuracy of any model, 1.0 otherwise; not for detectors.

    `resident` decodes every image once, keeps it at `resident_size` pixels (shorter side) on the device and
    crops there: for sets that fit in memory. `policy` acts on the crops: one of timm's RandAugment strings
    ("rand-m9-mstd0.5-inc1") or "moco". `augment: false` takes centre squares instead, in training too: for
    probing, where a frozen encoder then sees each image only once.

    Detection: images keep their aspect. `image_size` is the shorter side (of the longer see the model's `max_size`);
    in training it is drawn from `scales`, where given. `random_crop` cuts half of the images first, as DETR does.
    """

    image_size: int = _option(256, low=8)
    resident: bool = False
    resident_size: int | None = _option(None, low=8)
    crop_scale: tuple[float, float] = _option((0.2, 1.0), above=0.0, high=1.0)
    crop_pct: float | None = _option(None, above=0.0, high=1.0)
    hflip: bool = True
    policy: str | None = None
    augment: bool = True
    scales: tuple[int, ...] | None = _option(None, low=32)
    random_crop: bool = False
    num_workers: int = _option(8, low=0)


@dataclass(frozen=True)
class OptimSection:
    """AdamW or SGD, linear warm-up, then cosine to zero; lr = base_lr * batch_size / 256 (Table `appendix:FINOLA`).
    With `milestones` the rate is constant in place of the cosine, and a tenth from each of these epochs on.

    `batch_size` counts the images of one optimiser step: over all devices, nodes and accumulated parts.
    A run of fewer than two `warmup_epochs` warms up for its first half.
    `freeze_encoder` trains the rest alone; `layer_decay` lowers the learning rate from layer to layer.

    Reconstruction: `loss` is the mean squared error of "normalised" pixels (ImageNet mean and deviation) or of
    "raw" ones; `start_images` of the training images fit the start of a model with start "shifts"
    (`finola.models.linear_start`).
    Classification: `label_smoothing`, `mixup`, `cutmix` (their alphas) and `random_erasing` (its probability).
    """

    optimizer: str = _option("adamw", choices=("adamw", "sgd"))
    base_lr: float = _option(1.5e-4, above=0.0)
    batch_size: int = _option(128, low=1)
    epochs: int = _option(100, low=1)
    warmup_epochs: float = _option(10.0, low=0.0)
    milestones: tuple[float, ...] | None = _option(None, above=0.0)
    weight_decay: float = _option(0.1, low=0.0)
    betas: tuple[float, float] = _option((0.9, 0.95), low=0.0, high=1.0)
    clip_grad: float | None = _option(None, above=0.0)
    loss: str = _option("normalised", choices=("normalised", "raw"))
    start_images: int | None = _option(None, low=16)
    freeze_encoder: bool = False
    layer_decay: float | None = _option(None, above=0.0, high=1.0)
    label_smoothing: float = _option(0.0, low=0.0, high=1.0)
    mixup: float = _option(0.0, low=0.0)
    cutmix: float = _option(0.0, low=0.0)
    random_erasing: float = _option(0.0, low=0.0, high=1.0)

    @property
    def lr(self) -> float:
        """The highest learning rate, reached when the warm-up ends."""
        return self.base_lr * self.batch_size / 256

    @property
    def warmup(self) -> float:
        """The part of the run that is warm-up, 0 to 1/2."""
        return min(self.warmup_epochs / self.epochs, 0.5)


@dataclass(frozen=True)
class TrainerSection:
    """How it runs; a checkpoint is written every `checkpoint_steps` steps, every `checkpoint_minutes` minutes
    (whichever comes first; null turns one off) and at the end. `max_time` is in minutes. The precision
    64-true is for checks: in fp32 two ways to the same gradient drift apart by rounding alone.
    Every `knn_every`-th validation measures the k-NN accuracy of the encoder too, where training and validation
    images have labels of the same classes (and there are 20 training images to vote)."""

    precision: str = _option("bf16-mixed", choices=("bf16-mixed", "32-true", "64-true"))
    accumulate: int = _option(1, low=1)
    ema_decay: float | None = _option(None, above=0.0, high=1.0)
    accelerator: str = _option("auto", choices=("auto", "cpu", "gpu"))
    devices: int | str = _option("auto", low=1, choices=("auto",))
    num_nodes: int = _option(1, low=1)
    strategy: str = _option("auto", choices=("auto", "ddp"))
    checkpoint_steps: int | None = _option(None, low=1)
    checkpoint_minutes: float | None = _option(10.0, above=0.0)
    val_every: int = _option(1, low=1)
    panel_every: int = _option(1, low=1)
    knn_every: int | None = _option(None, low=1)
    compile: bool = False
    channels_last: bool = False
    max_time: float | None = _option(None, above=0.0)


@dataclass(frozen=True)
class PaperSection:
    """Where the paper has this run, and its validation PSNR in dB, its top-1 accuracy, box AP or mask AP in percent;
    null where the paper gives no number. `after`: the row whose weights the run must start from for these to be its
    own; a result of a run from other weights, or with another model, other data or another optim, leaves all out."""

    table: str | None = None
    row: str | None = None
    psnr: float | None = None
    top1: float | None = None
    box_ap: float | None = None
    mask_ap: float | None = None
    after: str | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, besides the images. `name` is the file's, for the record."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    trainer: TrainerSection = field(default_factory=TrainerSection)
    paper: PaperSection = field(default_factory=PaperSection)
    seed: int = _option(0, low=0)
    name: str = ""

    def model_config(self) -> ModelConfig:
        """The model's configuration in this run: the named one, overridden, at the data's image size."""
        from finola.registry import model_config

        return model_config(self.model.name, image_size=self.data.image_size, **self.model.overrides)

    def as_dict(self) -> dict[str, Any]:
        """Plain types alone, in the shape of the YAML file."""
        sections = dataclasses.asdict(self)
        del sections["name"]
        model = sections["model"]
        sections["model"] = {"name": model["name"], **model["overrides"]}
        plain: dict[str, Any] = _plain(sections)
        return plain

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def load_recipe(name_or_path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a shipped recipe ("imagenet/resolution_8") or a YAML file, lay `overrides` over it and check all.

    `overrides` are command-line words: ["--optim.epochs", "5", "--data.hflip=false"].
    Raises RecipeError, one line naming the file or option, the key, what was got and what was expected.
    """
    path = find_recipe(name_or_path)
    recipe = _build(_read(path, ()), overrides or [], str(path))
    return dataclasses.replace(recipe, name=_name(path))


def list_recipes() -> dict[str, str]:
    """Name -> first line of the header comment, for every shipped recipe."""
    paths = sorted(RECIPE_FOLDER.rglob("*.yaml"))
    return {_name(path): _title(path) for path in paths}


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe's name (with or without .yaml), or of a path.

    Raises RecipeError with the nearest names.
    """
    path = Path(name_or_path)
    for candidate in (path, RECIPE_FOLDER / path, Path(f"{path}.yaml"), RECIPE_FOLDER / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    raise RecipeError(f"{name_or_path}: no such recipe and no such file"
                      f"{near(str(name_or_path), list_recipes()) or ';'} `finola train --list` lists them all")


def differences(old: dict, new: dict, prefix: str = "") -> dict[str, tuple]:
    """Dotted key -> (old value, new value), for every key of two recipes' `as_dict` that differs."""
    changed: dict[str, tuple] = {}
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changed |= differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changed[f"{prefix}{key}"] = (before, after)
    return changed


# reading YAML -------------------------------------------------------------------------------------

class _Loader(yaml.SafeLoader):
    """The safe loader (no Python tags), which also refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is written twice",
                                                        key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read(path: Path, readers: tuple[Path, ...]) -> dict:
    """The file's keys laid over those of its `base`; `readers`, the files that led here, stop a circle."""
    if path.resolve() in readers:
        raise RecipeError(f"{path}: base: the files refer to each other in a circle; remove one `base:`")
    content = _parse(path)
    base = content.pop("base", None)
    if base is None:
        return content
    base_path = path.parent / str(base)
    if not base_path.is_file():
        raise RecipeError(f"{path}: base: got {base!r}, expected the path of a file relative to this one")
    return _merge(_read(base_path, (*readers, path.resolve())), content)


def _parse(path: Path) -> dict:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a key that cannot be hashed
        raise RecipeError(f"{path}: not valid YAML without tags: {error}".replace("\n", " ")) from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not a text file in UTF-8; expected a YAML recipe") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: got {_kind(content)}, expected sections such as `model:` and `optim:`")
    return content


def _merge(base: dict, changes: dict) -> dict:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if both else value
    return merged


def _name(path: Path) -> str:
    """`imagenet/resolution_8` for a shipped recipe, the file's stem for another."""
    shipped = path.resolve().is_relative_to(RECIPE_FOLDER.resolve())
    named = path.resolve().relative_to(RECIPE_FOLDER.resolve()) if shipped else Path(path.name)
    return named.with_suffix("").as_posix()


def _title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


# overrides ----------------------------------------------------------------------------------------

def parse_overrides(words: list[str]) -> dict:
    """["--optim.epochs", "5", "--data.hflip=false"] -> {"optim.epochs": 5, "data.hflip": False}."""
    values, words = {}, list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise RecipeError(f"{word}: expected an override such as --optim.epochs 5")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise RecipeError(f"{word}: a value is missing; write {word} VALUE")
            text = words.pop(0)
        values[key] = _parse_value(word, text)
    return values


def _parse_value(option: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, TypeError):
        raise RecipeError(f"{option}: cannot read the value {text!r}; write it as in a YAML file") from None


# checking -----------------------------------------------------------------------------------------

def _build(content: dict, overrides: list[str], where: str) -> Recipe:
    name: str = _section(Recipe, content, where, "").model.name
    for key, value in parse_overrides(overrides).items():
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        alone = _merge({"model": {"name": name}}, nested)  # so that a mistake is blamed on the right place
        name = _section(Recipe, alone, "command line", "").model.name
        content = _merge(content, nested)
    recipe: Recipe = _section(Recipe, content, where, "")
    _check_together(recipe, where)
    return recipe


def _section(cls: type, content: object, where: str, prefix: str) -> Any:
    """A dataclass from a mapping, every key and value checked; `prefix` is the dotted way to it."""
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: {prefix.rstrip('.')}: got {_kind(content)}, expected keys under it")
    if cls is ModelSection:
        return _model_section(content, where, prefix)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "name"}
    types = typing.get_type_hints(cls)
    values = {}
    for key, value in content.items():
        dotted = f"{prefix}{key}"
        if key not in fields:
            raise RecipeError(f"{where}: unknown key {dotted!r}{near(str(key), fields)}")
        if dataclasses.is_dataclass(types[key]):
            values[key] = _section(types[key], value, where, f"{dotted}.")
        else:
            values[key] = _value(types[key], value, fields[key].metadata, f"{where}: {dotted}")
    return cls(**values)


def _model_section(content: dict, where: str, prefix: str) -> ModelSection:
    """`name` and the overrides; their keys and types are those of the named model's configuration."""
    from finola.registry import model_config

    name = _value(str, content.get("name", ModelSection.name), {}, f"{where}: {prefix}name")
    try:
        config = model_config(name)
    except FinolaError as error:
        raise RecipeError(f"{where}: {error}") from None
    hints = typing.get_type_hints(type(config))
    types = {"name": str} | {f.name: hints[f.name] for f in dataclasses.fields(config) if f.name != "image_size"}
    if "image_size" in content:
        raise RecipeError(f"{where}: unknown key '{prefix}image_size'; set data.image_size instead")
    values = {}
    for key, value in content.items():
        if key not in types:
            raise RecipeError(f"{where}: unknown key '{prefix}{key}'{near(str(key), types)}")
        values[key] = _value(types[key], value, {}, f"{where}: {prefix}{key}")
    values.pop("name", None)
    return ModelSection(name, values)


def _value(kind: Any, value: Any, limits: Mapping[str, Any], what: str) -> Any:
    """`value` as `kind` and within `limits`; a whole number passes for a float, a list for a tuple."""
    converted = _convert(kind, value)
    if converted is _WRONG:
        raise RecipeError(f"{what}: got {value!r} ({_kind(value)}), expected {_expected(kind)}")
    for item in converted if isinstance(converted, tuple) else (converted,):
        problem = _outside(item, limits)
        if problem:
            raise RecipeError(f"{what}: got {value!r}, expected {problem}")
    return converted


_WRONG = object()


def _convert(kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType):
        results = (_convert(option, value) for option in typing.get_args(kind))
        return next((result for result in results if result is not _WRONG), _WRONG)
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        if not isinstance(value, list | tuple):
            return _WRONG
        if parts[-1] is Ellipsis:
            parts = parts[:1] * len(value)
        if len(value) != len(parts):
            return _WRONG
        items = tuple(_convert(part, item) for part, item in zip(parts, value, strict=True))
        return _WRONG if _WRONG in items else items
    if kind is float:
        return _to_float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    return _WRONG


def _to_float(value: object) -> Any:
    """YAML reads 1e-4 (without a point) as a word: it is taken for the number it is."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return _WRONG
    try:
        return float(value)
    except ValueError:
        return _WRONG


def _outside(item: Any, limits: Mapping[str, Any]) -> str | None:
    """What was expected of `item`, or None where it keeps to the limits."""
    if item is None:
        return None
    choices = limits.get("choices")
    if isinstance(item, str):
        return f"one of {', '.join(choices)}" if choices and item not in choices else None
    if isinstance(item, float) and not math.isfinite(item):
        return "a finite number"
    if "low" in limits and item < limits["low"]:
        return f"at least {limits['low']}"
    if "above" in limits and item <= limits["above"]:
        return f"more than {limits['above']}"
    if "high" in limits and item > limits["high"]:
        return f"at most {limits['high']}"
    return None


def _check_together(recipe: Recipe, where: str) -> None:
    """The rules that tie two keys."""
    data, optim = recipe.data, recipe.optim
    if data.crop_scale[0] > data.crop_scale[1]:
        raise RecipeError(f"{where}: data.crop_scale: got {list(data.crop_scale)}, expected small, large")
    if optim.batch_size % recipe.trainer.accumulate:
        raise RecipeError(f"{where}: optim.batch_size: got {optim.batch_size}, expected a multiple of"
                          f" trainer.accumulate = {recipe.trainer.accumulate}")
    try:
        config = recipe.model_config()
    except FinolaError as error:
        raise RecipeError(f"{where}: {error}") from None
    if not data.augment:
        _check_unaugmented(recipe, config.keeps_features, where)
    for key, why in SPECIAL_KEYS.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        if value and key not in config.recipe_keys:
            raise RecipeError(f"{where}: {key}: got {value}, {why}; {recipe.model.name} is of kind {config.kind!r}")


def _check_unaugmented(recipe: Recipe, keeps_features: bool, where: str) -> None:
    """`data.augment: false` is for features that are computed once."""
    if not (keeps_features and recipe.optim.freeze_encoder):
        raise RecipeError(f"{where}: data.augment: got false, which needs a classifier and optim.freeze_encoder: true")
    changing = {"data.policy": recipe.data.policy, "optim.mixup": recipe.optim.mixup,
                "optim.cutmix": recipe.optim.cutmix, "optim.random_erasing": recipe.optim.random_erasing}
    for key, value in changing.items():
        if value:
            raise RecipeError(f"{where}: {key}: got {value}, expected none with data.augment: false")


# words --------------------------------------------------------------------------------------------

_KINDS = {NoneType: "null", bool: "true or false", int: "a whole number", float: "a number", str: "text",
          list: "a list", dict: "a section"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _expected(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return " or ".join(_expected(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        return "a list of numbers" if parts[-1] is Ellipsis else f"a list of {len(parts)} numbers"
    return _KINDS[kind]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
