"""Probe a pre-trained encoder: train a head on its frozen features."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from finola.cli import train
from finola.cli.options import SOURCES, Subparsers
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.training.recipe import Recipe

EPILOG = """examples:
  finola probe imagenette/lin_w720 --weights runs/imagenette/masked_b_w720/weights.safetensors \\
      --data imagenette/train --val imagenette/val
  finola probe imagenette/lin_w720 --weights W --data mine/train --val mine/val --data.augment false

The recipe chooses the head: lin (batch norm and a linear layer) or tran-1 (one transformer block). The encoder does
not change by one bit. Its features of images that are always seen alike are computed once: of the validation set,
and with --data.augment false of the training set too. The options are those of finola train.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "probe", help="train a head on a frozen encoder", description=__doc__, epilog=EPILOG)
    train.add_options(parser, weights=f"the pre-trained weights, of any kind: {SOURCES}")
    return parser


def run(args: argparse.Namespace) -> None:
    train.run(args, _check, "the pre-trained weights to probe")


def _check(recipe: Recipe) -> None:
    if not recipe.model_config().keeps_features or not recipe.optim.freeze_encoder:
        raise RecipeError(f"{recipe.name}: is not for probing, which needs a classifier and optim.freeze_encoder: true;"
                          " take a lin or tran1 recipe (finola probe --list)")
