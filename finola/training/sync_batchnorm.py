"""Batch statistics over all processes, so that N processes train as one does with the same global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn


def synchronise_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace every batch norm by one whose training statistics span all processes; the parameters stay."""
    if device.type == "cpu":
        return _convert(model)
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


class SyncBatchNormCPU(nn.modules.batchnorm._BatchNorm):
    """torch's SyncBatchNorm runs on accelerators alone; this one, made of plain operations, runs on CPUs."""

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:  # x: (B, C) or (B, C, ...)
        if not self.training:
            unchanged: Tensor = super().forward(x)
            return unchanged
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        count = _SumOverProcesses.apply(values.new_tensor(x.numel() / x.shape[1]))
        mean = _SumOverProcesses.apply(values.sum(axes)) / count  # (C,)
        centred = values - mean.view(shape)
        variance = _SumOverProcesses.apply(centred.square().sum(axes)) / count  # (C,)
        self._track(mean.detach(), (variance * count / (count - 1)).detach())
        out: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.num_batches_tracked is None or self.running_mean is None or self.running_var is None:
            return  # without track_running_stats
        self.num_batches_tracked += 1
        momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes, all of whose losses depend on it: its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduced(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_reduced(gradient)


def _all_reduced(x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total)
    return total


def _convert(module: nn.Module) -> nn.Module:
    """The module with its batch norms exchanged, their parameters and buffers taken over."""
    for name, child in module.named_children():
        setattr(module, name, _convert(child))
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module
    converted = SyncBatchNormCPU(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(converted, name, getattr(module, name))
    return converted.train(module.training)
