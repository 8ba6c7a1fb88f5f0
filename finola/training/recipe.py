"""Recipes: the settings of one training run, typed and checked.

A recipe has the sections of `Sections` below. The shipped ones are the rows of `finola/recipes/` at one of their scales
(see `finola.training.tables`): "imagenet/resolution_8", "imagenette/lin_w720". A recipe of your own is a YAML file:

    base: imagenette/default                            # a shipped recipe, or a file relative to this one
    model:   {embed_dim: 512}                           # changes to the fields of the named model
    data:    {image_size: 256}
    optim:   {base_lr: 1.5e-4, batch_size: 128, epochs: 100}
    trainer: {precision: bf16-mixed}

`base` is read first and the file's keys are laid over it. Dotted overrides come last:

    load_recipe("imagenet/default", ["--optim.epochs", "5"])

Listing recipes does not import torch; loading one does, since the model checks its own section.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from finola.errors import FinolaError, RecipeError, near
from finola.training import tables

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from finola.models.base import ModelConfig

# keys that only some kinds of models have (`ModelConfig.recipe_keys`) -> what is wrong with others
SPECIAL_KEYS = {
    **dict.fromkeys(("optim.layer_decay", "optim.label_smoothing", "optim.mixup", "optim.cutmix",
                     "optim.random_erasing"), "which only classifiers have"),
    "optim.rate": "which only autoencoders have",
    **dict.fromkeys(("data.scales", "data.random_crop"), "which only detectors have"),
    **dict.fromkeys(("data.policy", "data.resident"), "which detectors do not have"),
}

# what a resumed run may change: batches and weights stay the same (the number of processes is compared too)
FREE_KEYS = {
    "paper", "data.num_workers", "weights.file", "weights.recipe", "weights.runs", "weights.part", "files.val",
    *(f"files.{split}.{key}" for split in ("train", "val") for key in ("paths", "files")),
    "trainer.accelerator", "trainer.devices", "trainer.num_nodes", "trainer.strategy", "trainer.checkpoint_steps",
    "trainer.checkpoint_minutes", "trainer.val_every", "trainer.panel_every", "trainer.knn_every", "trainer.max_time",
}
# keys that the paper's figures do not depend on
SAME_RUN = {"data.num_workers", "data.resident", "data.resident_size"}

Precision = Literal["bf16-mixed", "32-true", "64-true"]
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Pixels = Annotated[int, Field(ge=8)]


class _Section(BaseModel):
    model_config = STRICT


class ModelSection(_Section):
    """A name of `finola.list_models()`, which decides the kind of model and of task, and changes to its fields."""

    name: str = "finola_mfw2880_c3072_r16"
    overrides: dict[str, Any] = {}


class DataSection(_Section):
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

    image_size: Pixels = 256
    resident: bool = False
    resident_size: Pixels | None = None
    crop_scale: tuple[PositiveShare, PositiveShare] = (0.2, 1.0)
    crop_pct: PositiveShare | None = None
    hflip: bool = True
    policy: str | None = None
    augment: bool = True
    scales: tuple[Annotated[int, Field(ge=32)], ...] | None = None
    random_crop: bool = False
    num_workers: Annotated[int, Field(ge=0)] = 8


class OptimSection(_Section):
    """AdamW or SGD, linear warm-up, then cosine to zero; lr = base_lr * batch_size / 256 (Table `appendix:FINOLA`).
    With `milestones` the rate is constant in place of the cosine, and a tenth from each of these epochs on.

    `batch_size` counts the images of one optimiser step: over all devices, nodes and accumulated parts.
    A run of fewer than two `warmup_epochs` warms up for its first half.
    `freeze_encoder` trains the rest alone; `layer_decay` lowers the learning rate from layer to layer.

    Reconstruction: `loss` is the mean squared error of "normalised" pixels (ImageNet mean and deviation) or of
    "raw" ones; `start_images` of the training images fit the start of a model with start "shifts"
    (`finola.models.linear_start`). A `rate` trains for the codec too, half of each batch as its tiles (the price of a
    bit, relative to the codec's own; `finola.codec.rate`): from weights that were calibrated.
    Classification: `label_smoothing`, `mixup`, `cutmix` (their alphas) and `random_erasing` (its probability).
    """

    optimizer: Literal["adamw", "sgd"] = "adamw"
    base_lr: Positive = 1.5e-4
    batch_size: Count = 128
    epochs: Count = 100
    warmup_epochs: NotNegative = 10.0
    milestones: tuple[Positive, ...] | None = None
    weight_decay: NotNegative = 0.1
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_grad: Positive | None = None
    loss: Literal["normalised", "raw"] = "normalised"
    start_images: Annotated[int, Field(ge=16)] | None = None
    rate: NotNegative = 0.0
    freeze_encoder: bool = False
    layer_decay: PositiveShare | None = None
    label_smoothing: Share = 0.0
    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    random_erasing: Share = 0.0

    @property
    def lr(self) -> float:
        """The highest learning rate, reached when the warm-up ends."""
        return self.base_lr * self.batch_size / 256

    @property
    def warmup(self) -> float:
        """The part of the run that is warm-up, 0 to 1/2."""
        return min(self.warmup_epochs / self.epochs, 0.5)


class TrainerSection(_Section):
    """How it runs; a checkpoint is written every `checkpoint_steps` steps, every `checkpoint_minutes` minutes
    (whichever comes first; null turns one off) and at the end. `max_time` is in minutes. The precision
    64-true is for checks: in fp32 two ways to the same gradient drift apart by rounding alone.
    Every `knn_every`-th validation measures the k-NN accuracy of the encoder too, where training and validation
    images have labels of the same classes (and there are 20 training images to vote)."""

    precision: Precision = "bf16-mixed"
    accumulate: Count = 1
    ema_decay: PositiveShare | None = None
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: Count | Literal["auto"] = "auto"
    num_nodes: Count = 1
    strategy: Literal["auto", "ddp"] = "auto"
    checkpoint_steps: Count | None = None
    checkpoint_minutes: Positive | None = 10.0
    val_every: Count = 1
    panel_every: Count = 1
    knn_every: Count | None = None
    compile: bool = False
    channels_last: bool = False
    max_time: Positive | None = None


class _Sections(_Section):
    """What a YAML file may hold, `model:` aside, which the named model's configuration checks."""

    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    trainer: TrainerSection = TrainerSection()
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, besides the images, and where it comes from.

    Attributes:
        name: SCALE/ROW, or the stem of a file.
        shipped: whether it is that row of `finola/recipes/` as it stands there: no file of one's own, and nothing
            changed on the command line that results depend on.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    trainer: TrainerSection = TrainerSection()
    seed: int = 0
    name: str = ""
    shipped: bool = False

    def model_config(self) -> ModelConfig:
        """The model's configuration in this run: the named one, overridden, at the data's image size."""
        from finola.registry import model_config

        return model_config(self.model.name, image_size=self.data.image_size, **self.model.overrides)

    def model_class(self) -> type[ModelConfig]:
        """The class of that configuration, which is known even where the fields do not go together."""
        from finola.registry import MODELS, config_class

        return config_class(MODELS[self.model.name].kind)

    def as_dict(self) -> dict[str, Any]:
        """Plain types alone, in the shape of the YAML file."""
        model = self.model.model_dump(mode="json")
        sections = {key: getattr(self, key).model_dump(mode="json") for key in ("data", "optim", "trainer")}
        return {"model": {"name": model["name"], **model["overrides"]}, **sections, "seed": self.seed}

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


def load_recipe(name_or_path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a shipped recipe ("imagenet/resolution_8") or a YAML file, lay `overrides` over it and check all.

    `overrides` are command-line words: ["--optim.epochs", "5", "--data.hflip=false"].
    Raises RecipeError, one line naming the file or option, the key, what was got and what was expected.
    """
    name, where, content = _read(str(name_or_path), ())
    changes = parse_overrides(overrides or [])
    recipe = _build(content, changes, where)
    shipped = where == name and _does_the_same(recipe, _build(content, {}, where) if changes else recipe)
    return dataclasses.replace(recipe, name=name, shipped=shipped)


def _does_the_same(recipe: Recipe, other: Recipe) -> bool:
    """Whether both train the same model in the same way."""
    ours, theirs = ({key: plain.as_dict()[key] for key in ("model", "data", "optim")} for plain in (recipe, other))
    return differences(ours, theirs).keys() <= SAME_RUN


def list_recipes() -> list[str]:
    """The names of the shipped recipes, SCALE/ROW."""
    return tables.names()


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
    """The safe loader (no Python tags), which also refuses a key written twice and reads 1e-4 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is written twice",
                                                        key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
                              list("-+0123456789"))


def _read(name: str, readers: tuple[Path, ...], beside: Path = Path()) -> tuple[str, str, dict]:
    """(name, where it stands, its keys laid over those of its `base`) of a shipped recipe or of a file, relative to the
    folder `beside`; `readers`, the files that led here, stop a circle."""
    path = next((path for path in (beside / name, beside / f"{name}.yaml") if path.is_file()), None)
    if path is None:
        scale, _, run = name.removesuffix(".yaml").partition("/")
        if run not in tables.runs() or scale not in tables.runs()[run].scales:
            raise RecipeError(f"{name}: no such recipe and no such file{near(name, list_recipes()) or ';'}"
                              " `finola train --list` lists them all")
        return f"{scale}/{run}", f"{scale}/{run}", tables.settings(run, scale)
    if path.resolve() in readers:
        raise RecipeError(f"{path}: base: the files refer to each other in a circle; remove one `base:`")
    content = _parse(path)
    base = content.pop("base", None)
    if base is not None:
        try:
            content = tables.merge(_read(str(base), (*readers, path.resolve()), path.parent)[2], content)
        except RecipeError as error:
            raise RecipeError(f"{path}: base: {error}" if "circle" not in str(error) else str(error)) from None
    return path.stem, str(path), content


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

def _build(content: dict, changes: dict, where: str) -> Recipe:
    """The recipe that a file's content makes with the dotted `changes` of the command line."""
    name = _check(content, where).model.name
    for key, value in changes.items():
        nested = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        alone = tables.merge({"model": {"name": name}}, nested)  # so that a mistake is blamed on the right place
        name = _check(alone, "command line").model.name
        content = tables.merge(content, nested)
    recipe = _check(content, where)
    _check_together(recipe, where)
    return recipe


def _check(content: dict, where: str) -> Recipe:
    """A recipe from a mapping, every key and value checked."""
    rest = dict(content)
    model = _model_section(rest.pop("model", {}), where)
    sections = _validated(_Sections, rest, where, "", known=["model", *_Sections.model_fields])
    return Recipe(model, sections.data, sections.optim, sections.trainer, sections.seed)


def _model_section(content: object, where: str) -> ModelSection:
    """`name` and the overrides; their keys and types are those of the named model's configuration."""
    from finola.registry import model_config

    if not isinstance(content, dict):
        raise RecipeError(f"{where}: model: got {_kind(content)}, expected keys under it")
    if "image_size" in content:
        raise RecipeError(f"{where}: unknown key 'model.image_size'; set data.image_size instead")
    name = content.get("name", ModelSection().name)
    if not isinstance(name, str):
        raise RecipeError(f"{where}: model.name: got {name!r} ({_kind(name)}), expected text")
    try:
        config = model_config(name)
    except FinolaError as error:
        raise RecipeError(f"{where}: {error}") from None
    fields = _validated(_fields_of(config.kind), content, where, "model.")
    return ModelSection(name=name, overrides={key: getattr(fields, key) for key in content if key != "name"})


@cache
def _fields_of(kind: str) -> type[BaseModel]:
    """The fields of a kind's configurations with their types, for checking."""
    from finola.registry import config_class

    config = config_class(kind)
    hints = typing.get_type_hints(config)
    fields: dict[str, Any] = {f.name: (hints[f.name], None) for f in dataclasses.fields(config)}
    del fields["image_size"]
    found: type[BaseModel] = create_model("ModelFields", __config__=STRICT, name=(str, ""), **fields)
    return found


S = typing.TypeVar("S", bound=BaseModel)


def _validated(section: type[S], content: dict, where: str, prefix: str, known: Iterable[str] = ()) -> S:
    """`content` as a `section`, or one line with all that is wrong with it; `prefix` is the dotted way to it."""
    try:
        return section.model_validate(_tuples(content))
    except ValidationError as error:
        problems: dict[str, str] = {}  # the first of each key
        for details in error.errors(include_url=False):
            key, problem = _problem(section, details, content, prefix, known)
            problems.setdefault(key, problem)
        raise RecipeError(f"{where}: {'; '.join(problems.values())}") from None


def _problem(section: type[BaseModel], error: ErrorDetails, content: dict, prefix: str,
             known: Iterable[str]) -> tuple[str, str]:
    """(dotted key, what is wrong with it) of one of pydantic's errors."""
    keys: list[str] = []
    value: Any = content
    hint: Any = section
    for part in error["loc"]:  # as far as it names keys: then come places in a list and members of a union
        if not (isinstance(hint, type) and issubclass(hint, BaseModel)):
            break
        section = hint
        keys.append(str(part))
        value = value[part]
        hint = section.model_fields[str(part)].annotation if part in section.model_fields else None
    key = prefix + ".".join(keys)
    if error["type"] == "extra_forbidden":
        return key, f"unknown key {key!r}{near(keys[-1], known if known and len(keys) == 1 else section.model_fields)}"
    if error["type"] in LIMITS:
        return key, f"{key}: got {value!r}, expected {LIMITS[error['type']].format_map(error.get('ctx', {}))}"
    return key, f"{key}: got {value!r} ({_kind(value)}), expected {_expected(hint)}"


def _tuples(value: Any) -> Any:
    """Lists, which YAML has, as the tuples that sections hold."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


class FaultyRecipe(RecipeError):
    """Keys that are right by themselves and wrong together: all such faults in one line, and the recipe itself."""

    def __init__(self, message: str, recipe: Recipe):
        super().__init__(message)
        self.recipe = recipe


def faults_of_data(recipe: Recipe, data: Sequence[str], val: Sequence[str] | None) -> list[str]:
    """What is wrong with the images that --data and --val name for a recipe, which may be a faulty one itself."""
    from finola.models.base import resolve

    try:
        resolve(recipe.model_class().data).open(recipe, data, val, Path())
    except FinolaError as error:
        return [str(error)]
    return []


def _check_together(recipe: Recipe, where: str) -> None:
    """The rules that tie two keys."""
    if faults := list(_faults_together(recipe)):
        raise FaultyRecipe(f"{where}: {'; '.join(faults)}", recipe)


def _faults_together(recipe: Recipe) -> Iterator[str]:
    data, optim = recipe.data, recipe.optim
    if data.crop_scale[0] > data.crop_scale[1]:
        yield f"data.crop_scale: got {list(data.crop_scale)}, expected small, large"
    if optim.batch_size % recipe.trainer.accumulate:
        yield (f"optim.batch_size: got {optim.batch_size}, expected a multiple of trainer.accumulate ="
               f" {recipe.trainer.accumulate}")
    if optim.rate and recipe.trainer.compile:
        yield "trainer.compile: got true, expected false with optim.rate; --trainer.compile false turns it off"
    try:
        recipe.model_config()
    except FinolaError as error:
        yield str(error)
    config = recipe.model_class()
    if not data.augment:
        yield from _faults_unaugmented(recipe, config.keeps_features)
    for key, why in SPECIAL_KEYS.items():
        section, name = key.split(".")
        value = getattr(getattr(recipe, section), name)
        if value and key not in config.recipe_keys:
            yield f"{key}: got {value}, {why}; {recipe.model.name} is of kind {config.kind!r}"


def _faults_unaugmented(recipe: Recipe, keeps_features: bool) -> Iterator[str]:
    """`data.augment: false` is for features that are computed once."""
    if not (keeps_features and recipe.optim.freeze_encoder):
        yield "data.augment: got false, which needs a classifier and optim.freeze_encoder: true"
    changing = {"data.policy": recipe.data.policy, "optim.mixup": recipe.optim.mixup,
                "optim.cutmix": recipe.optim.cutmix, "optim.random_erasing": recipe.optim.random_erasing}
    for key, value in changing.items():
        if value:
            mend = f"--{key} {'null' if isinstance(value, str) else 0}"
            yield f"{key}: got {value}, expected none with data.augment: false; {mend} turns it off"


# words --------------------------------------------------------------------------------------------

LIMITS = {"greater_than": "more than {gt}", "greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}",
          "finite_number": "a finite number", "literal_error": "one of {expected}"}
_KINDS = {NoneType: "null", bool: "true or false", int: "a whole number", float: "a number", str: "text",
          list: "a list", dict: "a section"}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _expected(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "keys under it"
    if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(_expected(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Annotated:
        return _expected(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return "a list of numbers" if parts[-1] is Ellipsis else f"a list of {len(parts)} numbers"
    return _KINDS[hint]
