"""What several commands share: options, and what they open."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from finola.data.workers import usable_cores
from finola.errors import RecipeError, WeightsError

if TYPE_CHECKING:
    import torch

    from finola.data.datasets import ImageDataset
    from finola.models.autoencoder import FinolaAutoencoder
    from finola.models.base import ImageModel, ModelConfig

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
M = TypeVar("M", bound="ImageModel")

SOURCES = "a file, a run's folder, a shipped model's name, or hf-hub:OWNER/NAME[@REVISION]"  # of weights, for help
OVERRIDE = re.compile(r"--\w+\.")  # of a recipe's key: --optim.epochs 5 or --optim.epochs=5


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without the dotted options (--optim.epochs 5), and these with their values."""
    words, others, overrides = list(words), [], []
    while words:
        word = words.pop(0)
        if not OVERRIDE.match(word):
            others.append(word)
            continue
        overrides.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return others, overrides


def add_model(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="NAME", help="a model whose weights are shipped (default: the compact one)")
    which.add_argument("--weights", metavar="FILE", help=f"weights, as finola train writes them: {SOURCES}")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def add_limit(parser: argparse.ArgumentParser, default: int | None = None) -> None:
    parser.add_argument("--limit", type=positive, default=default, metavar="N",
                        help=f"take N images, spread evenly over the set ({default or 'all'})")


def add_resample(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resample", choices=("bicubic", "bilinear"), default="bicubic",
                        help="how images are resized (%(default)s)")


def add_crop_pct(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--crop-pct", type=share, metavar="P",
                        help="the centre crop's share of the resized shorter side (default: 0.875 where classes are"
                             " told, otherwise 1)")


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=natural, default=usable_cores(), metavar="N",
                        help="processes that decode; 0 for none (%(default)s)")


def add_reading(parser: argparse.ArgumentParser) -> None:
    """How the squares of --data are read (`finola.cli.measures.squares`), and where they are computed on; --json."""
    add_limit(parser)
    add_resample(parser)
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="images at once (%(default)s)")
    add_workers(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, no progress bar")


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An integer of at least 0, for argparse."""
    return _at_least(0, text)


def above_zero(text: str) -> float:
    """A finite number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def share(text: str) -> float:
    """A number above 0, at most 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0, at most 1")
    return value


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least {least}")
    return int(text)


def open_model(args: argparse.Namespace) -> FinolaAutoencoder:
    """The autoencoder of --model or --weights, on --device, in evaluation mode."""
    from finola.factory import create_model
    from finola.registry import DEFAULT_MODEL
    from finola.weights import load_weights

    device = open_device(args.device)
    model = (load_weights(weights_path(args)) if args.weights else
             create_model(args.model or DEFAULT_MODEL, pretrained=True))
    return require_autoencoder(model, args.weights).to(device).eval()


def require_autoencoder(model: ImageModel, source: str) -> FinolaAutoencoder:
    """The model itself; raises WeightsError unless it is an autoencoder."""
    from finola.models.autoencoder import FinolaAutoencoder

    if not isinstance(model, FinolaAutoencoder):
        raise WeightsError(f"{source}: got a model of kind {model.config.kind!r}, expected an autoencoder; "
                           "finola train makes one, or leave --weights out for the shipped one")
    return model


def open_weights(args: argparse.Namespace, require: Callable[[ImageModel, str], M]) -> M:
    """The model of --weights, on --device, in evaluation mode; `require(model, name)` gives it back or refuses it."""
    from finola.weights import load_weights

    if args.weights is None:
        raise RecipeError("--weights is missing; no classifier and no detector comes along: finola probe, finola"
                          " finetune and finola detect train make them")
    device = open_device(args.device)
    return require(load_weights(weights_path(args)), args.weights).to(device).eval()


def open_limited(paths: list[str], limit: int | None) -> ImageDataset:
    """The data set of --data and --limit."""
    from finola.data import open_data
    from finola.data.datasets import Subset

    dataset = open_data(paths)
    return dataset if limit is None else Subset(dataset, limit)


def weights_path(args: argparse.Namespace) -> Path:
    """The file that --model or --weights means; the Hub is asked once in a command."""
    from finola.registry import DEFAULT_MODEL, pretrained_path
    from finola.weights import find_weights

    if "weights_path" not in args:
        args.weights_path = find_weights(args.weights) if args.weights else pretrained_path(args.model or DEFAULT_MODEL)
    path: Path = args.weights_path
    return path


def weights_identity(path: Path, config: ModelConfig) -> dict[str, Any]:
    """What a result says of the weights it was made with: the file's name and hash, and the model's configuration."""
    from finola.weights import weights_hash

    return {"weights": path.name, "sha256": weights_hash(path), "config": config.to_dict()}


def tell_apart(files: Sequence[Path]) -> list[str]:
    """A name for each weights file: the last parts of its path, as few as tell all of them apart. A run's
    `weights.safetensors` goes by its folder. Files given twice are numbered."""
    paths = [file.absolute() for file in files]
    parts = [path.parent.parts if path.stem == "weights" else (*path.parent.parts, path.stem) for path in paths]
    names, different = [""] * len(files), len(set(parts))
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == different:
            break
    return [name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
            for place, name in enumerate(names)]


def open_device(name: str | None) -> torch.device:
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


def minutes(text: str) -> float:
    """A time of the command line: "1:30:00" -> 90.0, "20" -> 20.0."""
    parts = text.split(":")
    try:
        if len(parts) == 1:
            time = float(text)
        else:
            hours, minutes, seconds = map(int, parts)
            time = 60 * hours + minutes + seconds / 60
    except ValueError:
        time = 0.0
    if not time > 0:
        raise RecipeError(f"--max-time: got {text!r}, expected HH:MM:SS or minutes, more than none")
    return time
