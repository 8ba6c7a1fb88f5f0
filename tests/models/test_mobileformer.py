"""The Mobile-Former encoders: the paper's counts, timm's interface, gradients, precision, export."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import nn
from training import assert_same_gradients_and_buffers

import finola.timm_models  # noqa: F401  (registers the encoders)
from finola.errors import FinolaError
from finola.evaluation.flops import count
from finola.models.encoders import create_encoder
from finola.models.mobileformer import (
    CONFIGS,
    DepthwiseConv,
    DynamicReLU,
    FormerToMobile,
    MobileFormer,
    MobileFormerConfig,
    MobileToFormer,
)

SMALL = "mobileformer_w720"
TOKEN_DIM = {name: 192 if name == SMALL else 256 for name in CONFIGS}
WIDTH = {name: min(2880, int(name.removeprefix("mobileformer_w"))) for name in CONFIGS}  # of the final map


def small(**kwargs) -> nn.Module:
    return timm.create_model(SMALL, **kwargs)


def image(batch: int = 2, height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.rand(batch, 3, height, width).contiguous(memory_format=torch.channels_last)


def meta(name: str, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def meta_image(height: int, width: int) -> torch.Tensor:
    return torch.empty(1, 3, height, width, device="meta")


# --- the paper's figures ---


@pytest.mark.parametrize(
    "name, params",
    [
        ("mobileformer_w720", 4.9e6),
        ("mobileformer_w1440", 11.7e6),
        ("mobileformer_w2880", 25.0e6),
        ("mobileformer_w4320", 43.5e6),
        ("mobileformer_w5760", 67.6e6),
    ],
)
def test_parameters_are_the_papers(name, params):
    assert count(meta(name, num_classes=0), meta_image(32, 32)).params == pytest.approx(params, rel=0.015)


@pytest.mark.parametrize("name, params", [("mobileformer_w4320", 43.5e6), ("mobileformer_w5760", 67.6e6)])
def test_a_final_map_as_wide_as_the_name_has_more_parameters_than_the_paper(name, params):
    wide = meta(name, num_classes=0, out_channels=int(name.removeprefix("mobileformer_w")))
    assert count(wide, meta_image(32, 32)).params > 1.02 * params


@pytest.mark.parametrize(
    "name, macs",
    [("mobileformer_w720", 5.6e9), ("mobileformer_w1440", 20.4e9), ("mobileformer_w2880", 77.5e9)],
)
def test_multiply_adds_are_the_papers_at_800x1333(name, macs):
    encoder = meta(name, num_classes=0, strict_img_size=False)
    assert count(encoder, meta_image(800, 1333)).macs == pytest.approx(macs, rel=0.015)


def test_linear_classifier_has_the_abstracts_parameters_and_multiply_adds():
    params, macs = count(meta(SMALL), meta_image(224, 224))
    assert params == pytest.approx(5.8e6, rel=0.015)
    assert macs == pytest.approx(285e6, rel=0.015)


def test_count_of_known_modules():
    conv = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8))
    assert count(conv, torch.rand(2, 3, 8, 8)) == (3 * 8 * 9 + 16, 2 * 16 * 8 * 27 + 2 * 16 * 8)
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.rand(2, 5, 16)
    with torch.no_grad():
        macs = count(attention, x, x, x).macs
    assert macs == 2 * (4 * 5 * 16 * 16 + 2 * 5 * 5 * 16)


def test_count_leaves_the_module_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval(), nn.Dropout())
    count(model, torch.rand(1, 3, 4, 4))
    assert [m.training for m in model] == [True, False, True]
    assert not any(m._forward_hooks for m in model.modules())
    assert model[1].num_batches_tracked == 0


# --- shapes and timm's interface ---


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes(name):
    encoder = meta(name).eval()
    for height, width in ((16, 16), (64, 96), (256, 256)):
        x = meta_image(height, width)
        features, tokens = encoder.forward_map_and_tokens(x)
        assert features.shape == (1, WIDTH[name], height // 16, width // 16)
        assert tokens.shape == (1, 6, TOKEN_DIM[name])
        assert encoder(x).shape == (1, 1000)


@pytest.mark.parametrize("name", CONFIGS)
def test_features_only(name):
    backbone = meta(name, features_only=True)
    maps = backbone(meta_image(64, 96))
    assert backbone.feature_info.reduction() == [2, 4, 8, 16]
    assert [m.shape[1] for m in maps] == backbone.feature_info.channels()
    assert [m.shape[2:] for m in maps] == [(64 // s, 96 // s) for s in backbone.feature_info.reduction()]
    assert backbone.feature_info.channels()[-1] == WIDTH[name]


def test_features_only_drops_what_it_does_not_need():
    torch.manual_seed(1)
    full = small(features_only=True).eval()
    pruned = small(features_only=True, out_indices=(1, -2)).eval()
    pruned.load_state_dict(full.state_dict(), strict=False)
    x = image()
    for got, expected in zip(pruned(x), full(x)[1:3], strict=True):
        torch.testing.assert_close(got, expected)
    sum(m.sum() for m in pruned(x)).backward()
    assert all(p.grad is not None for p in pruned.parameters())


def test_intermediates_agree_with_forward():
    encoder, x = small().eval(), image()
    final, maps = encoder.forward_intermediates(x)
    features, tokens = encoder.forward_map_and_tokens(x)
    torch.testing.assert_close(final, features)
    torch.testing.assert_close(maps[-1], features)
    torch.testing.assert_close(encoder.head(torch.cat([features.mean((2, 3)), tokens[:, 0]], 1)), encoder(x))
    (last,) = encoder.forward_intermediates(x, indices=1, intermediates_only=True)
    torch.testing.assert_close(last, features)
    early, (same,) = encoder.forward_intermediates(x, indices=[1], stop_early=True)
    torch.testing.assert_close(early, maps[1])
    torch.testing.assert_close(same, maps[1])


def test_reset_classifier():
    encoder, x = small().double(), image().double()
    encoder.reset_classifier(7)
    assert encoder.get_classifier().weight.dtype == torch.float64
    assert encoder(x).shape == (2, 7)
    encoder.reset_classifier(0)
    assert encoder(x).shape == (2, 720 + 192)
    encoder.reset_classifier(0, "")
    assert encoder(x).shape == (2, 720 + 192, 4, 4)  # the map, and beside it the first token
    plain = create_encoder(SMALL, global_pool="").double()
    assert plain(x).shape == (2, 720, 4, 4)


@pytest.mark.parametrize("num_classes, pool", [(0, "max"), (10, "")])
def test_unknown_pooling_is_an_error(num_classes, pool):
    with pytest.raises(FinolaError, match="global_pool"):
        small(num_classes=num_classes, global_pool=pool)


def test_layer_groups_are_stem_twelve_blocks_and_head():
    encoder = meta(SMALL)
    groups = group_parameters(encoder, encoder.group_matcher())
    assert len(groups) == 14
    assert set(groups[0]) >= {"tokens", "stem.0.weight"}
    assert "tail.0.weight" in groups[12]
    assert groups[13] == ["head.weight", "head.bias"]
    assert encoder.no_weight_decay() <= dict(encoder.named_parameters()).keys()


def test_other_numbers_of_channels():
    assert small(in_chans=1, num_classes=3)(torch.rand(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("height, width", [(60, 64), (64, 100), (8, 8)])
def test_size_that_16_does_not_divide_is_an_error(height, width):
    with pytest.raises(FinolaError, match=f"got {height}x{width}, expected .* divisible by 16"):
        small()(image(1, height, width))


# --- gradients ---


@pytest.mark.parametrize(
    "kwargs", [{"num_classes": 10}, {"num_classes": 0, "global_pool": ""}], ids=["logits", "map"]
)
def test_every_parameter_gets_a_gradient(kwargs):
    encoder = small(**kwargs)
    encoder(image()).square().sum().backward()
    assert [n for n, p in encoder.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_gradient_checkpointing_changes_nothing():
    plain, saving = small(num_classes=10), small(num_classes=10)
    saving.load_state_dict(plain.state_dict())
    saving.set_grad_checkpointing()
    x = image()
    for encoder in (plain, saving):
        encoder(x).square().sum().backward()
    assert_same_gradients_and_buffers(plain, saving)


def test_checkpointing_stores_less():
    def stored_bytes(encoder: nn.Module) -> int:
        storages = {}

        def pack(t):
            storages[t.data_ptr()] = t  # held, so that no address is used twice
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            encoder(image())
        return sum(t.nbytes for t in storages.values())

    plain, saving = small(), small()
    saving.set_grad_checkpointing()
    assert stored_bytes(saving) < 0.5 * stored_bytes(plain)


# --- the blocks against their definitions ---


def test_dynamic_relu_is_the_larger_of_two_lines():
    act = DynamicReLU(channels=5, token_dim=8).double()
    nn.init.normal_(act.slopes.weight, std=5)  # slopes all over their ranges, a1 < a2 included
    x = torch.randn(4, 5, 3, 2, dtype=torch.double, requires_grad=True)
    token = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    a1, a2 = F.hardsigmoid(act.slopes(act.hidden(token).relu()))[..., None, None].chunk(2, dim=1)
    assert (2 * a1 < 2 * a2 - 1).any()
    torch.testing.assert_close(act(x, token), torch.maximum(2 * a1 * x, (2 * a2 - 1) * x))
    assert torch.autograd.gradcheck(act, (x, token))


def test_dynamic_relu_starts_close_to_a_leaky_relu():
    x, token = torch.randn(4, 96, 8, 8), torch.randn(4, 192)
    act = next(m for m in small().modules() if isinstance(m, DynamicReLU))
    torch.testing.assert_close(act(x, token), F.leaky_relu(x, 0.5), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_cross_attentions_follow_their_definitions(memory_format):
    x = torch.randn(2, 8, 4, 6).contiguous(memory_format=memory_format)
    tokens = torch.randn(2, 6, 12)

    def heads(t):  # (B, L, C) -> (B, 2, L, C / 2)
        return t.unflatten(2, (2, -1)).transpose(1, 2)

    pixels = x.flatten(2).mT  # (B, N, C)
    reader = MobileToFormer(8, 12)
    read = F.scaled_dot_product_attention(heads(reader.query(tokens)), heads(pixels), heads(pixels))
    gated = read.transpose(1, 2).flatten(2) * 2 * F.hardsigmoid(reader.gate(tokens))
    torch.testing.assert_close(reader(x, tokens), reader.norm(tokens + reader.out(gated)))

    writer = FormerToMobile(8, 12)
    keys, values = heads(writer.key(tokens)), heads(writer.value(tokens))
    read = F.scaled_dot_product_attention(heads(pixels), keys, values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(writer(x, tokens), x + read.mT.reshape(x.shape))


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolution_is_the_grouped_one(stride):
    conv, x = DepthwiseConv(5, 15, stride), torch.rand(2, 5, 6, 8)
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight, stride=stride, padding=1, groups=5))


# --- running it ---


def test_images_of_a_batch_do_not_mix_in_eval():
    encoder, x = small(num_classes=10).double().eval(), image(3).double()
    torch.testing.assert_close(encoder(x)[1:2], encoder(x[1:2]))


def padded_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An image of 75x101, the same in a batch of 128x160 with noise around it, and that batch's padding."""
    picture, batch = image(1, 75, 101), image(2, 128, 160)
    batch[:1, :, :75, :101] = picture
    padding = torch.zeros(2, 128, 160, dtype=torch.bool)
    padding[0, 75:], padding[0, :, 101:] = True, True
    return picture, batch, padding


def settled(encoder: nn.Module) -> nn.Module:
    """For evaluation, with BatchNorms that turn zeros into other numbers."""
    for norm in encoder.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.normal_(norm.bias, std=0.1)
    return encoder.eval()


def test_a_padded_picture_gives_the_maps_it_gives_alone():
    encoder = settled(small(num_classes=0, strict_img_size=False)).double()
    picture, batch, padding = padded_batch()
    alone = encoder.forward_intermediates(picture.double(), intermediates_only=True)
    together = encoder.forward_intermediates(batch.double(), intermediates_only=True, padding=padding)
    blind = encoder.forward_intermediates(batch.double(), intermediates_only=True)
    for one, both, mixed in zip(alone, together, blind, strict=True):
        height, width = one.shape[-2:]
        torch.testing.assert_close(both[:1, :, :height, :width], one)
        assert not both[0, :, height:].any() and not both[0, :, :, width:].any()
        torch.testing.assert_close(both[1], mixed[1])
        assert (mixed[:1, :, :height, :width] - one).abs().max() > 1e-3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_gradient_comes_from_the_padding(checkpointing):
    encoder = settled(small(num_classes=0))
    encoder.set_grad_checkpointing(checkpointing)
    _, batch, padding = padded_batch()
    batch.requires_grad_()
    maps = encoder.forward_intermediates(batch, intermediates_only=True, padding=padding)
    sum(x.square().sum() for x in maps).backward()
    reached = batch.grad.abs().sum(1) > 0
    assert not reached[padding].any() and reached[~padding].float().mean() > 0.99


def test_bf16_autocast_is_finite_and_near_fp32():
    encoder, x = small(num_classes=0), image()
    expected = encoder(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = encoder(x)
    assert F.cosine_similarity(got.float(), expected).min() > 0.99
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


def test_whole_model_in_bf16():
    encoder = small(num_classes=0).bfloat16().eval()
    out = encoder(image().bfloat16())
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def export_round_trip(encoder: nn.Module, path, **kwargs) -> nn.Module:
    torch.export.save(torch.export.export(encoder, (image(),), **kwargs), path)
    return torch.export.load(path).module()


@pytest.mark.slow
def test_export_round_trip(tmp_path):
    encoder = small(num_classes=10).eval()
    loaded = export_round_trip(encoder, tmp_path / "encoder.pt2")
    x = image()
    torch.testing.assert_close(loaded(x), encoder(x))


@pytest.mark.slow
def test_export_round_trip_at_any_batch_and_height(tmp_path):
    encoder = small(num_classes=10).eval()
    batch, rows = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("rows", min=2, max=8)
    shapes = {"x": {0: batch, 2: 16 * rows}}
    loaded = export_round_trip(encoder, tmp_path / "encoder.pt2", dynamic_shapes=shapes)
    x = image(3, height=96)
    torch.testing.assert_close(loaded(x), encoder(x))


@pytest.mark.slow
def test_compiled_with_checkpointing_equals_eager():
    tiny = MobileFormerConfig(stem=8, stages=(((16, 8),), ((16, 8),), ((16, 8),)), out_channels=16)
    plain, saving = (MobileFormer(tiny, num_classes=5) for _ in range(2))
    saving.load_state_dict(plain.state_dict())
    saving.set_grad_checkpointing()
    x = image()
    plain(x).square().sum().backward()
    torch.compile(saving, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    assert_same_gradients_and_buffers(plain, saving)
