"""Does the map of a plain autoencoder obey a first-order law? It has no vector and no law: its decoder reads the map.

    python benchmarks/plain_autoencoder.py --data IMAGENETTE/train --val IMAGENETTE/val --out runs/law-plain

Encoder (Mobile-Former W720) and decoder of the shipped model with nothing between them, trained for --epochs on random
crops by its squared error; then the law is fitted to its maps as `finola inspect law` does, and law.json and law.png
are written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from finola.analysis.law import as_record, measure_law, plot_law
from finola.cli.inspect.results import write_results
from finola.cli.options import open_limited
from finola.data import Batches, ResidentImages, ResidentLoader, open_data
from finola.evaluation.metrics import psnr
from finola.models.decoder import ConvDecoder
from finola.models.encoders import create_encoder
from finola.models.mobileformer import ENCODER_STRIDE
from finola.provenance import record
from finola.training.tasks.base import learning_rate

SIZE, WIDTHS = 128, (224, 128, 64, 16, 16)
BATCH, RATE = 32, 1e-3


class PlainAutoencoder(nn.Module):
    """Images (B, 3, S, S) in [0, 1] -> the same, by a map (B, 720, S/16, S/16)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = create_encoder("mobileformer_w720")
        self.decoder = ConvDecoder(self.encoder.num_features, ENCODER_STRIDE, widths=WIDTHS)

    def map(self, x: Tensor) -> Tensor:
        z: Tensor = self.encoder.forward_features((2 * x - 1).contiguous(memory_format=torch.channels_last))
        return z

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decoder(self.map(x)).float()
        return (y + 1) / 2


def train(model: PlainAutoencoder, paths: list[str], epochs: int) -> None:
    images = ResidentImages(open_data(paths), SIZE * 5 // 4, skip_bad=True, draft=True)
    loader = ResidentLoader(images, Batches(BATCH, train=True), image_size=SIZE)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.02)
    total, step = epochs * len(loader), 0
    with tqdm(total=total, desc="training", unit="step") as bar:
        for _ in range(epochs):
            for batch in loader:
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(step, total, 0.05, RATE)
                x = batch["image"]
                with torch.autocast("cpu", torch.bfloat16):
                    x_hat = model(x)
                optimiser.zero_grad()
                (x_hat - x).square().mean().backward()
                optimiser.step()
                step += 1
                bar.update()
                bar.set_postfix(psnr=f"{psnr(x_hat.detach(), x).mean():.2f}")


def squares(paths: list[str], limit: int | None) -> ResidentLoader:
    """Batches of centre squares, as often as they are asked for."""
    images = ResidentImages(open_limited(paths, limit), SIZE, skip_bad=True)
    return ResidentLoader(images, Batches(BATCH, train=False), image_size=SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--val", nargs="+", required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, help="images to fit the law to, and to judge it by")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    model = PlainAutoencoder().to(memory_format=torch.channels_last)
    train(model.train(), args.data, args.epochs)
    model.eval()
    fitted, judged = squares(args.data, args.limit), squares(args.val, args.limit)
    measured = measure_law({"map of a plain autoencoder": model.map}, *(
        (batch["image"] for batch in loader) for loader in (fitted, judged)))
    with torch.no_grad():
        scores = torch.cat([psnr(model(batch["image"]), batch["image"]) for batch in judged])
    result = record(torch.device("cpu"), {
        "data": args.data, "val": args.val, "images": [len(fitted.images), len(judged.images)], "image_size": SIZE,
        "epochs": args.epochs, "psnr": scores.mean().item(), "maps": as_record(measured)})
    args.out.mkdir(parents=True, exist_ok=True)
    write_results(args.out, "law", result, {"law": plot_law(result["maps"])})
    print(f"{scores.mean():.2f} dB; {args.out}/law.json")


if __name__ == "__main__":
    main()
