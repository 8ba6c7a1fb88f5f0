"""First stages of latent diffusion and FINOLA at 256 px: code, cost, latency and memory, beside KL f8 in one run.

    python benchmarks/first_stages.py --data imagenet1k-sample --limit 100 --out results/first_stages_cpu.json
    python benchmarks/first_stages.py --first-stage sd-vae sdxl-vae --data imagenet/val --out mine.json

What has no weights here is built with random ones, which cost the same, and its PSNR and rFID are those of the
literature, with source and data set. --first-stage adds folders as diffusers saves them; what has weights is scored on
--data. Latencies are medians of turns on one image, and ratios medians of the turns' ratios; small stages take turns
with KL f8 all together, large ones each by itself. Memory is that of a process of its own beyond Python and the
libraries.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

import finola
from finola.cli.options import open_limited, positive
from finola.data.loader import read_squares
from finola.evaluation.first_stages import (
    DiffusersStage,
    FinolaStage,
    FirstStage,
    Latency,
    cost,
    latencies,
    open_first_stage,
)
from finola.evaluation.memory import fresh_process, process_peak
from finola.evaluation.reconstruction import evaluate
from finola.files import write_json
from finola.provenance import record

SIZE, REFERENCE, SHIPPED = 256, "KL f8 (Stable Diffusion)", "FINOLA, shipped, 4 squares of 128 px"
MEBIBYTE = 2**20
LARGE = 200_000_000  # parameters; two such models need not be held at once
LDM = "CompVis/latent-diffusion README.md"
OPEN_IMAGES = "trained on OpenImages; the validation set is not named"


class Literature(NamedTuple):
    """PSNR in dB and rFID as a source gives them, None where it gives none; `data`: of which images."""

    psnr: float | None
    rfid: float | None
    data: str
    source: str


LITERATURE = {
    "VQGAN f16": Literature(20.83, 5.15, OPEN_IMAGES, LDM),
    "VQGAN f8": Literature(23.07, 1.14, OPEN_IMAGES, LDM),
    REFERENCE: Literature(24.19, 0.90, OPEN_IMAGES, LDM),
    "KL f16": Literature(24.08, 0.87, OPEN_IMAGES, LDM),
    "DC-AE f64c128": Literature(26.15, 0.22, "ImageNet val at 512 px",
                                "mit-han-lab/efficientvit applications/dc_ae/README.md"),
    "FINOLA (the paper's)": Literature(25.8, None, "ImageNet val, 256 px", "the paper, table:recon-baselines (a)"),
}
NEVER_RUN = {  # SDXL's is KL f8 with other weights; the rest are rows of other tables
    "KL f8, SDXL's weights": Literature(24.7, 4.42, "COCO 2017 val, 256 px", "model card of stabilityai/sdxl-vae"),
    "VQGAN f16 of taming-transformers": Literature(19.9, 4.98, "not named", "arXiv:2112.10752, Fig. 1"),
    "KL f8, Stable Diffusion's weights, on COCO": Literature(
        23.4, 4.99, "COCO 2017 val, 256 px", "model card of stabilityai/sdxl-vae"),
}
PAPER = {  # its table:recon-baselines (a): feature dimension, PSNR
    "VQGAN": ("16x16x256", 19.9), "Stable Diffusion": ("16x16x256", 24.1), "FINOLA": ("1x1x3072", 25.8),
}


def convolutional(kind: str, widths: tuple[int, ...], attention: bool, **options: Any) -> nn.Module:
    """An encoder and decoder of residual convolutions, 128 channels times `widths`; attention at the smallest maps."""
    import diffusers

    down, up = ["DownEncoderBlock2D"] * len(widths), ["UpDecoderBlock2D"] * len(widths)
    if attention:
        down[-1], up[0] = "AttnDownEncoderBlock2D", "AttnUpDecoderBlock2D"
    return getattr(diffusers, kind)(
        block_out_channels=tuple(128 * width for width in widths), down_block_types=tuple(down),
        up_block_types=tuple(up), layers_per_block=2, **options)


def deep_compression(widths: tuple[int, ...], latent_channels: int) -> nn.Module:
    """DC-AE: residual blocks at the three largest maps, EfficientViT's below."""
    import diffusers

    small = len(widths) - 3
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * small
    return diffusers.AutoencoderDC(
        latent_channels=latent_channels, encoder_block_types=blocks, decoder_block_types=blocks,
        encoder_block_out_channels=widths, decoder_block_out_channels=widths,
        encoder_layers_per_block=(0, 4, 8) + (2,) * small, decoder_layers_per_block=(0, 5, 10) + (2,) * small,
        encoder_qkv_multiscales=((),) * len(widths), decoder_qkv_multiscales=((),) * len(widths),
        decoder_norm_types=("batch_norm",) * 3 + ("rms_norm",) * small,
        decoder_act_fns=("relu",) * 3 + ("silu",) * small)


def tiny() -> nn.Module:
    import diffusers

    return diffusers.AutoencoderTiny()


CODEBOOK = {"num_vq_embeddings": 16384}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "VQGAN f16": lambda: convolutional("VQModel", (1, 1, 2, 2, 4), True, latent_channels=8, **CODEBOOK),
    "VQGAN f8": lambda: convolutional("VQModel", (1, 2, 2, 4), True, latent_channels=4, **CODEBOOK),
    REFERENCE: lambda: convolutional("AutoencoderKL", (1, 2, 4, 4), False, latent_channels=4),
    "KL f16": lambda: convolutional("AutoencoderKL", (1, 1, 2, 2, 4), True, latent_channels=16),
    "DC-AE f32c32": lambda: deep_compression((128, 256, 512, 512, 1024, 1024), 32),
    "DC-AE f64c128": lambda: deep_compression((128, 256, 512, 512, 1024, 1024, 2048), 128),
    "TAESD": tiny,
    "FINOLA (the paper's)": lambda: finola.create_model("finola_mfw2880_c3072_r16", start="random"),
    SHIPPED: lambda: finola.create_model("finola_mfw720_c768_r8", pretrained=True),
}


def build(name: str) -> FirstStage:
    """A row's stage, by its name or the path of a folder, for evaluation."""
    torch.manual_seed(0)
    if name not in MODELS:
        return open_first_stage(name)
    model = MODELS[name]().eval().requires_grad_(False)
    return (FinolaStage if name.startswith("FINOLA") else DiffusersStage)(model, name)


def process_memory(name: str) -> int:
    """Bytes that a stage and one image through it take beyond Python and the libraries; for a process of its own."""
    import diffusers  # noqa: F401  counts as a library

    before = process_peak()
    with torch.no_grad():
        build(name)(torch.rand(1, 3, SIZE, SIZE))
    return process_peak() - before


def score(name: str, stage: FirstStage, args: argparse.Namespace) -> dict[str, Any] | None:
    """PSNR and SSIM of what has weights, on --data."""
    if not args.data or (name in MODELS and name != SHIPPED):
        return None
    dataset = open_limited([args.data], args.limit)
    batches = read_squares(dataset, SIZE, batch_size=8, workers=0, device=torch.device("cpu"), resample="bicubic")
    found, _ = evaluate({name: stage}, batches, len(dataset), progress=True)
    means = found[name].means()
    return {"psnr": means["psnr"], "ssim": means["ssim"], "images": len(dataset),
            "data": Path(args.data).resolve().name}


def take_turns(stages: dict[str, FirstStage], turns: int) -> dict[str, list[Latency]]:
    x = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    with tqdm(total=len(stages) * (turns + 1), desc="latency", unit="run") as bar:
        return latencies(stages, x, turns, bar.update)


def measure(names: list[str], args: argparse.Namespace) -> list[dict]:
    # before this process holds any model: on Linux a new process starts with the peak of the one that starts it
    memory = {name: fresh_process(process_memory, name) for name in tqdm(names, "memory", unit="stage")}
    rows: dict[str, dict] = {}
    together: dict[str, FirstStage] = {REFERENCE: build(REFERENCE)}
    reference = cost(together[REFERENCE], SIZE)
    for name in names:
        stage = together[REFERENCE] if name == REFERENCE else build(name)
        costs, literature = cost(stage, SIZE), LITERATURE.get(name)
        macs = (reference.encode_macs + reference.decode_macs) / (costs.encode_macs + costs.decode_macs)
        rows[name] = {
            "name": name, "weights": "random" if name in MODELS and name != SHIPPED else "its own", **costs._asdict(),
            "memory_mib": memory[name] / MEBIBYTE,
            "reference_over_this": {"macs": macs, "memory": memory[REFERENCE] / memory[name]},
            "measured": score(name, stage, args), "literature": literature and literature._asdict()}
        if costs.params > LARGE:
            add_times(rows, take_turns({REFERENCE: together[REFERENCE], name: stage}, args.turns), [name])
        else:
            together[name] = stage
        del stage
    add_times(rows, take_turns(together, args.turns), together)
    return list(rows.values())


def add_times(rows: dict[str, dict], times: dict[str, list[Latency]], names: Iterable[str]) -> None:
    """Latencies of the rows `names`, and the reference's over theirs in the same turns."""
    for name in names:
        rows[name]["encode_ms"] = 1000 * median(turn.encode for turn in times[name])
        rows[name]["decode_ms"] = 1000 * median(turn.decode for turn in times[name])
        rows[name]["reference_over_this"]["latency"] = median(
            there.both / here.both for there, here in zip(times[REFERENCE], times[name], strict=True))


def line(row: dict) -> str:
    ratio, quality = row["reference_over_this"], row["measured"] or row["literature"]
    psnr = f"  PSNR {quality['psnr']:.2f} dB, {'measured' if row['measured'] else 'literature'}" if quality else ""
    macs, times = (f"{row[f'encode_{unit}'] / scale:7.1f} +{row[f'decode_{unit}'] / scale:7.1f}"
                   for unit, scale in (("macs", 1e9), ("ms", 1)))
    return (f"{row['name']:38}{row['numbers']:7}{row['bits']:8} bit {row['params'] / 1e6:7.2f}M{macs} GMACs"
            f"{times} ms{row['memory_mib']:6.0f} MiB; {REFERENCE} takes {ratio['macs']:.1f} times the MACs, "
            f"{ratio['latency']:.1f} times as long{psnr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="only these rows")
    parser.add_argument("--first-stage", nargs="+", default=[], metavar="DIR", help="also these folders of diffusers")
    parser.add_argument("--data", metavar="DIR", help="images to score what has weights on")
    parser.add_argument("--limit", type=positive, metavar="N", help="so many images, spread over the set")
    parser.add_argument("--turns", type=positive, default=5, help="turns that are counted (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    names = list(dict.fromkeys([REFERENCE, *args.models, *args.first_stage]))
    rows = measure(names, args)
    print(*map(line, rows), sep="\n")
    if args.out:
        result = record(torch.device("cpu"), {
            "size": SIZE, "turns": args.turns, "reference": REFERENCE, "results": rows,
            "literature_alone": {name: entry._asdict() for name, entry in NEVER_RUN.items()},
            "paper": {name: {"feature_dimension": shape, "psnr": psnr} for name, (shape, psnr) in PAPER.items()}})
        write_json(args.out, result)


if __name__ == "__main__":
    main()
