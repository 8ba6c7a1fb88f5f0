"""Run the experiments that test the paper's claims, and write docs/evidence.md out of what they gave.

    python benchmarks/evidence.py --data IMAGENETTE/train --val IMAGENETTE/val --coco COCO128 [--claims CLAIM ...]
    python benchmarks/evidence.py                                              docs/evidence.md alone

benchmarks/evidence.yaml lists the claims: what the paper says, the commands, the verdict and why. Runs go into --out
and are resumed there; what a command is asked to give is copied into results/evidence/, out of which the page is
written. A command may name files by a pattern.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import selfsupervised
import transfer
import yaml
from matplotlib.figure import Figure
from PIL import Image
from tables import made_by

from finola.analysis import law
from finola.drawing import rasterise
from finola.files import atomic_write
from finola.training.report import cells, markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "evidence"
PLACES = {"data": "TRAIN", "val": "VAL", "coco": "COCO128", "out": "OUT"}  # as commands name them on the page
VERDICTS = ("appears", "does not appear", "cannot be told here", "open")
HEAD = """# Evidence

The paper's claims, tested at a scale that some hours of a CPU can pay for: images of 64 px, small models, short
schedules. A verdict says what these runs show, and no more; what the paper's own scale would show is not known here.
Written by `python benchmarks/evidence.py` from results/evidence/; `make evidence` runs everything again."""


def main() -> int:
    claims = yaml.safe_load((ROOT / "benchmarks" / "evidence.yaml").read_text())
    names = [claim["claim"] for claim in claims]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="training images; without them the page alone is written")
    parser.add_argument("--val", help="validation images")
    parser.add_argument("--coco", help="the folder of coco128, for the claim transfer")
    parser.add_argument("--out", type=Path, default=Path("runs/evidence"), help="(%(default)s)")
    parser.add_argument("--claims", nargs="+", choices=names, default=names, metavar="CLAIM", help=", ".join(names))
    args = parser.parse_args()
    failed = []
    if args.data:
        if not args.val:
            parser.error("--val: missing; name the validation images")
        if "transfer" in args.claims and not args.coco:
            parser.error("--coco: missing; name the folder of coco128, or leave out transfer by --claims")
        failed = [claim["claim"] for claim in claims if claim["claim"] in args.claims and not run(claim, args)]
    with atomic_write(ROOT / "docs" / "evidence.md") as path:
        path.write_text(page(claims))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(claim: dict[str, Any], args: argparse.Namespace) -> bool:
    """The claim's commands, and what they gave copied; False where a command failed, which leaves out the rest."""
    for step in claim.get("runs", ()):
        words = [file for word in shlex.split(step["command"]) for file in expand(word.format(**vars(args)))]
        print("$", shlex.join(words), flush=True)
        program = ["-m", "finola.cli", *words[1:]] if words[0] == "finola" else [str(ROOT / words[1]), *words[2:]]
        if subprocess.run([sys.executable, *program], check=False).returncode:
            return False
        RESULTS.mkdir(parents=True, exist_ok=True)
        for kept, source in step["keep"].items():
            keep(Path(source.format(**vars(args))), RESULTS / kept, args)
    for kept, source in claim.get("plots", {}).items():
        PLOTS[kept](json.loads((RESULTS / source).read_text())).save(RESULTS / kept)
    return True


def keep(source: Path, kept: Path, args: argparse.Namespace) -> None:
    """Copy a result; in JSON, folders are called what the page calls them."""
    if source.suffix != ".json":
        shutil.copyfile(source, kept)
        return
    text = source.read_text()
    for name, place in PLACES.items():
        if folder := getattr(args, name):
            text = text.replace(str(folder), place)
    kept.write_text(text)


def expand(word: str) -> list[str]:
    """The files that a pattern names, or the word as it is."""
    return (sorted(glob.glob(word)) or [word]) if "*" in word else [word]


# --- the page ---


def page(claims: list[dict[str, Any]]) -> str:
    lines = [HEAD, "", "| claim | in the paper | verdict |", "|---|---|---|"]
    lines += [f"| [{claim['title']}](#{anchor(claim['title'])}) | {claim['tables']} | **{claim['verdict']}** |"
              for claim in claims]
    return "\n".join(lines) + "\n\n" + "\n\n".join(map(section, claims)) + "\n"


def anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def section(claim: dict[str, Any]) -> str:
    if claim["verdict"] not in VERDICTS:
        raise SystemExit(f"{claim['claim']}: verdict {claim['verdict']!r}, expected one of {', '.join(VERDICTS)}")
    parts = [f"## {claim['title']}", f"**The paper** ({claim['tables']}): {claim['paper'].strip()}",
             f"**What was run.** {claim['setting'].strip()}"]
    for step in claim.get("runs", ()):
        parts.append("```text\n" + step["command"].format(**PLACES) + "\n```")
        parts += [shown(kept) for kept in step["keep"]]
    parts += [shown(kept) for kept in claim.get("plots", ())]
    return "\n\n".join([*parts, f"**Verdict: {claim['verdict']}.** {claim['why'].strip()}"])


def shown(kept: str) -> str:
    """A kept result on the page: a table of the numbers, or the image."""
    path = RESULTS / kept
    if not path.exists():
        return "Not run yet."
    if path.suffix == ".json":
        return table(json.loads(path.read_text()))
    return f"![{path.stem}]({os.path.normpath(Path('..', 'results', 'evidence', kept))})"


def table(found: dict[str, Any]) -> str:
    """A result as Markdown, by what it holds."""
    what, rows = next(show(found) for key, show in TABLES.items() if key in found)
    return "\n".join([*markdown_table(rows), "", f"{what}, {made_by(found)}."])


def of_reproduce(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    return f"{found['seeds']} seed{'s' * (found['seeds'] > 1)}", cells(found)


def of_methods(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Of benchmarks/selfsupervised.py."""
    return f"{found['epochs']} epochs of pre-training", selfsupervised.cells(found)


def of_detectors(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Of benchmarks/transfer.py."""
    return f"{found['recipe']}, {found['epochs']} epochs", transfer.cells(found)


def of_law(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """Of finola inspect law and benchmarks/plain_autoencoder.py."""
    rows = [["maps", *law.HEAD], *([row["name"], *law.cells(row)] for row in found["maps"])]
    return f"{found['images'][0]} images fitted, {found['images'][1]} judged", rows


def of_curvature(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """The median over the images of some ranks, of z as it is and of z divided by its surfaces' deviation."""
    ranks = (1, 8, 64)

    def medians(rows: list[dict[str, Any]]) -> list[str]:
        return [f"{row['median']:.2f}" for row in rows if row["rank"] in ranks]

    head = ["model", "map", *(f"rank {rank}{how}" for how in ("", ", divided") for rank in ranks)]
    rows = [[model["label"], " x ".join(map(str, model["map"]["shape"])), *medians(model["raw"]),
             *medians(model["standardised"])] for model in found["models"]]
    return f"{found['images']} images", [head, *rows]


def of_embedding(found: dict[str, Any]) -> tuple[str, list[list[str]]]:
    mean, samples, mirror = found["mean"], found["samples"], found["mirror"]
    half = next(row for row in found["mixtures"]["shares"] if row["share"] == 0.5)
    rows = [
        ["its mean is decoded to an image that differs from gray by",
         f"{mean['deviation']['channels']:.1f} of 255 levels"],
        ["and from one colour by", f"{mean['deviation']['pixels']:.1f} levels"],
        *([f"{name}: correlation with the reconstruction, of values and of hues",
           f"{row['values']:+.2f}, {row['hues']:+.2f}"]
          for name, row in ((name, row["correlation_with_reconstruction"]) for name, row in mirror.items())),
        ["neighbouring pixels differ, in samples", f"{samples['roughness']:.1f} levels"],
        ["and in reconstructions", f"{samples['roughness_of_reconstructions']:.1f} levels"],
        ["half of two vectors each, beside half of their two reconstructions each",
         f"{half['psnr_to_mixed_reconstructions']:.2f} dB"],
        *([f"{row['components']} principal components explain of the variance",
           f"{100 * row['explained_variance']:.0f} %, {row['psnr']:.2f} dB"] for row in found["components"]["counts"]),
    ]
    return f"{mean['images']} images", [["of the space of q", "measured"], *rows]


TABLES = {"table": of_reproduce, "methods": of_methods, "maps": of_law, "models": of_curvature,
          "mixtures": of_embedding, "detectors": of_detectors}


# --- plots ---


def plot_channels(found: dict[str, Any]) -> Image.Image:
    """PSNR over the length of q, of the rows of table:ablation (a): the paper's and ours."""
    rows = [row for row in found["rows"] if row["name"].startswith("channels_")]
    ours = sorted((int(row["scaled_to"].split()[-2]), row["ours"]["psnr"]["mean"]) for row in rows)
    paper = sorted((int(row["name"].split("_")[1]), row["paper"]["psnr"]) for row in rows)
    figure = Figure(figsize=(6, 4), layout="constrained", dpi=110)
    axes = figure.subplots()
    for points, label in ((paper, "the paper, 256 px"), (ours, f"here, {rows[0]['scaled_to'].split(',')[0]}")):
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="numbers in q", ylabel="PSNR, dB")
    return finished(figure)


def plot_lengths(found: dict[str, Any]) -> Image.Image:
    """Linear probing over the epochs of pre-training, beside an encoder that was not trained."""
    methods = selfsupervised.METHODS
    scores = {row["name"]: statistics.fmean(row["scores"]["lin"]) for row in found["methods"] if row["scores"]["lin"]}
    figure = Figure(figsize=(6, 4), layout="constrained", dpi=110)
    axes = figure.subplots()
    for label in ("FINOLA", "masked FINOLA-E", "masked FINOLA-B"):
        points = [(selfsupervised.epochs_of(name, found["epochs"]), scores[name]) for name in scores
                  if methods[name].changes == methods[label].changes]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(scores["untrained encoder"], color="0.6", linestyle=":", label="untrained encoder")
    axes.set_xscale("log")
    axes.set_xticks([3, 10, 30], ["3", "10", "30"])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="epochs of pre-training", ylabel="linear probing, top-1 in %")
    return finished(figure)


def finished(figure: Figure) -> Image.Image:
    (axes,) = figure.axes
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return rasterise(figure)


PLOTS = {"channels.png": plot_channels, "lengths.png": plot_lengths}  # as evidence.yaml names them


if __name__ == "__main__":
    sys.exit(main())
