"""Parameters and multiply-adds of any module, counted by running it.

Multiply-adds (MAdds, MACs) are those of convolutions, linear layers and attention products, plus one for each
output element of a BatchNorm: the convention under which the encoders meet the paper's figures.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import finola.kernels.operators  # noqa: F401  (defines torch.ops.finola)

aten = torch.ops.aten

__all__ = ["Count", "count"]


class Count(NamedTuple):
    """params: number of parameters; macs: multiply-adds of one forward pass."""

    params: int
    macs: int


def count(module: nn.Module, *inputs: Any) -> Count:
    """Run `module(*inputs)` once, in eval mode, and count.

    The meta device needs neither time nor memory, whatever the size:

        with torch.device("meta"):
            model = create_encoder("mobileformer_w2880")
            params, macs = count(model, torch.empty(1, 3, 224, 224))

    `macs` is for the whole batch given. The module's training flags are left as they were.
    """
    params = sum(p.numel() for p in module.parameters())
    flops = _Flops()
    with torch.no_grad(), _eval_mode(module), _plain_attention(), _batchnorm_outputs(module) as norms, flops:
        module(*inputs)
    return Count(params, flops.total // 2 + sum(norms))


@register_flop_formula(torch.ops.finola.grow)
def _grow_flops(q: Sequence[int], matrices: Any, size: Sequence[int], origin: Any, path: str, *_: Any,
                **__: Any) -> int:
    """Of the operator (`finola.kernels.operators`), from the shapes of its tensors."""
    paths = 2 if path == "average" else 1
    return 2 * paths * q[0] * (size[0] * size[1] - 1) * q[1] ** 2


@register_flop_formula(torch.ops.finola.ungrow)
def _ungrow_flops(grad: Sequence[int], normals: Any, rstds: Any, matrices: Any, origin: Any, path: str, *_: Any,
                  **__: Any) -> int:
    return 2 * _grow_flops((grad[0], grad[3]), matrices, grad[1:3], origin, path)


class _Flops(TorchDispatchMode):
    """Adds up the operations' flops by the formulas of PyTorch's FlopCounterMode, which itself follows the modules and
    takes many times longer."""

    def __init__(self) -> None:
        super().__init__()
        self.formulas = FlopCounterMode(display=False).flop_registry
        self.total = 0

    def __torch_dispatch__(
        self, operation: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        quick = _QUICK.get(operation) if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        result = operation(*args, **(kwargs or {})) if quick is None else quick(*args)
        formula = self.formulas.get(operation.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def _like(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x)


def _normalised(x: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics, which only a backward pass reads, are empty."""
    return torch.empty_like(x), x.new_empty(0), x.new_empty(0)


def _product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


# Shapes of what some operations give, since their own kernels for the meta device, in Python, would take most of the
# time
_QUICK: dict[OpOverload, Callable[..., Any]] = {
    **dict.fromkeys((aten.native_layer_norm.default, aten.native_batch_norm.default), _normalised),
    **dict.fromkeys((aten.hardsigmoid.default, aten.relu.default, aten.gelu.default), _like),
    aten._safe_softmax.default: _like,
    aten.addmm.default: _product,
}


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
