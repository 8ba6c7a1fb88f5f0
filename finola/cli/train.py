"""Train a model by a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from finola.cli.options import SOURCES, Subparsers, minutes, positive
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.training.recipe import Recipe

EPILOG = """examples:
  finola train --list
  finola train imagenette/default --data imagenette/train --val imagenette/val
  finola train imagenette/default --data imagenette/train --val imagenette/val --resume
  finola train imagenet/channels_512 --data imagenet/train --optim.epochs 30 --trainer.devices 8
  torchrun --nnodes 2 --nproc_per_node 8 ... -m finola.cli train imagenet/default --trainer.num_nodes 2 ...

Every key of a recipe can be overridden by --SECTION.KEY VALUE; --print-recipe shows them all. SIGTERM and
Ctrl-C write a checkpoint at the next step and exit with 143 and 130. --max-time does the same, then writes
the results and exits with 0. With several processes, batch norm spans all of them.
"""

DATA = {
    "imagenet": "--data IMAGENET/train --val IMAGENET/val",
    **dict.fromkeys(("imagenette", "pocket"), "--data IMAGENETTE/train --val IMAGENETTE/val"),
    "coco": "--data COCO/annotations/instances_train2017.json --val COCO/annotations/instances_val2017.json",
    "coco128": "--data COCO128/annotations/instances_train2017.json --val COCO128/annotations/instances_train2017.json",
    "pretrained": "--data IMAGENETTE/train IMAGENET_SAMPLE COCO --val IMAGENETTE/val",
}
Check: TypeAlias = "Callable[[Recipe], None]"  # refuses, with a RecipeError, a recipe that is not for the command


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "train", help="train a model by a recipe", description=__doc__, epilog=EPILOG
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser, metavar: str = "DIR",
                data: str = "training images: folders or shards", val: str = "validation images",
                weights: str = f"start from these weights, or from their encoder: {SOURCES}") -> None:
    """What `finola train`, `probe`, `finetune` and `detect train` share; `metavar`, `data`, `val` say what the data
    are, `weights` which weights it starts from."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name (see --list) or a YAML file")
    parser.add_argument("--data", nargs="+", metavar=metavar, help=data)
    parser.add_argument("--val", nargs="+", metavar=metavar, help=val)
    parser.add_argument("--weights", metavar="FILE", help=weights)
    parser.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true",
                        help="go on with the run in --out; from the start if it has no checkpoint yet")
    parser.add_argument("--allow-changes", action="store_true",
                        help="with --resume: accept another recipe, number of images or of processes")
    parser.add_argument("--max-time", metavar="TIME", help="train for this time, HH:MM:SS or minutes, then "
                        "validate and write the results")
    parser.add_argument("--num-classes", type=positive, metavar="N",
                        help="the number of classes in --data, where a classifier or detector in the weights has"
                             " others: its last layer starts anew")
    parser.add_argument("--new-head", action="store_true",
                        help="take the encoder alone of a classifier or detector in the weights")
    parser.add_argument("--seed", metavar="N", help="seed of the weights, the crops and their order")
    parser.add_argument("--list", action="store_true", help="list the recipes")
    parser.add_argument("--print-recipe", action="store_true", help="print the recipe, overrides included")
    parser.set_defaults(overrides=[])  # `finola.cli.main` puts the dotted options there


def run(args: argparse.Namespace, check: Check | None = None, weights: str | None = None) -> None:
    """`weights` says which weights the command needs; None where it can do without."""
    from finola.training.recipe import FaultyRecipe, faults_of_data, load_recipe

    if args.list:
        _list(check)
        return
    if args.recipe is None:
        raise RecipeError("RECIPE is missing; finola train --list lists the recipes")
    if args.max_time is not None:
        args.overrides += ["--trainer.max_time", str(minutes(args.max_time))]
    if args.seed is not None:
        args.overrides += ["--seed", args.seed]
    try:
        recipe = load_recipe(args.recipe, args.overrides)
    except FaultyRecipe as error:
        faults = faults_of_data(error.recipe, args.data, args.val) if args.data else []
        raise RecipeError("; ".join([str(error), *faults])) from None
    if args.print_recipe:
        print(_header(recipe) + recipe.as_yaml(), end="")
        return
    if check is not None:
        check(recipe)
    if weights and not args.weights:
        raise RecipeError(f"--weights is missing; name {weights}")
    if not args.data:
        raise RecipeError(f"--data is missing; name what to train {recipe.name} on (--help says more)")
    _train(args, recipe)


def _list(check: Check | None) -> None:
    """The runs in the groups of their files, each with its title, at the full scale; the head says which others."""
    from finola.training.recipe import load_recipe
    from finola.training.tables import runs

    def serves(name: str) -> bool:
        if check is None:
            return True
        try:
            check(load_recipe(name))
        except RecipeError:
            return False
        return True

    groups: dict[str, list[str]] = {}
    for name, run in runs().items():
        if serves(f"{run.scales[0]}/{name}"):
            group = f"{run.table.title}{f' ({run.table.label})' if run.table.label else ''}, {or_else(run.scales)}"
            groups.setdefault(group, []).append(f"  {run.scales[0]}/{name:32} {run.title}")
    print("\n\n".join("\n".join([f"{group}:", *lines]) for group, lines in groups.items()))


def or_else(scales: Sequence[str]) -> str:
    """("imagenet", "imagenette", "pocket") -> "imagenet/ (or imagenette/, pocket/)"."""
    others = ", ".join(f"{scale}/" for scale in scales[1:])
    return f"{scales[0]}/" + (f" (or {others})" if others else "")


def _header(recipe: Recipe) -> str:
    """Comments: the run's title, its command, and what the paper measures of it."""
    from finola.training.tables import figures, image_scale, runs, scale_of, start

    scale, _, name = recipe.name.partition("/")
    if name not in runs():
        return ""
    run, before = runs()[name], start(name, image_scale(scale))
    command = f"finola {_command(recipe)} {recipe.name} {DATA[scale]}"
    if before:
        command += f" --weights runs/{scale_of(before[-1], image_scale(scale))}/{before[-1]}/weights.safetensors"
    lines = [f"{run.title} ({run.table.title})", command]
    for figure in figures(recipe.name) if recipe.shipped else ():
        after = f" after {' > '.join(figure.runs[:-1])}" if figure.runs[:-1] else ""
        lines.append(f"paper, {figure.table}, {figure.row}: {figure.metric} {figure.value}{after}")
    return "".join(f"# {line}\n" for line in lines)


def _command(recipe: Recipe) -> str:
    """What `finola` is called with to train by a recipe."""
    config = recipe.model_config()
    if config.score == "objects":
        return "detect train"
    if not config.keeps_features or (recipe.optim.layer_decay is None and not recipe.optim.freeze_encoder):
        return "train"
    return "probe" if recipe.optim.freeze_encoder else "finetune"


def _train(args: argparse.Namespace, recipe: Recipe) -> None:
    import logging

    from finola.training.engine import fit

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    out = args.out or f"runs/{recipe.name}"
    fit(recipe, args.data, args.val, out, resume=args.resume, allow_changes=args.allow_changes,
        init_from=args.weights, num_classes=args.num_classes, new_head=args.new_head)
