"""Training throughput of the shipped recipe and which part bounds it, measured in turns in one run.

    python benchmarks/throughput.py --data IMAGENETTE/train [--device cuda] [--batch-size 256] [--out FILE]

Images per second of the whole training step on resident data, of the step on one batch, compiled and not, of the data
alone, and of the model's parts (forward + backward each). The data is never the bound where its rate is
several times the step's.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from finola.data import Batches, ResidentImages, ResidentLoader, open_data
from finola.evaluation.speed import seconds
from finola.files import write_json
from finola.models.autoencoder import FinolaAutoencoder
from finola.provenance import record
from finola.training.recipe import load_recipe


def rate(function: Callable[[], None], images: int, device: str, budget: float) -> float:
    """Images per second of a function that handles `images` of them, over about `budget` seconds."""
    function()
    calls = max(1, int(budget / max(seconds(function, device), 1e-6)))
    return images * calls / seconds(function, device, calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--resident-size", type=int, help="of the images kept on the device (default: the recipe's)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for all measurements together")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = load_recipe("pretrained/finola_mfw720_c768_r8")
    size = args.resident_size or recipe.data.resident_size
    torch.manual_seed(0)
    model = FinolaAutoencoder(recipe.model_config()).to(args.device, memory_format=torch.channels_last).train()
    compiled = copy.deepcopy(model)
    compiled.compile()
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in (model, compiled)}
    started = time.monotonic()
    images = ResidentImages(open_data(args.data), size, args.device, skip_bad=True, draft=True)
    decoding = len(images) / (time.monotonic() - started)
    loader = ResidentLoader(images, Batches(args.batch_size, train=True), image_size=recipe.data.image_size)
    stream = iter(loader)

    def batch() -> torch.Tensor:
        nonlocal stream
        try:
            return next(stream)["image"]
        except StopIteration:
            stream = iter(loader)
            return next(stream)["image"]

    x = batch()
    with torch.no_grad():
        q = model.encode(x)
        z = model.grow(q)

    def backward(forward: Callable[[], torch.Tensor]) -> None:
        with torch.autocast(torch.device(args.device).type, torch.bfloat16):
            result = forward()
        result.float().square().mean().backward()

    def step(x: torch.Tensor, model: FinolaAutoencoder = model) -> None:
        backward(lambda: model(x) - x)
        optimizers[model].step()
        optimizers[model].zero_grad()

    parts = {
        "step": lambda: step(batch()),
        "step without data": lambda: step(x),
        "step without data, compiled": lambda: step(x, compiled),
        "data": batch,
        "encoder and pooling": lambda: backward(lambda: model.encode(x)),
        "autoregression": lambda: backward(lambda: model.grow(q.requires_grad_())),
        "decoder": lambda: backward(lambda: model.decoder(z.requires_grad_())),
    }
    budget = args.seconds / len(parts)
    rates = {name: round(rate(part, args.batch_size, args.device, budget), 1) for name, part in parts.items()}
    modules = ("encoder and pooling", "autoregression", "decoder")
    result = record(torch.device(args.device), {
        "recipe": recipe.name, "batch_size": args.batch_size, "resident_size": size, "images_per_second": rates,
        "decoding_images_per_second": round(decoding, 1), "bound": min(modules + ("data",), key=rates.get),
        "data_over_step": round(rates["data"] / rates["step"], 1),
    })
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
