"""The facts any implementation of the operator must satisfy (docs/operator.md)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import random_law

from finola.autoregression import (
    EPS,
    NORMS,
    PATHS,
    Finola,
    Repetition,
    advance,
    autoregress,
    autoregress_lines,
    autoregress_literal,
    batch_normalise,
    normalise,
)
from finola.errors import FinolaError
from finola.kernels.batched import FEW_CHANNELS
from finola.kernels.grid import DIRECTIONS, resolve_origin

sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))


def problem(size, channels=7, **options):
    return random_law(channels, **options)


def gradients(z, inputs, seed=1):
    weighting = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype)
    return torch.autograd.grad((z * weighting).sum(), inputs, allow_unused=True)


def assert_same(actual, expected, tolerance=1e-10):
    for a, e in zip(actual, expected, strict=True):
        a = torch.zeros_like(e) if a is None else a
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=15)
@given(size=sizes, data=st.data())
def test_equals_the_literal_recursion_with_gradients(path, norm, size, data):
    origin = data.draw(st.tuples(st.integers(0, size[0] - 1), st.integers(0, size[1] - 1)))
    q, weights = problem(size, seed=data.draw(st.integers(0, 99)))
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    expected = autoregress_literal(q, size, weights, origin, path, normalise if norm == "layer" else lambda z: z)
    expected_gradients = [torch.zeros_like(i) if g is None else g
                          for g, i in zip(gradients(expected, inputs), inputs, strict=True)]
    fast = autoregress(q, size, **weights, origin=origin, path=path, norm=norm)
    lines = autoregress_lines(q, size, weights, dict.fromkeys(weights, normalise if norm == "layer" else lambda z: z),
                              origin, path)
    for z in (fast, lines):
        assert z.shape == (2, 7, *size)
        assert_same([z, *gradients(z, inputs)], [expected, *expected_gradients])


@pytest.mark.parametrize("channels", [96, FEW_CHANNELS])
@pytest.mark.parametrize("amx", [False, True])  # without it, many channels lie one after the other in memory
@pytest.mark.parametrize("size", [(4, 4), (1, 3), (20, 3)])
def test_fp32_is_close_to_fp64_with_gradients(channels, amx, size, monkeypatch):
    monkeypatch.setattr("finola.kernels.batched.cpu_has", lambda feature: amx)
    q, weights = problem(size, channels)
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (q, *weights.values())]
        z = autoregress(inputs[0], size, **dict(zip(weights, inputs[1:], strict=True)))
        assert z.dtype == dtype
        results.append([z.double(), *(None if g is None else g.double() for g in gradients(z.double(), inputs))])
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)


def test_gradcheck():
    q, weights = problem((3, 4), channels=4)
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in weights.values())]
    assert torch.autograd.gradcheck(lambda q, *w: autoregress(q, (3, 4), **dict(zip(DIRECTIONS, w, strict=True)),
                                                              origin=(1, 2)), inputs)


def test_average_is_the_mean_of_both_paths():
    q, weights = problem((5, 6))
    row, column, mean = (autoregress(q, (5, 6), **weights, path=p) for p in ("row_first", "column_first", "average"))
    torch.testing.assert_close(mean, (row + column) / 2)
    assert (row - column).abs().max() > 1e-3  # the two orders do not commute


def test_a_larger_map_cropped_round_the_origin_is_the_smaller_map():
    q, weights = problem((4, 5))
    small = autoregress(q, (4, 5), **weights, origin=(2, 1))
    large = autoregress(q, (9, 8), **weights, origin=(5, 3))
    torch.testing.assert_close(large[:, :, 3:7, 2:7], small)


def test_transposing_swaps_the_axes_matrices():
    q, w = problem((5, 6))
    z = autoregress(q, (5, 6), **w, origin=(1, 4))
    swapped = autoregress(q, (6, 5), right=w["down"], left=w["up"], down=w["right"], up=w["left"], origin=(4, 1))
    torch.testing.assert_close(swapped.mT, z)


def test_flipping_swaps_opposite_directions():
    q, w = problem((5, 6))
    z = autoregress(q, (5, 6), **w, origin=(1, 4))
    swapped = autoregress(q, (5, 6), right=w["left"], left=w["right"], down=w["down"], up=w["up"], origin=(1, 1))
    torch.testing.assert_close(swapped.flip(-1), z)


def test_a_constant_added_to_q_shifts_the_map():
    q, weights = problem((5, 5))
    shifted = autoregress(q + 3.0, (5, 5), **weights)
    torch.testing.assert_close(shifted, autoregress(q, (5, 5), **weights) + 3.0)


def test_growth_is_at_most_linear():
    q, weights = problem((1, 40), gain=5.0)
    z = autoregress(q, (1, 40), **weights, origin="top_left")
    bound = q.norm(dim=1)[:, None] + torch.arange(40) * torch.linalg.matrix_norm(weights["right"], 2) * 7**0.5
    assert (z[:, :, 0].norm(dim=1) <= bound + 1e-9).all()


def test_without_the_norm_a_walk_is_a_matrix_power():
    q, weights = problem((1, 9))
    z = autoregress(q, (1, 9), **weights, origin="top_left", norm="none")
    power = torch.linalg.matrix_power(torch.eye(7, dtype=q.dtype) + weights["right"], 8)
    torch.testing.assert_close(z[:, :, 0, 8], q @ power.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [0.0, 2.5])
def test_constant_q_stays_finite_with_finite_gradients(dtype, value):
    _, weights = problem((4, 4))
    weights = {d: w.to(dtype).requires_grad_() for d, w in weights.items()}
    q = torch.full((2, 7), value, dtype=dtype, requires_grad=True)
    z = autoregress(q, (4, 4), **weights)
    z.float().square().sum().backward()
    assert z.isfinite().all() and q.grad.isfinite().all()
    assert all(w.grad.isfinite().all() for w in weights.values())


def test_bf16_and_autocast_are_close_to_fp32_and_keep_the_state_in_fp32():
    q, weights = (problem((16, 16), channels=64)[0].float(), {})
    for d, w in problem((16, 16), channels=64, gain=0.1)[1].items():
        weights[d] = w.float()
    reference = autoregress(q, (16, 16), **weights)
    with torch.autocast("cpu", torch.bfloat16):
        z = autoregress(q, (16, 16), **weights)
        plain = autoregress_lines(q, (16, 16), weights, dict.fromkeys(weights, normalise), (8, 8))
    assert z.dtype == plain.dtype == torch.float32
    half = autoregress(q.bfloat16(), (16, 16), **{d: w.bfloat16() for d, w in weights.items()})
    assert half.dtype == torch.bfloat16
    for other in (z, plain, half.float()):
        assert (other - reference).norm() / reference.norm() < 1e-2


def test_the_map_is_channels_last():
    q, weights = problem((4, 4))
    assert autoregress(q, (4, 4), **weights).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("origin, expected", [("center", (2, 3)), ("top_left", (0, 0)), ("bottom_right", (4, 5)),
                                              ("top_right", (0, 5)), ("bottom_left", (4, 0)), ((1, 2), (1, 2))])
def test_q_stands_at_the_origin(origin, expected):
    q, weights = problem((5, 6))
    assert resolve_origin(origin, (5, 6)) == expected
    torch.testing.assert_close(autoregress(q, (5, 6), **weights, origin=origin)[:, :, *expected], q)


def test_corner_origins_need_two_matrices_only():
    assert set(dict(Finola(8, (4, 4), "top_left").named_parameters())) == {"right", "down"}
    assert set(dict(Finola(8, (4, 4), "bottom_right").named_parameters())) == {"left", "up"}
    assert set(dict(Finola(8, (4, 4), "center").named_parameters())) == set(DIRECTIONS)


def test_a_norm_without_a_fast_form_runs_line_by_line(monkeypatch):
    def root_mean_square(z, eps):
        return z / (z.square().mean(-1, keepdim=True) + eps).sqrt()

    monkeypatch.setitem(NORMS, "rms", root_mean_square)
    q, matrices = random_law(6)
    origin = resolve_origin("center", (4, 5))
    expected = autoregress_literal(q, (4, 5), matrices, origin, norm=lambda z: root_mean_square(z, EPS))
    torch.testing.assert_close(autoregress(q, (4, 5), **matrices, norm="rms"), expected)


def test_module_equals_function_and_takes_other_sizes():
    module = Finola(8, (4, 4)).double()
    q = torch.randn(3, 8, dtype=torch.float64)
    weights = dict(module.named_parameters())
    torch.testing.assert_close(module(q), autoregress(q, (4, 4), **weights))
    torch.testing.assert_close(module(q, (6, 6))[:, :, 1:5, 1:5], module(q))


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_module_takes_an_origin_and_leaves_no_matrix_without_gradient(norm):
    module = Finola(8, (4, 4), norm=norm).double()
    q = torch.randn(3, 8, dtype=torch.float64)
    z = module(q, origin=(0, 3))
    torch.testing.assert_close(z, autoregress(q, (4, 4), **dict(module.named_parameters()), origin=(0, 3), norm=norm))
    z.square().sum().backward()
    assert {name: bool(p.grad.any()) for name, p in module.named_parameters()} == {
        "right": False, "left": True, "down": True, "up": False}
    with pytest.raises(FinolaError, match="outside the 4x4 map"):
        module(q, origin=(4, 0))


def test_advance_walks_the_map():
    q, w = problem((5, 6))
    z = autoregress(q, (5, 6), **w, origin=(3, 1))
    torch.testing.assert_close(advance(q, w["right"], 4), z[:, :, 3, 5])
    both = advance(advance(q, w["right"], 2), w["up"], 3) + advance(advance(q, w["up"], 3), w["right"], 2)
    torch.testing.assert_close(both / 2, z[:, :, 0, 3])
    assert advance(q, w["down"], 0) is q


def test_batch_norm_uses_line_statistics_in_training_and_running_ones_in_evaluation():
    module = Finola(6, (3, 4), norm="batch").double()
    q = torch.randn(5, 6, dtype=torch.float64)
    trained = module(q)
    torch.testing.assert_close(
        trained, autoregress_literal_lines(q, (3, 4), dict(module.named_parameters())), rtol=1e-9, atol=1e-9)
    assert module.norms["right"].num_batches_tracked > 0
    module.eval()
    # with fixed statistics an image's map does not depend on the other images
    torch.testing.assert_close(module(q)[:1], module(q[:1]))
    assert not torch.allclose(module(q), trained)


def autoregress_literal_lines(q, size, weights):
    """Batch norm has no per-position form; its own reference: whole lines, written out."""
    (height, width), (oy, ox) = size, resolve_origin("center", size)

    def line(start, back, forth, before, after):
        left, right = [start], [start]
        for _ in range(before):
            left.append(left[-1] + batch_normalise(left[-1]) @ weights[back].T)
        for _ in range(after):
            right.append(right[-1] + batch_normalise(right[-1]) @ weights[forth].T)
        return left[:0:-1] + right

    row = torch.stack(line(q, "left", "right", ox, width - 1 - ox), 1)  # (B, W, C)
    column = torch.stack(line(q, "up", "down", oy, height - 1 - oy), 1)  # (B, H, C)
    first = torch.stack(line(row, "up", "down", oy, height - 1 - oy), 1)  # (B, H, W, C)
    second = torch.stack(line(column, "left", "right", ox, width - 1 - ox), 2)
    return ((first + second) / 2).permute(0, 3, 1, 2)


def test_repetition_holds_q_everywhere_and_the_embedding_tells_positions_apart():
    q = torch.randn(2, 8)
    assert torch.equal(Repetition(8, (3, 4))(q), q[:, :, None, None].expand(2, 8, 3, 4))
    module = Repetition(8, (3, 4), position=True)
    torch.testing.assert_close(module(q), q[:, :, None, None] + module.position)


@pytest.mark.parametrize("change, message", [
    ({"origin": "middle"}, "origin.*middle"),
    ({"origin": (4, 0)}, "outside the 4x4 map"),
    ({"right": None}, "right.*matrix is needed"),
    ({"up": torch.zeros(3, 3)}, r"up: got shape \(3, 3\)"),
    ({"path": "diagonal"}, "path.*diagonal"),
    ({"norm": "group"}, "norm.*group"),
    *(({"size": size}, "size: got .*, expected a height") for size in ((0, 4), (4, 0), (4.0, 4), (4, 4.0), (4,))),
    ({"implementation": "fast"}, "implementation.*'fast', expected one of auto, plain"),
])
def test_bad_arguments_are_named(change, message):
    q, weights = problem((4, 4))
    arguments = {"size": (4, 4), **weights, **change}
    with pytest.raises(FinolaError, match=message):
        autoregress(q, **arguments)


@pytest.mark.parametrize(("q", "message"), [
    (np.zeros((1, 4), np.float32), "q: got ndarray, expected a tensor"),
    (torch.ones(1, 4, dtype=torch.int64), "q: got torch.int64, expected floating-point numbers"),
])
def test_a_q_that_is_no_tensor_of_real_numbers_is_refused(q, message):
    with pytest.raises(FinolaError, match=message):
        autoregress(q, (4, 4), **random_law(4)[1])
    for norm in ("layer", "batch"):
        with pytest.raises(FinolaError, match=message):
            Finola(4, (4, 4), norm=norm)(q)


def test_one_number_is_the_size_of_a_square():
    q, weights = random_law(4)
    assert torch.equal(autoregress(q, 8, **weights), autoregress(q, (8, 8), **weights))
    module = Finola(4, 8)
    assert module.size == (8, 8) and module(q.float(), 3).shape[-2:] == (3, 3)
