"""Which tiles and steps a quality should stand for: the least error at each rate, over sides and levels.

    python benchmarks/codec_sides.py imagenette160/val --out results/rd/sides.json

Tiles are cut at random places out of the images, so that no image's own size decides. Each side is tried with each
level; bits are those of the payload. `SIDE_AT_50` and `LEVEL_AT_50` in finola/codec/codec.py follow the best pairs.
Images should be neither those of training nor those that the codec is judged by.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from finola.cli.compress import add_codec, open_codec
from finola.cli.options import open_limited, positive
from finola.codec.codec import Codec
from finola.codec.entropy import encode
from finola.codec.rd import interpolate
from finola.codec.refine import decode_tiles
from finola.data.datasets import ImageDataset
from finola.data.images import random_square, resize_shorter, to_tensor
from finola.files import write_json
from finola.inference.tiles import resize
from finola.provenance import record

SIDES, LEVELS = range(48, 121, 8), range(48, 73, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", metavar="DIR", help="a folder of images")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.15, 0.19, 0.25, 0.35], metavar="BPP")
    parser.add_argument("--tiles", type=positive, default=256, metavar="N", help="of each side (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    add_codec(parser)
    args = parser.parse_args()
    codec, dataset, found = open_codec(args), open_limited([args.data], args.tiles), []
    for side in tqdm(SIDES, unit="side", disable=args.json):
        tiles = cut(dataset, args.tiles, side)
        q = encoded(codec, tiles)
        found += [measure(codec, tiles, q, level) for level in LEVELS]
    best = [row for rate in args.rates if (row := least_error(found, rate))]
    result = record(codec.device, {"data": Path(args.data).name, "tiles": args.tiles, "best": best, "measured": found})
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result))
        return
    for row in best:
        print(f"{row['rate']:.2f} bit per pixel: side {row['side']}, level {row['level']:.0f}, {row['psnr']:.2f} dB")
    if len(best) < len(args.rates):
        print(f"no side and level reach the other {len(args.rates) - len(best)} of --rates")


def cut(dataset: ImageDataset, count: int, side: int) -> Tensor:
    """(count, 3, side, side), each out of another image while they last."""
    rng, tiles = random.Random(0), []
    for place in range(count):
        image = dataset.load(place % len(dataset))
        image = image if min(image.size) >= side else resize_shorter(image, side)
        tiles.append(to_tensor(random_square(image, side, rng)))
    return torch.stack(tiles)


@torch.no_grad()
def encoded(codec: Codec, tiles: Tensor) -> Tensor:
    """Tiles (N, 3, side, side) -> q (N, C)."""
    size = codec.model.config.image_size
    return torch.cat([codec.model.encode(resize(part, size).to(codec.device))
                      for part in tiles.split(codec.batch_size)])


@torch.no_grad()
def measure(codec: Codec, tiles: Tensor, q: Tensor, level: int) -> dict[str, Any]:
    """Bits per pixel and PSNR, of the mean squared error of all, of tiles (N, 3, side, side) at a level."""
    quantiser, side, error = codec.calibration.quantiser(level=level), tiles.shape[-1], 0.0
    symbols = quantiser.symbols(codec.calibration.positions(q))  # (N, C)
    vectors = codec.calibration.vectors(quantiser.centres(symbols))
    for original, part in zip(tiles.split(codec.batch_size), vectors.split(codec.batch_size), strict=True):
        error += (decode_tiles(codec.model, part, side).cpu() - original).square().sum().item()
    payload = encode(symbols.cpu().numpy().astype(np.int16), codec.calibration, quantiser)
    return {"side": side, "level": level, "rate": 8 * len(payload) / len(tiles) / side**2,
            "psnr": -10 * float(np.log10(error / tiles.numel()))}


def least_error(found: list[dict[str, Any]], rate: float) -> dict[str, Any] | None:
    """The side and level of the highest PSNR at a rate, levels interpolated in the logarithm of the rate; None where
    nothing reaches it."""
    candidates = []
    for side in SIDES:
        rows = [row for row in found if row["side"] == side]
        for low, high in pairwise(sorted(rows, key=lambda row: row["rate"])):
            if low["rate"] <= rate < high["rate"]:
                between = {name: interpolate(low, high, rate, name, "rate") for name in ("level", "psnr")}
                candidates.append({"rate": rate, "side": side, **between})
    return max(candidates, key=lambda row: row["psnr"], default=None)


if __name__ == "__main__":
    main()
