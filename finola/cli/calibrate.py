"""`finola calibrate`: make the codec and the playground ready for a model of one's own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from finola.cli.options import Subparsers, add_device, add_limit, open_limited, open_model, weights_path
from finola.errors import RecipeError

EXAMPLE = """examples:
  finola calibrate --weights runs/mine/weights.safetensors --data imagenette/train
  finola compress photo.jpg photo.fnl --weights runs/mine/weights.safetensors

Writes two files beside the weights:
  WEIGHTS.codec.safetensors       for finola compress and decompress: the range of each number of q, how much each
                                  matters to the image, and the probabilities for the entropy coder
  WEIGHTS.components.safetensors  for finola playground: the mean of q and its first principal components
Both sides of the codec need the same weights and codec file; what was written with an earlier calibration cannot be
read with a new one. Thousands of images make better tables."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "calibrate",
        help="make the codec and the playground ready for weights of your own",
        description="Measure what finola compress and finola playground must know of a model, from training images.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--weights", required=True, metavar="FILE",
                        help="an autoencoder's weights file, by finola train")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="training images: folders or shards")
    add_limit(parser, 2400)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the crops (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print a report for machines, no progress bar")
    add_device(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.analysis.statistics import Statistics, components_path, save_components
    from finola.codec import calibration_path
    from finola.codec.calibrate import calibrate, embed
    from finola.files import check_folder
    from finola.weights import weights_hash

    weights = weights_path(args)
    if weights != Path(args.weights):
        raise RecipeError(f"--weights: {args.weights} is shipped or published with its calibration; name a"
                          " weights file of your own")
    target = calibration_path(weights)
    check_folder(target.parent, "--weights")
    model, images = open_model(args), open_limited(args.data, args.limit)
    show = sys.stderr.isatty() and not args.json
    plain, zoomed = embed(model, images, seed=args.seed, progress=show)
    calibration, statistics = calibrate(model, plain, zoomed), Statistics(model.config.embed_dim)
    statistics.add(plain)
    names = ["/".join(Path(folder).resolve().parts[-2:]) for folder in args.data]
    sha256, components = weights_hash(weights), components_path(weights)
    calibration.save(target, {"data": json.dumps(names), "images": str(len(images)), "weights_sha256": sha256})
    save_components(statistics, components, sha256, ", ".join(names))
    report = {"file": str(target), "components": str(components), "images": len(images), "bytes": target.stat().st_size}
    print(json.dumps(report) if args.json else
          f"{target}: {report['bytes']:,} bytes from {len(images)} images; {components.name} beside it")
