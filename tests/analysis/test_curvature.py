"""Gaussian curvature against closed forms, the ranking of channels, and the maps it is measured on."""

import math

import pytest
import torch

from finola.analysis.curvature import (
    Curvatures,
    central_corner,
    feature_map,
    gaussian_curvature,
    measure_curvature,
    peak_curvature,
    plot_curvatures,
    standardise,
)
from finola.errors import FinolaError, RecipeError, WeightsError
from finola.factory import create_model
from finola.models.masked import MaskedConfig, MaskedFinola
from finola.registry import DEFAULT_MODEL

SIDE = 16


def grid(side=SIDE):
    """y and x (side, side), float64, zero in the middle."""
    steps = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    return torch.meshgrid(steps, steps, indexing="ij")


def inner(z):
    return z[..., 1:-1, 1:-1]


@pytest.fixture(scope="module")
def autoencoder():
    torch.manual_seed(0)
    return create_model(DEFAULT_MODEL, start="random", image_size=64, map_size=4, embed_dim=16,
                        decoder_widths=(16, 8, 8, 8, 8), pool_heads=2).eval()  # fmt: skip


def masked(variant):
    torch.manual_seed(0)
    config = MaskedConfig("mobileformer_w720", variant, image_size=64, block_size=2, embed_dim=16, decoder_dim=16,
                          decoder_depth=1, decoder_heads=2, pool_heads=2)  # fmt: skip
    return MaskedFinola(config).eval()


def batches(count=4, size=64):
    return [{"image": torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(i))} for i in range(count)]


# --- closed forms ------------------------------------------------------------------------------------------


def test_a_sphere_has_one_over_its_radius_squared():
    y, x = grid()
    curvature = gaussian_curvature((20**2 - x**2 - y**2).sqrt())
    # the differences are second order: their error at 7.5 of 20 from the middle is below one part in a hundred
    assert torch.allclose(inner(curvature), torch.full((14, 14), 1 / 20**2).double(), rtol=0.01)
    assert curvature.min().item() == pytest.approx(0.00238, abs=5e-6)  # at a border, with one-sided differences


def test_a_sphere_is_met_better_by_a_finer_grid():
    errors = []
    for scale in (1, 2):  # the same sphere in smaller steps is a larger one in steps of one
        y, x = grid(8 * scale + 1)
        radius = 20.0 * scale
        curvature = inner(gaussian_curvature((radius**2 - x**2 - y**2).sqrt()))
        errors.append((curvature * radius**2 - 1).abs().max().item())
    assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("bend", [0.3, -2.0])
def test_a_saddle_is_exact_at_the_borders_too(bend):
    y, x = grid()
    exact = -(bend**2) / (1 + bend**2 * (x**2 + y**2)) ** 2
    assert torch.allclose(gaussian_curvature(bend * x * y), exact, rtol=1e-12, atol=0)


def test_a_paraboloid_is_exact_in_the_interior():
    y, x = grid()
    exact = 0.24 / (1 + 0.36 * x**2 + 0.16 * y**2) ** 2
    assert torch.allclose(inner(gaussian_curvature(0.3 * x**2 + 0.2 * y**2)), inner(exact), rtol=1e-12, atol=0)


def test_planes_and_cylinders_have_none():
    y, x = grid()
    cylinder = (20**2 - x**2).sqrt() + 0.5 * y
    flat = torch.stack([3 * x - 2 * y + 7, torch.zeros(SIDE, SIDE).double(), cylinder, cylinder.T])
    assert gaussian_curvature(flat).abs().max() < 1e-15


def test_turned_mirrored_and_lifted_surfaces_have_the_same_curvature():
    z = torch.randn(3, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    curvature = gaussian_curvature(z)
    assert torch.allclose(gaussian_curvature(z.mT), curvature.mT)
    assert torch.allclose(gaussian_curvature(z.flip(-1)), curvature.flip(-1))
    assert torch.allclose(gaussian_curvature(5 - z), curvature)


@pytest.mark.parametrize("shape", [(16,), (2, 16), (4, 16, 2)])
def test_too_small_a_surface_is_refused(shape):
    with pytest.raises(FinolaError, match="at least 3"):
        gaussian_curvature(torch.zeros(shape))


# --- peaks -------------------------------------------------------------------------------------------------


def test_peaks_of_one_sign_and_of_both():
    y, x = grid(17)
    saddle, bowl = 0.3 * x * y, 0.1 * (x**2 + y**2)  # -0.09 and 0.04 in the middle
    both = torch.cat([saddle, bowl], dim=1)
    assert peak_curvature(saddle).item() == pytest.approx(0.09 / math.sqrt(2))
    assert peak_curvature(bowl).item() == pytest.approx(0.04 / math.sqrt(2))
    lowest, highest = gaussian_curvature(both).aminmax()
    assert lowest < 0 < highest
    assert peak_curvature(both).item() == pytest.approx(math.hypot(lowest, highest) / math.sqrt(2))


def test_the_interior_leaves_the_border_out():
    bump = torch.zeros(2, 8, 8)
    bump[0, 0, 0] = bump[1, 4, 4] = 1
    everywhere, interior = peak_curvature(bump), peak_curvature(bump, interior=True)
    assert 0 < interior[0] < everywhere[0] and interior[1] == everywhere[1]


def test_standardised_maps_have_unit_deviation_and_do_not_depend_on_scale():
    z = torch.randn(5, 6, 7, dtype=torch.float64) + 10 * torch.arange(5).view(5, 1, 1)
    unit = standardise(z)
    assert (unit - unit.mean((1, 2), keepdim=True)).square().mean().item() == pytest.approx(1)
    assert torch.allclose(peak_curvature(standardise(1000 * z)), peak_curvature(unit))
    assert torch.equal(standardise(torch.ones(2, 4, 4)), torch.ones(2, 4, 4))


# --- models ------------------------------------------------------------------------------------------------


def test_each_image_ranks_its_own_channels(autoencoder):
    measured = measure_curvature(autoencoder, batches(), top=16)
    assert measured.raw.shape == measured.standardised.shape == (8, 16)
    assert measured.leaders.shape == (8,) and measured.map_shape == (16, 4, 4)
    with torch.no_grad():
        z = torch.cat([autoencoder.grow(autoencoder.encode(batch["image"])) for batch in batches()])
    expected, channels = peak_curvature(z).sort(1, descending=True)
    assert torch.allclose(measured.raw, expected) and torch.equal(measured.leaders, channels[:, 0])
    few = measure_curvature(autoencoder, batches(), top=3)
    assert torch.equal(few.raw, measured.raw[:, :3])


@pytest.mark.parametrize("variant", ["block", "element"])
def test_the_map_of_a_masked_model_grows_from_the_middle(variant):
    model, x = masked(variant), batches(1)[0]["image"]
    assert central_corner(model) == (1, 1)
    with torch.no_grad():
        z = feature_map(model, x)
        hidden = x.clone()
        hidden[:, :, :16], hidden[:, :, 48:], hidden[..., :16], hidden[..., 48:] = 0, 1, 1, 0
        assert z.shape == (2, 16, 4, 4) and torch.equal(feature_map(model, hidden), z)
    assert measure_curvature(model, batches(1), top=4).raw.shape == (2, 4)


def test_distributions_are_quantiles_over_the_images():
    scores = torch.arange(11.0)[:, None] + torch.tensor([100.0, 0.0])
    row = Curvatures(scores, 2 * scores, torch.zeros(11), (2, 4, 4)).distribution("standardised", [2])[0]
    assert row == {"rank": 2, "mean": 10.0, "p10": pytest.approx(2.0), "median": 10.0, "p90": pytest.approx(18.0)}


def test_the_plot_shows_every_model(autoencoder):
    measured = measure_curvature(autoencoder, batches(2), top=8)
    one, two, renamed = (plot_curvatures(dict.fromkeys(names, measured)) for names in ("a", "ab", "b"))
    assert one.size == two.size and len({image.tobytes() for image in (one, two, renamed)}) == 3


@pytest.mark.parametrize("top", [0, 17])
def test_more_ranks_than_channels_are_refused(autoencoder, top):
    with pytest.raises(RecipeError, match=f"top: got {top}, expected 1 to 16"):
        measure_curvature(autoencoder, batches(1), top)


def test_models_without_a_growing_map_are_refused():
    with pytest.raises(WeightsError, match="'classifier'"):
        feature_map(create_model("mobileformer_w720+lin", num_classes=2).eval(), batches(1)[0]["image"])
