"""The yardsticks keep what they say, and no linear code of their length does better than PCA."""

import numpy as np
import pytest
import torch

from finola.errors import DataError
from finola.evaluation.linear_codes import dct_zonal, fit_pca, thumbnail, zone_sides


def pictures(count, size=8, seed=0):
    """Smooth random 8-bit images, (count, 3, size, size) in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    rough = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(rough, size=size, mode="bilinear")
    return smooth.mul(255).round().div(255)


def test_pca_equals_a_full_singular_value_decomposition():
    x = pictures(40)
    pca = fit_pca(x.split(7), 12)
    flat = x.flatten(1).double()
    _, _, directions = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    expected = (flat - flat.mean(0)) @ directions[:12].T @ directions[:12] + flat.mean(0)
    assert torch.allclose(pca.reconstruct(x).flatten(1).double(), expected, atol=1e-5)
    assert torch.allclose(pca.components @ pca.components.T, torch.eye(12), atol=1e-5)
    assert pca.encode(x).shape == (40, 12)


def test_pca_reconstructs_what_lies_in_its_span():
    basis = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)) / 8
    x = 0.5 + torch.einsum("nk,kchw->nchw", torch.rand(30, 3) * 2 - 1, basis)
    pca = fit_pca([x], 3)
    assert (pca.reconstruct(x) - x).abs().max() < 0.006  # it is fitted to 8-bit values


@pytest.mark.parametrize("components", [0, 40, 200])
def test_pca_needs_more_images_than_components(components):
    with pytest.raises(DataError, match=f"{components} components to 40 images of 192 values; .*39"):
        fit_pca([pictures(40)], components)


@pytest.mark.parametrize(
    "coefficients, sides", [(3, (1, 1)), (753, (25, 8)), (768, (25, 8)), (3072, (50, 16))]
)
def test_zones_of_the_dct(coefficients, sides):
    assert zone_sides(coefficients) == sides
    assert sides[0] ** 2 + 2 * sides[1] ** 2 <= coefficients


def test_the_dct_projects_onto_as_many_dimensions_as_it_says():
    identity = torch.eye(3 * 16 * 16, dtype=torch.float64).view(-1, 3, 16, 16)
    matrix = dct_zonal(identity, 66).flatten(1)
    assert torch.linalg.matrix_rank(matrix) == 7**2 + 2 * 2**2  # zone_sides(66) is (7, 2)
    assert torch.allclose(matrix @ matrix, matrix)


def test_the_dct_keeps_low_frequencies_and_drops_high_ones():
    x = (torch.arange(16) + 0.5) * np.pi / 16
    grey = torch.ones(1, 3, 16, 1)
    low, high = grey * torch.cos(6 * x) / 4, grey * torch.cos(7 * x) / 4
    assert torch.allclose(dct_zonal(low, 66), low.expand(1, 3, 16, 16), atol=1e-6)
    assert dct_zonal(high, 66).abs().max() < 1e-6
    red = torch.zeros(1, 3, 16, 16)
    red[:, 0] = 0.7
    assert torch.allclose(dct_zonal(red, 3), red, atol=1e-6)


def test_the_dct_refuses_too_few_and_too_many_coefficients():
    with pytest.raises(DataError, match="needs 3 coefficients"):
        dct_zonal(pictures(1), 2)
    with pytest.raises(DataError, match="do not fit images of 8 px"):
        dct_zonal(pictures(1), 500)


def test_thumbnail():
    constant = torch.full((1, 3, 32, 32), 0.3)
    assert torch.allclose(thumbnail(constant, 4), constant, atol=1e-6)
    stripes = torch.tensor([0.0, 1.0]).repeat(16).expand(1, 3, 32, 32)
    assert (thumbnail(stripes, 4)[..., 8:-8] - 0.5).abs().max() < 0.05  # averaged, not skipped
    x = pictures(4, size=32)
    assert (thumbnail(x, 16) - x).square().mean() < (thumbnail(x, 4) - x).square().mean()


def test_pca_is_the_best_linear_code_of_its_length_on_the_images_it_was_fitted_to():
    x = pictures(100, size=16)
    error = {
        "pca": (fit_pca([x], 48).reconstruct(x) - x).square().mean(),
        "dct": (dct_zonal(x, 48) - x).square().mean(),
        "thumbnail": (thumbnail(x, 4) - x).square().mean(),
    }
    assert min(error, key=error.get) == "pca"
