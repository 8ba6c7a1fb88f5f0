"""Train several recipes with the same overrides, one after the other, and write their table.

    python benchmarks/ablation.py results/autoregression_imagenette \
        imagenette/autoregression_repeat_16 imagenette/autoregression_repeat_pos_16 \
        imagenette/autoregression_linear_16 imagenette/autoregression_norm_linear_16 \
        --data IMAGENETTE/train --val IMAGENETTE/val -- --optim.epochs 5

Each run's folder lies beside the table's in runs/; a run that was stopped is resumed. RESULT.json holds what every
run's result.json says, RESULT.md the table, RESULT.png the images.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from PIL import Image

from finola.drawing import stack
from finola.files import atomic_write
from finola.training.recipe import load_recipe


def train(recipe: str, args: argparse.Namespace, overrides: list[str]) -> Path:
    """Run one recipe to its end; a run that does not converge has a result too."""
    out = args.runs / args.result.name / recipe
    command = [sys.executable, "-m", "finola.cli", "train", recipe, "--data", *args.data, "--val", *args.val,
               "--out", str(out), "--resume", *overrides]
    subprocess.run(command, check=False)
    if not (out / "result.json").exists():
        raise SystemExit(f"{recipe}: the run left no result.json; see its messages above")
    return out


def table(rows: list[dict]) -> str:
    lines = ["| recipe | val PSNR, dB | paper, full scale | converged | steps | minutes |", "|---|---|---|---|---|---|"]
    for row in rows:
        paper = load_recipe(row["recipe"]).paper.psnr
        psnr = f"{row['val_psnr']:.2f}" if row["val_psnr"] is not None else "-"
        converged = "yes" if row["converged"] else "no"
        lines.append(f"| {row['recipe']} | {psnr} | {paper or 'does not converge'} | {converged} | {row['step']} "
                     f"| {row['seconds'] / 60:.1f} |")
    first = rows[0]
    return "\n".join(lines) + f"\n\n{first['hardware']}, torch {first['torch']}, commit {first['commit']}\n"


def pictures(folders: list[Path]) -> Image.Image | None:
    """The runs' panels under one another, in the order of the table."""
    panels = [Image.open(folder / "panel.png") for folder in folders if (folder / "panel.png").exists()]
    return stack(panels) if panels else None


def main() -> None:
    argv, overrides = sys.argv[1:], []
    if "--" in argv:
        cut = argv.index("--")
        argv, overrides = argv[:cut], argv[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="path of the table, without a suffix")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--val", nargs="+", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    folders = [train(recipe, args, overrides) for recipe in args.recipes]
    rows = [json.loads((folder / "result.json").read_text()) for folder in folders]
    with atomic_write(args.result.with_suffix(".json")) as path:
        path.write_text(json.dumps({"overrides": overrides, "runs": rows}, indent=1) + "\n")
    with atomic_write(args.result.with_suffix(".md")) as path:
        path.write_text(table(rows))
    if (picture := pictures(folders)) is not None:
        with atomic_write(args.result.with_suffix(".png")) as path:
            picture.save(path)
    print(table(rows))


if __name__ == "__main__":
    main()
