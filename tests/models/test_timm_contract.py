"""What timm's own test suite asks of a model (CONTRIBUTING.md says how to run it on ours), and extraction of features
by the names of layers."""

from __future__ import annotations

import pytest
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import finola.timm_models  # noqa: F401  (registers the encoders)
from finola.errors import FinolaError
from finola.models.mobileformer import CONFIGS

NAME = "mobileformer_w720"


@pytest.fixture(scope="module")
def model():
    return timm.create_model(NAME).eval()


@pytest.fixture
def x():
    return torch.randn(2, 3, 64, 96)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_its_configuration(name):
    with torch.device("meta"):
        model, x = timm.create_model(name).eval(), torch.empty(1, 3, 224, 224)
        features = model.forward_features(x)
        assert features.shape == (1, model.num_features, *model.default_cfg["pool_size"])
        assert model.forward_head(features, pre_logits=True).shape == (1, model.head_hidden_size)
        model.reset_classifier(0)
        assert model(x).shape == (1, model.head_hidden_size)
        model.reset_classifier(0, "")
        assert model(x).shape == features.shape
    assert {f"{model.default_cfg[key]}.weight" for key in ("first_conv", "classifier")} <= {
        *timm.create_model(NAME).state_dict()}


@torch.no_grad()
def test_the_head_needs_what_the_features_give(model, x):
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    assert torch.equal(model.head(model.forward_head(features, pre_logits=True)), model(x))
    final, tokens = model.forward_map_and_tokens(x)
    expected = model.head(torch.cat([final.mean((2, 3)), tokens[:, 0]], dim=1))
    torch.testing.assert_close(model(x), expected)


@torch.no_grad()
def test_traced_forward_is_the_same(model, x):
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(FinolaError, match="got 40x64, expected a height and a width divisible by 16"):
        traced(torch.randn(1, 3, 40, 64))


def test_traced_backward_reaches_every_parameter(x):
    model = timm.create_model(NAME, num_classes=7).train()
    torch.fx.symbolic_trace(model)(x).mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@torch.no_grad()
def test_features_by_the_names_of_layers(model, x):
    _, names = get_graph_node_names(model)
    assert {"stem", "tail"} <= {name.partition(".")[0] for name in names}
    maps = create_feature_extractor(model, {"stages.1.1.mobile.project": "early", "tail": "final", "head": "logits"})(x)
    assert maps["early"].shape[2:] == (16, 24)
    assert torch.equal(maps["final"], model.forward_map_and_tokens(x)[0])
    assert torch.equal(maps["logits"], model(x))
