"""`finola inspect curvature`: Gaussian curvature of the feature surfaces, models over one another."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from finola.cli.inspect.results import add_data_options, write_results
from finola.cli.options import open_device, open_limited, positive
from finola.files import check_folder

EXAMPLE = """examples:
  finola inspect curvature --data imagenette/val --out inspected
  finola inspect curvature --model finola_mfw720_c768_r8 --weights runs/masked/weights.safetensors \\
      --data imagenette/val --limit 500 --out inspected

Each channel of the map z is a surface over its grid. Within each image the channels are ranked by their peak
curvature, the root mean square of the highest and the lowest on the surface; curvature.png shows the k-th rank's
median over the images and its spread, of z as it is and of z divided by the deviation of its surfaces.
  autoencoder      z is the map that q grows to
  masked FINOLA    z is the whole map, grown from the visible block in the middle of the image"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "curvature",
        help="Gaussian curvature of the feature surfaces, models over one another",
        description="Gaussian curvature of the feature surfaces of one model, or of several over one another.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME",
                        help="models whose weights are shipped (without --weights: the compact one)")
    parser.add_argument("--weights", nargs="+", default=[], metavar="FILE",
                        help="weights files, of autoencoders or masked FINOLAs")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="images: folders or shards")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the results, made if need be")
    parser.add_argument("--top", type=positive, default=128, metavar="K", help="ranks to keep (%(default)s)")
    parser.add_argument("--interior", action="store_true", help="leave the border of the map out")
    add_data_options(parser)
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


def _open_models(args: argparse.Namespace, device) -> dict:
    """What the plot calls each model -> its weights file and the model."""
    from finola.analysis.curvature import require_growing_map
    from finola.factory import create_model
    from finola.registry import DEFAULT_MODEL, pretrained_path
    from finola.weights import load_weights

    names = args.model or ([] if args.weights else [DEFAULT_MODEL])
    opened = [(pretrained_path(name), create_model(name, pretrained=True)) for name in names]
    opened += [(Path(file), load_weights(file)) for file in args.weights]
    models = {}
    for number, (path, model) in enumerate(opened, 1):
        require_growing_map(model, path)
        label = _label(model.config, path)
        label = f"{label} ({number})" if label in models else label
        models[label] = (path, model.to(device).eval())
    return models


def _try_on_nothing(args: argparse.Namespace, models: dict) -> None:
    """Measure a black image, so that what is wrong with the last model shows before the first has seen the data."""
    import torch

    from finola.analysis.curvature import measure_curvature

    for _, model in models.values():
        size = model.config.image_size
        black = torch.zeros(1, 3, size, size, device=next(model.parameters()).device)
        measure_curvature(model, [{"image": black}], args.top, args.interior)


def _label(config, path: Path) -> str:
    kind = "FINOLA"
    if config.kind == "masked":
        kind = "masked FINOLA-B" if config.variant == "block" else "masked FINOLA-E"
    return f"{kind}, {path.stem}"


def _result(args: argparse.Namespace, models: dict, measured: dict, images: int, device) -> dict:
    from datetime import UTC, datetime

    from finola.provenance import environment

    return {
        "data": args.data,
        "images": images,
        "resample": args.resample,
        "positions": "interior" if args.interior else "all",
        "models": [_model_result(label, *models[label], curvatures) for label, curvatures in measured.items()],
        **environment(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _model_result(label: str, path: Path, model, curvatures) -> dict:
    from finola.analysis.curvature import central_corner
    from finola.weights import weights_hash

    ranks = [1]
    while 2 * ranks[-1] <= curvatures.raw.shape[1]:
        ranks.append(2 * ranks[-1])
    channels, counts = curvatures.leaders.unique(return_counts=True)
    leading = counts.argsort(descending=True)[:5]
    return {
        "label": label,
        "weights": path.name,
        "sha256": weights_hash(path),
        "config": model.config.to_dict(),
        "map": {
            "shape": curvatures.map_shape,
            "grown_from": "q" if model.config.kind == "autoencoder" else "the visible block in the middle",
            "block_corner": None if model.config.kind == "autoencoder" else central_corner(model),
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
