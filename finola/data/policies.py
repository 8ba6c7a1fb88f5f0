"""What may happen to a training crop beyond crop and flip: RandAugment, or MoCo-v2's distortions.

timm and torchvision draw from the global generators of Python, NumPy and PyTorch. A policy seeds all three for
each crop and restores them afterwards, so what it does depends on its seed alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import numpy as np
import torch
from PIL import Image

from finola.errors import RecipeError

FILL = (124, 116, 104)  # ImageNet's mean colour in 8 bits
RAND_AUGMENT = re.compile(r"rand(-([mn]|mmax)\d+|-(mstd|p)\d+(\.\d+)?|-inc[01]|-t(weights|3aw?))*")


class Policy:
    """A random change of an 8-bit image that is a function of (image, seed).

    Args:
        name: a RandAugment string of timm's, such as "rand-m9-mstd0.5-inc1" (2 operations of magnitude 9 with a
            deviation of 0.5, stronger with the magnitude), or "moco" (colour jitter, grey, blur).

    Raises:
        RecipeError: another name.
    """

    transform: Callable[[Image.Image], Image.Image]

    def __init__(self, name: str):
        if name == "moco":
            self.transform = _moco()
        elif isinstance(name, str) and RAND_AUGMENT.fullmatch(name):
            self.transform = _rand_augment(name)
        else:
            raise RecipeError(f"policy: got {name!r}, expected 'moco' or a RandAugment string of timm's such as "
                              "'rand-m9-mstd0.5-inc1'")

    def __call__(self, image: Image.Image, seed: int) -> Image.Image:
        """An RGB image and a seed below 2^32 -> an RGB image of the same size."""
        with seeded(seed):
            return self.transform(image)


@cache
def get_policy(name: str) -> Policy:
    """The policy of that name, made once in each process; RecipeError as in `Policy`."""
    return Policy(name)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and PyTorch's CPU generators started from `seed`, and restored afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would restart the GPUs' generators too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def _rand_augment(name: str) -> Callable[[Image.Image], Image.Image]:
    from timm.data.auto_augment import rand_augment_transform  # here, because importing timm takes a second

    transform = rand_augment_transform(name, {"img_mean": FILL})
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.level_fn = partial(_keep_a_bit, operation.level_fn)
    apply: Callable[[Image.Image], Image.Image] = transform
    return apply


def _keep_a_bit(bits_of: Callable[..., tuple[int]], magnitude: float, hparams: dict) -> tuple[int]:
    """timm asks to keep 0 bits at the strongest posterising, which leaves a black image; 1 is the least."""
    (bits,) = bits_of(magnitude, hparams)
    return (max(1, bits),)


def _moco() -> Callable[[Image.Image], Image.Image]:
    """MoCo-v2 (Chen et al., 2020) after the crop; the flip is the loader's."""
    from torchvision import transforms

    jitter = transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    blur = transforms.GaussianBlur(13, sigma=(0.1, 2.0))  # 13 pixels: three deviations to either side
    apply: Callable[[Image.Image], Image.Image] = transforms.Compose(
        [
            transforms.RandomApply([jitter], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.RandomApply([blur], p=0.5),
        ]
    )
    return apply
