"""A table of the paper with ours beside it: as JSON, as Markdown and as an image."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from finola.files import atomic_write, write_json
from finola.provenance import record
from finola.training.reproduce import Reproduction, Stage
from finola.training.tables import Row, Table, find_table

MARKS = {"diverged": "did not converge", "failed": "failed", "left out": "left out", "stopped": "under way",
         "waiting": "not yet"}


def report(table: Table, reproduction: Reproduction) -> dict[str, Any]:
    """The table's rows with the paper's figures and ours, mean and standard deviation over the seeds."""
    plan = reproduction.plan
    found = {"table": table.label, "title": table.title, "scale": plan.scale, "seeds": plan.seeds,
             "overrides": plan.overrides,
             "data": {key: paths for key, paths in vars(reproduction.data).items() if paths},
             "rows": [_row(row, reproduction) for row in plan.rows]}
    return record(torch.device("cuda" if torch.cuda.is_available() else "cpu"), found)


def _row(row: Row, reproduction: Reproduction) -> dict[str, Any]:
    stages = reproduction.plan.stages_of(row)
    results = [result for stage in stages if (result := reproduction.result(stage))]
    return {
        "name": row.name, "title": row.title, "scaled_to": _scaled_to(stages), "paper": dict(row.paper),
        "ours": {metric: _ours(row, metric, reproduction) for metric in row.metrics},
        "hours": round(sum(result["seconds"] for result in results) / 3600, 3),
        "commits": sorted({result["commit"] or "unknown" for result in results}),
        "hardware": sorted({result["hardware"] for result in results}),
        "runs": [str(reproduction.folder(stage).relative_to(reproduction.out)) for stage in stages],
        "problems": sorted({reproduction.reasons[stage.key][1] for stage in stages
                            if stage.key in reproduction.reasons}),
    }


def _scaled_to(stages: list[Stage]) -> str:
    """The sizes at this scale of what the row begins with, which its title says at the paper's."""
    config = next(stage for stage in stages if stage.start is None).recipe.model_config()
    sizes = [f"{config.image_size} px"]
    if map_size := getattr(config, "map_size", None):
        sizes.append(f"map {map_size}x{map_size}")
    if channels := getattr(config, "embed_dim", None):
        sizes.append(f"{channels} channels")
    return ", ".join(sizes)


def _ours(row: Row, metric: str, reproduction: Reproduction) -> dict[str, Any]:
    """`mean`, `deviation` (None of one seed) and `values` over the seeds that are finished; `state` of the rest."""
    seeds = range(reproduction.plan.seeds)
    stages = [reproduction.plan.measured[row.name, metric, seed] for seed in seeds]
    states = [_state(stage, reproduction) for stage in stages]
    name = row.metrics[metric].score or metric
    values = [score(reproduction.result(stage) or {}, name)
              for stage, state in zip(stages, states, strict=True) if state == "finished"]
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "deviation": statistics.stdev(known) if len(known) > 1 else None,
        "values": known,
        "seeds": len(stages),
        "state": next((state for state in states if state != "finished"), "finished"),
    }


def _state(stage: Stage, reproduction: Reproduction) -> str:
    """A run's state, or that of the run which it waits for."""
    state = reproduction.state(stage)
    if state == "waiting" and stage.start and reproduction.state(stage.start) != "finished":
        return _state(stage.start, reproduction)
    return state


def score(result: dict[str, Any], name: str) -> float | None:
    """A score of a run's last validation, or of its training ("train_psnr")."""
    last = result["history"][-1] if result.get("history") else {}
    value: float | None = last.get(name if name.startswith("train_") else f"val_{name}")
    return value


# showing ------------------------------------------------------------------------------------------


def cells(found: dict[str, Any]) -> list[list[str]]:
    """Head and rows: row | at this scale | each metric: paper, ours | hours | commit."""
    metrics = list(dict.fromkeys(metric for row in found["rows"] for metric in row["ours"]))
    head = ["row", "at this scale", *(f"{metric}: {who}" for metric in metrics for who in ("paper", "ours")),
            "hours", "commit"]
    return [head, *(_line(row, metrics) for row in found["rows"])]


def _line(row: dict[str, Any], metrics: list[str]) -> list[str]:
    scores = (cell for metric in metrics for cell in (_paper(row, metric), _cell(row, metric)))
    return [row["title"], row["scaled_to"], *scores, f"{row['hours']:.2f}" if row["hours"] else "-",
            ", ".join(map(_short, row["commits"])) or "-"]


def _short(commit: str) -> str:
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")


def _paper(row: dict[str, Any], metric: str) -> str:
    return f"{row['paper'][metric]:.1f}" if metric in row["paper"] else "-"


def _cell(row: dict[str, Any], metric: str) -> str:
    ours = row["ours"].get(metric)
    if ours is None:
        return "-"
    mark = MARKS.get(ours["state"], "")
    if ours["mean"] is None:
        return mark or "-"
    spread = f" ± {ours['deviation']:.2f}" if ours["deviation"] is not None else ""
    count = f" ({len(ours['values'])} of {ours['seeds']})" if mark else ""
    return f"{ours['mean']:.2f}{spread}{count}"


def markdown_table(rows: list[list[str]]) -> list[str]:
    """The lines of a table whose first row is its head."""
    return ["| " + " | ".join(row) + " |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def markdown(found: dict[str, Any]) -> str:
    seeds = "1 seed" if found["seeds"] == 1 else f"{found['seeds']} seeds, mean ± standard deviation"
    changed = f" with {' '.join(found['overrides'])}" if found["overrides"] else ""
    hardware = sorted({name for row in found["rows"] for name in row["hardware"]})
    lines = [f"# {found['title']} ({found['table']})", "",
             f"paper: ImageNet and COCO at full scale; ours: at the scale {found['scale']}{changed}, {seeds}"
             + (f", on {', '.join(hardware)}." if hardware else "."), ""]
    lines += markdown_table(cells(found))
    problems = [f"- {row['title']}: {problem}" for row in found["rows"] for problem in row["problems"]]
    return "\n".join(lines + ([""] + problems if problems else [])) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """The table as an image."""
    from matplotlib.figure import Figure

    lines = cells(found)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    figure = Figure(figsize=(0.085 * sum(widths) + 0.2 * len(widths), 0.28 * len(lines) + 0.5), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    axes.set_title(f"{found['title']} ({found['table']}), at the scale {found['scale']}", fontsize=9)
    table = axes.table(lines[1:], colLabels=lines[0], loc="center", cellLoc="center",
                       colWidths=[width / sum(widths) for width in widths])
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.scale(1, 1.25)
    for (line, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.8")
        ours = lines[0][column].endswith(": ours")
        cell.get_text().set_fontweight("bold" if line == 0 or ours else "normal")
    figure.savefig(path, dpi=150, bbox_inches="tight")  # a title may be wider than the table


def _with_earlier(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """A report with the rows that only the one in `path` has, in the table's order."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before[key] == found[key] for key in ("seeds", "overrides", "data"))
        rows = {row["name"]: row for row in (*before["rows"], *found["rows"])}
    except (OSError, ValueError, KeyError, TypeError):  # none, or not one of ours
        return found
    order = [row.name for row in find_table(found["table"]).rows]
    return found | {"rows": sorted(rows.values(), key=lambda row: order.index(row["name"]))} if same else found


def write(found: dict[str, Any], folder: Path) -> Path:
    """TABLE-SCALE.json, .md and .png in `folder`; returns the path of the Markdown. Rows of an earlier call by the same
    settings, which this one was not asked for, stay."""
    stem = folder / f"{found['table'].partition(':')[2].replace(':', '-')}-{found['scale']}"
    found = _with_earlier(found, stem.with_name(f"{stem.name}.json"))
    write_json(stem.with_name(f"{stem.name}.json"), found, indent=2)
    with atomic_write(stem.with_name(f"{stem.name}.md")) as path:
        path.write_text(markdown(found), encoding="utf-8")
    with atomic_write(stem.with_name(f"{stem.name}.png")) as path:
        draw(found, path)
    return stem.with_name(f"{stem.name}.md")
