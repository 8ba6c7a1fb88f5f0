"""Parameters and multiply-adds of any module, counted by running it.

Multiply-adds (MAdds, MACs) are those of convolutions, linear layers and attention products, plus one for each
output element of a BatchNorm: the convention under which the encoders meet the paper's figures.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from finola.kernels.batched import HAS_ONEDNN

__all__ = ["Count", "count"]


class Count(NamedTuple):
    """params: number of parameters; macs: multiply-adds of one forward pass."""

    params: int
    macs: int


def count(module: nn.Module, *inputs: Any) -> Count:
    """Run `module(*inputs)` once, in eval mode, and count.

    The meta device needs neither time nor memory, whatever the size:

        with torch.device("meta"):
            model = timm.create_model("mobileformer_w2880", num_classes=0)
            params, macs = count(model, torch.empty(1, 3, 224, 224))

    `macs` is for the whole batch given. The module's training flags are left as they were.
    """
    params = sum(p.numel() for p in module.parameters())
    products = FlopCounterMode(display=False, custom_mapping=_onednn())
    with (
        torch.enable_grad(),  # under no_grad, FlopCounterMode fails on views of parameters
        _eval_mode(module),
        _plain_attention(),
        _batchnorm_outputs(module) as norms,
        products,
    ):
        module(*inputs)
    return Count(params, products.get_total_flops() // 2 + sum(norms))


def _onednn() -> dict:
    """What PyTorch does not count by itself: the operator's products on a CPU (`finola.kernels.batched`)."""
    def linear(x: tuple[int, int], weight: tuple[int, int], *args, **kwargs) -> int:
        return 2 * x[0] * weight[0] * weight[1]

    return {torch.ops.mkldnn._linear_pointwise: linear} if HAS_ONEDNN else {}


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextmanager
def _batchnorm_outputs(module: nn.Module) -> Iterator[list[int]]:
    """A list that receives the number of output elements of each BatchNorm that runs."""
    sizes: list[int] = []
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    handles = [m.register_forward_hook(lambda _m, _in, out: sizes.append(out.numel())) for m in norms]
    try:
        yield sizes
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as two matrix products: PyTorch does not count all of its fused kernels."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
