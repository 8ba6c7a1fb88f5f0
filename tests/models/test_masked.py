"""Masked FINOLA: what it sees, what it predicts and from what, its loss and its images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from finola.autoregression import autoregress, autoregress_literal
from finola.errors import FinolaError
from finola.kernels.grid import DIRECTIONS
from finola.models.masked import VARIANTS, MaskedConfig, MaskedFinola, MaskedImageModel
from finola.models.masking import SCHEMES, block_assignment, block_corners, block_mask, patchify

TINY = {"encoder": "mobileformer_w720", "image_size": 64, "block_size": 2, "embed_dim": 8, "pool_heads": 2,
        "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}


def tiny(**overrides) -> MaskedFinola:
    return MaskedFinola(MaskedConfig(**TINY | overrides))


def images(batch: int = 2, size: int = 64) -> Tensor:
    return torch.rand(batch, 3, size, size)


def pixels(mask: Tensor) -> Tensor:
    """(B, h, w) -> (B, S, S), each position as its 16x16 pixels."""
    return torch.kron(mask.float(), torch.ones(16, 16)).bool()


# --- what is predicted, and from what ---


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("corner", [(0, 0), (4, 4), (0, 3), (2, 4), (2, 2), (3, 1)])
def test_each_block_prediction_is_the_law_from_its_source(corner, scheme):
    model = tiny(image_size=128, block_size=4, scheme=scheme, gain=1.0).double()
    features = torch.randn(2, 720, 4, 4, dtype=torch.float64)
    z = model.grow(features, corner)  # (B, C, 8, 8)
    starts = model.reduce(features.permute(0, 2, 3, 1))  # (B, 4, 4, C)
    weights = dict(model.autoregression.named_parameters())
    reach = autoregress_literal(starts.flatten(0, 2), (9, 9), weights, (4, 4)).unflatten(0, (2, 4, 4))
    y0, x0 = corner
    torch.testing.assert_close(z[:, :, y0 : y0 + 4, x0 : x0 + 4], starts.permute(0, 3, 1, 2))
    for group in block_assignment((8, 8), (4, 4), corner, scheme):
        v, u = group.offset
        for y, x in group.sources.tolist():
            for dy, dx in ((v, 0), (0, u), (v, u)):
                torch.testing.assert_close(z[:, :, y + dy, x + dx], reach[:, y - y0, x - x0, :, 4 + dy, 4 + dx])


@pytest.mark.parametrize("corner", [(0, 0), (1, 1), (2, 0)])
def test_element_variant_is_pooling_the_map_from_the_blocks_centre_and_one_linear_layer(corner):
    model = tiny(variant="element").double().eval()
    x = images().double()
    patches, _ = model(x, corner)
    y0, x0 = corner
    crop = x[:, :, 16 * y0 : 16 * y0 + 32, 16 * x0 : 16 * x0 + 32]
    q = model.pool(model.encoder.forward_features((crop - model.mean) / model.std))
    matrices = dict(model.autoregression.named_parameters())
    z = autoregress(q, (4, 4), **matrices, origin=(y0 + 1, x0 + 1))
    torch.testing.assert_close(patches, model.decoder(z.permute(0, 2, 3, 1)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_prediction_comes_from_the_visible_pixels_alone(variant):
    model = tiny(variant=variant)
    for corner in block_corners((4, 4), (2, 2)):
        x = images().requires_grad_()
        patches, mask = model(x, corner)
        assert patches.shape == (2, 4, 4, 768)
        assert torch.equal(mask, block_mask((4, 4), (2, 2), corner).expand(2, 4, 4))
        (gradient,) = torch.autograd.grad(patches.square().sum(), x)
        seen = gradient.ne(0).any(1)  # (B, S, S)
        assert not seen[pixels(mask)].any() and seen[~pixels(mask)].float().mean() > 0.9


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_corner_is_drawn_once_for_the_batch_from_the_global_generator(variant):
    model, x = tiny(variant=variant).eval(), images()
    masks = [model(x)[1] for _ in range(12)]
    assert all(torch.equal(mask[0], mask[1]) and (~mask[0]).sum() == 4 for mask in masks)
    assert len({tuple(mask[0].flatten().tolist()) for mask in masks}) > 3
    torch.manual_seed(5)
    patches, mask = model(x)
    torch.manual_seed(5)
    again, same = model(x)
    assert torch.equal(patches, again) and torch.equal(mask, same)


def test_without_embed_dim_the_block_variant_keeps_the_encoders_width_and_the_element_variant_has_512():
    assert tiny(embed_dim=None).autoregression.dim == 720
    assert tiny(embed_dim=None, variant="element", pool_heads=None).autoregression.dim == 512


@pytest.mark.parametrize("block", [1, 3])
def test_the_element_variant_takes_blocks_of_other_sizes(block):
    model = tiny(variant="element", block_size=block)
    for corner in block_corners((4, 4), (block, block)):
        patches, mask = model(images(), corner)
        assert patches.isfinite().all() and (~mask[0]).sum() == block**2
        model.zero_grad()
        model.loss(images(), patches, mask).backward()
        assert all(getattr(model.autoregression, d).grad is not None for d in DIRECTIONS)


# --- loss and gradients ---


@pytest.mark.parametrize("variant, corner, unused", [
    ("block", (0, 0), {"left", "up"}), ("block", (1, 2), {"right"}), ("block", (1, 1), set()),
    ("element", (0, 0), set()), ("element", (1, 2), {"right"}), ("element", (2, 2), {"right", "down"}),
])
def test_every_parameter_gets_a_gradient_for_every_corner(variant, corner, unused):
    model, x = tiny(variant=variant), images(batch=4)
    patches, mask = model(x, corner)
    model.loss(x, patches, mask).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or not grad.isfinite().all()] == []
    zero = {name for name, grad in grads.items() if not grad.any()}
    assert zero == {f"autoregression.{d}" for d in unused}  # zero, not missing


@pytest.mark.parametrize("norm_pix_loss", [False, True])
def test_the_loss_is_that_of_the_masked_patches_alone(norm_pix_loss):
    model, x = tiny(norm_pix_loss=norm_pix_loss), images()
    patches, mask = (t.detach() for t in model(x, (1, 0)))
    loss = model.loss(x, patches, mask)
    target = patchify((x - model.mean) / model.std, 16)[mask]  # (masked, 768)
    if norm_pix_loss:
        target = (target - target.mean(1, keepdim=True)) / target.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(loss, (patches[mask] - target).square().mean(), rtol=1e-4, atol=1e-5)
    visible = torch.where(mask[..., None], patches, torch.nan)
    assert torch.equal(model.loss(x, visible, mask), loss)
    repainted = torch.where(pixels(mask)[:, None], x, 1 - x)
    assert torch.equal(model.loss(repainted, patches, mask), loss)


@pytest.mark.parametrize("norm_pix_loss", [False, True])
def test_the_true_patches_have_no_loss_and_paint_the_image(norm_pix_loss):
    model, x = tiny(norm_pix_loss=norm_pix_loss), images()
    mask = block_mask((4, 4), (2, 2), (0, 1)).expand(2, 4, 4)
    patches = patchify((x - model.mean) / model.std, 16)
    if norm_pix_loss:
        patches = (patches - patches.mean(-1, keepdim=True)) / patches.std(-1, correction=0, keepdim=True)
    assert model.loss(x, patches, mask) < 1e-6
    visible, x_hat = model.paint(x, patches, mask)
    torch.testing.assert_close(x_hat, x, rtol=1e-4, atol=1e-4)
    masked = pixels(mask)[:, None].expand_as(x)
    assert (visible[masked] == 0.5).all() and torch.equal(visible[~masked], x[~masked])


def test_the_picture_is_the_prediction_in_the_masked_region_and_the_original_elsewhere():
    model, x = tiny(), images()
    mask = block_mask((4, 4), (2, 2), (2, 2)).expand(2, 4, 4)
    _, x_hat = model.paint(x, torch.zeros(2, 4, 4, 768), mask)  # zero is ImageNet's mean colour
    masked = pixels(mask)[:, None]
    torch.testing.assert_close(x_hat, torch.where(masked, model.mean.expand_as(x), x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_autocast_is_finite_near_fp32_and_keeps_the_map_in_fp32(variant):
    model, x = tiny(variant=variant).eval(), images()
    with torch.autocast("cpu", torch.bfloat16):
        z = model.grow(model.encode_block(x, (1, 1)), (1, 1))
        patches, mask = model(x, (1, 1))
        loss = model.loss(x, patches, mask)
    assert z.dtype == loss.dtype == torch.float32
    reference = model(x, (1, 1))[0]
    assert (patches.float() - reference).norm() / reference.norm() < 0.05
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_undecayed_names_are_parameters(variant):
    model = tiny(variant=variant)
    names = model.no_weight_decay()
    assert names <= {name for name, _ in model.named_parameters()}
    assert ("pool.query" in names) == (variant == "element") and "encoder.tokens" in names


# --- bad input ---


@pytest.mark.parametrize("change, message", [
    ({"encoder": "resnet_of_nowhere"}, "encoder: unknown timm model 'resnet_of_nowhere'"),
    ({"encoder": "hf-hub:someone/model"}, "encoder: unknown timm model"),
    ({"variant": "column"}, "variant: got 'column', expected one of block, element"),
    ({"scheme": "inward"}, "scheme: got 'inward'"),
    ({"image_size": 72}, "image_size: got 72, expected a multiple of 16"),
    ({"image_size": 32}, "image_size: got 32, expected.*at least 48"),
    ({"block_size": 3}, "block_size: got 3 patches, expected half of the 4x4 patches of image_size 64.*image_size 96"),
    ({"variant": "element", "block_size": 5}, "block_size: got 5 patches, expected from 1 to 3.*4x4 patches"),
    ({"variant": "element", "block_size": 4}, "block_size: got 4 patches, expected from 1 to 3"),
    ({"variant": "element", "block_size": 0}, "block_size: got 0 patches"),
    ({"embed_dim": 0}, "embed_dim: got 0"),
    ({"decoder_depth": 0}, "decoder_depth: got 0, expected at least 1"),
    ({"decoder_heads": 3}, "decoder_heads: got 3, expected a divisor of decoder_dim 16"),
    ({"variant": "element", "pool_heads": 3}, "pool_heads: got 3, expected a divisor of embed_dim 8"),
])
def test_bad_configurations_are_named(change, message):
    with pytest.raises(FinolaError, match=message) as error:
        MaskedConfig(**TINY | change)
    assert "\n" not in str(error.value)


def test_bad_images_and_corners_are_named():
    model = tiny()
    with pytest.raises(FinolaError, match=r"image: got shape \(1, 3, 48, 64\), expected \(B, 3, 64, 64\)"):
        model(torch.zeros(1, 3, 48, 64))
    with pytest.raises(FinolaError, match=r"corner: \(y0, x0\) = \(3, 0\)"):
        model(images(), (3, 0))


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        MaskedImageModel(MaskedConfig(**TINY))
