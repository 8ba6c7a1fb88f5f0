"""Where a run comes from: the weights it started from, the files of its images, and which of the paper's figures are
its own. It stands in recipe.yaml, in the checkpoint's identity, in result.json and in the metadata of the weights:

    weights: {file, sha256, recipe, runs, part} of the weights file or shipped model, or null; `recipe` made it, after
             the other `runs` (null where one of them was no shipped recipe as it stands); `part` is what was taken
    files:   {train, val}: {paths, files, sha256} of the images, or null; see `finola.data.fingerprint`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from finola.data.datasets import Dataset
from finola.data.fingerprint import fingerprint
from finola.training.recipe import Recipe
from finola.training.tables import figures
from finola.weights import find_weights, read_metadata, weights_hash

UNKNOWN = "unknown"  # the weights of a run whose checkpoint is older than this record
Origin: TypeAlias = "dict[str, Any] | str | None"  # of weights: the record, UNKNOWN, or None without weights


def origin_of_weights(source: str | Path, part: str | None = None) -> dict[str, Any]:
    """The record of a weights file or a shipped model's name, `part` of which was taken. WeightsError where it cannot
    be read."""
    path = find_weights(source)
    recipe, runs = (_parsed(read_metadata(path).get(key)) for key in ("recipe", "runs"))
    return {"file": str(source), "sha256": weights_hash(path), "recipe": recipe if isinstance(recipe, str) else None,
            "runs": runs if isinstance(runs, list) else None, "part": part}


def _parsed(text: str | None) -> Any:
    """A run writes its metadata as JSON; other programs as they like."""
    try:
        return json.loads(text) if text is not None else None
    except json.JSONDecodeError:
        return text


def origin_of_data(words: Sequence[str | Path] | None, dataset: Dataset | None) -> dict[str, Any] | None:
    """The record of the data set that `words` name; None where there is none."""
    if not words or dataset is None:
        return None
    count, digest = fingerprint(dataset)
    return {"paths": [str(word) for word in words], "files": count, "sha256": digest}


def as_comment(origin: dict[str, Any]) -> str:
    """The record as comments for the end of recipe.yaml, which stays a recipe."""
    lines = [f"# {key}: {json.dumps(value)}" for key, value in origin.items()]
    return "\n".join(["# This run's origin:", *lines]) + "\n"


def runs_of(recipe: Recipe, weights: Origin) -> list[str] | None:
    """The chain of shipped recipes that a run ends: its own name after those behind the weights it started from. None
    where one of them was changed or is not known."""
    if not recipe.shipped:
        return None
    if weights is None:
        return [recipe.name]
    before = weights["runs"] if isinstance(weights, dict) else None
    return [*before, recipe.name] if before else None


def own_figures(recipe: Recipe, weights: Origin) -> list[dict[str, Any]]:
    """What the paper measures of a run: the figures of its row after the runs that this one came after, no other's."""
    runs = runs_of(recipe, weights)
    return [{"table": figure.table, "row": figure.row, "metric": figure.metric, "value": figure.value}
            for figure in figures(recipe.name) if runs == list(figure.runs)]
