"""Pre-train by every method on one budget, probe and fine-tune each encoder, and write the table.

    python benchmarks/selfsupervised.py --data IMAGENETTE/train --val IMAGENETTE/val --out runs/pretraining
    python benchmarks/selfsupervised.py ... --methods "masked FINOLA-E" "masked FINOLA-B" --seeds 0 1 2

The recipes are the Imagenette twins, scaled down further to what a CPU core does in an hour: 64-px images, the smallest
encoders, one transformer block in the decoders of masked FINOLA-B and of MAE. Linear probes see centre squares, so that
the frozen encoder's features are computed once; tran-1 probes, fine-tuning and supervised training crop and mirror, no
more: the recipes' stronger augmentation is made for hundreds of epochs, and slows so few down. Fine-tuning runs in
float32, as the recipes' probing does: bf16 rounds away part of what tells the features of two images apart. Seed 0
alone is fine-tuned; of the lengths of q, the shorter schedule, the deeper decoder and the lower learning rate of
pre-training, none. The encoder that was not trained and FINOLA's after three times the epochs are fine-tuned at a
quarter of the learning rate too: it may favour one of them.
Runs lie in OUT, one folder for each method and seed; those that have finished are kept, one that was stopped is
resumed. OUT/pretraining.json holds the scores of all that have finished, of this call or an earlier one,
OUT/pretraining.md the table, OUT/pretraining.png images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from finola.cli.options import positive
from finola.drawing import stack
from finola.factory import create_model
from finola.files import atomic_write, write_json
from finola.provenance import record
from finola.training.report import markdown_table, score
from finola.weights import save_weights

PROBED = ("lin", "tran1")


@dataclass(frozen=True)
class Method:
    recipe: str | None  # of the pre-training; None: the encoder stays as it starts
    changes: tuple[str, ...] = ()
    encoder: str = "w720"
    length: float = 1.0  # of its schedule, in --epochs
    scores: tuple[str, ...] = (*PROBED, "finetuning")  # keys of SCORES


SMALL = ("--data.image_size", "64", "--data.resident", "true", "--data.resident_size", "96")
LIGHT = ("--data.crop_scale", "[0.35, 1]", "--data.policy", "null", "--optim.random_erasing", "0",
         "--optim.mixup", "0", "--optim.cutmix", "0")
ADAMW = ("--optim.base_lr", "4e-3")
MASKED = (*ADAMW, "--model.block_size", "2")
B = (*MASKED, "--model.decoder_depth", "1")
DEEPER, SLOWER = ("--model.decoder_depth", "4"), ("--optim.base_lr", "1e-3")  # said after a method's own
FINOLA = (*ADAMW, "--model.map_size", "4", "--model.decoder_widths", "[128, 64, 32, 16, 16]", "--model.embed_dim")
AT_TWO_RATES = (*Method.scores, "finetuning-slow")
METHODS = {
    "untrained encoder": Method(None, scores=AT_TWO_RATES),
    "FINOLA": Method("default", (*FINOLA, "512")),
    "FINOLA, 64 numbers": Method("default", (*FINOLA, "64"), scores=("lin",)),
    "FINOLA, 128 numbers": Method("default", (*FINOLA, "128"), scores=("lin",)),
    "FINOLA, 256 numbers": Method("default", (*FINOLA, "256"), scores=("lin",)),
    "masked FINOLA-E": Method("masked_e_w720", MASKED),
    "masked FINOLA-B": Method("masked_b_w720", B),
    "masked FINOLA-B, a third of the epochs": Method("masked_b_w720", B, length=1 / 3, scores=PROBED),
    "FINOLA, three times the epochs": Method("default", (*FINOLA, "512"), length=3, scores=AT_TWO_RATES),
    "masked FINOLA-E, three times the epochs": Method("masked_e_w720", MASKED, length=3),
    "masked FINOLA-B, three times the epochs": Method("masked_b_w720", B, length=3),
    "masked FINOLA-B, 4 blocks": Method("masked_b_w720", (*B, *DEEPER), scores=PROBED),
    "FINOLA, a quarter of the rate": Method("default", (*FINOLA, "512", *SLOWER), scores=PROBED),
    "masked FINOLA-E, a quarter of the rate": Method("masked_e_w720", (*MASKED, *SLOWER), scores=PROBED),
    "masked FINOLA-B, a quarter of the rate": Method("masked_b_w720", (*B, *SLOWER), scores=PROBED),
    "masked FINOLA-B, 4 blocks, a quarter of the rate": Method("masked_b_w720", (*B, *DEEPER, *SLOWER), scores=PROBED),
    "MoCo-v2": Method("moco_w720"),
    "MAE, ViT-tiny": Method("mae_tiny", (*ADAMW, "--model.decoder_depth", "1"), "vit_tiny"),
    "SimMIM, ViT-tiny": Method("simmim_base", (*ADAMW, "--model.name", "simmim_vit_tiny"), "vit_tiny"),
    "untrained ViT-tiny": Method(None, encoder="vit_tiny"),
    "supervised": Method("supervised_w720", (*ADAMW, *LIGHT), scores=()),  # its own head has learned
}
FINETUNING = (*LIGHT, "--trainer.precision", "32-true", "--optim.epochs", "5", "--optim.batch_size", "64",
              "--optim.warmup_epochs", "1", "--optim.base_lr")
SCORES = {  # stage -> command, recipe, what changes in it, the stage whose weights it starts from
    "lin": ("probe", "lin_{}", ("--data.augment", "false", "--optim.epochs", "60", "--optim.batch_size", "512"),
            "pretraining"),
    "tran1": ("probe", "tran1_{}", (*LIGHT, "--optim.epochs", "10", "--optim.batch_size", "256", "--optim.base_lr",
                                    "1e-3", "--optim.warmup_epochs", "1"), "pretraining"),
    "finetuning": ("finetune", "tran1_ft_{}", (*FINETUNING, "2e-3"), "tran1"),
    "finetuning-slow": ("finetune", "tran1_ft_{}", (*FINETUNING, "5e-4"), "tran1"),
}
ENCODERS = {"w720": "mobileformer_w720", "vit_tiny": "vit_tiny_patch16_224"}  # in names of recipes -> of models
VIT = {"tran1_vit_tiny": "tran1_default", "tran1_ft_vit_tiny": "finetune_default"}  # rows the paper does not have
COLUMNS = {"PSNR, dB": ("pretraining", "psnr"), "k-NN": ("knn", "knn"), "lin": ("lin", "top1"),
           "tran-1": ("tran1", "top1"), "tran-1-ft": ("finetuning", "top1"), "lr/4": ("finetuning-slow", "top1")}
OF_SUPERVISED = {"tran-1-ft": ("pretraining", "top1")}  # its head learns with it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR")
    parser.add_argument("--val", required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and the table")
    parser.add_argument("--epochs", type=positive, default=10, help="of pre-training (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED",
                        help="one run of a method for each (%(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD",
                        help="; ".join(METHODS))
    args = parser.parse_args()
    for seed in args.seeds:
        for name in args.methods:
            run_method(name, seed, args)
            write(collect(args.out, args.epochs, args.data), args.out)
    print((args.out / "pretraining.md").read_text())


# --- runs ---


def folder_of(name: str, seed: int, out: Path) -> Path:
    return out / name.lower().replace(",", "").replace(" ", "_") / f"seed{seed}"


def epochs_of(name: str, epochs: int) -> int:
    """A method's, out of those of --epochs."""
    return max(1, round(epochs * METHODS[name].length))


def run_method(name: str, seed: int, args: argparse.Namespace) -> None:
    """Pre-training, k-NN, probes and fine-tuning of one method and seed, as far as they have not finished."""
    method, folder = METHODS[name], folder_of(name, seed, args.out)
    weights = {"pretraining": folder / "pretraining" / "weights.safetensors"}
    same = ("--seed", str(seed))
    if method.recipe:
        epochs = epochs_of(name, args.epochs)
        words = (*SMALL, "--optim.epochs", str(epochs), "--optim.batch_size", "64", "--optim.warmup_epochs", "1",
                 "--trainer.val_every", str(max(1, epochs // 3)), *method.changes, *same)
        run("train", method.recipe, folder / "pretraining", words, args)
    elif not weights["pretraining"].exists():
        torch.manual_seed(seed)
        model = create_model(f"{ENCODERS[method.encoder]}+lin", image_size=64, num_classes=1)
        save_weights(model, weights["pretraining"])
    neighbours(weights["pretraining"], folder, args)
    for stage in method.scores:
        command, recipe, words, source = SCORES[stage]
        if command == "finetune" and seed:
            continue  # it costs as much as the pre-training
        start = ("--weights", str(weights[source]), *(("--new-head",) if source == "pretraining" else ()))
        run(command, recipe.format(method.encoder), folder / stage, (*SMALL, *words, *start, *same), args)
        weights[stage] = folder / stage / "weights.safetensors"


def run(command: str, recipe: str, out: Path, words: tuple[str, ...], args: argparse.Namespace) -> None:
    if has_finished(out):
        return
    if recipe in VIT:
        words = (*words, "--model.name", f"{ENCODERS['vit_tiny']}+tran1")
    call(command, f"imagenette/{VIT.get(recipe, recipe)}", "--data", args.data, "--val", args.val, "--out", str(out),
         "--resume", *words)


def neighbours(weights: Path, folder: Path, args: argparse.Namespace) -> None:
    out = folder / "knn.json"
    if not out.exists():
        call("eval", str(weights), "--knn", "--train", args.data, "--data", args.val, "--out", str(out))


def has_finished(run: Path) -> bool:
    result = run / "result.json"
    return result.exists() and json.loads(result.read_text())["finished"]


def call(*words: str | Path) -> None:
    """The command line, in a process of its own."""
    subprocess.run([sys.executable, "-m", "finola.cli", *words], check=True)


# --- the table ---


def collect(out: Path, epochs: int, data: str) -> dict[str, Any]:
    """The scores of all methods and seeds that are in OUT, method -> column -> one score for each seed."""
    methods, earlier = [], earlier_methods(out, epochs)
    for name in METHODS:
        if name in earlier and not folder_of(name, 0, out).parent.exists():
            methods.append(earlier[name])
            continue
        found = [stages_of(folder) for folder in sorted(folder_of(name, 0, out).parent.glob("seed*"))]
        columns = COLUMNS | (OF_SUPERVISED if name == "supervised" else {})
        scores = {column: [value for stages in found if (value := score_of(stages, *where)) is not None]
                  for column, where in columns.items()}
        runs = [stage for stages in found for stage in stages.values() if "commit" in stage]
        if any(scores.values()):
            methods.append({"name": name, "scores": scores, "commits": sorted({run["commit"] for run in runs}),
                            "hours": round(sum(run.get("seconds", 0) for run in runs) / 3600, 2)})
    return record(torch.device("cpu"), {"data": Path(data).resolve().parent.name, "epochs": epochs, "methods": methods})


def earlier_methods(out: Path, epochs: int) -> dict[str, dict[str, Any]]:
    """Method -> its row of an earlier table, which stays where its runs have been moved or deleted since."""
    path = out / "pretraining.json"
    table = json.loads(path.read_text()) if path.exists() else {"methods": [], "epochs": epochs}
    return {row["name"]: row for row in table["methods"]} if table["epochs"] == epochs else {}


def stages_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Stage -> result of those that have finished."""
    results = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/result.json")}
    if (folder / "knn.json").exists():
        results["knn"] = json.loads((folder / "knn.json").read_text())
    return {stage: result for stage, result in results.items() if result.get("finished", True)}


def score_of(stages: dict[str, dict[str, Any]], stage: str, name: str) -> float | None:
    result = stages.get(stage, {})
    return result.get("scores", {}).get("knn_top1") if stage == "knn" else score(result, name)


def cells(found: dict[str, Any]) -> list[list[str]]:
    """Head and rows: method | each column: mean ± deviation | hours."""
    return [["pre-training", *COLUMNS, "seeds", "hours"],
            *([row["name"], *(cell(row["scores"][column]) for column in COLUMNS),
               str(max(map(len, row["scores"].values()))), f"{row['hours']:.1f}"] for row in found["methods"])]


def cell(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}" if values else "-"


def write(found: dict[str, Any], out: Path) -> None:
    write_json(out / "pretraining.json", found)
    with atomic_write(out / "pretraining.md") as path:
        path.write_text("\n".join(markdown_table(cells(found))) + "\n")
    names = ("FINOLA", "masked FINOLA-E", "masked FINOLA-B", "MAE, ViT-tiny")
    panels = [folder_of(name, 0, out) / "pretraining" / "panel.png" for name in names]
    opened = [Image.open(panel) for panel in panels if panel.exists()]
    if opened:
        with atomic_write(out / "pretraining.png") as path:
            stack(opened).save(path)


if __name__ == "__main__":
    main()
