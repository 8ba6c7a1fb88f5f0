"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from finola.errors import RecipeError, WeightsError


def add_model(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="a model whose weights are shipped (default: the compact one)")
    which.add_argument("--weights", metavar="FILE", help="a weights file, as finola train writes it")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An integer of at least 0, for argparse."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least {least}")
    return int(text)


def open_model(args: argparse.Namespace):
    """The autoencoder of --model or --weights, on --device, in evaluation mode."""
    from finola.factory import create_model
    from finola.models.autoencoder import FinolaAutoencoder
    from finola.registry import DEFAULT_MODEL
    from finola.weights import load_weights

    device = open_device(args.device)
    model = load_weights(args.weights) if args.weights else create_model(args.model or DEFAULT_MODEL, pretrained=True)
    if not isinstance(model, FinolaAutoencoder):
        raise WeightsError(f"{args.weights}: got a model of kind {model.config.kind!r}, expected an autoencoder; "
                           "finola train makes one, or leave --weights out for the shipped one")
    return model.to(device).eval()


def open_weights(args: argparse.Namespace, require: Callable):
    """The model of --weights, on --device, in evaluation mode; `require(model, name)` may refuse it."""
    from finola.weights import load_weights

    device = open_device(args.device)
    model = load_weights(args.weights)
    require(model, args.weights)
    return model.to(device).eval()


def open_limited(paths: list[str], limit: int | None):
    """The data set of --data and --limit."""
    from finola.data import open_data
    from finola.data.datasets import Subset

    dataset = open_data(paths)
    return dataset if limit is None else Subset(dataset, limit)


def weights_path(args: argparse.Namespace) -> Path:
    """The file that --model or --weights means."""
    from finola.registry import DEFAULT_MODEL, pretrained_path

    return Path(args.weights) if args.weights else pretrained_path(args.model or DEFAULT_MODEL)


def open_device(name: str | None):
    """The torch device of --device.

    Raises:
        RecipeError: no such device on this machine.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise RecipeError(f"--device: {name!r} cannot be used on this machine ({reason}); try cpu") from error
    return device
