"""The Triton kernels, run by Triton's interpreter (tests/conftest.py), against the literal recursion in float64."""

import os

import pytest
import torch
from laws import random_law

from finola.autoregression import autoregress_literal
from finola.kernels import batched
from finola.kernels.plan import Plan

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without CUDA", allow_module_level=True)

from finola.kernels import triton_rows as kernels


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The sweeps with Triton's kernels, batched products, and memory laid out as on CUDA, full of NaN at first."""
    def baddbmm(z, x, matrices, out_dtype, out):  # which a CPU does not have
        out.copy_(z + torch.bmm(x.to(out_dtype), matrices.to(out_dtype)))

    monkeypatch.setattr(torch, "baddbmm", baddbmm)
    monkeypatch.setattr(batched, "_stack", lambda names, weights, _: torch.stack([weights[d] for d in names]))
    monkeypatch.setattr(batched, "normalise_rows", kernels.normalise_rows)
    monkeypatch.setattr(batched, "ungrow_rows", kernels.ungrow_rows)
    monkeypatch.setattr(batched, "_empty", lambda shape, dtype, device: torch.full(shape, float("nan"), dtype=dtype))


def rows(*shape, dtype=torch.float32, mean=0.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) + mean).to(dtype)


@pytest.mark.parametrize("channels", [1, 5, 64, 130])
@pytest.mark.parametrize(("dtype", "mean", "tolerance"), [
    (torch.float32, 0.0, 1e-5), (torch.float32, 10.0, 1e-4), (torch.bfloat16, 10.0, 1e-2)])
def test_rows_equal_float64(channels, dtype, mean, tolerance):
    z = rows(3, 2, 3, channels, mean=mean)
    normal = torch.full((3, 4, 2, 3, channels), float("nan"), dtype=dtype)[:2, 1]  # a step of two of three directions
    rstd = torch.full((3, 4, 2, 3, 1), float("nan"))[:2, 1]
    z_map = torch.full((3, 5, 6, channels), 4.0)  # (B, H, W, C)
    lines = [z_map[:, 1, :2].transpose(0, 1), z_map[:, :2, 4].transpose(0, 1)]
    kernels.normalise_rows(z[:2], normal, rstd, 1e-5, lines, bool(mean))
    for state, line in zip(z, lines, strict=False):
        torch.testing.assert_close(line, (state + 4) / 2 if mean else state)
    assert (z_map == 4).sum() >= (5 * 6 - 4) * 3 * channels  # nothing else is written
    x = z[:2].double().requires_grad_()
    expected = torch.nn.functional.layer_norm(x, [channels], eps=1e-5)
    torch.testing.assert_close(normal.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    inward, gradient = rows(2, 2, 3, channels, dtype=dtype), rows(3, 2, 3, channels)
    outside = gradient.clone()
    kernels.ungrow_rows(gradient[:2], inward, normal, rstd, lines, 0.5)
    slope, = torch.autograd.grad(expected, x, inward.double())
    torch.testing.assert_close(gradient[:2].double(), outside[:2].double() + slope + 0.5 * torch.stack(lines).double(),
                               rtol=5 * tolerance,
                               atol=5 * tolerance * rstd.max().item())
    assert torch.equal(gradient[2], outside[2])


CASES = [  # size, origin, path; rows and steps of every kind
    ((3, 4), (1, 2), "average"), ((5, 3), (0, 0), "average"), ((4, 4), (3, 3), "row_first"),
    ((2, 5), (1, 0), "column_first"), ((1, 4), (0, 1), "average"),
]
LONG = [((5, 9), (2, 8), "average"), ((8, 8), (4, 4), "average"), ((7, 6), (0, 5), "row_first"),
        ((1, 129), (0, 0), "average")]


@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "origin", "path"),
                         CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in LONG])
def test_the_map_and_its_gradients_equal_the_literal_recursion(as_on_cuda, size, origin, path, dtype, mean):
    q, matrices = random_law(13, batch=3, gain=0.3)
    q = (q + mean).float().double()  # the same in single precision
    plan = Plan(size, origin, path, True, 1e-5, dtype, lockstep=True)
    weights = {d: matrices[d].to(dtype).double() for d in plan.steps}
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    expected = autoregress_literal(q, size, weights, origin, path)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, inputs, grad, allow_unused=True)

    def run():
        state = torch.promote_types(dtype, torch.float32)
        low = {d: w.detach().to(dtype) for d, w in weights.items()}
        z, kept = batched.grow(q.detach().to(state), low, plan, keep=True)
        grad_q, grad_weights = batched.ungrow(grad.permute(0, 2, 3, 1).to(state), kept, low, plan)
        return [z.permute(0, 3, 1, 2), grad_q, *(grad_weights.get(d) for d in low)]

    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    found = run()
    for actual, target in zip(found, [expected, *expected_gradients], strict=True):
        if target is None:
            assert actual is None
        else:
            assert (actual.double() - target).norm() <= tolerance * target.norm() + 1e-12
    for actual, again in zip(found, run(), strict=True):
        assert actual is None or torch.equal(actual, again)


FUSED = [((3, 4), (1, 2), "average", 3, 16), ((2, 3), (0, 0), "average", 9, 48), ((1, 4), (0, 1), "row_first", 2, 16)]
FUSED_LONG = [((5, 9), (2, 8), "average", 3, 80), ((4, 4), (3, 3), "column_first", 17, 32),
              ((1, 129), (0, 0), "average", 2, 16)]


@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize(("size", "origin", "path", "batch", "channels"),
                         FUSED + [pytest.param(*case, marks=pytest.mark.slow) for case in FUSED_LONG])
def test_a_kernel_a_step_equals_the_literal_recursion(size, origin, path, batch, channels, mean):
    """In fp16, since the interpreter's products of bf16 are wrong."""
    q, matrices = random_law(channels, batch=batch, gain=0.3)
    q = (q + mean).float()
    plan = Plan(size, origin, path, True, 1e-5, torch.float16, lockstep=True, fused=True)
    weights = {d: matrices[d].float() for d in plan.steps}
    inputs = [t.double().requires_grad_() for t in (q, *weights.values())]
    expected = autoregress_literal(inputs[0], size, dict(zip(weights, inputs[1:], strict=True)), origin, path)
    z, kept = batched.grow(q, weights, plan, keep=True)
    assert (z.permute(0, 3, 1, 2).double() - expected).norm() <= 2e-3 * (expected - mean).norm()
    assert torch.equal(z, batched.grow(q, weights, plan, keep=False)[0])
    grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    targets = torch.autograd.grad(expected, inputs, grad.permute(0, 3, 1, 2).double())
    grad_q, grad_weights = batched.ungrow(grad, kept, weights, plan)
    for found, target in zip([grad_q, *(grad_weights[d] for d in weights)], targets, strict=True):
        assert (found.double() - target).norm() <= 1e-2 * target.norm()
