"""Reproduce a table of the paper: train its rows one after another, and print the table with ours beside it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.options import Subparsers, minutes, positive
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.training.reproduce import Reproduction
    from finola.training.tables import Table

EPILOG = """examples:
  finola reproduce --list
  finola reproduce resolution --scale imagenette --data imagenette/train --val imagenette/val --out runs/imagenette
  finola reproduce norm+linear --scale pocket --rows autoregression_linear_16 autoregression_norm_linear_16 \\
      --seeds 3 --data imagenette/train --val imagenette/val --out runs/pocket
  finola reproduce finola-mocov2 --data imagenet/train --val imagenet/val --out runs/imagenet \\
      --coco coco/annotations/instances_train2017.json --coco-val coco/annotations/instances_val2017.json

Called again, it goes on where it stopped: what is finished is not repeated, and what several rows or tables of one
--out need is trained once. --scale: imagenet (the paper's own settings), imagenette (128 px) or pocket (64 px, for
CPUs); detectors are trained by coco's settings or, at the smaller scales, by coco128's. Keys of recipes, such as
--trainer.devices 2, hold for every run. A row that fails does not stop the others: the table says why, and the exit
code is 3.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "reproduce", help="train the rows of one of the paper's tables", description=__doc__, epilog=EPILOG)
    parser.add_argument("table", nargs="?", metavar="TABLE", help="a LaTeX label of the paper, with or without table:")
    parser.add_argument("--list", action="store_true", help="list the tables, their rows and the paper's figures")
    parser.add_argument("--json", action="store_true", help="print the list or the table as JSON")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="some of the rows (default: all)")
    parser.add_argument("--scale", choices=("imagenet", "imagenette", "pocket"), default="imagenet",
                        help="the paper's own (%(default)s), 128 px, or 64 px for CPUs")
    parser.add_argument("--data", nargs="+", metavar="DIR", help="training images: folders or shards")
    parser.add_argument("--val", nargs="+", metavar="DIR", help="validation images: folders or shards")
    parser.add_argument("--coco", nargs="+", metavar="FILE",
                        help="for detectors: annotations in COCO's format, and perhaps the folder of their images")
    parser.add_argument("--coco-val", nargs="+", metavar="FILE", help="the same for validation")
    parser.add_argument("--out", default="runs/reproduce", metavar="DIR", help="for runs and tables (%(default)s)")
    parser.add_argument("--max-time", metavar="TIME", help="stop after this time in total, with a checkpoint: "
                        "HH:MM:SS or minutes")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument("--seeds", type=positive, default=1, metavar="N",
                        help="train each row with the seeds 0 to N-1 (%(default)s)")
    parser.set_defaults(overrides=[])  # `finola.cli.main` puts the dotted options there
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.training.tables import find_table, tables

    if args.list:
        _list([find_table(args.table)] if args.table else tables(), args.json)
        return
    if args.table is None:
        raise RecipeError("TABLE is missing; finola reproduce --list lists the paper's tables")
    table = find_table(args.table)
    _reproduce(args, table)


def _list(listed: list[Table], as_json: bool) -> None:
    if as_json:
        print(json.dumps([{
            "table": table.label, "title": table.title, "shown_in": list(table.shown_in),
            "rows": [{"name": row.name, "title": row.title, "metrics": list(row.metrics), "paper": dict(row.paper)}
                     for row in table.rows]} for table in listed], indent=1))
        return
    for table in listed:
        print(f"{table.label}: {table.title}")
        for row in table.rows:
            figures = ", ".join(f"{metric} {row.paper.get(metric, '-')}" for metric in row.metrics)
            print(f"  {row.name:32} {row.title}: {figures}")


def _reproduce(args: argparse.Namespace, table: Table) -> None:
    from finola.training.reproduce import Data, Plan, Reproduction, choose, opened

    begun = time.monotonic()
    deadline = begun + 60 * minutes(args.max_time) if args.max_time is not None else math.inf
    data = Data(args.data, args.val, args.coco, args.coco_val)
    plan = Plan.of(choose(table, args.rows), args.scale, args.seeds, args.overrides)
    reproduction = Reproduction(plan, data, Path(args.out))
    with opened(reproduction.out, args.scale, reproduction.check_data()):
        _announce(table, reproduction)
        try:
            reproduction.train(jobs=args.jobs, deadline=deadline, say=_say, changed=lambda: _write(table, reproduction))
        finally:
            path = _write(table, reproduction)
        _print(args, path)
    if any(state in ("failed", "left out") for state, _ in reproduction.reasons.values()):
        sys.exit(3)


def _announce(table: Table, reproduction: Reproduction) -> None:
    plan = reproduction.plan
    states = [reproduction.state(stage) for stage in plan.stages.values()]
    done = sum(state in ("finished", "diverged") for state in states)
    counts = [f"{count} {what}{'s' * (count > 1)}" for count, what in ((len(plan.rows), "row"), (len(states), "run"))]
    _say(f"{table.label} at the scale {plan.scale}: {', '.join(counts)}, {done} done")
    for stage in plan.stages.values():
        if stage.key in reproduction.reasons:
            _say(f"left out: {stage.recipe.name} ({reproduction.reasons[stage.key][1]})")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(table: Table, reproduction: Reproduction) -> Path:
    from finola.training.report import report, write

    return write(report(table, reproduction), reproduction.out)


def _print(args: argparse.Namespace, path: Path) -> None:
    print((path.with_suffix(".json") if args.json else path).read_text(encoding="utf-8"), end="")
    _say(f"written: {path}, {path.with_suffix('.png').name}, {path.with_suffix('.json').name}")
