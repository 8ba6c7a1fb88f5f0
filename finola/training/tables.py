"""The tables of the paper: their rows, the runs that a row takes, and the figures that the paper gives.

Each file of `finola/recipes/` is one table or figure of the paper, or a group of settings that tables share:

    table: table:norm+linear            # its LaTeX label; left out by a group of settings
    title: Norm+linear against ...
    base: default                       # the row that rows of this file build on, unless they name another
    metrics: {psnr: {}}                 # what is measured of each row
    rows:
      autoregression_linear_16:         # what users type: `finola train imagenet/autoregression_linear_16`
        title: (a) linear, 16x16
        model: {autoregression: linear} # sections of a recipe: what differs from `base`
        imagenette: {model: {...}}      # ... and what differs at that scale
        after: NAME, or [NAME, ...]     # the runs, one after another, whose weights it starts from
        run: NAME                       # in place of settings: the run is another row's
        paper: {psnr: 25.4}             # the paper's figures, where it gives any

A metric names its `score` (its own name unless it says otherwise) and the `runs` that follow the row's own; {encoder}
and the like stand for what `with:` says, of the file or of the row, and `scaled:` at a smaller scale.

A row's settings at a scale are those of its base at that scale, then its own, then its own for that scale. Nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finola.errors import RecipeError, near

FOLDER = Path(__file__).parents[1] / "recipes"
# scale of images -> the one that it builds on, and the scale of detectors that goes with it
SCALES: dict[str, str | None] = {"imagenet": None, "imagenette": "imagenet", "pocket": "imagenette", "pretrained": None}
DETECTION_SCALES: dict[str, str | None] = {"coco": None, "coco128": "coco"}
DETECTION_SCALE = {"imagenet": "coco", "imagenette": "coco128", "pocket": "coco128"}
SECTIONS = ("model", "data", "optim", "trainer")
Settings = dict[str, Any]  # sections of a recipe


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)


class Metric(_Strict):
    """`score`: what the last of `runs`, or else the row's own run, is judged by."""

    score: str | None = None
    runs: list[str] = []


class _Row(_Strict):
    title: str
    base: str | None = None
    run: str | None = None
    after: str | list[str] = []
    words: dict[str, str] = Field({}, alias="with")
    scaled: dict[str, dict[str, str]] = {}
    metrics: dict[str, Metric] | None = None
    paper: dict[str, float] = {}
    model: Settings = {}
    data: Settings = {}
    optim: Settings = {}
    trainer: Settings = {}
    imagenette: Settings = {}
    pocket: Settings = {}
    coco128: Settings = {}


class _File(_Strict):
    title: str
    rows: dict[str, _Row]
    table: str | None = None
    shown_in: list[str] = []
    data: str = "images"
    base: str | None = None
    scales: list[str] | None = None
    words: dict[str, str] = Field({}, alias="with")
    scaled: dict[str, dict[str, str]] = {}
    metrics: dict[str, Metric] = {}


class Run(NamedTuple):
    """A named run: what `finola train SCALE/NAME` trains."""

    name: str
    title: str
    scales: tuple[str, ...]  # where it exists, the full one first
    base: str | None
    after: tuple[str, ...]  # templates
    own: Settings
    overlays: Mapping[str, Settings]  # scale -> what differs there
    table: Table


class Row(NamedTuple):
    """A row of one of the paper's tables."""

    name: str
    title: str
    run: str  # a template
    metrics: Mapping[str, Metric]
    paper: Mapping[str, float]
    entry: _Row
    table: Table

    def chain(self, metric: str, scale: str) -> list[str]:
        """The runs, one after another, that a metric takes at a scale of images."""
        words = self.table.words(scale) | _words(self.entry, scale)
        first, *rest = (template.format_map(words) for template in (self.run, *self.metrics[metric].runs))
        return [*start(first, scale), first, *rest]

    def figures(self, scale: str) -> list[Figure]:
        """The paper's numbers, for the runs at a scale of images."""
        return [Figure(self.table.label, self.title, metric, self.metrics[metric].score or metric, value,
                       tuple(f"{scale_of(name, scale)}/{name}" for name in self.chain(metric, scale)))
                for metric, value in self.paper.items()]


class Figure(NamedTuple):
    """A number of the paper: what a run is judged by after those before it."""

    table: str  # its label
    row: str  # its title
    metric: str
    score: str
    value: float
    runs: tuple[str, ...]  # SCALE/NAME of the run last, before it of those whose weights it starts from


class Table(NamedTuple):
    """A table or figure of the paper, by its LaTeX label; "" for a group of settings."""

    label: str
    title: str
    shown_in: tuple[str, ...]  # figures that draw the same rows
    file: _File

    def words(self, scale: str) -> dict[str, str]:
        """What {encoder} and the like stand for, at a scale of images."""
        return _words(self.file, scale)

    @property
    def rows(self) -> list[Row]:
        """Those that something is measured of."""
        listed = ((name, row, self.file.metrics if row.metrics is None else row.metrics)
                  for name, row in self.file.rows.items())
        return [Row(name, row.title, row.run or name, metrics, row.paper, row, self)
                for name, row, metrics in listed if metrics]


def tables() -> list[Table]:
    """The tables and figures of the paper that have rows to train."""
    return [table for table in _tables() if table.label and table.rows]


def find_table(label: str) -> Table:
    """By its label, with or without "table:" or "fig:".

    Raises:
        RecipeError: there is none, with near ones.
    """
    known = {name: table for table in tables() for name in (table.label.partition(":")[2], table.label)}
    if label not in known:
        names = [name for name in known if (":" in name) == (":" in label)]
        raise RecipeError(f"{label}: no such table{near(label, names) or ';'} `finola reproduce --list` lists them all")
    return known[label]


@cache
def runs() -> dict[str, Run]:
    """Every run by its name, in the order of the files."""
    found: dict[str, Run] = {}
    for table in _tables():
        for name, row in table.file.rows.items():
            own = {key: getattr(row, key) for key in SECTIONS if getattr(row, key, None)}
            if row.run or not (own or row.base or table.file.base):
                continue
            if name in found:
                raise RecipeError(f"{name}: has settings in two files, of {found[name].table.title!r} and"
                                  f" {table.title!r}")
            scales = DETECTION_SCALES if table.file.data == "objects" else tuple(DETECTION_SCALE)
            after = (row.after,) if isinstance(row.after, str) else tuple(row.after)
            overlays = {scale: getattr(row, scale) for scale in ("imagenette", "pocket", "coco128")}
            found[name] = Run(name, row.title, tuple(table.file.scales or scales), row.base or table.file.base, after,
                              own, overlays, table)
    return found


def figures(name: str) -> tuple[Figure, ...]:
    """The paper's figures that the run SCALE/NAME ends at; none for another name."""
    scale, _, run = name.partition("/")
    if run not in runs() or scale not in runs()[run].scales or scale == "pretrained":
        return ()
    return tuple(figure for table in tables() for row in table.rows for figure in row.figures(image_scale(scale))
                 if figure.runs[-1] == name)


def names() -> list[str]:
    """SCALE/NAME of every run."""
    return [f"{scale}/{run.name}" for run in runs().values() for scale in run.scales]


def settings(name: str, scale: str) -> Settings:
    """The sections of a run's recipe at a scale; `name` must be in `runs()`, `scale` among its scales."""
    run = runs()[name]
    found = merge(settings(run.base, scale), run.own) if run.base else run.own
    for step in chain(scale):
        found = merge(found, run.overlays.get(step, {}))
    return found


def start(name: str, scale: str) -> list[str]:
    """The runs, one after another, whose weights a run starts from at a scale of images."""
    run = runs()[name]
    before = [template.format_map(run.table.words(scale)) for template in run.after]
    return start(before[0], scale) + before if before else []


def scale_of(name: str, scale: str) -> str:
    """A run's scale where runs on images have `scale`."""
    return DETECTION_SCALE[scale] if runs()[name].table.file.data == "objects" else scale


def image_scale(scale: str) -> str:
    """The scale of images that goes with a scale of detectors; another is itself."""
    return next((images for images, objects in DETECTION_SCALE.items() if objects == scale), scale)


def chain(scale: str) -> list[str]:
    """A scale and those it builds on, from the full one."""
    below = (SCALES | DETECTION_SCALES)[scale]
    return [*chain(below), scale] if below else [scale]


def _words(entry: _File | _Row, scale: str) -> dict[str, str]:
    """`with:`, and over it `scaled:` as far as the scale builds on it."""
    found = dict(entry.words)
    for step in chain(scale):
        found |= entry.scaled.get(step, {})
    return found


def merge(base: Settings, changes: Settings) -> Settings:
    """`changes` laid over `base`, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


@cache
def _tables() -> list[Table]:
    """All files, by their names."""
    found = []
    for path in sorted(FOLDER.glob("*.yaml")):
        try:
            file = _File.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (ValidationError, yaml.YAMLError) as error:
            raise RecipeError(f"{path}: {error}".replace("\n", " ")) from None
        found.append(Table(file.table or "", file.title, tuple(file.shown_in), file))
    return found
