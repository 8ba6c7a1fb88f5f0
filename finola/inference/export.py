"""Models as ONNX files, which run without PyTorch: by onnxruntime, in a browser, on a phone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from finola.autoregression import Finola
from finola.evaluation.speed import seconds
from finola.files import atomic_write
from finola.models.base import ExportPart, ImageModel, require_evaluation

TURNS = 7  # of timing


class Exported(NamedTuple):
    """An ONNX file: its argument and results with their shapes, "B" for the batch, and how it compares with torch.

    `meaning` says what the results are. `difference` is the largest one, as a part of the largest value;
    `milliseconds` are those of one image by itself, (onnxruntime, torch), medians of turns taken alternately."""

    path: Path
    argument: dict[str, tuple]
    results: dict[str, tuple]
    difference: float
    milliseconds: tuple[float, float]
    meaning: str


def export(model: ImageModel, folder: str | Path, images: Tensor, *, progress: bool = False) -> list[Exported]:
    """Write a model's parts as ONNX files, and run each beside torch. The names of a model's classes stand in their
    metadata: "classes", a JSON list.

    Args:
        model: an autoencoder (encoder.onnx, decoder.onnx), a classifier (classifier.onnx) or a DETR (detector.onnx), in
            evaluation mode.
        folder: for the files; what has their names there is replaced.
        images: (B, 3, S, S) in [0, 1], B at least 2, to compare on.
        progress: show a bar: a file takes about half a minute.

    Raises:
        FinolaError: another kind of model, or one in training mode.
        RecipeError: a folder that cannot be written to.
        ModuleNotFoundError: without the extra 'export'.
    """
    require_evaluation(model)
    found, value, parts = [], images, model.export_parts()
    for name, part in tqdm(parts.items(), "files", unit="file", leave=False, disable=not progress):
        path = Path(folder) / f"{name}.onnx"
        with torch.no_grad(), _plain(model):
            _write(model, part, path)
        exported, results = _compare(part, path, value)
        found.append(exported)
        value = results[0]  # what the encoder gives is what the decoder takes
    return found


@contextmanager
def _plain(model: nn.Module) -> Iterator[None]:
    """The operator in operations that ONNX has."""
    operators = [module for module in model.modules() if isinstance(module, Finola)]
    before = [operator.implementation for operator in operators]
    for operator in operators:
        operator.implementation = "plain"
    try:
        yield
    finally:
        for operator, implementation in zip(operators, before, strict=True):
            operator.implementation = implementation


class _Function(nn.Module):
    """A part of a model as a module, which is what torch exports."""

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Any]):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _write(model: ImageModel, part: ExportPart, path: Path) -> None:
    program = torch.onnx.export(
        _Function(model, part.function).eval(), (part.example,), dynamo=True, verbose=False, optimize=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},), input_names=[part.argument], output_names=list(part.results))
    assert program is not None  # with dynamo=True
    if classes := getattr(model.config, "classes", ()):
        program.model.metadata_props["classes"] = json.dumps(classes)
    with atomic_write(path) as temporary:
        program.save(temporary)


def _compare(part: ExportPart, path: Path, value: Tensor) -> tuple[Exported, list[Tensor]]:
    """The file beside torch on a batch; and torch's results."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {part.argument: value.cpu().numpy()}
    with torch.inference_mode():
        expected = _listed(part.function(value))
        one = {part.argument: given[part.argument][:1]}
        times = _in_turns(lambda: session.run(None, one), lambda: part.function(value[:1]))
    differences = [(torch.from_numpy(ours) - theirs.cpu()).abs().max() / theirs.abs().max().cpu()
                   for ours, theirs in zip(session.run(None, given), expected, strict=True)]
    onnx, torch_ = (1000 * time for time in times)
    shapes = {name: ("B", *result.shape[1:]) for name, result in zip(part.results, expected, strict=True)}
    exported = Exported(path, {part.argument: ("B", *value.shape[1:])}, shapes, max(map(float, differences)),
                        (onnx, torch_), part.meaning)
    return exported, [result.clone() for result in expected]


def _in_turns(*functions: Callable[[], Any]) -> list[float]:
    """The median time of each function in seconds, called in turns."""
    for function in functions:
        function()
    turns = [[seconds(function, "cpu") for function in functions] for _ in range(TURNS)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _listed(results: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)
