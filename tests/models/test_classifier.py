"""Encoders with a head: the paper's counts, gradients, freezing, layer-wise decay, bad configurations."""

import pytest
import torch

from finola.errors import FinolaError
from finola.evaluation.flops import count
from finola.models.classifier import Classifier, ClassifierConfig
from finola.models.encoders import create_encoder
from finola.models.heads import HEADS, LinearHead, TransformerHead, create_head, map_and_tokens

ENCODERS = ("mobileformer_w720", "vit_tiny_patch16_224")


def tiny(head="lin", encoder="mobileformer_w720", **options):
    torch.manual_seed(0)
    return Classifier(ClassifierConfig(encoder, image_size=32, head=head, num_classes=5, **options))


@pytest.mark.parametrize(
    "name, params, macs",
    [
        ("mobileformer_w720+lin", 5.8e6, 0.285e9),  # the introduction's figures; the table rounds to 6M
        ("mobileformer_w1440+lin", 14e6, None),
        ("mobileformer_w2880+lin", 28e6, None),
        ("mobileformer_w720+tran4", 7e6, 0.7e9),
        ("mobileformer_w1440+tran4", 20e6, 2.6e9),
        ("mobileformer_w2880+tran4", 57e6, 9.9e9),
    ],
)
def test_encoder_and_head_meet_the_published_counts(name, params, macs):
    encoder, head = name.split("+")
    with torch.device("meta"):
        counted = count(Classifier(ClassifierConfig(encoder, head=head)), torch.empty(1, 3, 224, 224))
    assert counted.params == pytest.approx(params, rel=0.04)
    assert macs is None or counted.macs == pytest.approx(macs, rel=0.03)


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_gets_a_gradient(encoder, head):
    model = tiny(head, encoder)
    logits = model(torch.rand(4, 3, 32, 32))
    assert logits.shape == (4, 5)
    torch.nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("encoder", ENCODERS)
def test_map_and_token_are_those_of_the_encoder(encoder):
    size = {"img_size": 48} if encoder.startswith("vit") else {}
    model = create_encoder(encoder, **size).eval()
    x = torch.randn(2, 3, 48, 48)
    features, token = map_and_tokens(model, x)
    assert features.shape == (2, model.num_features, 3, 3)
    if encoder.startswith("vit"):
        whole = model.forward_features(x)
        assert torch.equal(token, whole[:, 0]) and torch.equal(features[:, :, 1, 0], whole[:, 1 + 3])
    else:
        pooled = torch.cat([features.mean((2, 3)), token], dim=1)
        torch.testing.assert_close(pooled, model(x))


def test_a_transformer_head_sees_the_positions_as_a_set():
    head = create_head("tran1", 30, 12, 5, width=64).eval()
    features, token = torch.randn(2, 30, 3, 4), torch.randn(2, 12)
    torch.testing.assert_close(head(features, token), head(features.flip(3), token))
    assert not torch.allclose(head(features, token), head(features, token + 1))
    assert not torch.allclose(head(features, token), head(features + 1, token))


def test_the_linear_head_is_blind_to_scale_and_offset():
    head = LinearHead(6, 3, 5)
    features, token = torch.randn(8, 6, 2, 2), torch.randn(8, 3)
    torch.testing.assert_close(head(features, token), head(7 * features - 2, 3 * token + 1), rtol=1e-3, atol=1e-4)
    assert [name for name, _ in head.named_parameters()] == ["fc.weight", "fc.bias"]


def test_a_transformer_sees_neither_offset_nor_a_large_scale_of_the_features():
    """In training: what all images have in common is taken away before the first layer."""
    torch.manual_seed(0)
    head = TransformerHead(24, 16, 5, depth=1, width=64)
    features, token = 100 * torch.rand(4, 24, 3, 2), 100 * torch.rand(4, 16)
    torch.testing.assert_close(head(features, token), head(7 * features - 2, 3 * token + 1), rtol=1e-3, atol=1e-4)
    assert not any("norm" in name and name.startswith(("map", "token")) for name, _ in head.named_parameters())


def test_a_token_that_hardly_differs_between_images_is_not_blown_up():
    """As after masked pre-training; scaled to unit variance its gradient would be a hundred thousand times as large."""
    torch.manual_seed(0)
    head = TransformerHead(24, 16, 5, depth=1, width=64)
    token = (1 + 1e-5 * torch.randn(8, 16)).requires_grad_()
    normalised = head.token_norm(token)
    normalised.square().sum().backward()
    assert normalised.abs().max() < 1e-3 and token.grad.abs().max() < 0.1


@pytest.mark.parametrize(
    "channels, token_dim, width",
    [(720, 192, 192), (1440, 256, 384), (2880, 256, 768), (4320, 256, 768), (192, 192, 192)],
)
def test_default_widths(channels, token_dim, width):
    head = TransformerHead(channels, token_dim, 5, depth=1)
    assert head.norm.normalized_shape == (width,)
    assert head.blocks[0].attn.num_heads == width // 64


def test_dropout_acts_in_training_alone():
    model = tiny("tran1", dropout=0.5)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(model.eval()(x), model(x))
    features = model.features(x)
    model.head.train()
    assert not torch.equal(model.head.classify(*features), model.head.classify(*features))


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("head", ["lin", "tran1"])
def test_a_frozen_encoder_does_not_move_by_a_bit(encoder, head):
    model = tiny(head, encoder)
    model.freeze_encoder()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model.eval()
        model.train()
        torch.nn.functional.cross_entropy(model(torch.rand(4, 3, 32, 32)), torch.arange(4)).backward()
        optimizer.step()
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert not [name for name in moved if name.startswith("encoder.")]
    assert "head.fc.weight" in moved
    assert model.head.training and not any(module.training for module in model.encoder.modules())


@pytest.mark.parametrize("encoder, layers", [("mobileformer_w720", 13), ("vit_tiny_patch16_224", 13)])
def test_layer_scales_fall_from_head_to_stem(encoder, layers):
    model = tiny(encoder=encoder)
    scales = model.layer_scales(0.5)
    assert scales.keys() == dict(model.named_parameters()).keys()
    assert {scale for name, scale in scales.items() if name.startswith("head.")} == {1.0}
    assert sorted(set(scales.values()), reverse=True) == [0.5**i for i in range(layers + 1)]
    order = [name for name, _ in model.encoder.named_parameters()]
    assert scales[f"encoder.{order[0]}"] == 0.5**layers and scales[f"encoder.{order[-1]}"] == 0.5


def test_embeddings_are_not_decayed():
    assert tiny().no_weight_decay() == {"encoder.tokens"}
    assert tiny(encoder="vit_tiny_patch16_224").no_weight_decay() == {"encoder.cls_token", "encoder.pos_embed"}


@pytest.mark.parametrize("head", HEADS)
def test_a_new_class_count_leaves_the_rest(head):
    model = tiny(head)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.reset_classifier(3, ("ant", "bee", "cat"))
    assert model.config.num_classes == 3 and model.config.classes == ("ant", "bee", "cat")
    changed = [name for name, t in model.state_dict().items()
               if t.shape != before[name].shape or not torch.equal(t, before[name])]
    assert changed == ["head.fc.weight", "head.fc.bias"]
    assert model.eval()(torch.rand(1, 3, 32, 32)).shape == (1, 3)


def test_a_configuration_survives_json():
    config = ClassifierConfig(num_classes=2, classes=["ant", "bee"], head="tran1", dropout=0.1)
    assert config.classes == ("ant", "bee")
    assert ClassifierConfig(**config.to_dict()) == config


@pytest.mark.parametrize(
    "options, message",
    [
        ({"encoder": "resnet18"}, "encoder: got 'resnet18', expected one of mobileformer_w720"),
        ({"encoder": "hf-hub:somebody/something"}, "encoder: got 'hf-hub:"),
        ({"image_size": 40}, "image_size: got 40, expected a multiple of 16"),
        ({"head": "tran2"}, "head: got 'tran2', expected one of lin, tran1, tran4"),
        ({"num_classes": 0}, "num_classes: got 0"),
        ({"num_classes": 3, "classes": ("a", "b")}, "classes: got 2 names for num_classes=3"),
        ({"head": "tran1", "head_width": 100}, "head_width: got 100, expected a multiple of 64"),
        ({"head": "tran1", "head_width": 0}, "head_width: got 0"),
        ({"head": "tran1", "dropout": 1.0}, "dropout: got 1.0"),
        ({"head_width": 64}, "head 'lin': got width=64"),
        ({"encoder": "vit_base_patch16_siglip_224"}, "expected a Mobile-Former or a timm ViT with a class token"),
    ],
)
def test_bad_configurations_are_named(options, message):
    with pytest.raises(FinolaError, match=message), torch.device("meta"):
        Classifier(ClassifierConfig(**options))


def test_an_image_of_another_size_is_named():
    with pytest.raises(FinolaError, match=r"got shape \(1, 3, 48, 48\), expected \(B, 3, 32, 32\)"):
        tiny()(torch.rand(1, 3, 48, 48))
