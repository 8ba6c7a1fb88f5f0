"""bf16 for the codec's networks, where a machine has units for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from finola.errors import RecipeError
from finola.kernels.cpu import cpu_has


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bf16 in units of its own (AMX, AVX-512 BF16, Arm BF16)."""
    return cpu_has("avx512_bf16", "amx_bf16", "bf16")


def precision(device: torch.device, fast: bool) -> AbstractContextManager:
    """Within it products and convolutions run in bf16 if they are to be fast; else nothing changes.

    Raises:
        RecipeError: fast, on a device that has no units for bf16.
    """
    if not fast:
        return nullcontext()
    if not (torch.cuda.is_bf16_supported() if device.type == "cuda" else has_bf16_units()):
        raise RecipeError(f"fast: this {device.type} has no units for bf16; leave it out")
    return torch.autocast(device.type, torch.bfloat16)
