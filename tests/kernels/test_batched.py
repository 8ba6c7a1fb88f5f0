"""The sweeps of the fast implementation (finola/kernels/batched.py)."""

import pytest
import torch
from laws import random_law

from finola.autoregression import autoregress
from finola.kernels import batched
from finola.kernels.plan import Plan


@pytest.mark.parametrize("size", [(8, 8), (5, 9), (1, 4), (1, 1)])
@pytest.mark.parametrize("path", ["average", "row_first", "column_first"])
@pytest.mark.parametrize("normalised", [True, False])
def test_lockstep_sweeps_equal_the_separate_ones_in_any_layout(size, path, normalised, monkeypatch):
    q, matrices = random_law(7, batch=3)
    origin = size[0] // 3, size[1] // 3
    results = []
    monkeypatch.setattr(batched, "cpu_has", lambda feature: False)
    for lockstep, few in ((False, 0), (True, 0), (False, 256), (True, 256)):
        monkeypatch.setattr(batched, "FEW_CHANNELS", few)  # channels lie one after the other if there are as many
        plan = Plan(size, origin, path, normalised, 1e-5, torch.float64, lockstep)
        weights = {d: matrices[d] for d in plan.steps}
        z, kept = batched.grow(q, weights, plan, keep=True)
        torch.testing.assert_close(batched.grow(q, weights, plan, keep=False)[0], z)
        grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)
        results.append([z, *batched.ungrow(grad, kept, weights, plan)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_a_long_sweeps_weight_gradient_is_formed_in_pieces(monkeypatch):
    q, weights = random_law(6)
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in weights.values())]

    def gradients():
        return torch.autograd.grad(autoregress(q, (9, 13), **weights).sin().sum(), inputs)

    whole = gradients()  # 384 rows: no sweep here has as many
    monkeypatch.setattr(batched, "CPU_ROWS", 1)
    torch.testing.assert_close(gradients(), whole)


@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_many_steps_of_vectors_with_a_large_mean(mean):
    q, weights = random_law(64, gain=0.1)
    double, single = (autoregress((q + mean).to(dtype), (1, 129), **{d: w.to(dtype) for d, w in weights.items()},
                                  origin="top_left") for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)
