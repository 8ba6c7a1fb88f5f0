"""Pre-train by every method on the same budget, probe and fine-tune each encoder, and write the table.

    python benchmarks/selfsupervised.py results/selfsupervised_imagenette_64px \\
        --data IMAGENETTE/train --val IMAGENETTE/val

The recipes are the Imagenette twins, scaled down further to what two CPU cores do in an hour: 64-px images, the
smallest encoders, one transformer block in the decoders of masked FINOLA-B and of MAE, 12 epochs. Probes see centre
squares, so that the frozen encoder's features are computed once. Runs lie in --runs; those that have finished are kept,
one that was stopped is resumed, so several processes may share the work (--methods). RESULT.json holds every run's
result.json, RESULT.md the table, RESULT.png the images of the pre-training.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from PIL import Image

from finola.drawing import stack
from finola.factory import create_model
from finola.files import atomic_write, write_json
from finola.weights import save_weights

SMALL = ["--data.image_size", "64", "--data.resident", "true", "--data.resident_size", "96"]
PRETRAIN = [*SMALL, "--optim.epochs", "12", "--optim.batch_size", "64", "--optim.warmup_epochs", "1",
            "--trainer.val_every", "4", "--trainer.knn_every", "1"]
ADAMW = ["--optim.base_lr", "4e-3"]
BLOCK = ["--model.block_size", "2"]
METHODS = {  # name -> recipe of pre-training, what changes in it, encoder for the probes
    "untrained encoder": (None, [], "w720"),
    "FINOLA": ("default", [*ADAMW, "--model.embed_dim", "512", "--model.map_size", "4",
                           "--model.decoder_widths", "[128, 64, 32, 16, 16]"], "w720"),
    "masked FINOLA-E": ("masked_e_w720", [*ADAMW, *BLOCK], "w720"),
    "masked FINOLA-B": ("masked_b_w720", [*ADAMW, *BLOCK, "--model.decoder_depth", "1"], "w720"),
    "masked FINOLA-B, 36 epochs": ("masked_b_w720", [*ADAMW, *BLOCK, "--model.decoder_depth", "1",
                                                     "--optim.epochs", "36", "--trainer.val_every", "12"], "w720"),
    "MoCo-v2": ("moco_w720", [], "w720"),
    "MAE, ViT-tiny": ("mae_tiny", [*ADAMW, "--model.decoder_depth", "1"], "vit_tiny"),
    "supervised from scratch": ("supervised_w720", ADAMW, None),
}
FIXED = [*SMALL, "--data.augment", "false", "--optim.batch_size", "512"]
EVALUATIONS = {  # column -> command, recipe, what changes in it, the weights it starts from
    "lin": ("probe", "lin_{}", [*FIXED, "--optim.epochs", "60"], "pretraining"),
    "tran-1": ("probe", "tran1_{}", [*FIXED, "--data.policy", "null", "--optim.epochs", "20",
                                     "--optim.batch_size", "256", "--optim.warmup_epochs", "1"], "pretraining"),
    "tran-1-ft": ("finetune", "tran1_ft_{}", [*SMALL, "--optim.epochs", "4", "--optim.batch_size", "64",
                                              "--optim.base_lr", "2e-3", "--optim.warmup_epochs", "1"], "tran-1"),
}
VIT = {"tran1_vit_tiny": "tran1_default", "tran1_ft_vit_tiny": "finetune_default"}  # rows the paper does not have


def run(command: str, recipe: str, out: Path, args: argparse.Namespace, words: list[str]) -> dict:
    """One run to its end, unless it has ended before; its result.json. With --collect {} for one that has not."""
    result = out / "result.json"
    finished = result.exists() and json.loads(result.read_text())["finished"]
    if args.collect and not finished:
        return {}
    if not finished:
        if recipe in VIT:
            words = [*words, "--model.name", "vit_tiny_patch16_224+tran1"]
        subprocess.run([sys.executable, "-m", "finola.cli", command, f"imagenette/{VIT.get(recipe, recipe)}", "--data",
                        *args.data, "--val", *args.val, "--out", str(out), "--resume", *words], check=True)
    return json.loads(result.read_text())


def method_folder(name: str, args: argparse.Namespace) -> Path:
    return args.runs / name.lower().replace(",", "").replace(" ", "_")


def method(name: str, args: argparse.Namespace) -> dict:
    """Pre-training, probes and fine-tuning of one method: stage -> its result.json."""
    recipe, changes, encoder = METHODS[name]
    folder = method_folder(name, args)
    weights, results = {"pretraining": folder / "pretraining" / "weights.safetensors"}, {}
    if recipe is None:
        torch.manual_seed(0)
        save_weights(create_model("mobileformer_w720+lin", image_size=64, num_classes=1), weights["pretraining"])
    else:
        results["pretraining"] = run("train", recipe, folder / "pretraining", args, [*PRETRAIN, *changes])
    for column, (command, pattern, words, source) in EVALUATIONS.items() if encoder else ():
        start = ["--weights", str(weights[source]), *(["--new-head"] if source == "pretraining" else [])]
        results[column] = run(command, pattern.format(encoder), folder / column, args, [*words, *start])
        weights[column] = folder / column / "weights.safetensors"
    return results


def table(results: dict[str, dict]) -> str:
    lines = ["| method | PSNR, dB | k-NN | lin | tran-1 | tran-1-ft | pre-training, minutes | images/s |",
             "|---|---|---|---|---|---|---|---|"]
    for name, stages in results.items():
        first = stages.get("pretraining") or {}
        scores = [stages.get(column, {}).get("val_top1") for column in EVALUATIONS]
        scores[-1] = first.get("val_top1", scores[-1])
        numbers = [first.get("val_psnr"), first.get("val_knn"), *scores]
        cells = ["-" if number is None else f"{number:.1f}" for number in numbers]
        cells += [f"{first['seconds'] / 60:.1f}", f"{first['images_per_second']:.0f}"] if first else ["-", "-"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    runs = [run for stages in results.values() for run in stages.values() if run]
    commits = sorted({run["commit"][:12] for run in runs})
    return "\n".join(lines) + f"\n\n{runs[0]['hardware']}, torch {runs[0]['torch']}, commits {', '.join(commits)}\n"


def pictures(names: list[str], args: argparse.Namespace) -> Image.Image | None:
    """The pre-training panels of some methods under one another."""
    folders = [method_folder(name, args) / "pretraining" for name in names]
    panels = [Image.open(folder / "panel.png") for folder in folders if (folder / "panel.png").exists()]
    return stack(panels) if panels else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="path of the table, without a suffix")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--val", nargs="+", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/selfsupervised"))
    parser.add_argument("--collect", action="store_true", help="run nothing, write the table of what has finished")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    args = parser.parse_args()
    results = {name: method(name, args) for name in args.methods}
    write_json(args.result.with_suffix(".json"), results)
    with atomic_write(args.result.with_suffix(".md")) as path:
        path.write_text(table(results))
    if (picture := pictures(["FINOLA", "masked FINOLA-E", "masked FINOLA-B", "MAE, ViT-tiny"], args)) is not None:
        with atomic_write(args.result.with_suffix(".png")) as path:
            picture.save(path)
    print(table(results))


if __name__ == "__main__":
    main()
