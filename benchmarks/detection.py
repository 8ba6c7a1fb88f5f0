"""Detectors beside torchvision's Faster R-CNN R50-FPN: latency, memory, parameters, multiply-adds, in one run.

    python benchmarks/detection.py [--device cuda] [--models NAME ...] [--repeats 9] [--out results/detection_cpu.json]

A batch of one image of 800x1333 (padded to 800x1344); on a GPU also under bf16 autocast and in batches of 8. Each
model takes turns with the Faster R-CNN, and a ratio of latencies is the median of the turns' ratios; the file is
written after each model. Weights are random, and none of an
R-CNN's scores would pass its threshold, so that is set to let `CANDIDATES` boxes through to the suppression. Nearly
100 objects remain, as many as it gives at most: Mask R-CNN, which makes a mask for each, is shown at its dearest.
"""

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_resnet50_fpn

import finola
from finola.detection.loader import pad_batch, padding_of
from finola.evaluation.flops import count
from finola.evaluation.memory import fresh_process, process_peak
from finola.evaluation.speed import peak_memory, seconds
from finola.files import write_json
from finola.provenance import record

REFERENCE = "fasterrcnn_resnet50_fpn"
MODELS = [f"detr_mf_dec_{depths}_mfw{width}" for depths in (522, 211) for width in (720, 1440, 2880)]
MODELS += ["detr_r50", "mask_rcnn_mfw720", "mask_rcnn_mfw1440", "mask_rcnn_mfw2880"]
CPU_CASES = [("fp32", 1)]  # precision and batch size
GPU_CASES = [("fp32", 1), ("bf16", 1), ("fp32", 8), ("bf16", 8)]
CANDIDATES = 300  # boxes of all classes that reach the suppression
MEBIBYTE = 2**20


class Detecting(nn.Module):
    """A model and the images it is timed on: a call finds their objects."""

    def __init__(self, name: str, size: tuple[int, int], device: str):
        super().__init__()
        torch.manual_seed(0)
        self.size = size
        self.foreign = name == REFERENCE
        self.model = reference(size) if self.foreign else finola.create_model(name)
        self.to(device, memory_format=torch.channels_last).requires_grad_(False).eval()
        self.fill(1)
        if hasattr(self.model, "roi_heads"):
            self.model.roi_heads.score_thresh = self.candidate_score()

    def fill(self, batch_size: int) -> None:
        """Take `batch_size` images."""
        device = next(self.parameters()).device
        pictures = torch.rand(batch_size, 3, *self.size, generator=torch.Generator().manual_seed(0)).to(device)
        sizes = torch.tensor([self.size] * batch_size, device=device)
        images = pad_batch(list(pictures))
        self.inputs = (list(pictures),) if self.foreign else (
            images, padding_of(sizes, *images.shape[-2:]), sizes, sizes)

    @torch.no_grad()
    def forward(self) -> list[dict[str, Tensor]]:
        return self.model(*self.inputs) if self.foreign else self.model.detect(*self.inputs)

    def candidate_score(self) -> float:
        """The score that `CANDIDATES` boxes of the image pass."""
        logits = []
        handle = self.model.roi_heads.box_predictor.register_forward_hook(lambda _m, _in, out: logits.append(out[0]))
        self()
        handle.remove()
        scores = logits[0].softmax(-1)[:, 1:].flatten()  # without the background
        return scores.topk(CANDIDATES + 1).values[-1].item()


def reference(size: tuple[int, int]) -> nn.Module:
    height, width = size
    return fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, min_size=min(size), max_size=max(size))


def cpu_memory(name: str, size: tuple[int, int]) -> int:
    """Bytes that a model and its detection take beyond Python and the libraries; for a process of its own."""
    before = process_peak()
    Detecting(name, size, "cpu")()
    return process_peak() - before


def gpu_memory(detecting: Detecting, device: str) -> int:
    """Bytes of the weights and of what a detection makes."""
    weights = sum(tensor.nbytes for tensor in (*detecting.parameters(), *detecting.buffers()))
    return weights + peak_memory(detecting, device)


def latencies(models: dict[str, Detecting], device: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each model in each turn, after a turn that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in models}
    gc.collect()
    for turn in range(repeats + 1):
        for name, detecting in models.items():
            taken = seconds(detecting, device)
            if turn:
                times[name].append(taken)
    return times


def ratio(values, reference_values) -> float:
    return round(median(v / r for v, r in zip(values, reference_values, strict=True)), 3)


def row(name: str, counts: dict, memory: dict[str, int], times: dict[str, list[float]], precision: str,
        batch_size: int) -> dict:
    return {
        "model": name, "precision": precision, "batch_size": batch_size,
        "params": counts[name].params, "macs": counts[name].macs,  # for one image
        "latency_ms": round(1000 * median(times[name]), 1),
        "images_per_second": round(batch_size / median(times[name]), 2),
        "memory_mib": round(memory[name] / MEBIBYTE, 1),
        "of_reference": {
            "params": ratio([counts[name].params], [counts[REFERENCE].params]),
            "macs": ratio([counts[name].macs], [counts[REFERENCE].macs]),
            "latency": ratio(times[name], times[REFERENCE]),
            "memory": ratio([memory[name]], [memory[REFERENCE]]),
        },
    }


def measure(names: list[str], size: tuple[int, int], device: str, repeats: int) -> Iterator[dict]:
    """The rows of the reference, then of each model as soon as it is measured."""
    gpu = torch.device(device).type == "cuda"
    # before this process holds any model: on Linux a new process starts with the peak of the one that starts it
    memory = {} if gpu else {name: fresh_process(cpu_memory, name, size) for name in [REFERENCE, *names]}
    faster_rcnn = Detecting(REFERENCE, size, device)
    counts = {REFERENCE: count(faster_rcnn)}
    for name in [REFERENCE, *names]:
        models = {REFERENCE: faster_rcnn}
        if name != REFERENCE:
            models[name] = Detecting(name, size, device)
            counts[name] = count(models[name])
        for precision, batch_size in GPU_CASES if gpu else CPU_CASES:
            for detecting in models.values():
                detecting.fill(batch_size)
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
                times = latencies(models, device, repeats)
                if gpu:
                    memory = {other: gpu_memory(detecting, device) for other, detecting in models.items()}
            yield row(name, counts, memory, times, precision, batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--size", nargs=2, type=int, default=(800, 1333), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--repeats", type=int, default=9, help="turns that are counted")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    measured = []
    for found in measure(args.models, tuple(args.size), args.device, args.repeats):
        measured.append(found)
        print(f"{found['model']:28} {found['precision']} x{found['batch_size']} {found['params'] / 1e6:6.1f}M",
              f"{found['macs'] / 1e9:6.1f}G {found['latency_ms']:8.1f} ms {found['memory_mib']:8.1f} MiB",
              found["of_reference"], flush=True)
        if args.out:
            result = record(torch.device(args.device), {
                "size": list(args.size), "reference": REFERENCE, "repeats": args.repeats, "results": measured})
            write_json(args.out, result)


if __name__ == "__main__":
    main()
