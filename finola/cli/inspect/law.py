"""`finola inspect law`: do feature maps obey a first-order law that nothing imposed on them?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.inspect.results import write_results
from finola.cli.options import (
    SOURCES,
    Subparsers,
    add_reading,
    open_device,
    open_limited,
    tell_apart,
    weights_identity,
)
from finola.errors import RecipeError
from finola.files import check_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from finola.analysis.law import Maps
    from finola.models.base import ImageModel

EXAMPLE = """examples:
  finola inspect law --data imagenette/train --val imagenette/val --out inspected/law
  finola inspect law --weights runs/a/weights.safetensors runs/b/weights.safetensors --data imagenette/train \\
      --val imagenette/val --limit 2000 --out inspected/law

A law z(x+1,y) - z(x,y) = A n(z(x,y)), a matrix for each direction, is fitted by least squares to the maps of --data and
judged on those of --val. Beside it stands the best affine step, which is free of the law's form. The maps:
  encoder of NAME      the encoder's own final map, on which no law was imposed
  untrained encoder    the same network with random weights
  grown by NAME        of an autoencoder: the map that the law has made, for comparison
  patches of pixels    the 16x16 pixels of a cell as 768 channels
Each is measured a second time with the positions of an image shuffled: half of a step is explained even then, by the
way back to the mean. law.png shows what is explained of a step, and of whole maps grown from their middle alone."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "law",
        help="a first-order law fitted to maps on which none was imposed",
        description="Fit the paper's law to feature maps on which it was not imposed, and judge it on other images.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--weights", nargs="+", metavar="WEIGHTS",
                        help=f"models whose encoders give a map (default: the shipped autoencoder): each {SOURCES}")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="images to fit: folders or shards")
    parser.add_argument("--val", nargs="+", required=True, metavar="DIR", help="images to judge by")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results, made if need be")
    add_reading(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.analysis.law import as_record, measure_law, plot_law
    from finola.cli.measures import squares_of
    from finola.provenance import record

    out, device = check_folder(args.out), open_device(args.device)
    models = _open_models(args, device)
    size = models[0][1].config.image_size
    names = tell_apart([path for path, _ in models])
    sources = {of: maps for name, (_, model) in zip(names, models, strict=True)
               for of, maps in _sources(name, model).items()}
    sources |= {"patches of pixels": _patches}
    sets = [open_limited(paths, args.limit) for paths in (args.data, args.val)]
    show = sys.stderr.isatty() and not args.json

    def images(place: int, bar: str) -> Iterator[Tensor]:
        return (batch["image"] for batch in squares_of(args, sets[place], size, device, show, bar))

    measured = measure_law(sources, images(0, "fitting"), images(1, "judging"))
    result = record(device, {
        "data": args.data, "val": args.val, "images": [len(images) for images in sets], "image_size": size,
        "weights": [weights_identity(path, model.config) for path, model in models],
        "maps": as_record(measured)})
    write_results(out, "law", result, {"law": plot_law(result["maps"])})
    print(json.dumps(result) if args.json else _table(result, out))


def _open_models(args: argparse.Namespace, device: torch.device) -> list[tuple[Path, ImageModel]]:
    """Weights files and their models, of one image size."""
    from finola.registry import DEFAULT_MODEL
    from finola.weights import find_weights, load_weights

    paths = [find_weights(source) for source in args.weights or [DEFAULT_MODEL]]
    models = [(path, load_weights(path).to(device).eval()) for path in paths]
    sizes = {model.config.image_size for _, model in models}
    if len(sizes) > 1:
        raise RecipeError(f"--weights: models of several image sizes, {', '.join(map(str, sorted(sizes)))} pixels; name"
                          " those of one")
    return models


def _sources(name: str, model: ImageModel) -> dict[str, Maps]:
    """The maps of a model; WeightsError where its encoder gives none."""
    import torch

    from finola.errors import WeightsError
    from finola.models.autoencoder import FinolaAutoencoder
    from finola.models.encoders import create_encoder

    torch.manual_seed(0)
    untrained = create_encoder(model.config.encoder).to(model.mean.device).eval()
    size = model.config.image_size
    with torch.no_grad():
        shape = untrained.forward_features(model.mean.new_zeros(1, 3, size, size)).shape
    if len(shape) != 4 or min(shape[2:]) < 2:
        raise WeightsError(f"{name}: its encoder {model.config.encoder} gives {tuple(shape)} for an image, expected a "
                           "map (1, channels, height, width) of two positions a side at least")
    sources: dict[str, Maps] = {
        f"encoder of {name}": lambda x: model.encoder.forward_features(model.normalise(x)),
        f"untrained encoder {model.config.encoder}": lambda x: untrained.forward_features(model.normalise(x))}
    if isinstance(model, FinolaAutoencoder):
        sources[f"grown by {name}"] = lambda x: model.grow(model.encode(x))
    return sources


def _patches(x: Tensor) -> Tensor:
    """Images (B, 3, S, S) -> (B, 768, S/16, S/16)."""
    import torch.nn.functional as F

    return F.pixel_unshuffle(x, 16)


def _table(result: dict, out: Path) -> str:
    from finola.analysis.law import HEAD, cells

    widths = (8, 10, 9, 10, 15, 10)
    rows = [("", HEAD), *((row["name"], cells(row)) for row in result["maps"])]
    lines = [f"share of a step explained, {result['images'][0]} images fitted, {result['images'][1]} judged"]
    lines += [f"{name:44}" + "".join(f" {cell:>{width - 1}}" for cell, width in zip(row, widths, strict=True))
              for name, row in rows]
    return "\n".join([*lines, "grown: what a map grown from its middle by A explains of the spread about the mean",
                      f"law.png and law.json in {out}"])
