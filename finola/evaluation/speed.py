"""How fast the operator is, beside the limit (a plain matrix product) and the start (a loop over positions).

All times are medians. What is compared is measured in turns in the same run, since machines drift, and a ratio is
the median of the turns' ratios.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from finola.autoregression import autoregress, autoregress_lines, autoregress_literal, normalise
from finola.kernels.grid import DIRECTIONS, resolve_origin
from finola.provenance import device_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class OperatorResult:
    """One shape and dtype. Times in seconds; `*_of_product` is a rate over that of the plain product.

    `peak_maps` is the peak memory of forward and backward in fp32 feature maps: it includes the output, the
    incoming gradient and everything kept, but not the matrices and their gradients. None stands for what was
    not measured."""

    device: str
    dtype: str
    batch: int
    channels: int
    size: int
    macs: int
    forward: float
    forward_backward: float
    product_macs_per_second: float
    macs_per_second: float
    forward_of_product: float
    forward_backward_of_product: float
    peak_bytes: int
    peak_maps: float
    plain_forward_backward: float | None
    plain_peak_maps: float | None
    literal_forward: float | None
    speedup_over_literal: float | None

    def as_dict(self) -> dict:
        return asdict(self)


def bench_operator(batch: int, channels: int, size: int, dtype: str, device: str = "cpu",
                   compare: bool = True, repeats: int = 25) -> OperatorResult:
    """Measure `finola.autoregress` on a size x size map from its centre.

    The plain product is (batch · size, channels) x (channels, channels), the product of one line. `compare` adds
    the plain autograd implementation and the literal loop, which take far more time and memory.
    """
    kind = DTYPES[dtype]
    q = torch.randn(batch, channels, device=device, dtype=kind, requires_grad=True)
    weights = {d: (0.1 / channels**0.5 * torch.randn(channels, channels, device=device)).to(kind).requires_grad_()
               for d in DIRECTIONS}
    line = torch.randn(batch * size, channels, device=device, dtype=kind)
    grad = torch.randn(batch, channels, size, size, device=device, dtype=kind).to(memory_format=torch.channels_last)
    origin = resolve_origin("center", (size, size))

    @torch.no_grad()
    def product() -> Tensor:
        return torch.mm(line, weights["right"])

    @torch.no_grad()
    def forward() -> Tensor:
        return autoregress(q, (size, size), **weights)

    @torch.no_grad()
    def literal() -> Tensor:
        return autoregress_literal(q, (size, size), weights, origin)

    def training_step(operator: Callable[[], Tensor]) -> None:
        torch.autograd.grad(operator(), [q, *weights.values()], grad)

    def fast() -> None:
        training_step(lambda: autoregress(q, (size, size), **weights))

    def plain() -> None:
        norms = dict.fromkeys(weights, normalise)
        training_step(lambda: autoregress_lines(q, (size, size), weights, norms, origin))

    products, forwards, steps = [], [], []
    for _ in range(3):
        product()
        forward()
        fast()
    for _ in range(repeats):
        products.append(seconds(product, device, 20) / 20)
        forwards.append(seconds(forward, device))
        steps.append(seconds(fast, device))
    macs, product_macs = batch * 2 * size * size * channels**2, batch * size * channels**2

    def ratio(macs: int, times: list[float]) -> float:
        """The median over the turns of this rate over the product's in the same turn."""
        return median(macs / t / (product_macs / p) for t, p in zip(times, products, strict=True))

    map_bytes = batch * channels * size * size * 4
    grad_bytes = grad.nbytes  # made before, but part of what a training step holds
    weight_bytes = sum(w.nbytes for w in weights.values())

    def peak_maps(peak: int) -> float:
        return float((peak + grad_bytes - weight_bytes) / map_bytes)

    peak = peak_memory(fast, device)
    plain_peak = peak_maps(peak_memory(plain, device)) if compare else None
    literal_time = seconds(literal, device) if compare else None
    return OperatorResult(
        device=device_name(torch.device(device)), dtype=dtype, batch=batch, channels=channels, size=size, macs=macs,
        forward=median(forwards), forward_backward=median(steps),
        product_macs_per_second=product_macs / median(products),
        macs_per_second=macs / median(forwards),
        forward_of_product=ratio(macs, forwards),
        forward_backward_of_product=ratio(3 * macs, steps),
        peak_bytes=peak + grad_bytes, peak_maps=peak_maps(peak),
        plain_forward_backward=median(seconds(plain, device) for _ in range(3)) if compare else None,
        plain_peak_maps=plain_peak,
        literal_forward=literal_time,
        speedup_over_literal=None if literal_time is None else literal_time / median(forwards),
    )


def seconds(function: Callable, device: str, times: int = 1) -> float:
    """Seconds that `times` calls take, the device's queue emptied before and after."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        function()
    _synchronize(device)
    return time.perf_counter() - start


def peak_memory(function: Callable, device: str) -> int:
    """Bytes that tensors made by `function` hold at most at one time, beyond those that existed before."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    with _LiveBytes() as live:
        function()
    return int(live.peak)


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, operation: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in inputs | self.known:
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        self.known.add(storage._cdata)
        self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.held -= nbytes


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


T = TypeVar("T")


def timed(function: Callable[[Tensor], T], x: Tensor) -> tuple[T, float]:
    """What a function makes of images, and the seconds it took; on a GPU, the seconds until the work is done."""
    start = _now(x.device)
    result = function(x)
    return result, _now(x.device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
