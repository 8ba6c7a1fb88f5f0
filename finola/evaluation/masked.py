"""How well a masked image model paints the masked part of a set of images, over masks that are always the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from finola.data.datasets import spread
from finola.data.loader import Batch
from finola.drawing import PANEL_IMAGES
from finola.evaluation.metrics import psnr
from finola.evaluation.speed import timed
from finola.models.masked import MaskedImageModel

MASK_SEED = 0  # of the masks of the first batch; those of the next have the next seed, as in training's validation


@dataclass
class MaskedScores:
    """PSNR summed over the images shown so far, in dB, and some of them for a panel.

    Attributes:
        masked: of the masked region alone.
        whole: of the whole image, whose visible region is as it was.
        seconds: spent on predicting, loading aside.
        rows: visible part, prediction and original of some images, each (3, S, S).
    """

    images: int = 0
    masked: float = 0.0
    whole: float = 0.0
    seconds: float = 0.0
    rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def means(self) -> dict[str, float]:
        """Means over the images, in dB."""
        return {
            "psnr": self.masked / self.images,
            "psnr_whole": self.whole / self.images,
            "images_per_second": self.images / self.seconds,
        }


@torch.no_grad()
def evaluate_masked(model: MaskedImageModel, batches: Iterable[Batch], images: int) -> MaskedScores:
    """Predict the masked patches of all batches {"image": (B, 3, S, S), "index": (B,)}.

    The masks depend on the number of a batch and its size: scores compare at the same batch size alone.

    Args:
        model: in evaluation mode.
        images: their number in all.
    """
    scores, chosen = MaskedScores(), set(spread(images, PANEL_IMAGES).tolist())
    for number, batch in enumerate(batches):
        x = batch["image"]
        with fixed_masks(number):
            (patches, mask), seconds = timed(model, x)
        masked, whole, visible, x_hat = masked_psnr(model, x, patches, mask)
        scores.images += len(x)
        scores.whole += whole.double().sum().item()
        scores.masked += masked.double().sum().item()
        scores.seconds += seconds
        kept = [i for i, index in enumerate(batch["index"].tolist()) if index in chosen]
        scores.rows += [(visible[i].cpu(), x_hat[i].cpu(), x[i].cpu()) for i in kept]
    return scores


@contextmanager
def fixed_masks(batch: int) -> Iterator[None]:
    """Within it, a model draws the masks that belong to the number of a batch."""
    with torch.random.fork_rng():
        torch.manual_seed(MASK_SEED + batch)
        yield


def masked_psnr(model: MaskedImageModel, x: Tensor, patches: Tensor,
                mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PSNR of the masked region and of the whole image, (B,) each; the visible part and the prediction as images.

    The visible region has no error, so the two differ by the masked share of the image alone."""
    visible, x_hat = model.paint(x, patches, mask)
    whole = psnr(x_hat, x)
    return whole + 10 * mask.flatten(1).float().mean(1).log10(), whole, visible, x_hat
