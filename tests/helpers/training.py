"""Training runs small enough for a test (the smallest encoder, 32-px images, 16 numbers in q), and comparisons."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

RECIPE = """
model: {name: finola_mfw720_c768_r8, start: random, pool_heads: 2, embed_dim: 16, map_size: 8,
        decoder_widths: [16, 8, 8]}
data: {image_size: 32, num_workers: 0}
optim: {batch_size: 4, epochs: 2, warmup_epochs: 1}
trainer: {precision: 32-true, accelerator: cpu, ema_decay: 0.9}
"""


def make_images(folder: Path, train: int = 12, val: int = 4) -> Path:
    """`folder`/train and `folder`/val with smooth random 40x36 images of two classes."""
    for split, count in (("train", train), ("val", val)):
        generator = np.random.default_rng(count)
        for index in range(count):
            picture = Image.fromarray(generator.integers(0, 255, (5, 6, 3), dtype=np.uint8)).resize((40, 36))
            path = folder / split / f"class_{index % 2}" / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
    return folder


def read_checkpoint(out: Path) -> dict:
    return torch.load(out / "last.ckpt", weights_only=True)


def unequal(a, b, path: str = "") -> list[str]:
    """Where two checkpoints differ in any bit, the run's clock apart."""
    if path.endswith("seconds"):
        return []
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) else [path]
    if isinstance(a, dict):
        keys = a.keys() | b.keys()
        return [spot for key in keys for spot in unequal(a.get(key), b.get(key), f"{path}.{key}")]
    if isinstance(a, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [spot for i, pair in pairs for spot in unequal(*pair, f"{path}[{i}]")]
    return [] if a == b else [path]


def assert_same_gradients_and_buffers(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")
    for (name, p), q in zip(a.named_buffers(), b.buffers(), strict=True):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")


def signal_at(monkeypatch, task: type, batch: int, number: int = signal.SIGTERM) -> None:
    """Send ourselves a signal in the middle of a task's training batch `batch`, counted over all epochs."""
    original = task.training_step

    def training_step(self, *args):
        if self.trainer.fit_loop.total_batch_idx == batch:
            signal.raise_signal(number)
        return original(self, *args)

    monkeypatch.setattr(task, "training_step", training_step)
