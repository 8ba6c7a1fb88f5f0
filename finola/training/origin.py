"""Where a run comes from: the weights it started from, the files of its images, and which of the paper's figures are
its own. It stands in recipe.yaml, in the checkpoint's identity, in result.json and in the metadata of the weights:

    weights: {file, sha256, recipe, row, part} of the weights file, or null; `recipe` made it, as the paper's row if
             `row` is true; `part` is what was taken
    files:   {train, val}: {paths, files, sha256} of the images, or null; see `finola.data.fingerprint`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finola.data.datasets import Dataset
from finola.data.fingerprint import fingerprint
from finola.errors import RecipeError
from finola.training.recipe import PaperSection, Recipe, differences, load_recipe
from finola.weights import read_metadata, weights_hash

UNKNOWN = "unknown"  # the weights of a run whose checkpoint is older than this record
SAME_RUN = ("data.num_workers", "data.resident", "data.resident_size")  # keys that a row's figures do not depend on


def origin_of_weights(path: str | Path, part: str | None = None) -> dict[str, Any]:
    """The record of a weights file, `part` of which was taken. WeightsError where it cannot be read."""
    recipe, paper = (_parsed(read_metadata(path).get(key)) for key in ("recipe", "paper"))
    return {"file": str(path), "sha256": weights_hash(path), "recipe": recipe if isinstance(recipe, str) else None,
            "row": isinstance(paper, dict) and paper.get("table") is not None, "part": part}


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


def load_own(name_or_path: str | Path, overrides: list[str]) -> Recipe:
    """`load_recipe`, without the paper's row and figures where the overrides make it another run than the row: where
    they change model, data or optim in anything but how the data are held."""
    recipe = load_recipe(name_or_path, overrides)
    try:
        row = load_recipe(name_or_path)
    except RecipeError:  # a file that needs the overrides
        return replace(recipe, paper=PaperSection())
    theirs, ours = ({key: plain.as_dict()[key] for key in ("model", "data", "optim")} for plain in (row, recipe))
    changed = differences(theirs, ours).keys() - set(SAME_RUN)
    return replace(recipe, paper=PaperSection()) if changed else recipe


def with_figures_after(recipe: Recipe, weights: dict[str, Any] | str | None) -> Recipe:
    """The recipe, without the paper's row and figures where these hold after another run than that of the weights it
    started from: `paper.after` is the row of that run, at the scale of this one unless it names another. A run that is
    not its row in this sense does not count as that row for the next one."""
    after, scale = recipe.paper.after, recipe.name.rpartition("/")[0]
    if after is None:
        return recipe
    own = isinstance(weights, dict) and weights.get("row") and weights["recipe"] in (after, f"{scale}/{after}")
    return recipe if own else replace(recipe, paper=PaperSection())
