"""Write docs/results.md out of results/*.json: every number in the docs comes from a file that a command wrote.

    python benchmarks/tables.py
"""

import json
from pathlib import Path

import numpy as np

from finola.files import atomic_write

ROOT = Path(__file__).parent.parent


def read(name: str) -> dict:
    return json.loads((ROOT / "results" / name).read_text())


def made_by(result: dict) -> str:
    commit = (result.get("commit") or "unknown")[:12]
    return f"{result['hardware']}, torch {result['torch']}, commit {commit}"


def reconstruction() -> str:
    result, baselines = read("shipped_imagenette.json"), read("baselines_imagenette.json")
    rows = [row | {"code": "**finola_mfw720_c768_r8**"} for row in result["scores"]]
    rows += [row for row in baselines["scores"] if row["code"] != "model"]
    lines = ["## Reconstruction", "",
             f"{result['images']} images of Imagenette's validation set at 128 px (shorter side resized by antialiased "
             "bicubic, centre square); PSNR is the mean over images.", "",
             "| code | numbers | PSNR, dB | SSIM |", "|---|---|---|---|"]
    lines += [f"| {r['code']} | {r['numbers']} | {r['psnr']:.2f} | {r['ssim']:.3f} |" for r in rows]
    return "\n".join([*lines, "", f"`finola eval`; {made_by(result)}; weights {result['sha256'][:12]}. "
                      f"The linear codes: `finola eval --baselines`; {made_by(baselines)}."])


def operator() -> str:
    result = read("operator_cpu.json")
    lines = ["## The operator on a CPU", "",
             "Rates over that of a plain matrix product of one line's shape, measured in the same run; peak memory of "
             "forward and backward in fp32 feature maps, output and incoming gradient included, matrices and their "
             "gradients aside.", "",
             "| C | map | batch | dtype | forward | forward + backward | peak | plain autograd's peak | literal loop |",
             "|---|---|---|---|---|---|---|---|---|"]
    lines += [f"| {r['channels']} | {r['size']}² | {r['batch']} | {r['dtype']} | {r['forward_of_product']:.2f} "
              f"| {r['forward_backward_of_product']:.2f} | {r['peak_maps']:.1f} | {r['plain_peak_maps']:.1f} "
              f"| {r['speedup_over_literal']:.1f}x slower |" for r in result["results"]]
    return "\n".join([*lines, "", f"`python benchmarks/operator_bars.py`; {made_by(result)}."])


def ablation() -> str:
    text = (ROOT / "results" / "autoregression_imagenette_64px.md").read_text()
    larger = (ROOT / "results" / "autoregression_imagenette_64px_map32.md").read_text()
    return ("## Autoregression models, scaled down\n\n64-px images of Imagenette, 256 channels, 8x8 maps, 3 epochs: "
            f"minutes on one CPU core.\n\n{text}\n"
            "![reconstructions](../results/autoregression_imagenette_64px.png)\n\n"
            f"The same on 32x32 maps, one epoch:\n\n{larger}\n"
            "The repetition, which knows no place, falls behind. Linear and norm+linear are not told apart by runs as "
            "short as these, and the linear model still converges on 32x32 maps.")


def pretraining() -> str:
    text = (ROOT / "results" / "selfsupervised_imagenette_64px.md").read_text()
    return "\n\n".join([
        "## Pre-training methods on one budget, scaled down",
        "Imagenette at 64 px, 12 epochs of pre-training, W720 or ViT-tiny, one transformer block in the decoders of B "
        "and MAE; linear and tran-1 probing on centre squares, four epochs of fine-tuning; top-1 in %. The supervised "
        "row is trained for the same 12 epochs. PSNR is that of the masked region, for FINOLA of the whole image.",
        text,
        "B leads E in linear probing, in k-NN and after fine-tuning, not in tran-1; after 12 epochs neither leads "
        "vanilla FINOLA, and all are within a few points of the untrained encoder: masked prediction has hardly "
        "begun. B rises with the length of the schedule (k-NN and linear probing at 36 epochs against 12). The "
        "paper trains vanilla FINOLA for 100 epochs and the masked ones for 1600, on 135 times as many images.",
        "`python benchmarks/selfsupervised.py`. Other work ran on the same two cores: the times are no measure of "
        "speed.", "![FINOLA, masked FINOLA-E, masked FINOLA-B, MAE](../results/selfsupervised_imagenette_64px.png)"])


def pretraining_cost() -> str:
    result = read("pretraining_cpu.json")
    lines = ["## Cost of pre-training", "",
             "Images per second of a whole training step in bf16, each model at its own image size, over that of MAE "
             "on ViT-base in the same run.", "",
             "| model | input | parameters, M | forward, GMACs | of MAE, ViT-base |", "|---|---|---|---|---|"]
    lines += [f"| {r['model']} | {r['input']} | {r['params'] / 1e6:.1f} | {r['forward_macs'] / 1e9:.2f} "
              f"| {r['of_mae_vit_base']:.2f} |" for r in result["results"]]
    lines += ["", f"`python benchmarks/pretraining.py`, batches of {result['batch_size']}; {made_by(result)}."]
    return "\n".join(lines)


def codec() -> str:
    """Kodak at one rate and the curves' image."""
    table = read("rd/target.json")
    lines = ["## The codec beside others", "",
             f"The {table['images']} Kodak images, whole files; each codec at the highest setting whose file stays "
             f"below {table['target']} bit per pixel, image by image.", "",
             "| codec | bit per pixel | PSNR, dB | MS-SSIM |", "|---|---|---|---|"]
    lines += [f"| {name} | {p['bpp']:.3f} | {p['psnr']:.2f} | {p['ms_ssim']:.3f} |"
              for name, p in table["codecs"].items()]
    lines += ["", f"`finola rd kodak --target {table['target']}`; {made_by(table)}.", "",
              *_parts_of_the_codec(table["target"]), "", "![rate and distortion](../results/rd/rd.png)"]
    return "\n".join(lines)


def _parts_of_the_codec(rate: float) -> list[str]:
    """What entropy coding and refinement are worth, from the curves."""
    files = {name: read(f"rd/{name}.json") for name in ("finola-paper", "finola-bits", "finola", "finola-refine10")}
    curves = {name: file["results"] for name, file in files.items()}
    fixed, coded, plain, refined = curves.values()
    rows = ["| bits a number | fixed length, bit per pixel | entropy coded | saved | PSNR, dB |",
            "|---|---|---|---|---|"]
    rows += [f"| {bits:.0f} | {long:.3f} | {short:.3f} | {100 * (1 - short / long):.0f} % | {psnr:.2f} |"
             for bits, long, short, psnr in zip(fixed["q"], fixed["bpp"], coded["bpp"], fixed["psnr"], strict=True)]
    before, after = (np.interp(rate, curve["bpp"], curve["psnr"]) for curve in (plain, refined))
    record = files["finola-refine10"]["record"]
    without, with_them = (files[name]["record"]["bd_rate_against_jpeg"] for name in ("finola", "finola-refine10"))
    return ["Entropy coding alone, the same numbers written shorter:", "", *rows, "",
            f"Ten steps of refinement: {after - before:+.2f} dB at {rate} bit per pixel ({before:.2f} to {after:.2f} "
            f"dB, between the points of the curves); BD-rate against JPEG {without:+.0f} % without, {with_them:+.0f} % "
            f"with them. `finola rd kodak --refine 10`; {made_by(record)}."]


def detection() -> str:
    """The two runs that fit coco128, and the detectors' speed."""
    names = {"detr": "DETR, MF-Dec-211, W720", "mask_rcnn": "Mask R-CNN, W720"}
    lines = ["## Detection", "",
             "coco128's 128 images, trained on for an hour and a half and scored on the same images: a check that "
             "the pipeline learns, no measure of quality. COCO's average precision in %, in training's validation, in "
             "batches and bf16, and by `finola detect eval`, one image at a time in fp32.", "",
             "| model | recipe | epochs | box AP | mask AP | eval: box AP | mask AP | hours |",
             "|---|---|---|---|---|---|---|---|"]
    for key, name in names.items():
        run, scores = read(f"detection/{key}/result.json"), read(f"detection/{key}/scores.json")
        masks = (f"{run['val_mask_ap']:.1f}", f"{100 * scores['mask_ap']:.1f}") if "mask_ap" in scores else ("-", "-")
        lines.append(f"| {name} | {run['recipe']} | {run['history'][-1]['epoch'] + 1} | {run['val_box_ap']:.1f} "
                     f"| {masks[0]} | {100 * scores['box_ap']:.1f} | {masks[1]} | {run['seconds'] / 3600:.1f} |")
    lines += ["", f"`finola detect train`, `finola detect eval`; {made_by(run)}. Other work ran on the same cores."]
    for key, name in names.items():
        lines += ["", f"![{name}: found objects](../results/detection/{key}/panel.png)", "",
                  f"![{name}: curve](../results/detection/{key}/curve.png)"]
    speed = read("detection_cpu.json")
    height, width = speed["size"]
    lines += ["", f"Inference on one image of {height}x{width}, random weights, over torchvision's Faster R-CNN "
              "R50-FPN in the same run; memory is what model and detection take beside Python and the libraries.", "",
              "| model | parameters, M | GMACs | latency, ms | of Faster R-CNN | memory, MiB | of Faster R-CNN |",
              "|---|---|---|---|---|---|---|"]
    lines += [f"| {r['model']} | {r['params'] / 1e6:.1f} | {r['macs'] / 1e9:.1f} | {r['latency_ms']:.0f} "
              f"| {r['of_reference']['latency']:.2f} | {r['memory_mib']:.0f} | {r['of_reference']['memory']:.2f} |"
              for r in speed["results"]]
    return "\n".join([*lines, "", f"`python benchmarks/detection.py`; {made_by(speed)}."])


def analysis() -> str:
    pictures = {"mirror": "the mirror through the mean: 2m - q reverses the colours, the printed 2q - m does not",
                "components": "q projected on its first K principal components",
                "curvature": "peak curvature of FINOLA and masked FINOLA, trained alike for 12 epochs at 64 px",
                "equations": "residual of the recursion, and how far the two paths differ"}
    lines = ["## Analysis", "", "`finola inspect`; numbers in results/inspect/*.json.", "",
             "![growth](../results/inspect/growth.gif)"]
    for name, words in pictures.items():
        lines += ["", f"![{name}](../results/inspect/{name}.png)", "", f"*{words}*"]
    return "\n".join(lines)


def card() -> str:
    """The model card of the shipped weights."""
    weights = json.loads((ROOT / "finola" / "pretrained" / "finola_mfw720_c768_r8.json").read_text())
    scores = read("shipped_imagenette.json")["scores"][0]
    curve = [f"| {h['epoch'] + 1} | {h['step']} | {h['train_psnr']:.2f} | {h['val_psnr']:.2f} |"
             for h in weights["history"]]
    return "\n".join([
        f"# Model card: {weights['model']}", "", "Written by `python benchmarks/tables.py`.", "",
        "An autoencoder for 128-px squares: 768 numbers in q, an 8x8 map, a Mobile-Former W720 as encoder. Meant for "
        "trying the method, for tests and as a start; not for images that matter.", "",
        f"- **Weights**: fp16 safetensors, {weights['bytes'] / 2**20:.1f} MiB, sha256 `{weights['sha256']}`",
        f"- **Recipe**: `{weights['recipe']}`, seed {weights['seed']}, {weights['steps']} steps of "
        f"{weights['settings']['optim']['batch_size']} images", f"- **Data**: {weights['data']}",
        f"- **Hardware**: {weights['hardware']}, torch {weights['torch']}, {weights['hours']} hours, "
        f"{weights['images_per_second']:.0f} images/s; commit {weights['commit']}",
        f"- **Note**: {weights['note']}",
        f"- **Scores** on Imagenette's validation set, 128 px, fp16 weights: PSNR {scores['psnr']:.2f} dB (of the "
        f"pooled error {scores['psnr_pooled']:.2f} dB, of 8-bit images {scores['psnr_8bit']:.2f} dB), SSIM "
        f"{scores['ssim']:.3f}",
        f"- **Licence of the images**: {weights['licence']}",
        "- **Limits**: fine detail, faces and text are lost. The training set is small and holds ten classes for the "
        "most part; other images fare worse.", "",
        "| epoch | step | training PSNR, dB | validation PSNR, dB |", "|---|---|---|---|", *curve, "",
        "![training curve](../results/shipped_training_curve.png)"])


def main() -> None:
    with atomic_write(ROOT / "docs" / "model-card.md") as path:
        path.write_text(card() + "\n")
    text = "\n\n".join(["# Results", "Written by `python benchmarks/tables.py` from results/*.json.",
                        reconstruction(), codec(), analysis(), operator(), ablation(), pretraining(),
                        pretraining_cost(), detection()])
    with atomic_write(ROOT / "docs" / "results.md") as path:
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
