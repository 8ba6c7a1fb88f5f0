"""The law between grid points: closed forms, orders of convergence, and where the two equations hold together."""

import pytest
import torch
from laws import random_law
from tiny_models import COARSE, autoencoder

from finola.autoregression import PATHS, advance, autoregress
from finola.errors import FinolaError
from finola.kernels.grid import DIRECTIONS
from finola.models.autoencoder import AutoencoderConfig, FinolaAutoencoder
from finola.pde import GRIDS, METHODS, commutator, flow, law_of, map_at, render, residual

SIZE, ORIGIN = (4, 5), (1, 2)
YS, XS = (-1, 0, 1, 2), (-2, -1, 0, 1, 2)


def problem(channels=6, **options):
    return random_law(channels, **options)


@pytest.fixture(scope="module")
def model():
    return autoencoder(**COARSE)


# flow

def test_without_the_norm_the_flow_is_the_matrix_exponential():
    q, matrices = problem()
    expected = q @ torch.linalg.matrix_exp(1.7 * matrices["right"]).T
    torch.testing.assert_close(flow(q, matrices["right"], 1.7, step=0.01, norm="none"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("rk4", 4)])
def test_order_of_convergence(method, order, norm):
    q, matrices = problem()
    exact = flow(q, matrices["down"], 2, step=1 / 256, method="rk4", norm=norm)
    errors = [(flow(q, matrices["down"], 2, step=2.0**-k, method=method, norm=norm) - exact).norm() for k in (3, 4, 5)]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert torch.log2(coarse / fine).item() == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_unit_euler_steps_are_the_recursion(distance):
    q, matrices = problem()
    expected = advance(q, matrices["left"], distance)
    torch.testing.assert_close(flow(q, matrices["left"], distance, method="euler"), expected, rtol=0, atol=1e-12)


def test_euler_draws_straight_lines_between_its_steps():
    q, matrices = problem()
    one, two = (flow(q, matrices["up"], u, method="euler") for u in (1, 2))
    quarter = flow(q, matrices["up"], 1.25, method="euler")
    torch.testing.assert_close(quarter, 0.75 * one + 0.25 * two, rtol=0, atol=1e-12)


def test_flows_compose():
    q, matrices = problem()
    right = matrices["right"]
    parts = flow(flow(q, right, 0.37, step=0.05), right, 1.2, step=0.05)
    torch.testing.assert_close(parts, flow(q, right, 1.57, step=0.05), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("step", [0.1, 1 / 3, 0.7])
def test_steps_that_do_not_divide_the_distance(step):
    q, matrices = problem(gain=0.1)
    exact = flow(q, matrices["right"], 1, step=1e-3)
    torch.testing.assert_close(flow(q, matrices["right"], 1, step=step), exact, rtol=1e-5, atol=1e-5)


# maps

@pytest.mark.parametrize("norm", ["layer", "none"])
@pytest.mark.parametrize("path", PATHS)
def test_at_integers_the_map_is_autoregress(path, norm):
    q, matrices = problem()
    expected = autoregress(q, SIZE, **matrices, origin=ORIGIN, path=path, norm=norm)
    z = map_at(q, YS, XS, **matrices, path=path, norm=norm)
    torch.testing.assert_close(z, expected, rtol=0, atol=1e-10)
    assert z.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", PATHS)
def test_a_position_is_reached_by_the_two_flows(path, method):
    q, matrices = problem()
    options = {"step": 0.4, "method": method}
    row_first = flow(flow(q, matrices["left"], 1.3, **options), matrices["down"], 0.9, **options)
    column_first = flow(flow(q, matrices["down"], 0.9, **options), matrices["left"], 1.3, **options)
    expected = {"row_first": row_first, "column_first": column_first}.get(path, (row_first + column_first) / 2)
    z = map_at(q, [2.0, 0.9, -0.2], [0.5, -1.3], **matrices, path=path, **options)  # in any order
    assert z.shape == (2, 6, 3, 2)
    torch.testing.assert_close(z[:, :, 1, 1], expected, rtol=0, atol=1e-12)


def test_gradients_agree_with_finite_differences():
    q, matrices = problem(channels=3, batch=1)
    inputs = [q.requires_grad_(), *(w.requires_grad_() for w in matrices.values())]

    def grow(q, *weights):
        return map_at(q, [-0.5, 0.7], [-0.3, 1.2], **dict(zip(DIRECTIONS, weights, strict=True)), method="rk4")

    assert torch.autograd.gradcheck(grow, inputs)


@pytest.mark.parametrize("method", METHODS)
def test_constant_q_stays_finite(method):
    _, matrices = problem()
    q = torch.full((1, 6), 3.0, dtype=torch.float64, requires_grad=True)
    z = map_at(q, [-1.5, 2.5], [-1.5, 2.5], **matrices, method=method)
    z.sum().backward()
    assert torch.isfinite(z).all() and torch.isfinite(q.grad).all()


def test_half_precision_grows_in_single():
    q, matrices = problem()
    z = map_at(q.bfloat16(), YS, XS, **{d: m.float() for d, m in matrices.items()})
    expected = map_at(q.bfloat16().float(), YS, XS, **{d: m.float() for d, m in matrices.items()})
    assert z.dtype == torch.bfloat16 and torch.equal(z, expected.bfloat16())


# residual and commutator

def test_residual_is_zero_where_the_map_has_one_path():
    q, matrices = problem()
    z = autoregress(q, SIZE, **matrices, origin=ORIGIN)
    horizontal, vertical = residual(z, **matrices, origin=ORIGIN)
    assert horizontal.shape == (2, 4, 4) and vertical.shape == (2, 3, 5)
    y, x = ORIGIN
    assert horizontal[:, y].max() < 1e-12 and vertical[:, :, x].max() < 1e-12
    elsewhere = torch.cat([horizontal[:, [0, 2, 3]].flatten(), vertical[:, :, [0, 1, 3, 4]].flatten()])
    assert elsewhere.min() > 1e-4


@pytest.mark.parametrize(("path", "exact", "other"), [("row_first", 1, 0), ("column_first", 0, 1)])
def test_residual_of_one_path_is_zero_along_its_second_sweep(path, exact, other):
    q, matrices = problem()
    misses = residual(autoregress(q, SIZE, **matrices, origin=ORIGIN, path=path), **matrices, origin=ORIGIN)
    assert misses[exact].max() < 1e-12 and misses[other].max() > 1e-3


def test_residual_of_a_constant_map_is_one():
    q, matrices = problem()
    z = q[:, :, None, None].expand(-1, -1, *SIZE)
    for miss in residual(z, **matrices, origin=ORIGIN):
        torch.testing.assert_close(miss, torch.ones_like(miss))


def test_one_line_has_no_steps_across():
    q, matrices = problem()
    horizontal, vertical = residual(autoregress(q, (1, 3), **matrices), right=matrices["right"], left=matrices["left"])
    assert horizontal.shape == (2, 1, 2) and vertical.shape == (2, 0, 3)


def test_commutator_is_zero_with_one_matrix_for_all_directions():
    q, matrices = problem()
    same = dict.fromkeys(DIRECTIONS, matrices["right"])
    assert commutator(q, SIZE, **same).max() < 1e-12


def test_commutator_against_the_two_paths():
    q, matrices = problem()
    difference = commutator(q, SIZE, **matrices, origin=ORIGIN)
    a = advance(advance(q, matrices["right"], 2), matrices["down"], 1)  # row first
    b = advance(advance(q, matrices["down"], 1), matrices["right"], 2)
    distance = (((a - q).square().sum(1) + (b - q).square().sum(1)) / 2).sqrt()
    torch.testing.assert_close(difference[:, 2, 4], (a - b).norm(dim=1) / distance)
    assert difference[:, 1].max() == 0 and difference[:, :, 2].max() == 0
    assert 1e-3 < difference.max() <= 2


# images

@pytest.mark.parametrize("grid", GRIDS)
def test_render_at_factor_one_is_decode(model, grid):
    q = torch.randn(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(render(model, q, 1, grid=grid), model.decode(q))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("factor", [2, 3])
def test_render_at_an_odd_factor_holds_the_trained_positions(model, grid, factor):
    q = torch.randn(1, 16)
    with torch.no_grad():
        picture, trained = render(model, q, factor, grid=grid), model.decode(q)
    assert picture.shape == (1, 3, 32 * factor, 32 * factor)
    centres = picture[:, :, factor // 2 :: factor, factor // 2 :: factor]
    held = grid == "pixels" and factor == 3  # an even factor has no part at the centre
    assert torch.allclose(centres, trained, atol=1e-5) == held


def test_finer_map_holds_the_trained_one(model):
    law, q = law_of(model), torch.randn(1, 16)
    with torch.no_grad():
        fine = map_at(q, [i / 3 for i in range(-6, 6)], [0], **law.matrices())
        torch.testing.assert_close(fine[:, :, ::3], model.grow(q)[:, :, :, 2:3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("origin", "missing"), [("top_left", {"left", "up"}), ("bottom_right", {"right", "down"})])
def test_render_beyond_an_edge_that_holds_q(grid, origin, missing):
    torch.manual_seed(0)
    config = AutoencoderConfig("mobileformer_w720", embed_dim=16, image_size=32, map_size=4, pool_heads=1,
                               decoder_widths=(16, 8, 8, 8), origin=origin)
    model = FinolaAutoencoder(config).eval()
    assert missing.isdisjoint(law_of(model).directions)
    with torch.no_grad():
        assert render(model, torch.randn(1, 16), 2, grid=grid).isfinite().all()


# errors

@pytest.mark.parametrize(("change", "message"), [
    ({"distance": -1}, "distance: got -1"),
    ({"distance": float("nan")}, "distance: got nan"),
    ({"step": 0}, "step: got 0"),
    ({"method": "heun"}, "method: got 'heun', expected one of euler, rk4"),
    ({"norm": "batch"}, "norm: got 'batch', expected one of layer, none"),
    ({"matrix": torch.zeros(2, 3)}, r"matrix: got shape \(2, 3\)"),
])
def test_errors_of_flow(change, message):
    arguments = {"z": torch.zeros(1, 6), "matrix": torch.zeros(6, 6), "distance": 1.0} | change
    with pytest.raises(FinolaError, match=message):
        flow(**arguments)


@pytest.mark.parametrize(("change", "message"), [
    ({"q": torch.zeros(6)}, "q: got shape"),
    ({"ys": []}, "ys: got"),
    ({"xs": [float("inf")]}, "xs: got"),
    ({"path": "diagonal"}, "path: got 'diagonal'"),
    ({"left": None}, "left: the coordinates reach out"),
])
def test_errors_of_map_at(change, message):
    arguments = {"q": torch.zeros(1, 6), "ys": [0.5], "xs": [-0.5]} | dict.fromkeys(DIRECTIONS, torch.zeros(6, 6))
    with pytest.raises(FinolaError, match=message):
        map_at(**arguments | change)


def test_errors_of_residual_commutator_and_render(model):
    q, matrices = problem()
    with pytest.raises(FinolaError, match="z: got shape"):
        residual(q)
    with pytest.raises(FinolaError, match="up: the coordinates reach out"):
        residual(autoregress(q, SIZE, **matrices), **{**matrices, "up": None})
    with pytest.raises(FinolaError, match="norm: got 'batch'"):
        commutator(q, SIZE, **matrices, norm="batch")
    with pytest.raises(FinolaError, match="factor: got 0"):
        render(model, torch.zeros(1, 16), 0)
    with pytest.raises(FinolaError, match="grid: got 'fine'"):
        render(model, torch.zeros(1, 16), 2, grid="fine")
    with pytest.raises(FinolaError, match="obeys no differential equation"):
        law_of(torch.nn.Identity())
