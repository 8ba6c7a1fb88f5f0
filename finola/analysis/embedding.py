"""What the space of the vectors q holds (paper, appendix "Inspecting the Embedding Space"): the mean vector, the
line through it, samples, mixtures and principal components, each decoded to an image and measured.

Shapes: q (E, C) float64; images (E, 3, S, S) float RGB, clamped to [0, 1]; m is the mean vector (C,) of many
images, E the examples at hand. Differences of images are in 8-bit levels, 0 to 255.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from finola.analysis.statistics import Components, Statistics, principal_components
from finola.drawing import panel
from finola.errors import DataError, FinolaError, RecipeError
from finola.evaluation.metrics import psnr
from finola.models.autoencoder import FinolaAutoencoder
from finola.models.base import require_evaluation

FADE = (1.0, 0.75, 0.5, 0.25, 0.0)  # shares of q - m that are kept
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)  # of the first image in a mixture
SAMPLES = 16
ENLARGED = 8  # times, the difference of the mean image from its mean colour
BATCH = 16  # vectors decoded at once
ROWS = 6  # examples shown in an image


# --- vectors -----------------------------------------------------------------------------------------------


def along_line(q: Tensor, mean: Tensor, share: float) -> Tensor:
    """m + share · (q - m): q for share 1, the mean for 0."""
    return mean + share * (q - mean)


def mirror(q: Tensor, mean: Tensor) -> Tensor:
    """2m - q, as far beyond the mean as q is on its side. Mirrored twice, q is itself again."""
    return 2 * mean - q


def mirror_as_printed(q: Tensor, mean: Tensor) -> Tensor:
    """2q - m, the paper's formula as it stands: twice as far from the mean as q, on the same side."""
    return 2 * q - mean


def mix(a: Tensor, b: Tensor, share: float) -> Tensor:
    """share · a + (1 - share) · b, of vectors or of images."""
    return share * a + (1 - share) * b


def sample(mean: Tensor, components: Components, count: int, seed: int) -> Tensor:
    """Vectors (count, C) from the normal distribution with this mean and covariance.

    The noise is multiplied by the symmetric root of the covariance, so that samples do not depend on the signs of
    the components, which differ between machines.
    """
    noise = torch.randn(count, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return mean + (noise @ components.vectors * components.variances.sqrt()) @ components.vectors.T


def project(q: Tensor, mean: Tensor, components: Components, count: int) -> Tensor:
    """m + V Vᵀ (q - m) with the first `count` components V; with all C of them, q itself."""
    first = components.vectors[:, :count]
    return mean + (q - mean) @ first @ first.T


# --- measures of images ----------------------------------------------------------------------------------


def grayness(x: Tensor) -> dict[str, float]:
    """How far an image (3, H, W) is from one gray, as mean absolute deviations in 8-bit levels: of each pixel's
    channels from their mean, and of the pixels from the image's mean colour. A plain gray has 0 and 0."""
    channels = (x - x.mean(0)).abs().mean()
    pixels = (x - x.mean((1, 2), keepdim=True)).abs().mean()
    return {"channels": 255 * channels.item(), "pixels": 255 * pixels.item()}


def colour_correlation(a: Tensor, b: Tensor) -> dict[str, float]:
    """Correlation over the pixels of two sets of images (E, 3, H, W), mean over the E pairs.

    `values` is that of all red, green and blue values, `hues` of what is left when each pixel's gray is taken
    away. Reversed colours have -1 in both."""
    hues = [x - x.mean(1, keepdim=True) for x in (a, b)]
    return {"values": _correlation(a, b), "hues": _correlation(*hues)}


def roughness(x: Tensor) -> float:
    """Mean absolute difference of neighbouring pixels of images (E, 3, H, W), in 8-bit levels."""
    across, down = x.diff(dim=-1).abs().mean(), x.diff(dim=-2).abs().mean()
    return 255 * ((across + down) / 2).item()


# --- studies: one image and its numbers each -------------------------------------------------------------


class Study(NamedTuple):
    numbers: dict
    image: Image.Image


@dataclass(frozen=True)
class EmbeddingSpace:
    """A model's embedding space, known by its statistics over many images, with some examples.

    Attributes:
        model: in evaluation mode, on any device.
        mean, components, images: m, the principal components, and the number of images they are of.
        names: of the E examples.
        x, q, x_hat: the examples, their vectors and their reconstructions.
    """

    model: FinolaAutoencoder
    mean: Tensor
    components: Components
    images: int
    names: Sequence[str]
    x: Tensor
    q: Tensor
    x_hat: Tensor

    def decode(self, q: Tensor) -> Tensor:
        """q (n, C) -> images (n, 3, S, S) on the CPU, clamped."""
        return _decode(self.model, q)

    def shown(self) -> list[int]:
        """The examples that images show: at most ROWS, spread evenly."""
        count = len(self.x)
        return list(range(count)) if count <= ROWS else [i * count // ROWS for i in range(ROWS)]


@torch.no_grad()
def embedding_space(
    model: FinolaAutoencoder, statistics: Statistics, names: Sequence[str], x: Tensor
) -> EmbeddingSpace:
    """Take statistics of many images and examples x (E, 3, S, S) together.

    Raises:
        DataError: fewer than two examples, or statistics of fewer than two images.
        FinolaError: a model in training mode, or statistics of vectors of another length.
    """
    require_evaluation(model)
    if len(statistics.mean) != model.config.embed_dim:
        raise FinolaError(f"statistics: of vectors of {len(statistics.mean)} numbers, expected "
                          f"{model.config.embed_dim}, as the model makes them")
    if len(x) < 2:
        raise DataError(f"examples: got {len(x)} images, expected at least 2, so that there is a mixture")
    components = principal_components(statistics)
    device = model.mean.device
    q = torch.cat([model.encode(part.to(device)).cpu() for part in x.split(BATCH)]).double()
    return EmbeddingSpace(model, statistics.mean, components, statistics.count, names, x, q, _decode(model, q))


def study_mean(space: EmbeddingSpace) -> Study:
    """The image of the mean vector, which the paper finds to be gray."""
    image = space.decode(space.mean[None])
    colour = [255 * value for value in image[0].mean((1, 2)).tolist()]
    numbers = {"images": space.images, "mean_colour": colour, "deviation": grayness(image[0])}
    plain = image.mean((2, 3), keepdim=True).expand_as(image)
    shown = torch.cat([image, plain, 0.5 + ENLARGED * (image - plain)])
    captions = [f"of {space.images} vectors", "its mean colour", f"{ENLARGED} x the difference"]
    return Study(numbers, panel([shown], ["the mean vector, decoded"], [captions]))


def study_fade(space: EmbeddingSpace) -> Study:
    """From q to the mean: images keep their content and lose their colours and contrast."""
    steps = [space.decode(along_line(space.q, space.mean, share)) for share in FADE]
    gray = steps[-1]
    numbers = [
        {"share": share, "distance_from_mean_picture": 255 * (step - gray).abs().mean().item(),
         "correlation_with_reconstruction": colour_correlation(step, space.x_hat) if share else None}
        for share, step in zip(FADE, steps, strict=True)
    ]
    captions = ["original", "q", *(f"m + {share:g} (q - m)" for share in FADE[1:-1]), "mean m"]
    return Study({"steps": numbers}, _rows(space, [space.x, *steps], captions))


def study_mirror(space: EmbeddingSpace) -> Study:
    """The line from q through the mean to its mirror: 2m - q, which reverses the colours as the paper describes,
    and 2q - m, which it prints."""
    line = {
        "2q - m (printed)": mirror_as_printed(space.q, space.mean),
        "q": space.q,
        "(q + m) / 2": along_line(space.q, space.mean, 0.5),
        "mean m": along_line(space.q, space.mean, 0),
        "(3m - q) / 2": along_line(space.q, space.mean, -0.5),
        "2m - q (mirror)": mirror(space.q, space.mean),
    }
    images = {name: space.decode(q) for name, q in line.items()}
    readings = {"2m - q": images["2m - q (mirror)"], "2q - m": images["2q - m (printed)"]}
    numbers = {name: {"correlation_with_reconstruction": colour_correlation(image, space.x_hat)}
               for name, image in readings.items()}
    return Study(numbers, _rows(space, [space.x, *images.values()], ["original", *images]))


def study_samples(space: EmbeddingSpace, seed: int) -> Study:
    """Vectors drawn from the mean and covariance, which the paper finds to give noise."""
    pictures = space.decode(sample(space.mean, space.components, SAMPLES, seed))
    numbers = {"seed": seed, "samples": SAMPLES, "roughness": roughness(pictures),
               "roughness_of_reconstructions": roughness(space.x_hat)}
    half = SAMPLES // 2
    labels = [f"samples from the mean and covariance of {space.images} vectors, seed {seed}", ""]
    return Study(numbers, panel([pictures[:half], pictures[half:]], labels))


def study_mixtures(space: EmbeddingSpace) -> Study:
    """Each example mixed with the next: vectors mixed and decoded, beside the pixels mixed."""
    first, second = slice(None, -1), slice(1, None)
    vectors, pixels, scores, numbers = [], [], [], []
    for share in SHARES:
        vectors.append(space.decode(mix(space.q[first], space.q[second], share)))
        pixels.append(mix(space.x[first], space.x[second], share))
        scores.append(psnr(vectors[-1], pixels[-1]))  # (E - 1,)
        reconstructions = mix(space.x_hat[first], space.x_hat[second], share)
        numbers.append({
            "share": share,
            "psnr_to_mixed_originals": scores[-1].mean().item(),
            "psnr_to_mixed_reconstructions": psnr(vectors[-1], reconstructions).mean().item(),
            "correlation_with_mixed_originals": colour_correlation(vectors[-1], pixels[-1]),
        })
    rows, labels, captions = [], [], []
    for i, (one, other) in list(enumerate(pairwise(space.names)))[: ROWS // 2]:
        rows += [torch.stack([mixed[i] for mixed in vectors]), torch.stack([mixed[i] for mixed in pixels])]
        labels += [f"{one} with {other}: vectors mixed; share of {one}, and PSNR to the pixels mixed", "pixels mixed"]
        captions += [[f"{share:.0%}: {score[i]:.2f} dB" for share, score in zip(SHARES, scores, strict=True)],
                     [f"{share:.0%}" for share in SHARES]]
    return Study({"pairs": len(space.x) - 1, "shares": numbers}, panel(rows, labels, captions))


def study_components(space: EmbeddingSpace, counts: Sequence[int]) -> Study:
    """Reconstructions from the first K principal components, for each K of `counts`; errors as `check_counts`."""
    check_counts(counts, len(space.mean), space.images)
    vectors = [project(space.q, space.mean, space.components, count) for count in counts]
    pictures = [space.decode(q) for q in vectors]
    whole = (space.q - space.mean).square().sum()
    numbers = [
        {"components": count, "explained_variance": space.components.explained(count),
         "explained_of_examples": 1 - ((space.q - q).square().sum() / whole).item(),
         "psnr": psnr(image, space.x).mean().item()}
        for count, q, image in zip(counts, vectors, pictures, strict=True)
    ]
    captions = ["original", *(f"K = {count}" for count in counts)]
    return Study({"counts": numbers}, _rows(space, [space.x, *pictures], captions))


def check_counts(counts: Sequence[int], dim: int, images: int) -> None:
    """Whether statistics of so many images have that many of `dim` principal components, each count by itself.

    n images tell n - 1 components apart; all `dim` of them need no telling apart.

    Raises:
        RecipeError: a count out of range.
        DataError: too few images for it.
    """
    for count in counts:
        if not 1 <= count <= dim:
            raise RecipeError(f"components: got {count}, expected 1 to {dim}, the length of q")
        if images <= count < dim:
            raise DataError(f"components: {count} of {dim} need statistics of at least {count + 1} images, got "
                            f"{images}; take more images or fewer components")


def default_counts(dim: int) -> list[int]:
    """C/16 (the paper's 192 of 3072), C/8, C/4, C/2 and C components."""
    return sorted({max(1, dim // part) for part in (16, 8, 4, 2, 1)})


def told_apart(counts: Sequence[int], dim: int, images: int) -> list[int]:
    """Those of `counts` that statistics of so many images allow; see `check_counts`."""
    return [count for count in counts if count < images or count == dim]


@torch.no_grad()
def _decode(model: FinolaAutoencoder, q: Tensor) -> Tensor:
    device = model.mean.device
    return torch.cat([model.decode(part.float().to(device)).clamp(0, 1).cpu() for part in q.split(BATCH)])


def _rows(space: EmbeddingSpace, columns: Sequence[Tensor], captions: Sequence[str]) -> Image.Image:
    """One row for each example shown; `columns` are images (E, 3, S, S) each."""
    rows = [torch.stack([column[i] for column in columns]) for i in space.shown()]
    names = [space.names[i] for i in space.shown()]
    return panel(rows, names, [captions] * len(rows), max_columns=len(columns))


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's, for each pair of images over all its values; mean over the pairs. A plain image has 0."""
    a, b = (x.double().flatten(1) - x.double().flatten(1).mean(1, keepdim=True) for x in (a, b))
    return torch.cosine_similarity(a, b, dim=1).mean().item()
