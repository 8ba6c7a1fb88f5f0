"""A table of the paper, trained: the runs that its rows take, and how far they are.

A row's numbers come from runs one after another: pre-training, then a probe from its weights, say. A run is known by
all that decides it, its recipe, its seed and the run that it starts from, so that rows and tables that need the same
run share it. Everything lies in one folder:

    runs/pocket/lin_w720-5a1c9e02/        the folder of a run (see `finola.training.engine`), and its log beside it
    reproduce.json                        the scale and the data, which cannot change
    resolution-pocket.json, .md, .png     a table of the paper with ours beside it (see `finola.training.report`)
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from finola.data.workers import usable_cores
from finola.errors import EXTRAS, RecipeError, near
from finola.files import check_folder, write_json
from finola.models.base import resolve
from finola.training.jobs import Job
from finola.training.origin import origin_of_data
from finola.training.recipe import FREE_KEYS, Recipe, load_recipe
from finola.training.tables import Row, Table, scale_of

State = Literal["finished", "diverged", "stopped", "failed", "left out", "waiting"]
POLL = 0.5  # seconds


@dataclass(frozen=True)
class Data:
    """What to train and validate on: images, and annotations in COCO's format for detectors."""

    images: list[str] | None = None
    val: list[str] | None = None
    coco: list[str] | None = None
    coco_val: list[str] | None = None

    def of(self, recipe: Recipe) -> tuple[list[str] | None, list[str] | None]:
        """(training, validation) data of a run."""
        return (self.coco, self.coco_val) if detects(recipe) else (self.images, self.val)


@dataclass(frozen=True)
class Stage:
    """A run of the plan: a recipe with its seed, after the run whose weights it starts from."""

    recipe: Recipe
    start: Stage | None

    def __str__(self) -> str:
        return f"{self.recipe.name}, seed {self.recipe.seed}"

    @cached_property
    def key(self) -> str:
        """Eight hexadecimal digits: equal for runs that do the same."""
        config = self.recipe.model_config()
        settings = self.recipe.as_dict() | {"model": {"kind": config.kind, **config.to_dict()}}
        for dotted in FREE_KEYS:
            section, _, name = dotted.partition(".")
            settings.get(section, {}).pop(name, None)
        decided = json.dumps([settings, self.start.key if self.start else None], sort_keys=True)
        return hashlib.sha256(decided.encode()).hexdigest()[:8]


@dataclass
class Plan:
    """The runs that some rows take, in the order in which they are best trained.

    `measured`: (row's name, metric, seed) -> the run that is judged.
    """

    rows: Sequence[Row]
    scale: str
    seeds: int
    overrides: list[str]
    measured: dict[tuple[str, str, int], Stage] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)  # by key

    @classmethod
    def of(cls, rows: Sequence[Row], scale: str, seeds: int = 1, overrides: Sequence[str] = ()) -> Plan:
        """`overrides`: words of the command line for every run ("--trainer.devices", "2")."""
        plan = cls(rows, scale, seeds, list(overrides))

        @cache
        def recipe_of(name: str) -> Recipe:
            return load_recipe(f"{scale_of(name, scale)}/{name}", plan.overrides)

        for seed in range(seeds):
            for row in rows:
                for metric in row.metrics:
                    stage = None
                    for name in row.chain(metric, scale):
                        stage = plan._add(Stage(replace(recipe_of(name), seed=seed), stage))
                    assert stage is not None
                    plan.measured[row.name, metric, seed] = stage
        return plan

    def _add(self, stage: Stage) -> Stage:
        """The run of the plan that does what `stage` does."""
        return self.stages.setdefault(stage.key, stage)

    def stages_of(self, row: Row) -> list[Stage]:
        """All runs that a row takes, with all seeds."""
        found: dict[str, Stage] = {}
        for (name, _, _), stage in self.measured.items():
            step: Stage | None = stage
            while name == row.name and step is not None:
                found[step.key] = step
                step = step.start
        return list(found.values())


def detects(recipe: Recipe) -> bool:
    return recipe.model_config().score == "objects"


class Reproduction:
    """The runs of a plan in a folder: which are done, and the training of the rest.

    Attributes:
        reasons: key of a run -> why it failed or was left out.
    """

    def __init__(self, plan: Plan, data: Data, out: Path):
        self.plan, self.data, self.out = plan, data, out
        self.reasons: dict[str, tuple[State, str]] = {}
        for stage in plan.stages.values():
            reason = self._obstacle(stage)
            if reason:
                self.reasons[stage.key] = ("left out", reason)

    def _obstacle(self, stage: Stage) -> str | None:
        """Why a run cannot be trained here."""
        train, val = self.data.of(stage.recipe)
        if train is None or val is None:
            what = "train" if train is None else "validate"
            options = ("--coco", "--coco-val") if detects(stage.recipe) else ("--data", "--val")
            return f"needs {options[0] if train is None else options[1]}, images to {what} on"
        needed = stage.recipe.model_config().needs
        packages = ["scipy", "faster_coco_eval"] if detects(stage.recipe) else [needed] if needed else []
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            return f"needs the package {missing[0]}; pip install 'finola[{EXTRAS[missing[0]]}]'"
        return self.reasons[stage.start.key][1] if stage.start and stage.start.key in self.reasons else None

    def check_data(self) -> dict[str, Any]:
        """Before the first hour: raise DataError, RecipeError where the data do not fit the runs. Returns the hash of
        the files of each set (see `finola.data.fingerprint`)."""
        if len(self.reasons) == len(self.plan.stages):
            raise RecipeError(f"nothing to train: {next(iter(self.reasons.values()))[1]}")
        found: dict[str, Any] = {}
        for objects, name in ((False, "images"), (True, "coco")):
            stages = [stage for stage in self.plan.stages.values()
                      if stage.key not in self.reasons and detects(stage.recipe) == objects]
            if stages:
                recipe = max(stages, key=lambda stage: stage.recipe.optim.batch_size).recipe
                train, val = self.data.of(recipe)
                run_data = resolve(recipe.model_config().data).open(recipe, train, val, self.out)
                if any(stage.recipe.model_config().has_classes for stage in stages):
                    run_data.classes()
                found |= {name: origin_of_data(train, run_data.train), f"{name}_val": origin_of_data(val, run_data.val)}
        return found

    def folder(self, stage: Stage) -> Path:
        """A run's folder: that of an equal run under another name, where there is one."""
        runs = self.out / "runs"
        there = [path for path in runs.glob(f"*/*-{stage.key}") if path.is_dir()]
        return there[0] if there else runs / f"{stage.recipe.name}-{stage.key}"

    def result(self, stage: Stage) -> dict[str, Any] | None:
        """The content of a run's result.json; None before there is one."""
        try:
            found: dict[str, Any] = json.loads((self.folder(stage) / "result.json").read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            return None

    def state(self, stage: Stage) -> State:
        if stage.key in self.reasons:
            return self.reasons[stage.key][0]
        result = self.result(stage)
        if result is None:
            return "stopped" if self.folder(stage).exists() else "waiting"
        if result["converged"] is False:
            return "diverged"
        return "finished" if result["finished"] else "stopped"

    def ready(self) -> Iterator[Stage]:
        """The runs that may be trained now: not done, and not after one that is not."""
        for stage in self.plan.stages.values():
            if self.state(stage) in ("stopped", "waiting") and (
                    stage.start is None or self.state(stage.start) == "finished"):
                yield stage

    def train(self, *, jobs: int = 1, deadline: float = math.inf,
              say: Callable[[str], None] = print, changed: Callable[[], object] = lambda: None) -> None:
        """Train what is not done, `jobs` runs at a time, until the monotonic clock is at `deadline`. What ends this
        function ends the runs too, each with a checkpoint.

        Args:
            say: takes a line for the user: the runs' own, and what becomes of them.
            changed: called whenever a run has ended.
        """
        running: dict[str, Job] = {}
        try:
            while time.monotonic() < deadline:
                self._launch(running, jobs, say)
                if not running:
                    return
                time.sleep(POLL)
                for key, job in list(running.items()):
                    code = job.poll()  # before its lines are read: none is missed
                    for line in job.new_lines():
                        say(f"  {line}")
                    if code is not None:
                        self._ended(self.plan.stages[key], running.pop(key), say)
                        changed()
        finally:
            for job in running.values():
                job.stop()
            for key, job in running.items():
                job.wait()
                say(f"{self.plan.stages[key]}: stopped; the next call goes on with it")

    def _launch(self, running: dict[str, Job], jobs: int, say: Callable[[str], None]) -> None:
        for stage in self.ready():
            if len(running) >= jobs:
                return
            if stage.key not in running:
                say(f"{stage}: {self.folder(stage)}")
                running[stage.key] = self._start(stage, jobs)

    def _start(self, stage: Stage, jobs: int) -> Job:
        folder, (train, val) = self.folder(stage), self.data.of(stage.recipe)
        folder.parent.mkdir(parents=True, exist_ok=True)
        overrides = [*self.plan.overrides, "--seed", str(stage.recipe.seed)]
        start = str(self.folder(stage.start) / "weights.safetensors") if stage.start else None
        request = {"recipe": stage.recipe.name, "overrides": overrides, "data": train, "val": val, "out": str(folder),
                   "start": start}
        return Job(request, folder.with_name(f"{folder.name}.log"), max(usable_cores() // jobs, 1))

    def _ended(self, stage: Stage, job: Job, say: Callable[[str], None]) -> None:
        code = job.poll()
        if code:
            how = f"was killed by signal {-code}" if code < 0 else job.last_words
            self.reasons[stage.key] = ("failed", f"{how} ({job.log})")
            say(f"{stage}: failed: {how}; the rest goes on")
            return
        state, result = self.state(stage), self.result(stage)
        ending = {"diverged": "did not converge", "stopped": "stopped; the next call goes on with it"}.get(state, state)
        hours = f", {result['seconds'] / 3600:.2f} hours" if result else ""
        left = sum(self.state(other) in ("stopped", "waiting") for other in self.plan.stages.values())
        say(f"{stage}: {ending}{hours}; {left} to go")


@contextmanager
def opened(out: Path, scale: str, data: dict[str, Any]) -> Iterator[None]:
    """The folder of a reproduction, for this process alone; `data` is what `Reproduction.check_data` found.

    Raises:
        RecipeError: another process works in it, it is of another scale or of other data, or it holds other things.
    """
    out = check_folder(out)
    path, ours = out / "reproduce.json", {"scale": scale, **data}
    if out.exists() and any(out.iterdir()) and not path.exists():
        raise RecipeError(f"--out: {out} holds other files; choose a new folder, or one that finola reproduce has made")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            theirs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            for key, value in ours.items():
                _check_same(key, theirs.setdefault(key, value), value, out)
            write_json(path, theirs, indent=2)
            yield
    except Timeout:
        raise RecipeError(f"--out: another finola reproduce works in {out}; wait for its end, or choose another"
                          " folder") from None


def _check_same(key: str, before: Any, now: Any, out: Path) -> None:
    if key == "scale" and before != now:
        raise RecipeError(f"--out: {out} is of the scale {before}, not {now}; choose another folder")
    if key != "scale" and before["sha256"] != now["sha256"]:
        paths = [" ".join(record["paths"]) for record in (before, now)]
        raise RecipeError(f"--out: {out} is of other data ({key}: {before['files']} files of {paths[0]}, not"
                          f" {now['files']} of {paths[1]}); choose another folder")


def choose(table: Table, names: Sequence[str] | None) -> list[Row]:
    """The table's rows of these names, or all. RecipeError names one that is unknown, with near ones."""
    known = {row.name: row for row in table.rows}
    for name in names or ():
        if name not in known:
            hint = near(name, known) or f"; it has {', '.join(known)}"
            raise RecipeError(f"--rows: {table.label} has no row {name!r}{hint}")
    return [known[name] for name in names] if names else list(known.values())
