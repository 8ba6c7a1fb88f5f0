"""Fine-tune a pre-trained encoder and its head for classification."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from finola.cli import train
from finola.cli.options import SOURCES, Subparsers
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.training.recipe import Recipe

EPILOG = """examples:
  finola finetune imagenette/tran1_ft_w720 --weights runs/imagenette/tran1_w720/weights.safetensors \\
      --data imagenette/train --val imagenette/val
  finola finetune imagenette/tran4_ft_w720 --weights pretrained.safetensors --data mine/train --val mine/val
  finola finetune imagenette/tran1_ft_w720 --weights imagenette.safetensors --data flowers/train --val flowers/val \\
      --num-classes 102

The paper starts tran-1-ft from the probe's head, tran-4 from a new one. Weights with a classifier for other classes
are taken only where --num-classes says so (a new last layer) or --new-head (the encoder alone). The options are those
of finola train.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "finetune", help="train a pre-trained encoder and a head", description=__doc__, epilog=EPILOG)
    train.add_options(parser, weights=f"pre-trained or probed weights: {SOURCES}")
    return parser


def run(args: argparse.Namespace) -> None:
    train.run(args, _check, "the weights to start from (finola train starts from nothing)")


def _check(recipe: Recipe) -> None:
    if not recipe.model_config().keeps_features or recipe.optim.freeze_encoder:
        raise RecipeError(f"{recipe.name}: is not for fine-tuning, which needs a classifier and a trained encoder; "
                          "take a recipe with _ft_ in its name (finola finetune --list)")
