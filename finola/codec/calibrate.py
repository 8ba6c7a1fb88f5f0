"""Fit a calibration to a model: from embeddings of training images and the decoder's sensitivity to each channel."""

from __future__ import annotations

import random

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from finola.codec.calibration import (
    BINS,
    BINS_PER_DEVIATION,
    GAIN_BITS,
    NO_PARENT,
    NOISE_AT_50,
    TABLE_BITS,
    WEIGHT_BITS,
    Calibration,
    model_id,
)
from finola.codec.container import MAX_BITS
from finola.codec.entropy import Model
from finola.codec.quantiser import GRID, SMALLEST_STEP, Quantiser
from finola.data.datasets import ImageDataset
from finola.data.images import center_crop, random_square, resize_shorter, to_tensor
from finola.errors import DataError
from finola.models.autoencoder import FinolaAutoencoder

PARENTS, ACTIVITIES = 6, 12
SEEN = (30, 45, 60)  # levels whose quantised numbers the tables are made for, beside 4 bits
TAIL, TAIL_DEVIATIONS = 0.003, 4.0  # share of a wide Laplace distribution in each table: what was not yet seen
REACHES = np.arange(1.0, 10.0, 0.25)  # half ranges that are tried, in deviations
PROBES = 4  # random directions in the image for the sensitivity of each embedding
ZOOM = 2  # of the squares that are enlarged
BATCH = 32  # images encoded at once


@torch.no_grad()
def embed(
    model: FinolaAutoencoder, images: ImageDataset, *, seed: int = 0, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """What `calibrate` takes, out of the images of a data set: embeddings (N, C) of each, as the centre square or as a
    square at its own size by turns; and embeddings (N, C) of a square of half the size, enlarged. On the CPU."""
    rng, size, device = random.Random(seed), model.config.image_size, model.mean.device
    plain: list[Tensor] = []
    zoomed: list[Tensor] = []
    for first in tqdm(range(0, len(images), BATCH), "images", disable=not progress):
        pictures = [images.load(i) for i in range(first, min(first + BATCH, len(images)))]
        pictures = [p if min(p.size) >= size else resize_shorter(p, size) for p in pictures]
        squares = [random_square(p, size, rng) if i % 2 else center_crop(resize_shorter(p, size), size)
                   for i, p in enumerate(pictures)]
        small = [random_square(p, size // ZOOM, rng).resize((size, size), Image.Resampling.BICUBIC) for p in pictures]
        for embeddings, of in ((plain, squares), (zoomed, small)):
            embeddings.append(model.encode(torch.stack([to_tensor(square) for square in of]).to(device)).cpu())
    return torch.cat(plain), torch.cat(zoomed)


def calibrate(model: FinolaAutoencoder, plain: Tensor, zoomed: Tensor | None = None) -> Calibration:
    """
    Args:
        model: in evaluation mode.
        plain: (N, C) embeddings of training squares; ranges and sensitivity are theirs.
        zoomed: further embeddings (M, C), of small squares enlarged, which the tables must also know since tiles
            may be smaller than the model's squares.

    Raises:
        DataError: fewer than two embeddings, or a channel that never changes.
    """
    q = plain.double()
    mean, deviation = q.mean(0), q.std(0)
    if len(q) < 2 or not (deviation > 0).all():
        raise DataError(f"calibration: {len(q)} embeddings with {int((deviation > 0).sum())} of {q.shape[1]} channels "
                        "that change; take more images")
    unit = (deviation / GRID).float()
    step = _steps(sensitivity(model, plain), unit, 3 * model.config.image_size**2)
    bit_steps = _bit_steps((q - mean) / unit)
    every = q if zoomed is None else torch.cat([q, zoomed.double()])
    positions = ((every.float() - mean.float()) / unit).double().numpy()  # (N + M, C)
    parents, weights, residual = _predictors(positions, step)
    gain = np.rint(BINS_PER_DEVIATION * 2**GAIN_BITS / residual).clip(1).astype(np.int64)
    draft = Calibration(model_id(model), mean.float().numpy(), unit.numpy(), bit_steps, step, parents,
                        weights, gain, np.zeros(0, np.int64), np.zeros((1, BINS), np.int64))
    quantisers = [draft.quantiser(bits=4), *(draft.quantiser(level=level) for level in SEEN)]
    thresholds, tables = _tables(positions, draft, quantisers)
    return Calibration(draft.weights_id, draft.mean, draft.unit, bit_steps, step, parents, weights, gain,
                       thresholds, tables)


def sensitivity(model: FinolaAutoencoder, q: Tensor, images: int = 64) -> np.ndarray:
    """(C,): the mean over embeddings of ‖∂x̂/∂q_c‖², the squared change of the image for a unit change of channel c.

    With J the Jacobian and v of independent signs, the mean of (Jᵀv)_c² is that sum over the image.
    """
    generator, squares = torch.Generator().manual_seed(0), []
    device = next(model.parameters()).device
    for chunk in q[:: max(1, len(q) // images)][:images].split(16):
        for _ in range(PROBES):
            vectors = chunk.to(device).float().requires_grad_()
            image = model.decode(vectors)
            signs = torch.randint(0, 2, image.shape, generator=generator).mul(2).sub(1).to(image)
            (gradient,) = torch.autograd.grad((image * signs).sum(), vectors)
            squares.append(gradient.double().square().cpu())
    mean: np.ndarray = torch.cat(squares).mean(0).numpy()
    return mean


def _steps(sensitivity: np.ndarray, unit: Tensor, values: int) -> np.ndarray:
    """(C,) grid units: with steps Δ, channel c adds sensitivity_c Δ_c² / 12 / values to the mean squared error."""
    delta = np.sqrt(12 * NOISE_AT_50 * values / len(sensitivity) / sensitivity.clip(1e-12))
    steps: np.ndarray = np.rint(delta / unit.double().numpy())
    return steps.clip(SMALLEST_STEP, 2**20).astype(np.int64)


def _bit_steps(positions: Tensor) -> np.ndarray:
    """(MAX_BITS, C): for each number of bits and channel the even step of least squared error, over the positions."""
    best = []
    for bits in range(1, MAX_BITS + 1):
        steps = sorted({2 * max(1, round(reach * GRID / 2**bits)) for reach in REACHES})
        errors = []
        for step in steps:
            quantiser = Quantiser.from_bits(bits, np.full(positions.shape[1], step))
            errors.append((positions - quantiser.centres(quantiser.symbols(positions))).square().mean(0))
        best.append(np.array(steps)[torch.stack(errors).argmin(0).numpy()])
    return np.stack(best)


def _predictors(positions: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents and weights (C, PARENTS) of each channel, and the deviation (C,) of what they leave, in grid units.

    Parents are taken greedily among the earlier channels, each time the one that correlates most with what is left
    (orthogonal matching pursuit). They are known with the error of level 50, a variance of step² / 12.
    """
    moments = positions.T @ positions / len(positions)  # positions are measured from the mean
    noisy = moments + np.diag(step**2 / 12.0)
    channels, scale = len(step), np.sqrt(np.diag(noisy))
    parents = np.full((channels, PARENTS), NO_PARENT, np.int64)
    weights = np.zeros((channels, PARENTS), np.int64)
    for channel in range(1, channels):
        chosen: list[int] = []
        left = moments[channel, :channel].copy()
        for _ in range(min(PARENTS, channel)):
            score = np.abs(left) / scale[:channel]
            score[chosen] = -1
            chosen.append(int(score.argmax()))
            solution = np.linalg.solve(noisy[np.ix_(chosen, chosen)], moments[chosen, channel])
            left = moments[channel, :channel] - noisy[:channel, chosen] @ solution
        parents[channel, : len(chosen)] = chosen
        weights[channel, : len(chosen)] = np.rint(solution * 2**WEIGHT_BITS).clip(-(2**15), 2**15 - 1)
    predicted = np.zeros_like(positions)
    for parent, weight in zip(parents.T, weights.T, strict=True):
        predicted += positions[:, parent] * (weight / 2**WEIGHT_BITS)
    return parents, weights, np.sqrt(np.square(positions - predicted).mean(0)).clip(1)


def _tables(positions: np.ndarray, draft: Calibration, quantisers: list[Quantiser]) -> tuple[np.ndarray, np.ndarray]:
    """Limits of the activities and the residuals' frequencies at each, over all channels and quantisers."""
    activity, bins = (np.concatenate(part) for part in
                      zip(*(_walk(positions, draft, quantiser) for quantiser in quantisers), strict=True))
    thresholds = np.quantile(activity, np.arange(1, ACTIVITIES) / ACTIVITIES).astype(np.int64)
    which = np.searchsorted(thresholds, activity, side="right")
    counts = np.zeros((ACTIVITIES, BINS))
    np.add.at(counts, (which, bins), 1)
    return thresholds, np.stack([_frequencies(row) for row in counts])


def _walk(positions: np.ndarray, draft: Calibration, quantiser: Quantiser) -> tuple[np.ndarray, np.ndarray]:
    """The activity and the residual's bin, (C · N,) each, that coding these positions would meet."""
    symbols = quantiser.symbols(torch.from_numpy(positions)).numpy()
    model, activity, bins = Model(draft, quantiser, len(positions)), [], []
    for channel in range(draft.channels):
        model.frequencies(channel)
        residual = (positions[:, channel] - model.prediction) * (draft.gain[channel] / 2**GAIN_BITS)
        activity.append(model.activity.copy())
        bins.append(np.floor(residual).astype(np.int64) + BINS // 2)
        model.update(channel, symbols[:, channel])
    return np.concatenate(activity), np.concatenate(bins).clip(0, BINS - 1)


def _frequencies(counts: np.ndarray) -> np.ndarray:
    """Counts (BINS,) -> integers of sum 2^TABLE_BITS: made symmetric, smoothed, with a wide tail."""
    distance = np.abs(np.arange(BINS) + 0.5 - BINS / 2) / BINS_PER_DEVIATION
    kernel = np.hanning(BINS_PER_DEVIATION // 4 + 1)
    smooth = np.convolve(counts + counts[::-1] + 1e-9, kernel / kernel.sum(), mode="same")
    tail = np.exp(-distance / TAIL_DEVIATIONS)
    share = (1 - TAIL) * smooth / smooth.sum() + TAIL * tail / tail.sum()
    edges = np.rint(np.cumsum(share) / share.sum() * 2**TABLE_BITS).astype(np.int64)
    return np.diff(edges, prepend=0)
