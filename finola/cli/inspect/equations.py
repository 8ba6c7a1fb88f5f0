"""`finola inspect equations`: how far the maps obey the differential equations, and images on finer grids."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.inspect.results import choose_images, write_results
from finola.cli.options import (
    SOURCES,
    Subparsers,
    add_device,
    add_limit,
    add_model,
    open_model,
    positive,
    require_autoencoder,
    weights_identity,
    weights_path,
)
from finola.errors import RecipeError
from finola.files import check_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from finola.analysis.equations import Equations, Renderings
    from finola.models.autoencoder import FinolaAutoencoder

EXAMPLE = """examples:
  finola inspect equations --data kodak --out inspected/equations
  finola inspect equations --weights runs/mine/weights.safetensors --against runs/other/weights.safetensors \\
      --data imagenette/val --limit 100 --factors 2 --out inspected/equations

Written to OUT:
  equations.png      by position: how far the map misses the recursion at each step (residual), and how far the two
                     paths to a position differ (commutator), of this model and of another; 0 where they agree
  renderings_xF.png  the same q drawn F times larger, on finer grids, beside the model's image enlarged
  equations.json     the numbers; PSNR is against the original at F times the model's size
Residual: the error of a step over the step's length. Commutator: the difference of the two ways over their length.
Both are 0 where the equations hold, and 1 where the error is as large as the step. The renderings:
  finer map          the map is computed on a grid F times finer, and decoded
  finer pixels       map and decoder keep their grid, which is moved by fractions of a pixel, F x F times
  trained steps      one step of the law for a whole position, as trained; or F steps of 1/F
  euler, rk4         a step is taken as the law says, or by the Runge-Kutta method of fourth order
The largest centre square of each image is taken; one smaller than F times the model's size takes no part in F.
An image that cannot be decoded stops the command with exit code 3."""

LEGEND = (
    "residual: error of a step / its length; commutator: difference of the two ways / their length; 0 is exact",
    "finer map: computed on a finer grid, then decoded; finer pixels: the same grid moved by fractions of a pixel",
    "trained steps: whole positions, as trained; 1/factor: that part of one at a time, by Euler or Runge-Kutta",
)


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "equations",
        help="residual and commutator of the maps, renderings on finer grids",
        description="How far a model's maps obey the paper's two differential equations, and what its vectors give "
        "on grids\nfiner than it was trained on.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="images: folders, files or patterns")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results, made if need be")
    parser.add_argument("--factors", nargs="+", type=positive, default=[2, 3, 4], metavar="F",
                        help="draw this many times larger, at least 2 (2 3 4)")
    add_limit(parser)
    parser.add_argument("--against", metavar="WEIGHTS",
                        help="another model's weights, to compare commutators (default: this one's untrained start): "
                             + SOURCES)
    add_model(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, no progress bar")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.analysis.equations import measure_equations, plot_equations, renderings_panel, untrained
    from finola.data.images import decode_image
    from finola.pde import law_of

    out, factors = check_folder(args.out), _factors(args)
    paths = choose_images(args.data, out, args.limit)
    model = open_model(args)
    law_of(model)  # before anything is read
    against = _open_against(args, model.mean.device) or untrained(model)
    measured = measure_equations(model, map(decode_image, _bar(args, paths)), factors, against)
    result = _result(args, model, measured)
    pictures = {f"renderings_x{factor}": renderings_panel(found)
                for factor, found in measured.renderings.items() if found.scores}
    write_results(out, "equations", result, {"equations": plot_equations(measured), **pictures})
    print(json.dumps(result) if args.json else _summary(result, out))


def _factors(args: argparse.Namespace) -> list[int]:
    if min(args.factors) < 2:
        raise RecipeError(f"--factors: got {min(args.factors)}, expected at least 2")
    return sorted(set(args.factors))


def _open_against(args: argparse.Namespace, device: torch.device) -> tuple[str, FinolaAutoencoder] | None:
    """--against: its name and the model."""
    from finola.pde import law_of
    from finola.weights import load_weights

    if args.against is None:
        return None
    model = require_autoencoder(load_weights(args.against), args.against)
    law_of(model)
    return Path(args.against).name, model.to(device).eval()


def _bar(args: argparse.Namespace, paths: list[Path]) -> Iterable[Path]:
    from tqdm import tqdm

    return tqdm(paths, "images", unit="image", disable=args.json or not sys.stderr.isatty())


def _result(args: argparse.Namespace, model: FinolaAutoencoder, measured: Equations) -> dict:
    from finola.provenance import record

    residuals = {"horizontal": measured.horizontal, "vertical": measured.vertical}
    return record(model.mean.device, {
        **weights_identity(weights_path(args), model.config),
        "data": args.data,
        "images": measured.images,
        "origin": measured.origin,
        "residual": {kind: _by_position(values, measured.origin, kind) for kind, values in residuals.items()},
        "commutator": {name: _by_position(values, measured.origin, "commutator")
                       for name, values in measured.commutators.items()},
        "renderings": [_rendering(factor, found, model.config.image_size)
                       for factor, found in measured.renderings.items()],
    })


def _by_position(values: Tensor, origin: tuple[int, int], kind: str) -> dict:
    """The mean is taken where it is not zero by construction; None where that is nowhere."""
    from finola.analysis.equations import off_axes

    free = off_axes(values, origin, kind)
    return {"mean": free.mean().item() if len(free) else None, "max": values.max().item() if values.numel() else None,
            "by_position": values.tolist()}


def _rendering(factor: int, found: Renderings, size: int) -> dict:
    means = found.means()
    return {"factor": factor, "size": factor * size, "images": max(map(len, found.scores.values()), default=0),
            "psnr": means, "best": max(means, key=means.__getitem__, default=None)}


def _summary(result: dict, out: Path) -> str:
    def number(entry: dict) -> str:
        return "none" if entry["mean"] is None else f"{entry['mean']:.3f}"

    residual = result["residual"]
    lines = [f"{result['images']} images; residual of the steps along x {number(residual['horizontal'])}, "
             f"along y {number(residual['vertical'])}"]
    lines += [f"commutator of {name}: {number(entry)}" for name, entry in result["commutator"].items()]
    for entry in result["renderings"]:
        head = f"{entry['factor']} times larger, {entry['size']} px: "
        lines.append(head + (f"{entry['images']} images; best: {entry['best']}" if entry["best"] else
                             f"nothing drawn, no image has {entry['size']} px a side; take larger ones"))
        lines += [f"{psnr:8.2f} dB  {name}" for name, psnr in
                  sorted(entry["psnr"].items(), key=lambda item: item[1], reverse=True)]
    return "\n".join([*lines, *LEGEND, f"images and equations.json in {out}"])
