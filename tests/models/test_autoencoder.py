"""Every registered model at reduced size, every variant of its parts, and the shipped model's start."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from training import assert_same_gradients_and_buffers

import finola
from finola import AutoencoderConfig, FinolaAutoencoder, FinolaError, create_model, list_models
from finola.evaluation.metrics import psnr
from finola.models.base import IMAGENET_MEAN
from finola.models.decoder import ConvDecoder
from finola.models.linear_start import components, start_from_images
from finola.registry import model_config
from finola.weights import read_tensors

AUTOENCODERS = list_models("finola_*")
SCALES = (1, 2, 4, 8, 16, 32)
TINY = {"encoder": "mobileformer_w720", "image_size": 32, "map_size": 8, "embed_dim": 16, "pool_heads": 2,
        "decoder_widths": (8, 8, 8)}


def scale(name: str) -> int:
    config = model_config(name)
    return config.image_size // config.map_size


def reduced(name: str) -> FinolaAutoencoder:
    """The model with its own upsampling factor, but a small encoder, few channels and the smallest image."""
    s = scale(name)
    size = max(32, 2 * s)
    return create_model(name, encoder="mobileformer_w720", embed_dim=16, image_size=size, map_size=size // s,
                        pool_heads=2, decoder_widths=(8,) * (1 + int(math.log2(s))), start="random")


def tiny(**overrides) -> FinolaAutoencoder:
    return FinolaAutoencoder(AutoencoderConfig(**TINY | overrides))


def images(model: FinolaAutoencoder, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, model.config.image_size, model.config.image_size)


def assert_learns(model: FinolaAutoencoder) -> None:
    """One training step's worth of gradients: all there, all finite, none all zero."""
    x = images(model)
    x_hat = model(x)
    assert x_hat.shape == x.shape and x_hat.isfinite().all()
    (x_hat - x).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or not grad.any()] == []
    assert [name for name, grad in grads.items() if not grad.isfinite().all()] == []


# --- every registered model ---


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_registered_model(name):
    model = reduced(name)
    config = model.config
    assert config.image_size // config.map_size == scale(name)
    assert_learns(model)
    model.eval()
    x = images(model)
    with torch.no_grad():
        q = model.encode(x)
        assert q.shape == (2, config.embed_dim)
        assert model.grow(q).shape == (2, config.embed_dim, config.map_size, config.map_size)
        torch.testing.assert_close(model.decode(q), model(x))


@pytest.mark.parametrize("name", [next(n for n in AUTOENCODERS if scale(n) == s) for s in SCALES])
def test_bf16_autocast_is_finite_and_near_fp32(name):
    model = reduced(name).eval()
    x = images(model)
    with torch.autocast("cpu", torch.bfloat16):
        x_hat = model(x)
    assert x_hat.dtype == torch.float32
    assert (x_hat - model(x)).abs().mean() < 0.03
    with torch.autocast("cpu", torch.bfloat16):
        model.train()(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_names_say_what_the_models_are():
    for name in AUTOENCODERS:
        config = model_config(name)
        width = config.encoder.removeprefix("mobileformer_w")
        assert name == f"finola_mfw{width}_c{config.embed_dim}_r{config.map_size}"
    assert list_models("*_c3072_r16") == [f"finola_mfw{w}_c3072_r16" for w in (720, 1440, 2880, 4320, 5760)]


# --- variants ---


@pytest.mark.parametrize(("variant", "tensors"), [
    ({"autoregression": "norm_linear"}, {"right", "left", "down", "up"}),
    ({"autoregression": "norm_linear", "norm": "batch"}, {"right", "left", "down", "up"}),
    ({"autoregression": "linear"}, {"right", "left", "down", "up"}),
    ({"autoregression": "repeat"}, set()),
    ({"autoregression": "repeat_pos"}, {"position"}),
], ids=["layer", "batch", "linear", "repeat", "repeat_pos"])
def test_autoregression_variants(variant, tensors):
    model = tiny(**variant)
    assert dict(model.autoregression.named_parameters()).keys() == tensors
    assert_learns(model)
    names = dict(model.named_parameters()).keys()
    assert model.no_weight_decay() - names <= {"autoregression.position"}


def test_repetition_is_the_same_everywhere_and_the_others_are_not():
    q = torch.randn(2, 16)
    for kind in ("norm_linear", "linear", "repeat_pos"):
        z = tiny(autoregression=kind).grow(q)
        assert not torch.allclose(z[..., 0, 0], z[..., 1, 2])
    torch.testing.assert_close(tiny(autoregression="repeat").grow(q), q[:, :, None, None].expand(2, 16, 8, 8))


@pytest.mark.parametrize(("origin", "position", "matrices"), [
    ("center", (4, 4), {"right", "left", "down", "up"}),
    ("top_left", (0, 0), {"right", "down"}),
    ("top_right", (0, 7), {"left", "down"}),
    ("bottom_left", (7, 0), {"right", "up"}),
    ("bottom_right", (7, 7), {"left", "up"}),
    ((0, 3), (0, 3), {"right", "left", "down"}),
], ids=lambda value: "".join(sorted(value)) if isinstance(value, set) else str(value))
def test_origins(origin, position, matrices):
    model = tiny(origin=origin)
    assert dict(model.autoregression.named_parameters()).keys() == matrices
    q = torch.randn(2, 16)
    torch.testing.assert_close(model.grow(q)[:, :, *position], q)
    assert_learns(model)


@pytest.mark.parametrize("image_size", [32, 48, 64])
def test_image_sizes(image_size):
    model = tiny(image_size=image_size, map_size=image_size // 4).eval()
    assert model(images(model)).shape == (2, 3, image_size, image_size)


def test_images_of_a_batch_do_not_mix_in_eval():
    model = tiny().double().eval()
    x = images(model, 3).double()
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))


def test_the_output_is_on_the_scale_of_the_input():
    model = tiny().eval()
    nn.init.zeros_(model.decoder.to_rgb.weight)
    nn.init.zeros_(model.decoder.to_rgb.bias)
    grey = torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1).expand(2, 3, 32, 32)  # normalised pixels of zero
    torch.testing.assert_close(model(images(model)), grey)


# --- decoders (paper, Table "Decoder specifications") ---


def printed_weights(scale: int, channels: int) -> int:
    """Convolution weights of one column as printed, with 1x1 shortcuts where the channels change."""
    widths, total = (512, 512, 256, 256, 128, 128)[5 - int(math.log2(scale)):], 0
    for i, width in enumerate(widths):
        up_conv = 9 * channels**2 if i else 0
        shortcut = channels * width if channels != width else 0
        total += up_conv + 9 * channels * width + 9 * width**2 + shortcut
        channels = width
    return total + 9 * channels * 3


@pytest.mark.parametrize(("scale", "millions"), [(32, 32.71), (16, 25.63), (8, 11.73), (4, 9.96), (2, 4.53), (1, 4.08)])
@pytest.mark.parametrize("reduce", [None, "published", 96])
def test_decoder_weights(scale, millions, reduce):
    with torch.device("meta"):
        decoder = ConvDecoder(3072, scale, reduce)
        assert decoder(torch.empty(2, 3072, 3, 5)).shape == (2, 3, 3 * scale, 5 * scale)
    weights = sum(p.numel() for p in decoder.parameters() if p.ndim == 4)
    if reduce is None:
        assert weights == printed_weights(scale, 3072) == pytest.approx(millions * 1e6, abs=5e3)
    else:
        width = 96 if reduce == 96 else 1024 if scale >= 4 else 256
        assert weights == 3072 * width + printed_weights(scale, width)


@pytest.mark.parametrize("reduce", [None, "published"])
def test_at_full_resolution_three_convolutions_see_seven_pixels(reduce):
    decoder = ConvDecoder(6, 1, reduce, widths=(4,)).eval()
    for p in decoder.parameters():
        p.data.abs_()  # so that no ReLU hides a pixel
    z = torch.rand(1, 6, 15, 15, requires_grad=True)
    decoder(z)[0, :, 7, 7].sum().backward()
    touched = z.grad[0].abs().sum(0) > 0
    assert not touched.clone().index_fill_(0, torch.arange(4, 11), False).any()
    assert not touched.clone().index_fill_(1, torch.arange(4, 11), False).any()
    assert touched[4, 4] and touched[10, 10]


@pytest.mark.parametrize("scale", SCALES)
def test_every_decoder_learns(scale):
    assert_learns(tiny(image_size=64, map_size=64 // scale, decoder_widths=(8,) * (1 + int(math.log2(scale))),
                       decoder_reduce=12))


# --- the start as shifts ---


def shifts(origin="center", widths=(8,) * 5) -> FinolaAutoencoder:
    return tiny(image_size=64, map_size=4, embed_dim=64, pool_heads=16, decoder_widths=widths, start="shifts",
                origin=origin)


@pytest.mark.parametrize("origin", ["center", "top_left", "bottom_right", (2, 1)], ids=str)
def test_each_position_finds_its_own_cell_in_the_slot_of_the_origin(origin):
    model = shifts(origin)
    level = model.pool.out.bias.detach()  # ±4, alternating
    codes = 0.1 * torch.randn(2, 4, 4, 4)  # (B, grid row, grid column, channels of a slot)
    z = model.grow(codes.flatten(1) + level).detach()  # (B, C, 4, 4)
    y, x = {"center": (2, 2), "top_left": (0, 0), "bottom_right": (3, 3)}.get(origin, origin)
    slot = z.unflatten(1, (4, 4, 4))[:, y, x] - level[:4, None, None]  # (B, channels of a slot, map row, map column)
    torch.testing.assert_close(slot, codes.permute(0, 3, 1, 2), rtol=0, atol=0.02)


def test_each_slot_of_q_reads_its_own_cell():
    pool = shifts().pool
    features = torch.rand(1, 720, 4, 4)
    q = pool(features)
    for cell in range(16):
        other = features.clone().flatten(2)
        other[..., cell] = torch.rand(720)
        change = (pool(other.view_as(features)) - q).square().view(16, 4).sum(1)  # by slot
        assert change[cell] > 0.95 * change.sum()


def test_the_start_as_shifts_learns():
    assert_learns(shifts())


def test_the_start_from_images_is_a_linear_code_of_them():
    model = tiny(image_size=64, map_size=4, embed_dim=12 * 16, pool_heads=16, start="shifts",
                 decoder_widths=(24, 24, 16, 16, 16))
    x = torch.nn.functional.interpolate(torch.rand(24, 3, 8, 8), (64, 64), mode="bicubic").clamp(0, 1)
    before = psnr(model.train()(x), x).mean()
    start_from_images(model, x)
    codes = model.encode(x).unflatten(1, (4, 4, 12))  # (B, y, x, 12)
    leading = components(x, 16, 12)[:, 0]  # (B, y, x)
    correlation = torch.corrcoef(torch.stack([codes[..., 0].flatten(), leading.flatten()]))[0, 1]
    assert correlation > 0.95
    assert psnr(model(x), x).mean() > max(before, psnr(x.mean((2, 3), keepdim=True).expand_as(x), x).mean()) + 2


def test_the_start_from_images_asks_for_a_start_as_shifts():
    with pytest.raises(FinolaError, match="start_images: needs a model with start 'shifts'"):
        start_from_images(tiny(), torch.rand(2, 3, 32, 32))
    with pytest.raises(FinolaError, match="needs a decoder that narrows"):
        start_from_images(shifts(widths=(64, 8, 8, 8, 8)), torch.rand(2, 3, 64, 64))


# --- export ---


class Method(nn.Module):
    """One method of a model as a module."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model, self.name)(x)


@pytest.mark.parametrize("name", [pytest.param("encode", marks=pytest.mark.slow), "decode"])
def test_export_round_trip(tmp_path, name):
    model = tiny().eval()
    x = images(model) if name == "encode" else torch.randn(2, 16)
    torch.export.save(torch.export.export(Method(model, name), (x,)), tmp_path / "part.pt2")
    loaded = torch.export.load(tmp_path / "part.pt2").module()
    torch.testing.assert_close(loaded(x), getattr(model, name)(x))


# --- errors ---


@pytest.mark.parametrize("shape", [(2, 3, 48, 48), (2, 1, 32, 32), (3, 32, 32), (2, 3, 32, 64)], ids=str)
def test_images_of_another_shape(shape):
    with pytest.raises(FinolaError, match=r"got shape .* expected \(B, 3, 32, 32\)"):
        tiny()(torch.rand(shape))


@pytest.mark.parametrize(("overrides", "message"), [
    ({"image_size": 40}, "image_size: got 40, expected a multiple of 16"),
    ({"image_size": 0}, "image_size: got 0"),
    ({"map_size": 12}, "map_size: got 12, expected a divisor of image_size 32"),
    ({"map_size": 0}, "map_size: got 0"),
    ({"embed_dim": 0}, "embed_dim: got 0"),
    ({"autoregression": "quadratic"}, "autoregression: got 'quadratic', expected one of norm_linear"),
    ({"norm": "group"}, "norm: got 'group'"),
    ({"origin": "middle"}, "origin: got 'middle', expected .* center"),
    ({"origin": (8, 0)}, r"origin: \(y, x\) = \(8, 0\) lies outside the 8x8 map"),
    ({"pool_heads": 3}, "pool_heads: got 3, expected a divisor of embed_dim 16"),
    ({"decoder_widths": (8, 8)}, "decoder_widths: got 2 numbers, expected 3"),
    ({"decoder_reduce": "half"}, "decoder_reduce: got 'half'"),
    ({"image_size": 48, "map_size": 16}, r"image size / map size: got 3, expected one of \[1, 2, 4"),
    ({"start": "zero"}, "start: got 'zero'"),
    ({"pooling": "mean"}, "pooling: got 'mean', expected one of positions, plain"),
    ({"start": "shifts", "pooling": "plain", "pool_heads": 4, "map_size": 2, "decoder_widths": (8,) * 5},
     "pooling: 'plain' has no positions for a start in cells"),
    ({"start": "shifts", "pool_heads": 4}, "start 'shifts': needs an autoregression, map_size 2"),
], ids=str)
def test_configurations_that_make_no_model(overrides, message):
    with pytest.raises(FinolaError, match=message):
        tiny(**overrides)


def test_pooling_as_printed_knows_no_positions(tmp_path):
    """Keys and values of the map alone, a small query: q is that of torch's own attention layer, and does not depend on
    the order of the positions. The choice travels with the weights."""
    model = tiny(pooling="plain").eval()
    pool, features = model.pool, torch.randn(3, model.encoder.num_features, 2, 2)
    assert [name for name, _ in pool.named_parameters() if "position" in name] == []
    assert 0.01 < pool.query.std() < 0.03
    key, value = (layer(features.flatten(2).mT) for layer in (pool.key, pool.value))
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    attention.in_proj_weight.data.copy_(torch.eye(16).repeat(3, 1))
    attention.out_proj.load_state_dict(pool.out.state_dict())
    expected, _ = attention(pool.query.expand(3, 1, 16), key, value)
    assert torch.allclose(pool(features), expected[:, 0], atol=1e-5)
    assert torch.allclose(pool(features.flip(2, 3)), pool(features), atol=1e-5)
    assert not torch.allclose(tiny().pool(features.flip(2, 3)), tiny().pool(features), atol=1e-2)
    assert_learns(tiny(pooling="plain"))
    loaded = finola.load_weights(finola.save_weights(model, tmp_path / "plain.safetensors")).eval()
    assert loaded.config.pooling == "plain"
    x = images(model)
    assert torch.equal(loaded(x), model(x))


def test_weights_from_before_there_was_a_choice_of_pooling_load(tmp_path):
    model = tiny()
    path = finola.save_weights(model, tmp_path / "new.safetensors")
    tensors, metadata = read_tensors(path)
    config = json.loads(metadata["config"])
    assert config.pop("pooling") == "positions"
    save_file(tensors, tmp_path / "old.safetensors", metadata | {"config": json.dumps(config)})
    assert finola.load_weights(tmp_path / "old.safetensors").config == model.config


def test_unknown_names_and_options_give_near_ones():
    with pytest.raises(FinolaError, match="did you mean .*finola_mfw720_c768_r8"):
        create_model("finola_mfw720_c768_r9")
    with pytest.raises(FinolaError, match="unknown option 'embeding_dim'; did you mean embed_dim"):
        model_config("finola_mfw720_c768_r8", embeding_dim=64)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer", "batch", "none"])
def test_a_compiled_autoencoder_has_the_same_gradients(norm):
    plain, compiled = (tiny(norm=norm).double() for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(backend="aot_eager")
    x = images(plain).double()
    for model in (plain, compiled):
        model(x).square().mean().backward()
    assert_same_gradients_and_buffers(plain, compiled)
