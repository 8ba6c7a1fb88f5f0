"""How a map and its image grow out of one vector: an animated GIF.

A position u columns and v rows away from the origin is u + v steps of the law away from q. In the animation's k-th
frame the positions within k steps are there, and the others are not yet: their z is zero. On the left stands the
map, its first three principal components as colours; on the right what the decoder makes of it, shown where the
map is there. What lies at the edge still changes, since the decoder looks at neighbouring positions too.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from finola.drawing import GAP, LABEL_HEIGHT, to_image
from finola.files import atomic_write
from finola.kernels.grid import resolve_origin
from finola.models.autoencoder import FinolaAutoencoder
from finola.pde import law_of

SIDE = 256  # of each of the two images, in pixels, whatever the model's size
MOST_FRAMES = 24  # with larger maps several steps make one frame, so that the file's size is bounded
GRAY = 0.6  # of positions that are not there yet
STEP_MS, LAST_MS = 500, 2500


@torch.no_grad()
def growth_frames(model: FinolaAutoencoder, q: Tensor) -> list[Image.Image]:
    """The frames, RGB, all of one size: the first shows q alone, the last the whole map.

    Args:
        model: an autoencoder with FINOLA, in evaluation mode.
        q: (C,), one vector.

    Raises:
        FinolaError: a model whose map does not grow by steps.
    """
    law = law_of(model)
    z = model.grow(q[None])  # (1, C, R, R)
    steps = step_counts(law.size, resolve_origin(law.origin, law.size)).to(z.device)
    colours = principal_colours(z[0])
    last = int(steps.max())
    stride = max(1, -(-last // (MOST_FRAMES - 1)))
    frames = []
    for k in [*range(0, last, stride), last]:
        there = steps <= k
        image = model.decoder(z * there)[0].float() * model.std + model.mean
        caption = f"{k} of {last} steps: {int(there.sum())} of {there.numel()} positions"
        frames.append(_frame(colours, image, there, caption))
    return frames


def write_gif(frames: list[Image.Image], path: str | Path) -> None:
    """An endless GIF, whole or not at all; the last frame stays longer. The same frames give the same bytes."""
    # one palette for all frames, so that what is there already keeps its colours: those of the last, gray and white
    colours = Image.new("RGB", (SIDE, SIDE + 16), (round(GRAY * 255),) * 3)
    colours.paste("white", (0, SIDE, SIDE, SIDE + 8))
    colours.paste(frames[-1].crop((GAP, 2 * LABEL_HEIGHT, *frames[-1].size)).resize((SIDE, SIDE)))
    palette = colours.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=2)
    first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG) for frame in frames)
    durations = [STEP_MS] * len(rest) + [LAST_MS]
    with atomic_write(path) as temporary:
        first.save(temporary, format="GIF", save_all=True, append_images=rest, duration=durations, loop=0)


def step_counts(size: tuple[int, int], origin: tuple[int, int]) -> Tensor:
    """How many steps of the law lead from the origin to each position, (H, W)."""
    down, across = (torch.arange(n) - start for n, start in zip(size, origin, strict=True))
    return down.abs()[:, None] + across.abs()


def principal_colours(z: Tensor) -> Tensor:
    """A map z (C, H, W) -> its first three principal components over the positions as red, green and blue, each
    stretched to [0, 1]: (3, H, W). A component that the map does not have, or that is flat, is 1/2."""
    points = z.float().flatten(1).T  # (H W, C)
    points = points - points.mean(0)
    u, s, _ = torch.linalg.svd(points, full_matrices=False)
    scores = F.pad((u * s)[:, :3], (0, max(0, 3 - len(s))))  # (H W, 3)
    highest = scores.gather(0, scores.abs().argmax(0, keepdim=True))
    scores = scores * highest.sign()  # a component's sign is arbitrary: let the outermost position be bright
    low, high = scores.amin(0), scores.amax(0)
    flat = high - low <= 1e-6 * s[0]
    stretched = torch.where(flat, torch.tensor(0.5), (scores - low) / (high - low).clamp_min(1e-12))
    return stretched.T.reshape(3, *z.shape[-2:])


def _frame(colours: Tensor, image: Tensor, there: Tensor, caption: str) -> Image.Image:
    """Map | image under a caption: colours (3, R, R), image (3, S, S), there (R, R)."""
    canvas = Image.new("RGB", (3 * GAP + 2 * SIDE, 2 * LABEL_HEIGHT + SIDE + GAP), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=12)
    draw.text((GAP, 1), caption, fill="black", font=font)
    shown = F.interpolate(there[None, None].float(), image.shape[-2:])[0]  # nearest
    cells = to_image(torch.where(there, colours, GRAY)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    painted = to_image(torch.where(shown > 0, image, GRAY)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    for i, (panel, label) in enumerate(((cells, "map, three principal components"), (painted, "decoded"))):
        left = GAP + i * (SIDE + GAP)
        draw.text((left, LABEL_HEIGHT - 1), label, fill="black", font=font)
        canvas.paste(panel, (left, 2 * LABEL_HEIGHT))
    return canvas
