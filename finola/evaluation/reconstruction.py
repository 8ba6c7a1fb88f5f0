"""How well a model reconstructs a set of images, and what linear codes of its length do on the same pixels.

Preprocessing, stated with every number because PSNR depends on it: the shorter side resized to the model's
size (antialiased), the centre square cropped, 8-bit RGB. PSNR is that of `finola.psnr`, SSIM that of
torchmetrics (Gaussian window of 11 px, peak 1); both are computed for each image and averaged over images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure as ssim
from tqdm import tqdm

from finola.data.datasets import spread
from finola.data.loader import Batch
from finola.drawing import PANEL_IMAGES
from finola.evaluation.metrics import psnr
from finola.evaluation.speed import timed

Code = Callable[[Tensor], Tensor]  # images (B, 3, S, S) -> their reconstructions


@dataclass
class Scores:
    """What one code scores on the images shown to it so far, summed over images."""

    images: int = 0
    psnr: float = 0.0
    psnr_8bit: float = 0.0
    ssim: float = 0.0
    squared_error: float = 0.0  # mean over pixels, summed over images
    seconds: float = 0.0  # spent on reconstructing, loading aside

    def add(self, x_hat: Tensor, x: Tensor, seconds: float) -> Tensor:
        """Take in a batch (B, 3, S, S); returns the PSNR of each image, (B,)."""
        x_hat = x_hat.float().clamp(0, 1)
        scores = psnr(x_hat, x)
        self.images += len(x)
        self.psnr += scores.double().sum().item()
        self.psnr_8bit += psnr(x_hat.mul(255).round().div(255), x).double().sum().item()
        similarity = ssim(x_hat, x, data_range=1.0, reduction="none")
        assert isinstance(similarity, Tensor)  # a pair only where asked for
        self.ssim += similarity.double().sum().item()
        self.squared_error += (x_hat - x).square().flatten(1).mean(1).double().sum().item()
        self.seconds += seconds
        return scores

    def means(self) -> dict[str, float]:
        """Means over the images: PSNR, PSNR after rounding to 8 bits, SSIM; `psnr_pooled` is the PSNR of the
        mean squared error of all pixels. In dB, but for SSIM."""
        pooled = -10 * math.log10(max(self.squared_error / self.images, 1e-10))
        return {
            "psnr": self.psnr / self.images,
            "psnr_pooled": pooled,
            "psnr_8bit": self.psnr_8bit / self.images,
            "ssim": self.ssim / self.images,
            "images_per_second": self.images / self.seconds,
        }


@dataclass
class Examples:
    """Some of the images, spread evenly over the set, with each code's reconstruction and PSNR."""

    originals: list[Tensor] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    psnr: dict[str, list[float]] = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    codes: Mapping[str, Code], batches: Iterable[Batch], images: int, progress: bool = False
) -> tuple[dict[str, Scores], Examples]:
    """Score codes on the same batches, in one pass.

    Args:
        codes: name -> reconstruction; a model must be in evaluation mode.
        batches: {"image": (B, 3, S, S) in [0, 1], "index": (B,)}, as `read_squares` yields them.
        images: their number in all.
    """
    scores, examples = {name: Scores() for name in codes}, Examples()
    chosen = set(spread(images, PANEL_IMAGES).tolist())
    with tqdm(total=images, desc="evaluating", unit="image", disable=not progress) as bar:
        for batch in batches:
            x = batch["image"]
            kept = [i for i, index in enumerate(batch["index"].tolist()) if index in chosen]
            examples.originals += x[kept].cpu()
            for name, code in codes.items():
                x_hat, seconds = timed(code, x)
                quality = scores[name].add(x_hat, x, seconds)
                examples.rows.setdefault(name, []).extend(x_hat[kept].cpu())
                examples.psnr.setdefault(name, []).extend(quality[kept].tolist())
            bar.update(len(x))
    return scores, examples


