"""How fast the operator is, beside the limit (a plain matrix product) and the start (a loop over positions).

All times are medians. What is compared is measured in turns in the same run, since machines drift, and a ratio is
the median of the turns' ratios. On CUDA a small product takes less time than Python needs to launch it: there both
sides of a ratio are replayed as CUDA graphs (see `Stopwatch`).
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
from finola.kernels.operators import KERNELS
from finola.provenance import device_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class OperatorResult:
    """One shape and dtype. Times in seconds; `*_of_product` is a rate over that of the plain product.

    `timed_by` says how the product, the forward pass, and forward and backward were timed: `Stopwatch.method`.
    `*_launched` are the times of single calls as Python launches them, where the others are not.

    `peak_maps` is the peak memory of forward and backward in fp32 feature maps: it includes the output, the
    incoming gradient and everything kept, but not the matrices and their gradients. None stands for what was
    not measured."""

    device: str
    dtype: str
    batch: int
    channels: int
    size: int
    macs: int
    timed_by: tuple[str, str, str]
    forward: float
    forward_backward: float
    product_macs_per_second: float
    macs_per_second: float
    forward_of_product: float
    forward_backward_of_product: float
    forward_launched: float | None
    forward_backward_launched: float | None
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

    for _ in range(3):
        product()
        forward()
        fast()
    watches = stopwatch(product, device, 20), stopwatch(forward, device), stopwatch(fast, device)
    turns = [[watch.seconds() for watch in watches] for _ in range(repeats)]
    products, forwards, steps = ([turn[i] for turn in turns] for i in range(3))
    timed_by = (watches[0].method, watches[1].method, watches[2].method)
    del watches  # and the memory of their graphs
    macs, product_macs = batch * 2 * size * size * channels**2, batch * size * channels**2

    def ratio(macs: int, times: list[float]) -> float:
        """The median over the turns of this rate over the product's in the same turn."""
        return median(macs / t / (product_macs / p) for t, p in zip(times, products, strict=True))

    map_bytes = batch * channels * size * size * 4
    grad_bytes = grad.nbytes  # made before, but part of what a training step holds
    weight_bytes = sum(w.nbytes for w in weights.values())

    def peak_maps(peak: int) -> float:
        return float((peak + grad_bytes - weight_bytes) / map_bytes)

    def launched(function: Callable[[], Any]) -> float | None:
        return None if timed_by[0] == "clock" else median(seconds(function, device) for _ in range(repeats))

    peak = peak_memory(fast, device)
    plain_peak = peak_maps(peak_memory(plain, device)) if compare else None
    literal_time = seconds(literal, device) if compare else None
    return OperatorResult(
        device=device_name(torch.device(device)), dtype=dtype, batch=batch, channels=channels, size=size, macs=macs,
        timed_by=timed_by, forward=median(forwards), forward_backward=median(steps),
        product_macs_per_second=product_macs / median(products),
        macs_per_second=macs / median(forwards),
        forward_of_product=ratio(macs, forwards),
        forward_backward_of_product=ratio(3 * macs, steps),
        forward_launched=launched(forward), forward_backward_launched=launched(fast),
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


REPLAYS = 5  # in a row, on CUDA: the start of the first is a small part of them all


@dataclass(frozen=True)
class Stopwatch:
    """`seconds()` measures once how long a call takes, by one `method`:

    "clock"   the time of calls one after the other, launching them included
    "graph"   CUDA events round replays of a graph of these calls: the device alone
    "events"  CUDA events round these calls, where they cannot be captured in a graph
    """

    method: str
    seconds: Callable[[], float]


def stopwatch(function: Callable[[], Any], device: str, times: int = 1) -> Stopwatch:
    """The fairest stopwatch for `function` on `device`; `times` calls of it, which is warm, are timed as one."""
    if torch.device(device).type != "cuda":
        return Stopwatch("clock", lambda: seconds(function, device, times) / times)

    def calls() -> None:
        for _ in range(times):
            function()

    try:
        with torch.cuda.stream(torch.cuda.current_stream()):  # to come back to, also from a failed capture
            graph = _captured(calls)
    except RuntimeError:  # it waits for the device, say, or copies from the host
        torch.cuda.synchronize()
        return Stopwatch("events", lambda: _event_seconds(calls) / times)
    return Stopwatch("graph", lambda: _event_seconds(graph.replay) / times)


def _captured(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call, which first runs on a stream of its own: libraries allocate in their first call there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        function()
    graph.replay()
    return graph


def _event_seconds(function: Callable[[], None]) -> float:
    """Seconds of the device's time a call takes, the mean of `REPLAYS` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(REPLAYS):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / REPLAYS


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
        kernel = KERNELS.get(operation)
        if kernel is None:
            result = operation(*args, **(kwargs or {}))
        else:  # torch sees one operation: what it makes meanwhile counts too
            with self:
                result = kernel(*args, **(kwargs or {}))
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
