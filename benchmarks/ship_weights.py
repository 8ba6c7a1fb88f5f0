"""Put a run's weights into the package: fp16 safetensors and a card (JSON) with what made them and their hash.

    python benchmarks/ship_weights.py runs/pretrained/finola_mfw720_c768_r8 finola_mfw720_c768_r8 --data "..."
    finola calibrate --weights finola/pretrained/finola_mfw720_c768_r8.safetensors --data TRAIN

The second writes the codec's tables and the components of q, which belong to the weights by their hash.
"""

import argparse
import json
from pathlib import Path

import torch

from finola.files import write_json
from finola.registry import model_config, pretrained_path
from finola.weights import load_weights, save_weights, weights_hash

LIMIT = 24 * 2**20  # bytes of all shipped weights together
LICENCE = "Trained on images of ImageNet and COCO; for non-commercial research, see the terms in LICENSE."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("name", help="the registered model")
    parser.add_argument("--data", required=True, help="what it was trained on, in words")
    parser.add_argument("--note", default="", help="what else a reader must know")
    parser.add_argument("--before", type=Path, nargs="+", default=[], metavar="CARD",
                        help="cards of the runs whose weights it went on from, the first one first")
    args = parser.parse_args()
    result = json.loads((args.run / "result.json").read_text())
    model = load_weights(args.run / "weights.safetensors")
    if model.config != model_config(args.name):
        raise SystemExit(f"{args.run}: its configuration is not that of {args.name}")
    path = pretrained_path(args.name)
    save_weights(model, path, {"model": args.name, "licence": LICENCE}, dtype=torch.float16)
    total = sum(file.stat().st_size for file in path.parent.glob("*.safetensors"))
    if total > LIMIT:
        raise SystemExit(f"{path.parent}: {total} bytes of weights, more than the {LIMIT} allowed")
    card = {
        "model": args.name, "sha256": weights_hash(path), "bytes": path.stat().st_size, "licence": LICENCE,
        "data": args.data, "note": args.note, "recipe": result["recipe"], "settings": result["settings"],
        "seed": result["settings"]["seed"], "steps": result["step"], "hours": round(result["seconds"] / 3600, 2),
        "images_per_second": result["images_per_second"], "hardware": result["hardware"], "torch": result["torch"],
        "commit": result["commit"], "val_psnr_while_training": result["val_psnr"], "history": result["history"],
    }
    card["runs"] = [summary(part) for part in [*(json.loads(before.read_text()) for before in args.before), card]]
    write_json(path.with_suffix(".json"), card)
    print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, sha256 {card['sha256'][:12]}")


def summary(card: dict) -> dict:
    """What a run took and reached."""
    images = card["steps"] * card["settings"]["optim"]["batch_size"]
    return {key: card[key] for key in ("commit", "hours", "val_psnr_while_training")} | {"images": images}


if __name__ == "__main__":
    main()
