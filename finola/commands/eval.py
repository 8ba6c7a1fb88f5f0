"""`finola eval`: PSNR and SSIM of a model on a set of images, beside linear codes of the same length."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from finola.commands.options import add_device, natural, open_device, positive
from finola.errors import RecipeError

EXAMPLE = """examples:
  finola eval runs/mine/weights.safetensors --data imagenette/val
  finola eval finola_mfw720_c768_r8 --data imagenette/val --baselines --train imagenette/train \\
      --out result.json --panel panel.png

Preprocessing: shorter side resized to the model's size, centre square. PSNR: each image clamped to [0, 1],
peak 1, mean over RGB pixels, then over images; "pooled" takes the mean squared error of all images first,
"8-bit" rounds the reconstruction. An image that cannot be decoded stops the evaluation with exit code 3."""


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "eval",
        help="score a model on a set of images",
        epilog=EXAMPLE,
        description="PSNR and SSIM of a model's reconstructions, beside those of linear codes if asked.",
    )
    parser.add_argument("model", metavar="WEIGHTS", help="a weights file, or a shipped model's name")
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR", help="images: folders or shards")
    parser.add_argument("--limit", type=positive, metavar="N", help="take N images, spread evenly over the set")
    parser.add_argument("--resample", choices=("bicubic", "bilinear"), default="bicubic", help="(%(default)s)")
    parser.add_argument("--baselines", action="store_true", help="score linear codes of about as many numbers too")
    parser.add_argument("--train", nargs="+", metavar="DIR", help="with --baselines: images to fit the PCA to")
    parser.add_argument("--panel", metavar="FILE", help="write a picture of some reconstructions with their PSNR")
    parser.add_argument("--out", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, no progress bar")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--workers",
        type=natural,
        default=os.cpu_count(),
        metavar="N",
        help="processes that decode; 0 for none (%(default)s)",
    )
    add_device(parser)
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.evaluate import evaluate
    from finola.files import atomic_write

    if args.train and not args.baselines:
        raise RecipeError("--train: is of use with --baselines alone; add it or leave --train out")
    device, progress = open_device(args.device), sys.stderr.isatty() and not args.json
    path, model = _open(args.model, device)
    dataset = _open_data(args.data, args.limit)
    codes = {"model": (model.config.embed_dim, model)} | _baselines(args, model, device, progress)
    batches = _squares(args, dataset, model, device)
    scores, examples = evaluate({name: code for name, (_, code) in codes.items()}, batches, len(dataset), progress)
    rows = [{"code": name, "numbers": codes[name][0], **score.means()} for name, score in scores.items()]
    result = _result(args, path, model, dataset, device, rows)
    if args.json:
        print(json.dumps(result))
    else:
        _print_table(args, result)
    if args.panel:
        with atomic_write(args.panel) as temporary:
            _panel(examples).save(temporary, format="png")
    if args.out:
        with atomic_write(args.out) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _open(name: str, device):
    """The weights file that `name` means, and its model."""
    from finola.registry import create_model, pretrained_path
    from finola.weights import load_weights

    path = Path(name)
    if path.exists() or path.suffix == ".safetensors":
        model = load_weights(path)
    else:
        path, model = pretrained_path(name), create_model(name, pretrained=True)
    return path, model.to(device).eval()


def _open_data(paths: list[str], limit: int | None = None):
    from finola.data import open_data
    from finola.evaluate import Subset

    dataset = open_data(paths)
    return dataset if limit is None else Subset(dataset, limit)


def _squares(args: argparse.Namespace, dataset, model, device):
    from finola.evaluate import read_squares

    return read_squares(
        dataset,
        model.config.image_size,
        batch_size=args.batch_size,
        workers=args.workers,
        device=device,
        resample=args.resample,
    )


def _baselines(args: argparse.Namespace, model, device, progress: bool) -> dict:
    from tqdm import tqdm

    from finola.evaluate import baselines

    if not args.baselines:
        return {}
    train = None
    if args.train:
        dataset = _open_data(args.train)
        batches = _squares(args, dataset, model, device)
        total = -(-len(dataset) // args.batch_size)
        train = (batch["image"] for batch in tqdm(batches, "PCA", total, unit="batch", disable=not progress))
    return baselines(model.config.embed_dim, model.config.image_size, train)


def _result(args: argparse.Namespace, path: Path, model, dataset, device, rows: list[dict]) -> dict:
    from datetime import UTC, datetime

    from finola.provenance import environment
    from finola.weights import weights_hash

    return {
        "weights": path.name,
        "sha256": weights_hash(path),
        "config": model.config.to_dict(),
        "data": args.data,
        "images": len(dataset),
        "preprocessing": {
            "size": model.config.image_size,
            "shorter_side": f"antialiased {args.resample}",
            "crop": "centre",
        },
        "pca_fitted_to": args.train,
        "scores": rows,
        **environment(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _panel(examples):
    import torch

    from finola.pictures import panel

    count = len(examples.originals)
    rows = [torch.stack(row) for row in (examples.originals, *examples.rows.values())]
    captions = [[""] * count] + [[f"{score:.2f} dB" for score in scores] for scores in examples.psnr.values()]
    return panel(rows, ["original", *examples.rows], captions)


def _print_table(args: argparse.Namespace, result: dict) -> None:
    preprocessing = result["preprocessing"]
    print(
        f"{result['weights']}: {result['images']} images of {', '.join(result['data'])}; shorter side to "
        f"{preprocessing['size']} px by {preprocessing['shorter_side']}, centre square"
    )
    print(f"{'code':25}{'numbers':>8}{'PSNR':>8}{'pooled':>8}{'8-bit':>8}{'SSIM':>8}{'images/s':>10}")
    for row in result["scores"]:
        print(
            f"{row['code']:25}{row['numbers']:8}{row['psnr']:8.3f}{row['psnr_pooled']:8.3f}"
            f"{row['psnr_8bit']:8.3f}{row['ssim']:8.4f}{row['images_per_second']:10.1f}"
        )
    print(f"PSNR in dB; images/s of the code alone, on {result['hardware']}")
    if args.baselines and not args.train:
        print("PCA left out: it needs --train")
