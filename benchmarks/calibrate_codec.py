"""Make the codec's calibration of a model from training images, beside its weights.

    python benchmarks/calibrate_codec.py --data DATA/train
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tqdm import tqdm

from finola.codec.calibrate import calibrate
from finola.codec.calibration import calibration_path
from finola.data import ImageFolder, center_crop, resize_shorter, to_tensor
from finola.registry import DEFAULT_MODEL, create_model, pretrained_path
from finola.weights import load_weights, weights_hash

ZOOM = 2  # of the squares that are enlarged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True, help="folders of training images")
    parser.add_argument("--weights", help=f"a weights file (default: the shipped {DEFAULT_MODEL})")
    parser.add_argument("--images", type=int, default=2400, help="how many to take, at random (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, path = time.perf_counter(), args.weights or pretrained_path(DEFAULT_MODEL)
    model = (load_weights(args.weights) if args.weights else create_model(pretrained=True)).eval()
    folders = [ImageFolder(folder) for folder in args.data]
    names = [(folder, i) for folder in folders for i in range(len(folder))]
    chosen = random.Random(args.seed).sample(names, min(args.images, len(names)))
    plain, zoomed = embed(model, chosen, args.seed)
    calibration = calibrate(model, plain, zoomed)
    note = {"data": json.dumps(["/".join(Path(folder).resolve().parts[-2:]) for folder in args.data]),
            "images": str(len(chosen)), "weights_sha256": weights_hash(path)}
    target = calibration.save(calibration_path(path), note)
    print(f"{target.name}: {target.stat().st_size} bytes from {len(chosen)} images in "
          f"{time.perf_counter() - start:.0f} s")


@torch.no_grad()
def embed(model, chosen: list, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of the images, each as the centre square, fitted, or as a square at its own size, by turns; and
    those of a square of half the size, enlarged."""
    rng, size = random.Random(seed), model.config.image_size
    plain, zoomed = [], []
    for first in tqdm(range(0, len(chosen), 32), "images", disable=None):
        pictures = [folder.load(i) for folder, i in chosen[first : first + 32]]
        pictures = [p if min(p.size) >= size else resize_shorter(p, size) for p in pictures]
        squares = [_crop(p, size, rng) if i % 2 else center_crop(resize_shorter(p, size), size)
                   for i, p in enumerate(pictures)]
        small = [_crop(p, size // ZOOM, rng).resize((size, size), 3) for p in pictures]
        plain.append(model.encode(torch.stack([to_tensor(square) for square in squares])))
        zoomed.append(model.encode(torch.stack([to_tensor(square) for square in small])))
    return torch.cat(plain), torch.cat(zoomed)


def _crop(picture, size: int, rng: random.Random):
    x, y = rng.randrange(picture.width - size + 1), rng.randrange(picture.height - size + 1)
    return picture.crop((x, y, x + size, y + size))


if __name__ == "__main__":
    main()
