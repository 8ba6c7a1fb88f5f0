"""`finola demo`: three photographs reconstructed, each from one vector."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from finola.cli.options import Subparsers, add_device, add_model, open_model

if TYPE_CHECKING:
    from PIL import Image

    from finola.inference.reconstruct import Reconstruction

EXAMPLE = """example:
  finola demo --out images

Needs no file and no network: three photographs of the Kodak suite come with the package. For images of your own:
finola reconstruct IMAGES --out DIR"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "demo",
        help="reconstruct three photographs that come with the package",
        description="Reconstruct three photographs, each from one vector; writes finola-demo.png.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--out", default=".", metavar="DIR", help="folder for finola-demo.png (default: here)"
    )
    add_model(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print a report for machines")
    return parser


def run(args: argparse.Namespace) -> None:
    from finola.data.examples import example_images
    from finola.files import atomic_write
    from finola.inference.reconstruct import reconstruct

    model, path = open_model(args), Path(args.out) / "finola-demo.png"
    results = {name: reconstruct(model, image) for name, image in example_images().items()}
    with atomic_write(path) as temporary:
        _panel(results).save(temporary)
    scores = {name: result.psnr for name, result in results.items()}
    if args.json:
        print(json.dumps({"panel": str(path), "psnr": scores, "numbers": model.config.embed_dim}))
        return
    size = model.config.image_size
    print(f"{size}x{size} pixels from {model.config.embed_dim} numbers each:")
    for name, score in scores.items():
        print(f"  {name:24}{score:6.2f} dB")
    print(f"originals and reconstructions: {path}")


def _panel(results: dict[str, Reconstruction]) -> Image.Image:
    """Originals with their names over reconstructions with their PSNR."""
    import torch

    from finola.data.images import to_tensor
    from finola.drawing import panel

    originals = torch.stack([to_tensor(result.original) for result in results.values()])
    painted = torch.stack([to_tensor(result.reconstruction) for result in results.values()])
    captions = [list(results), [f"{result.psnr:.2f} dB" for result in results.values()]]
    return panel([originals, painted], ["original", "reconstruction"], captions)
