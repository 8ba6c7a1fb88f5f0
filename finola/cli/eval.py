"""`finola eval`: how good a model of any kind is on a set of images."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.options import (
    SOURCES,
    Subparsers,
    add_crop_pct,
    add_reading,
    open_device,
    open_limited,
    positive,
    weights_identity,
)
from finola.errors import RecipeError

if TYPE_CHECKING:
    from finola.cli.measures import Measured

EXAMPLE = """examples:
  finola eval runs/mine/weights.safetensors --data imagenette/val
  finola eval finola_mfw720_c768_r8 --data imagenette/val --baselines --train imagenette/train \\
      --out result.json --panel panel.png
  finola eval runs/masked/weights.safetensors --data imagenette/val --knn --train imagenette/train
  finola eval finola_mfw720_c768_r8 --first-stage sd-vae sdxl-vae --size 256 --data imagenet/val

What is measured follows from the weights:
  autoencoder          PSNR and SSIM of the reconstructions; --baselines adds linear codes of the same length
  classifier           top-1, top-5 and mean per-class accuracy; the data must have the weights' classes
  masked, mae, simmim  PSNR of the masked region and of the whole image; the masks depend on --batch-size
  any, with --knn      top-1 accuracy by the encoder's features: votes of the 20 nearest images of --train
  --first-stage        folders of diffusers (AutoencoderKL, VQModel, AutoencoderDC, AutoencoderTiny) beside an
                       autoencoder or alone: PSNR, SSIM, length of the code, parameters, multiply-adds, latency, memory

Preprocessing: shorter side resized to the model's size over --crop-pct, centre square; 0.875 for classifiers and
--knn (224 px: to 256), 1 for all others. PSNR: each image clamped to [0, 1],
peak 1, mean over RGB pixels, then over images; "pooled" takes the mean squared error of all images first,
"8-bit" rounds the reconstruction. An image that cannot be decoded stops the evaluation with exit code 3."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "eval",
        help="score a model on a set of images",
        epilog=EXAMPLE,
        description="Score a model of any kind on a set of images.",
    )
    parser.add_argument("model", metavar="WEIGHTS", nargs="?", help=f"weights: {SOURCES}")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="images: folders or shards")
    parser.add_argument("--baselines", action="store_true", help="score linear codes of about as many numbers too")
    parser.add_argument("--first-stage", nargs="+", metavar="DIR", default=[],
                        help="compare with first stages of latent diffusion, folders as diffusers saves them")
    parser.add_argument("--size", type=positive, metavar="N",
                        help="with --first-stage: squares of N pixels (default: the model's, or 256 without one)")
    parser.add_argument("--knn", action="store_true", help="score the encoder by the nearest neighbours in --train")
    parser.add_argument(
        "--train",
        nargs="+",
        metavar="DIR",
        help="with --baselines: images to fit the PCA to; with --knn: labelled images",
    )
    parser.add_argument(
        "--panel", metavar="FILE", help="write a panel: some images and what became of them, or the confusion matrix"
    )
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON")
    add_crop_pct(parser)
    add_reading(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.cli.first_stages import first_stages
    from finola.cli.measures import choose, result_of
    from finola.files import atomic_write, check_folder, write_json
    from finola.models.base import CLASSES_CROP_PCT
    from finola.weights import find_weights, load_weights

    for option, file in (("--out", args.out), ("--panel", args.panel)):
        if file:
            check_folder(Path(file).parent, option)
    if args.train and not (args.baselines or args.knn):
        raise RecipeError("--train: only --baselines and --knn use it; add one of them or leave --train out")
    if args.size and not args.first_stage:
        raise RecipeError("--size: only --first-stage uses it; a model is scored at its own size")
    if args.model is None and not args.first_stage:
        raise RecipeError("WEIGHTS: missing; name a weights file or a shipped model, or add --first-stage DIR")
    device, progress = open_device(args.device), sys.stderr.isatty() and not args.json
    if args.first_stage:
        args.crop_pct = args.crop_pct or 1.0
        result, measured = first_stages(args, device, progress)
    else:
        path = find_weights(args.model)
        model = load_weights(path).to(device).eval()
        measure = choose(args, model.config)
        args.crop_pct = args.crop_pct or (CLASSES_CROP_PCT if args.knn else model.config.crop_pct)
        dataset = open_limited(args.data, args.limit)
        measured = measure(args, model, dataset, progress)
        identity = weights_identity(path, model.config)
        result = result_of(args, device, identity, model.config.image_size, len(dataset), measured.fields)
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(result, measured)
    if args.panel and measured.panel:
        with atomic_write(args.panel) as temporary:
            measured.panel().save(temporary, format="png")
    if args.out:
        write_json(args.out, result, indent=2)


def _print_table(result: dict, measured: Measured) -> None:
    from finola.data.images import shorter_side

    preprocessing = result["preprocessing"]
    size = preprocessing["size"]
    name = result["weights"] or "first stages"
    print(
        f"{name}: {result['images']} images of {', '.join(result['data'])}; shorter side to "
        f"{shorter_side(size, preprocessing['crop_pct'])} px by {preprocessing['shorter_side']}, centre {size}x{size}"
    )
    print(*measured.table, sep="\n")
    print(f"{measured.note}, on {result['hardware']}")
