"""Write docs/results.md out of results/*.json: every number in the docs comes from a file that a command wrote.

    python benchmarks/tables.py
"""

import json
from pathlib import Path

import numpy as np

from finola.cli.card import front_matter
from finola.codec.codec import REFINE
from finola.codec.rd import bd_rate, from_compressai
from finola.files import atomic_write
from finola.registry import PRETRAINED_FOLDER, model_config

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
                      f"The linear codes: `finola eval --baselines`; {made_by(baselines)}.", "",
                      "![training curve](../results/shipped_training_curve.png)"])


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


def throughput() -> str:
    result = read("throughput_cpu.json")
    rates = result["images_per_second"]
    eager, compiled = rates["step without data"], rates["step without data, compiled"]
    parts = ("data", "encoder and pooling", "autoregression", "decoder")
    lines = ["## A training step of the shipped recipe", "",
             f"Images per second in bf16, batches of {result['batch_size']}, forward and backward, in one run: the "
             f"whole step {rates['step']:.0f}; compiled, it is {compiled / eager:.2f} times as fast ({compiled:.0f} "
             f"beside {eager:.0f}, the data left out). Its parts:", "", "| part | images/s |", "|---|---|"]
    lines += [f"| {name} | {rates[name]:.0f} |" for name in parts]
    return "\n".join([*lines, "", f"`python benchmarks/throughput.py --data imagenette160/train`; {made_by(result)}."])


def codec() -> str:
    """Kodak and squares of ImageNet at some rates, by both protocols, and what papers report."""
    kodak, imagenet = read("rd/target.json"), read("rd_imagenet/target.json")
    curves = read("rd/jpeg2000.json")["record"]
    avif = read("rd/avif.json")
    return "\n".join([
        "## The codec beside others", "",
        "Two protocols. *Fixed*: every image at one setting, means over the images, interpolated in the logarithm of "
        "the rate between the settings below and above; papers do this. *Per image*: each image at its highest setting "
        "below the rate, interpolated for each image between that and the next. Beside them the per-image choice as it "
        "is, without interpolation: its rate in whole files and in payloads (the coded data without headers and "
        "tables), and its PSNR. Rates of the first two columns count whole files. "
        "Images out of reach count as their smallest or largest file.", "",
        f"### Kodak, {kodak['images']} whole images", "", *_rates(kodak),
        f"`finola rd kodak {_targets(kodak)} --literature`; {made_by(kodak)}.{_missing(kodak)}", "",
        f"### ImageNet, {imagenet['images']} squares of {imagenet['crop']} px", "",
        "Every tenth image of imagenet1k-sample in the order of paths (places 0, 10, 20 ...), shorter side resized, "
        f"centre square. {_seen()} The images had been JPEG before, at quality 90 and 288 px.", "", *_rates(imagenet),
        f"`finola rd imagenet1k-sample --crop {imagenet['crop']} --limit {imagenet['images']} {_targets(imagenet)}`; "
        f"{made_by(imagenet)}.{_missing(imagenet)}", "",
        *_paper_table(kodak, imagenet), "", *_literature(kodak), "", *_options(), "", *_parts_of_the_codec(), "",
        *_refinement(kodak), "",
        "![rate and distortion](../results/rd/rd.png)", "",
        f"BD-rate of finola against JPEG, over the PSNR that both curves cover: {_bd_rate('jpeg', 'finola'):+.0f} %. "
        f"`finola rd kodak --out results/rd --literature`; JPEG 2000: {made_by(curves)}; the other curves "
        f"are of other runs, AVIF's ({avif['description']}): {made_by(avif['record'])}.", "",
        *first_stages()])


def _bd_rate(anchor: str, codec: str) -> float:
    curves = (from_compressai(read(f"rd/{name}.json")["results"]) for name in (anchor, codec))
    found = bd_rate(*curves)
    assert found is not None  # the two cover the same range
    return found


def _targets(table: dict) -> str:
    return f"--target {' '.join(table['targets'])}"


def _missing(table: dict) -> str:
    """Which rows have not been run."""
    codecs = {row["codec"] for rows in table["targets"].values() for row in rows}
    codecs |= {"finola", "finola-paper", "finola-bits", "jpeg", "webp", "jpeg2000", "avif"}
    lacks = [f"{', '.join(sorted(codecs - {row['codec'] for row in rows}))} at {rate}"
             for rate, rows in table["targets"].items() if codecs - {row["codec"] for row in rows}]
    return f" Not run yet: {'; '.join(lacks)}." if lacks else ""


def _rates(table: dict) -> list[str]:
    lines = []
    for rate, rows in table["targets"].items():
        lines += [f"At {rate} bit per pixel:", "",
                  "| codec | fixed, dB | per image, dB | below: files | payloads | PSNR, dB | MS-SSIM |",
                  "|---|---|---|---|---|---|---|"]
        for row in rows:
            single, chosen = row["per_image"], row["per_image"]["chosen"]
            out = single["above_target"] + single["below_target"]
            note = f" ({out} of {table['images']} images out of reach)" if out else ""
            lines.append(f"| {row['codec']} | {_decibels(row['fixed']['psnr'])} | {single['psnr']:.2f}{note} "
                         f"| {chosen['bpp']:.4f} | {chosen['payload_bpp']:.4f} | {chosen['psnr']:.2f} "
                         f"| {chosen['ms_ssim']:.3f} |")
        lines.append("")
    mode = table["paper_mode"]
    lines += [f"The paper's mode, 4 bits for every number and no entropy coding (`finola-paper` at 4): "
              f"{mode['payload_bpp']:.4f} bit per pixel of payload, {mode['bpp']:.4f} of files with their 28 bytes of "
              f"header and checksum, {mode['psnr']:.2f} dB.", ""]
    return lines


def _decibels(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _paper_table(kodak: dict, imagenet: dict) -> list[str]:
    """The paper's table:recon-baselines (b), with ours under it."""
    def jpeg(table: dict, rate: str) -> str:
        row = next(row for row in table["targets"][rate] if row["codec"] == "jpeg")
        return _decibels(row["fixed"]["psnr"])

    modes = [table["paper_mode"] for table in (imagenet, kodak)]
    ours = " | ".join(f"{mode['payload_bpp']:.2f} | {mode['psnr']:.2f}" for mode in modes)
    return ["### The paper's table (b)", "",
            "| | ImageNet, bit per pixel | PSNR | Kodak, bit per pixel | PSNR |", "|---|---|---|---|---|",
            "| JPEG, as printed | 0.50 | 24.5 | 0.20 | 24.0 |", "| FINOLA, as printed | 0.19 | 24.9 | 0.19 | 25.6 |",
            f"| JPEG of Pillow, measured here, fixed setting | 0.50 | {jpeg(imagenet, '0.5')} | 0.19 "
            f"| {jpeg(kodak, '0.19')} |",
            f"| finola's shipped weights, the paper's mode, payload | {ours} |", "",
            "The paper's JPEG is weaker than Pillow's with optimised Huffman tables; how it was made is not said. The "
            "paper's model has 3,072 numbers for 256x256 pixels and was trained on ImageNet for 100 epochs; the "
            "shipped one has 768 for 128x128, which is the same rate, and was trained for hours on two CPU cores."]


def _literature(table: dict) -> list[str]:
    rates = ["0.125", "0.19", "0.25"]
    lines = ["### What papers report on Kodak", "",
             "Figures only, PSNR in dB at a fixed setting, interpolated in the logarithm of the rate between the "
             "points of the source; none of these was run here. They train for 1.8 to 5 million steps, or, COOL-CHIC "
             "and C3, on each image by itself.", "",
             f"| codec | {' | '.join(rates)} bit per pixel | paper | source of the figures |",
             "|---|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {' | '.join(_decibels(row['psnr'].get(rate)) for rate in rates)} | {row['paper']} "
              f"| {row['source']} |" for row in table["literature"]]
    return lines


def _options() -> list[str]:
    result = read("rd/options.json")
    rates = list(result["results"][0]["psnr"])
    lines = ["### Options of the other codecs", "",
             f"{result['images']} Kodak images at a fixed setting, interpolated; each codec first as `finola rd` runs "
             "it, then with one option changed. PSNR in dB.", "",
             f"| codec | options | {' | '.join(rates)} bit per pixel | seconds to write |", "|---|---|---|---|---|"]
    for row in result["results"]:
        changed = ", ".join(f"{key}={value}" for key, value in row["changed"].items())
        options = f"with {changed}" if changed else f"**{row['options'].partition('Pillow, ')[2]}**"
        psnr = " | ".join(_decibels(row["psnr"][rate]) for rate in rates)
        lines.append(f"| {row['codec']} | {options} | {psnr} | {row['encoding_time']:.2f} |")
    ours = {row["codec"]: row["psnr"] for row in result["results"] if not row["changed"]}
    missed = max(row["psnr"][rate] - ours[row["codec"]][rate] for row in result["results"] for rate in rates)
    return [*lines, "", f"No other option would add more than {missed:.2f} dB.", "",
            f"`python benchmarks/codec_options.py kodak --limit {result['images']}`, Pillow "
            f"{result['pillow']}; {made_by(result)}. Other work ran on the same cores."]


def _parts_of_the_codec() -> list[str]:
    """What entropy coding is worth, from the curves."""
    fixed, coded = (read(f"rd/{name}.json")["results"] for name in ("finola-paper", "finola-bits"))
    rows = ["| bits a number | fixed length, bit per pixel | entropy coded | saved | PSNR, dB |",
            "|---|---|---|---|---|"]
    rows += [f"| {bits:.0f} | {long:.3f} | {short:.3f} | {100 * (1 - short / long):.0f} % | {psnr:.2f} |"
             for bits, long, short, psnr in zip(fixed["q"], fixed["bpp"], coded["bpp"], fixed["psnr"], strict=True)]
    return ["### Parts of the codec", "", "Entropy coding alone, the same numbers written shorter:", "", *rows]


def _refinement(table: dict) -> list[str]:
    """What the step of refinement is worth, and how long writing takes beside reading in the same run."""
    lines = [f"The step of refinement that is taken unless told, {table['images']} Kodak images at a fixed setting:",
             "", "| bit per pixel | steps | PSNR, dB | MS-SSIM | writing takes, in times of reading |",
             "|---|---|---|---|---|"]
    for rate, rows in table["targets"].items():
        named = {row["codec"]: row for row in rows}
        for steps, row in ((0, named["finola-refine0"]), (REFINE, named["finola"])):
            chosen = row["per_image"]["chosen"]
            lines.append(f"| {rate} | {steps} | {row['fixed']['psnr']:.2f} | {row['fixed']['ms_ssim']:.3f} "
                         f"| {chosen['encoding_time'] / chosen['decoding_time']:.1f} |")
    return [*lines, "", f"`finola rd kodak {_targets(table)} --refine 0`; {made_by(table)}."]


def first_stages() -> list[str]:
    """The paper's table:recon-baselines (a) and what belongs beside it."""
    result = read("first_stages_cpu.json")
    lines = ["## First stages of latent diffusion", "",
             "Codes of one 256-px image. PSNR and rFID marked *literature* were not measured here: no weights can be "
             "had on the machine that made this table, and those stages were built with random ones, which cost the "
             "same. A number of the code counts as 16 bits unless it is an index or said otherwise. Most of these were "
             "trained against a discriminator too, which costs PSNR for a better rFID; FINOLA for squared error.",
             "",
             "| first stage | numbers | bits | PSNR, dB | rFID | of which images, by which source |",
             "|---|---|---|---|---|---|"]
    for row in result["results"]:
        length = f"| {row['name']} | {row['numbers']:,} | {row['bits']:,} "
        if measured := row["measured"]:
            lines.append(f"{length}| {measured['psnr']:.2f}, measured | - | {measured['images']} squares of "
                         f"{measured['data']} |")
        lines += [length + _quality(row["literature"])] if row["literature"] else []
        lines += [f"{length}| - | - | no figure found |"] if not (measured or row["literature"]) else []
    lines += [f"| {name} | - | - {_quality(entry)}" for name, entry in result["literature_alone"].items()]
    lines += ["", "| first stage | parameters, M | GMACs, encode + decode | ms, encode + decode | memory, MiB "
              "| KL f8's MACs over it | KL f8's time over it | KL f8's memory over it |",
              "|---|---|---|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {row['params'] / 1e6:.2f} "
              f"| {row['encode_macs'] / 1e9:.1f} + {row['decode_macs'] / 1e9:.1f} "
              f"| {row['encode_ms']:.0f} + {row['decode_ms']:.0f} | {row['memory_mib']:.0f} "
              f"| {row['reference_over_this']['macs']:.1f} | {row['reference_over_this']['latency']:.1f} "
              f"| {row['reference_over_this']['memory']:.1f} |" for row in result["results"]]
    shapes = "; ".join(f"{name} {entry['feature_dimension']}, {entry['psnr']} dB" for name, entry in
                       result["paper"].items())
    command = (f"python benchmarks/first_stages.py --data imagenet1k-sample --limit 100 --turns {result['turns']} "
               "--out results/first_stages_cpu.json")
    return [*lines, "", f"`{command}`; medians of {result['turns']} turns; {made_by(result)}.", "",
            f"The paper's table (a) prints: {shapes}. Its 19.9 is what arXiv:2112.10752 gives for VQGAN f16 (rFID "
            "4.98), whose codes are 16x16 indices of vectors of 256 numbers. Its 24.1 is the row *KL f16, d=16* of "
            "CompVis/latent-diffusion (24.08 dB), not Stable Diffusion's KL f8 (24.19 dB): a latent of 16x16x16 = "
            "4,096 numbers. The 16x16x256 = 65,536 printed for it is then a slip; FINOLA's 3,072 are fewer by a "
            "quarter, not by a factor of 21."]


def _quality(entry: dict) -> str:
    rfid = "-" if entry["rfid"] is None else f"{entry['rfid']:.2f}"
    return f"| {entry['psnr']:.2f}, literature | {rfid} | {entry['data']}; {entry['source']} |"


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


def _seen() -> str:
    """Whether the shipped weights know the squares that they are judged by."""
    *before, last = shipped()["runs"]
    return (f"The last run of the shipped weights, over {last['images']:,} images, left these out; the shorter ones "
            f"before, over {sum(run['images'] for run in before):,}, did not.")


def shipped() -> dict:
    """The card of the shipped weights."""
    return json.loads((PRETRAINED_FOLDER / "finola_mfw720_c768_r8.json").read_text())


def card() -> str:
    """The model card of the shipped weights, which is also their README.md on the Hub."""
    weights = shipped()
    header = front_matter(model_config(weights["model"]), "finola-weights", metrics=["psnr", "ssim"],
                          datasets=["imagenette", "imagenet-1k", "coco"])
    terms = (PRETRAINED_FOLDER / "LICENSE").read_text().partition("\n\n")[2].rstrip()
    scores = read("shipped_imagenette.json")["scores"][0]
    curve = [f"| {h['epoch'] + 1} | {h['step']} | {h['train_psnr']:.2f} | {h['val_psnr']:.2f} |"
             for h in weights["history"]]
    return "\n".join([
        header, f"# Model card: {weights['model']}", "", "Written by `python benchmarks/tables.py`.", "",
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
        "- **Limits**: fine detail, faces and text are lost. The training set is small and holds ten classes for the "
        "most part; other images fare worse.", "",
        "| epoch | step | training PSNR, dB | validation PSNR, dB |", "|---|---|---|---|", *curve, "",
        *_runs(weights["runs"], weights["images_per_second"]), "", "## Licence", "", terms])


def _runs(runs: list[dict], images_per_second: float) -> list[str]:
    """The runs that the weights went through, and how many images more a decibel would take."""
    seen = np.cumsum([run["images"] for run in runs])
    psnr = [run["val_psnr_while_training"] for run in runs]
    lines = ["Runs, each from the weights of the one before:", "",
             "| run | images | images so far | hours | validation PSNR, dB |", "|---|---|---|---|---|"]
    lines += [f"| {i} | {run['images']:,} | {total:,} | {run['hours']:.1f} | {run['val_psnr_while_training']:.2f} |"
              for i, (run, total) in enumerate(zip(runs, seen, strict=True), 1)]
    doubling = (psnr[-1] - psnr[-2]) / np.log2(seen[-1] / seen[-2])
    rest = seen[-1] * 2 ** ((24 - psnr[-1]) / doubling) - seen[-1]
    hours = rest / images_per_second / 3600
    return [*lines, "", f"From run {len(runs) - 1} to {len(runs)} twice the images gave {doubling:.2f} dB. If that "
            f"goes on, 24 dB is {rest / 1e6:.1f} million images away, {hours:.0f} hours of two idle cores."]


def main() -> None:
    with atomic_write(ROOT / "docs" / "model-card.md") as path:
        path.write_text(card() + "\n")
    text = "\n\n".join(["# Results", "Written by `python benchmarks/tables.py` from results/*.json.",
                        reconstruction(), codec(), analysis(), operator(), throughput(), pretraining_cost(),
                        detection()])
    with atomic_write(ROOT / "docs" / "results.md") as path:
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
