"""The baselines MAE, SimMIM and MoCo-v2 at the smallest sizes."""

import sys
from dataclasses import replace

import pytest
import timm
import torch

from finola.cli.main import missing_extra
from finola.errors import FinolaError
from finola.evaluation.flops import count
from finola.models.masking import patchify, unpatchify
from finola.models.selfsupervised import Mae, MaeConfig, Moco, MocoConfig, Simmim, SimmimConfig

MAE = MaeConfig("vit_tiny_patch16_224", image_size=64, decoder_dim=32, decoder_depth=2, decoder_heads=2)
SIMMIM = SimmimConfig("vit_tiny_patch16_224", image_size=64)
MOCO = MocoConfig("mobileformer_w720", image_size=32, dim=16, hidden_dim=32, queue=64, momentum=0.9)


@pytest.fixture(scope="module")
def mae():
    torch.manual_seed(0)
    return Mae(MAE)


@pytest.fixture(scope="module")
def simmim():
    torch.manual_seed(0)
    return Simmim(SIMMIM)


@pytest.fixture
def moco():
    torch.manual_seed(0)
    return Moco(MOCO)


@pytest.fixture(params=["mae", "simmim"])
def masked_model(request):
    return request.getfixturevalue(request.param)


def images(batch=3, size=64, seed=0):
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def views(batch=4, seed=0):
    return images(2 * batch, 32, seed).unflatten(0, (batch, 2))


def seeded(model, x, seed=0):
    torch.manual_seed(seed)
    return model(x)


def without_gradient(model):
    return [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]


def test_shapes_and_scale(masked_model):
    x = images()
    patches, mask = masked_model(x)
    assert patches.shape == (3, 4, 4, 768) and mask.shape == (3, 4, 4) and mask.dtype == torch.bool
    loss = masked_model.loss(x, patches, mask)
    assert loss.shape == () and loss.isfinite()
    visible, painted = masked_model.paint(x, patches, mask)
    assert visible.shape == painted.shape == x.shape
    kept = ~mask
    assert torch.equal(patchify(painted, 16)[kept], patchify(x, 16)[kept])


@pytest.mark.parametrize("ratio, masked", [(0.75, 12), (0.5, 8), (0.6, 10), (0.9, 15)])
def test_mae_masks_its_ratio_of_each_image(ratio, masked):
    mask = Mae(replace(MAE, mask_ratio=ratio)).draw_mask(images())[2]
    assert mask.sum((1, 2)).tolist() == [masked] * 3
    assert not torch.equal(mask[0], mask[1])


def test_simmim_masks_whole_squares_of_32_pixels():
    model = Simmim(replace(SIMMIM, image_size=128))
    mask = model.draw_mask(images(size=128))[2]  # (3, 8, 8)
    squares = mask.unflatten(1, (4, 2)).unflatten(3, (4, 2)).transpose(2, 3).flatten(3)  # (3, 4, 4, 4)
    assert torch.equal(squares.any(3), squares.all(3))
    assert squares.all(3).sum((1, 2)).tolist() == [10] * 3  # 0.6 of 16 squares, 6 kept


def test_masks_come_from_torchs_generator(masked_model):
    x = images()
    masks = [seeded(masked_model, x, seed)[1] for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


@torch.no_grad()
def test_masked_pixels_do_not_enter_the_prediction(masked_model):
    masked_model.eval()
    x = images()
    patches, mask = seeded(masked_model, x)
    noise = patchify(torch.rand_like(x), 16)
    for changed, same in ((mask, True), (~mask, False)):
        other = unpatchify(torch.where(changed[..., None], noise, patchify(x, 16)))
        again, mask_again = seeded(masked_model, other)
        assert torch.equal(mask, mask_again)
        assert torch.equal(patches, again) == same


@torch.no_grad()
def test_mae_with_all_patches_visible_is_the_vit_itself(mae):
    """Position embeddings and the order of tokens are those of timm's own forward."""
    mae.eval()
    x = mae.normalise(images())
    everything = torch.arange(17).expand(3, 17)
    assert torch.allclose(mae.masked_encoder.encode(x, idx_keep=everything), mae.encoder.forward_features(x), atol=1e-5)


@torch.no_grad()
def test_mae_puts_each_visible_patch_in_its_place(mae):
    """What enters the decoder: visible patches where they were, the mask token everywhere else."""
    mae.eval()
    x = images(1)
    torch.manual_seed(3)
    kept, _, mask = mae.draw_mask(x)
    seen = []
    handle = mae.decoder.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    seeded(mae, x, seed=3)
    handle.remove()
    tokens = seen[0][0]  # (17, 32)
    is_mask_token = (tokens == mae.decoder.mask_token[0, 0]).all(1)
    assert torch.equal(is_mask_token[1:].view(4, 4), mask[0]) and not is_mask_token[0]
    visible = mae.embed(mae.masked_encoder.encode(mae.normalise(x), idx_keep=kept))
    assert torch.allclose(tokens[kept[0]], visible[0])


def test_simmim_loss_is_the_mean_absolute_error_of_masked_pixels(simmim):
    x = images()
    mask = torch.zeros(3, 4, 4, dtype=torch.bool)
    mask[0, 1, 2] = mask[2, 3, 3] = True
    target = patchify(simmim.normalise(x), 16)
    patches = torch.full_like(target, 1e6)  # as wrong as can be, where it does not count
    patches[mask] = target[mask] + 0.5
    assert simmim.loss(x, patches, mask).item() == pytest.approx(0.5, rel=1e-5)
    patches[0, 1, 2] -= 1.5  # off by -1
    assert simmim.loss(x, patches, mask).item() == pytest.approx(0.75, rel=1e-5)


def test_each_trained_parameter_of_the_masked_models_gets_a_gradient(masked_model):
    masked_model.train().zero_grad()
    x = images()
    masked_model.loss(x, *masked_model(x)).backward()
    assert without_gradient(masked_model) == []
    frozen = {name for name, p in masked_model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in masked_model.named_parameters() if name.endswith("pos_embed")}


@pytest.mark.parametrize("model_class, config", [(Mae, MAE), (Simmim, SIMMIM), (Moco, MOCO)])
def test_state_dict_round_trip(model_class, config):
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(model_class(config).eval())
    first, second = models
    state = first.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)  # each tensor once
    second.load_state_dict(state)
    x = views() if model_class is Moco else images()
    expected, got = seeded(first, x), seeded(second, x)
    assert torch.equal(expected, got) if model_class is Moco else torch.equal(expected[0], got[0])


@pytest.mark.parametrize("model_class, config", [(Mae, MAE), (Simmim, SIMMIM)])
def test_the_encoder_is_timms_vit(model_class, config):
    model = model_class(config)
    alone = timm.create_model(config.encoder, num_classes=0, img_size=config.image_size)
    alone.load_state_dict(model.encoder.state_dict())
    assert model.encoder(images()).shape == (3, 192)


def test_no_weight_decay_names_the_embeddings(mae, simmim, moco):
    vit = {"masked_encoder.vit.cls_token", "masked_encoder.vit.pos_embed"}
    assert mae.no_weight_decay() == vit | {"decoder.mask_token", "decoder.pos_embed"}
    assert simmim.no_weight_decay() == vit | {"masked_encoder.mask_token"}
    assert moco.no_weight_decay() == {"encoder.tokens"} <= dict(moco.named_parameters()).keys()


def test_each_trained_parameter_of_moco_gets_a_gradient(moco):
    moco(views()).backward()
    assert without_gradient(moco) == []
    frozen = {name for name, p in moco.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in moco.named_parameters() if name.startswith("momentum_")}


def test_moco_momentum_update(moco):
    with torch.no_grad():
        for parameter in (*moco.encoder.parameters(), *moco.projection.parameters()):
            parameter += torch.rand_like(parameter)
    pairs = [(moco.encoder, moco.momentum_encoder), (moco.projection, moco.momentum_projection)]
    expected = [0.9 * slow + 0.1 * trained for a, b in pairs
                for trained, slow in zip(a.parameters(), b.parameters(), strict=True)]
    moco.update_momentum_encoder()
    slow = [parameter for _, b in pairs for parameter in b.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(slow, expected, strict=True))


def test_moco_queue_takes_the_keys_in_training_alone(moco):
    bank = moco.contrast.memory_bank
    before = bank.bank.clone()
    moco.eval()(views())
    with torch.no_grad():
        moco.train()(views())
    assert torch.equal(bank.bank, before) and bank.bank_ptr.item() == 0
    moco(views())
    assert bank.bank_ptr.item() == 4 and torch.equal(bank.bank[4:], before[4:])
    x = moco.normalise(views()[:, 1])
    key = torch.nn.functional.normalize(moco.momentum_projection(moco.momentum_encoder(x)), dim=1)
    assert torch.allclose(bank.bank[:4], key, atol=1e-5)


def test_moco_goes_on_from_its_state_dict(moco):
    moco(views(seed=1))
    torch.manual_seed(1)
    resumed = Moco(MOCO)
    resumed.load_state_dict(moco.state_dict())
    assert torch.equal(resumed(views(seed=2)), moco(views(seed=2)))
    ours, theirs = resumed.state_dict(), moco.state_dict()
    assert ours["contrast.memory_bank.bank_ptr"].item() == 8
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_moco_loss_is_cross_entropy_of_the_positive_against_the_queue(moco):
    moco.eval()
    x = views()
    query = torch.nn.functional.normalize(moco.projection(moco.encoder(moco.normalise(x[:, 0]))), dim=1)
    key = torch.nn.functional.normalize(moco.momentum_projection(moco.momentum_encoder(moco.normalise(x[:, 1]))), dim=1)
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ moco.contrast.memory_bank.bank.T], dim=1) / 0.2
    expected = -logits.log_softmax(1)[:, 0].mean()
    assert torch.allclose(moco(x), expected, atol=1e-5)


@pytest.mark.parametrize("model_class, config", [(Mae, MAE), (Simmim, SIMMIM), (Moco, MOCO)])
def test_counts_on_the_meta_device(model_class, config):
    shape = (1, 2, 3, 32, 32) if model_class is Moco else (1, 3, 64, 64)
    with torch.device("meta"):
        on_meta = count(model_class(config), torch.empty(shape))
    assert on_meta == count(model_class(config), torch.rand(shape))


def test_image_of_another_size_is_refused(masked_model):
    with pytest.raises(FinolaError, match=r"image: got shape \(3, 3, 32, 32\), expected \(B, 3, 64, 64\)"):
        masked_model(images(size=32))


def test_moco_takes_two_views(moco):
    with pytest.raises(FinolaError, match=r"views: got shape \(4, 3, 32, 32\), expected \(B, 2, 3, 32, 32\)"):
        moco(images(4, 32))


@pytest.mark.parametrize("config_class, options, message", [
    (MaeConfig, {"encoder": "resnet50"}, "encoder: got 'resnet50', expected one of vit_tiny_patch16_224"),
    (SimmimConfig, {"encoder": "vit_relpos_base_patch16_224"}, "encoder: got 'vit_relpos_base_patch16_224'"),
    (MaeConfig, {"image_size": 100}, "image_size: got 100, expected a multiple of 16"),
    (SimmimConfig, {"image_size": 240}, "image_size: got 240, expected a multiple of 32"),
    (SimmimConfig, {"mask_patch": 24}, "mask_patch: got 24, expected a multiple of 16"),
    (MaeConfig, {"mask_ratio": 0.0}, "mask_ratio: got 0.0, .*above 0 to 0.995"),
    (MaeConfig, {"mask_ratio": 1.0}, "mask_ratio: got 1.0, .*196 squares"),
    (MaeConfig, {"decoder_dim": 100}, "decoder_dim: got 100, expected a multiple of decoder_heads"),
    (MaeConfig, {"decoder_depth": 0}, "decoder_depth: got 0, expected at least 1"),
    (MocoConfig, {"encoder": "mobileformer_w1"}, "encoder: unknown timm model 'mobileformer_w1'"),
    (MocoConfig, {"image_size": 40}, "image_size: got 40, expected a multiple of 16"),
    (MocoConfig, {"queue": 0}, "queue: got 0, expected at least 1"),
    (MocoConfig, {"temperature": 0.0}, "temperature: got 0.0, expected more than 0"),
    (MocoConfig, {"momentum": 1.0}, "momentum: got 1.0, expected at least 0 and less than 1"),
])
def test_bad_configurations(config_class, options, message):
    with pytest.raises(FinolaError, match=message):
        config_class(**options)


def test_without_lightly_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightly.models.modules", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        Mae(MAE)
    assert "pip install 'finola[ssl]'" in missing_extra(caught.value)
