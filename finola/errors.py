"""The errors the library raises on bad input. Each message names the file or field, what was got, what was
expected and what to do next; the command line prints it as one line and exits with `exit_code`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

# package -> the extra that installs it
EXTRAS = {
    **dict.fromkeys(("lightning", "torchmetrics", "matplotlib", "tensorboard", "rich", "filelock"), "train"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime", "onnx_ir"), "export"),
    **dict.fromkeys(("scipy", "faster_coco_eval"), "detection"),
    "constriction": "codec", "lightly": "ssl", "diffusers": "first-stages", "gradio": "app",
}


class FinolaError(ValueError):
    """Base of every error finola raises on bad input."""

    exit_code = 2


class RecipeError(FinolaError):
    """A recipe or an option: unknown key, wrong type, value out of range, missing file."""

    exit_code = 2


class DataError(FinolaError):
    """An image, a folder, a shard or an annotation file."""

    exit_code = 3


class WeightsError(FinolaError):
    """A weights file or a checkpoint: damaged, of another architecture, not finite, not to be trusted."""

    exit_code = 4


class BitstreamError(FinolaError):
    """A compressed stream that cannot be decoded."""

    exit_code = 4


def check_choice(name: str, value: object, choices: Collection[str], error: type[FinolaError] = FinolaError) -> None:
    """Raises `error` unless the value is one of the choices."""
    if value not in choices:
        raise error(f"{name}: got {value!r}, expected one of {', '.join(choices)}")


def near(word: str, names: Iterable[str], most: int = 3) -> str:
    """"; did you mean A or B?" for a message about an unknown word, or nothing where no name is like it."""
    names = list(names)
    matches = get_close_matches(word, names, n=most, cutoff=0.5)
    matches = matches or [name for name in names if word in name.split("_")][:most]  # lr -> base_lr
    return f"; did you mean {' or '.join(matches)}?" if matches else ""
