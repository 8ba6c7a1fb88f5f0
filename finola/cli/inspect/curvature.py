"""`finola inspect curvature`: Gaussian curvature of the feature surfaces, models over one another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.inspect.results import write_results
from finola.cli.options import (
    SOURCES,
    Subparsers,
    add_reading,
    open_device,
    open_limited,
    positive,
    tell_apart,
    weights_identity,
)
from finola.files import check_folder

if TYPE_CHECKING:
    import torch

    from finola.analysis.curvature import Curvatures, GrowingModel
    from finola.models.base import ModelConfig

EXAMPLE = """examples:
  finola inspect curvature --data imagenette/val --out inspected
  finola inspect curvature --model finola_mfw720_c768_r8 --weights runs/masked/weights.safetensors \\
      --data imagenette/val --limit 500 --out inspected

Each channel of the map z is a surface over its grid. Within each image the channels are ranked by their peak
curvature, the root mean square of the highest and the lowest on the surface; curvature.png shows the k-th rank's
median over the images and its spread, of z as it is and of z divided by the deviation of its surfaces.
  autoencoder      z is the map that q grows to
  masked FINOLA    z is the whole map, grown from the visible block in the middle of the image"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "curvature",
        help="Gaussian curvature of the feature surfaces, models over one another",
        description="Gaussian curvature of the feature surfaces of one model, or of several over one another.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME",
                        help="models whose weights are shipped (without --weights: the compact one)")
    parser.add_argument("--weights", nargs="+", default=[], metavar="FILE",
                        help=f"weights of autoencoders or masked FINOLAs, each {SOURCES}")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="images: folders or shards")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results, made if need be")
    parser.add_argument("--top", type=positive, default=128, metavar="K", help="ranks to keep (%(default)s)")
    parser.add_argument("--interior", action="store_true", help="leave the border of the map out")
    add_reading(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.analysis.curvature import measure_curvature, plot_curvatures
    from finola.cli.measures import squares

    out, device = check_folder(args.out), open_device(args.device)
    models = _open_models(args, device)
    _try_on_nothing(args, models)
    dataset = open_limited(args.data, args.limit)
    show = sys.stderr.isatty() and not args.json
    measured = {
        label: measure_curvature(model, squares(args, dataset, model, show, label), args.top, args.interior)
        for label, (_, model) in models.items()
    }
    result = _result(args, models, measured, len(dataset), device)
    write_results(out, "curvature", result, {"curvature": plot_curvatures(measured)})
    print(json.dumps(result) if args.json else _table(result, out))


def _open_models(args: argparse.Namespace, device: torch.device) -> dict[str, tuple[Path, GrowingModel]]:
    """What the plot calls each model -> its weights file and the model."""
    from finola.analysis.curvature import require_growing_map
    from finola.factory import create_model
    from finola.registry import DEFAULT_MODEL, pretrained_path
    from finola.weights import find_weights, load_weights

    names = args.model or ([] if args.weights else [DEFAULT_MODEL])
    opened = [(pretrained_path(name), create_model(name, pretrained=True)) for name in names]
    opened += [(path, load_weights(path)) for path in map(find_weights, args.weights)]
    labels = tell_apart([path for path, _ in opened])
    return {f"{_kind(model.config)}, {label}": (path, require_growing_map(model, path).to(device).eval())
            for label, (path, model) in zip(labels, opened, strict=True)}


def _try_on_nothing(args: argparse.Namespace, models: dict[str, tuple[Path, GrowingModel]]) -> None:
    """Measure a black image, so that what is wrong with the last model shows before the first has seen the data."""
    import torch

    from finola.analysis.curvature import measure_curvature

    for _, model in models.values():
        size = model.config.image_size
        black = torch.zeros(1, 3, size, size, device=model.mean.device)
        measure_curvature(model, [{"image": black}], args.top, args.interior)


def _kind(config: ModelConfig) -> str:
    from finola.models.masked import MaskedConfig

    if isinstance(config, MaskedConfig):
        return "masked FINOLA-B" if config.variant == "block" else "masked FINOLA-E"
    return "FINOLA"


def _result(args: argparse.Namespace, models: dict[str, tuple[Path, GrowingModel]], measured: dict[str, Curvatures],
            images: int, device: torch.device) -> dict:
    from finola.provenance import record

    return record(device, {
        "data": args.data,
        "images": images,
        "resample": args.resample,
        "positions": "interior" if args.interior else "all",
        "models": [_model_result(label, *models[label], curvatures) for label, curvatures in measured.items()],
    })


def _model_result(label: str, path: Path, model: GrowingModel, curvatures: Curvatures) -> dict:
    from finola.analysis.curvature import central_corner
    from finola.models.masked import MaskedFinola

    ranks = [1]
    while 2 * ranks[-1] <= curvatures.raw.shape[1]:
        ranks.append(2 * ranks[-1])
    channels, counts = curvatures.leaders.unique(return_counts=True)
    leading = counts.argsort(descending=True)[:5]
    return {
        "label": label,
        **weights_identity(path, model.config),
        "map": {
            "shape": curvatures.map_shape,
            "grown_from": "the visible block in the middle" if isinstance(model, MaskedFinola) else "q",
            "block_corner": central_corner(model) if isinstance(model, MaskedFinola) else None,
        },
        "raw": curvatures.distribution("raw", ranks),
        "standardised": curvatures.distribution("standardised", ranks),
        "most_often_first": [
            {"channel": channels[i].item(), "share_of_images": counts[i].item() / counts.sum().item()} for i in leading
        ],
    }


def _table(result: dict, out: Path) -> str:
    lines = [f"peak Gaussian curvature of {result['images']} images, median over them"]
    for model in result["models"]:
        lines.append(f"{model['label']}, map {' x '.join(map(str, model['map']['shape']))}")
        lines.append(f"{'rank':>8}{'z as it is':>14}{'standardised':>14}")
        lines += [f"{raw['rank']:8}{raw['median']:14.3g}{standard['median']:14.3g}"
                  for raw, standard in zip(model["raw"], model["standardised"], strict=True)]
    return "\n".join([*lines, f"curvature.png and curvature.json in {out}"])
