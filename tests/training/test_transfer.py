"""What a model takes from another's weights, tensor by tensor, and what it refuses."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from training import unequal

from finola.errors import WeightsError
from finola.factory import create_model
from finola.training.origin import origin_of_weights
from finola.training.transfer import transfer
from finola.weights import load_weights, save_weights

pytest.importorskip("lightly", reason="MAE, SimMIM and MoCo need the extra 'ssl'")

CLASSES = ("cat", "dog", "owl")
SMALL = {  # name in the tests -> registered name and what makes it small
    "autoencoder": ("finola_mfw720_c768_r8", {"image_size": 64, "start": "random", "embed_dim": 512, "pool_heads": 8,
                                              "decoder_widths": (16, 8, 8, 8)}),
    "masked_b": ("masked_finola_b_mfw720", {"image_size": 64, "block_size": 2, "decoder_depth": 1}),
    "masked_e": ("masked_finola_e_mfw720", {"image_size": 64, "block_size": 2}),
    "moco": ("moco_mfw720", {"image_size": 64, "queue": 16}),
    "lin": ("mobileformer_w720+lin", {"image_size": 64, "num_classes": 3, "classes": CLASSES}),
    "tran1": ("mobileformer_w720+tran1", {"image_size": 64, "num_classes": 3, "classes": CLASSES}),
    "mae": ("mae_vit_tiny", {"image_size": 64, "decoder_depth": 1}),
    "simmim": ("simmim_vit_tiny", {"image_size": 64}),
    "lin_vit": ("vit_tiny_patch16_224+lin", {"image_size": 64, "num_classes": 3, "classes": CLASSES}),
}


def build(kind, seed=0, **options):
    """A small model with every tensor drawn from `seed`, counters and zeros too: no two models have one in common."""
    return deepcopy(built(kind, seed, tuple(options.items())))


@cache
def built(kind, seed, options):
    name, small = SMALL[kind]
    model = create_model(name, **(small | dict(options)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


@pytest.fixture
def saved(tmp_path):
    """A function: the weights of a small model, as a file and as a state_dict."""
    def save(kind, **options):
        donor = build(kind, seed=1, **options)
        path = save_weights(donor, tmp_path / f"{kind}.safetensors")
        return path, donor.state_dict()

    return save


def floats(state, prefix=""):
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix) and tensor.is_floating_point()}


def taken(before, after, donor):
    """Names of the tensors that are now the donor's, bit for bit; all others must be as they were."""
    names = {name for name, tensor in floats(after).items() if not torch.equal(tensor, before[name])}
    assert unequal({name: after[name] for name in names}, {name: donor[name] for name in names}) == []
    return names


def transferred(model, source, **options):
    """The state before and after."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    transfer(model, source, **options)
    return before, model.state_dict()


@pytest.mark.parametrize(("source", "target"), [
    ("masked_b", "lin"), ("masked_e", "tran1"), ("moco", "lin"), ("autoencoder", "tran1"),
    ("masked_b", "autoencoder"), ("lin", "autoencoder"), ("mae", "lin_vit"), ("simmim", "lin_vit"), ("lin", "masked_b"),
])
def test_another_kind_takes_the_encoder_alone(source, target, saved):
    path, donor = saved(source)
    model = build(target)
    encoder = {f"encoder.{name}": tensor for name, tensor in model.encoder.state_dict().items()}
    theirs = {f"encoder.{name.removeprefix('masked_encoder.vit.').removeprefix('encoder.')}": tensor
              for name, tensor in donor.items() if name.startswith(("encoder.", "masked_encoder.vit."))}
    names = taken(*transferred(model, path), theirs)
    assert names == set(floats(encoder))


@pytest.mark.parametrize("kind", ["autoencoder", "masked_b", "moco", "mae", "lin", "tran1"])
def test_the_same_kind_takes_everything(kind, saved):
    path, donor = saved(kind)
    model = build(kind)
    assert taken(*transferred(model, path), donor) == set(floats(donor))


def test_moco_starts_its_slow_encoder_from_the_same_weights(saved):
    path, donor = saved("masked_b")
    model = build("moco")
    transfer(model, path)
    assert unequal(model.momentum_encoder.state_dict(), model.encoder.state_dict()) == []
    assert torch.equal(model.encoder.state_dict()["stem.0.weight"], donor["encoder.stem.0.weight"])


# masked E -> autoencoder --------------------------------------------------------------------------


def test_reconstruction_takes_pooling_and_matrices_of_masked_e(saved):
    """Of equal grids (a block of 4x4 patches, images of 64 px), so that the positions' embeddings are the same."""
    path, donor = saved("masked_e", image_size=128, block_size=4)
    model = build("autoencoder")
    before, after = transferred(model, path)
    position = after.pop("pool.position")
    assert torch.allclose(position, donor["pool.position"], atol=1e-5)
    matrices = {f"autoregression.{name}" for name in ("right", "left", "down", "up")}
    pooling = {name for name in after if name.startswith("pool.")}
    assert len(pooling) == 7
    assert taken(before, after, donor) == matrices | pooling | set(floats(after, "encoder."))


def test_positions_of_a_block_are_stretched_over_the_grid(saved):
    """From 2x2 to 4x4: the corners keep their order, and the deviation is what it was."""
    path, donor = saved("masked_e")
    model = build("autoencoder")
    transfer(model, path)
    assert model.pool.position.shape == (16, donor["pool.position"].shape[1])
    assert model.pool.position.std().item() == pytest.approx(donor["pool.position"].std().item(), rel=1e-4)
    corners = model.pool.position.view(4, 4, -1)[::3, ::3].flatten(0, 1)
    similarity = torch.corrcoef(torch.cat([corners, donor["pool.position"]]))[:4, 4:]
    assert similarity.argmax(1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [{"embed_dim": 256, "pool_heads": 8}, {"autoregression": "repeat"}])
def test_what_does_not_fit_of_masked_e_is_left(options, saved):
    path, donor = saved("masked_e")
    model = build("autoencoder", **options)
    before, after = transferred(model, path)
    changed = {name for name in floats(after) if not torch.equal(after[name], before[name])}
    expected = set(floats(after, "encoder."))
    if "embed_dim" not in options:
        expected |= set(floats(after, "pool."))
    assert changed == expected


# masked B -> autoencoder --------------------------------------------------------------------------

MATRICES = {f"autoregression.{name}" for name in ("right", "left", "down", "up")}


def test_reconstruction_takes_the_matrices_of_masked_b_at_its_own_width(saved):
    """720 channels of W720; there is no pooling to take: q starts as a mean of what the matrices act on."""
    path, donor = saved("masked_b")
    model = build("autoencoder", embed_dim=720, pool_heads=12)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert transfer(model, path) == "encoder, matrices"
    after = model.state_dict()
    passed = {"pool.value.weight", "pool.out.weight"}
    for name in passed:
        assert torch.equal(after.pop(name), torch.eye(720))
    assert taken({k: v for k, v in before.items() if k not in passed}, after, donor) == (
        MATRICES | set(floats(after, "encoder.")))


def test_masked_b_behind_a_linear_layer_hands_that_on_as_values(saved):
    path, donor = saved("masked_b", embed_dim=64)
    model = build("autoencoder", embed_dim=64)
    assert transfer(model, path) == "encoder, matrices"
    assert torch.equal(model.pool.value.weight, donor["reduce.weight"])
    assert torch.equal(model.pool.value.bias, donor["reduce.bias"])
    assert torch.equal(model.pool.out.weight, torch.eye(64))
    assert torch.equal(model.autoregression.up, donor["autoregression.up"])


@pytest.mark.parametrize(("theirs", "ours", "part"), [
    ("positions", "positions", "encoder, matrices, pooling"), ("plain", "plain", "encoder, matrices, pooling"),
    ("plain", "positions", "encoder, matrices"), ("positions", "plain", "encoder, matrices"),
])
def test_a_pooling_is_taken_by_one_of_its_kind(theirs, ours, part, saved):
    path, donor = saved("masked_e", pooling=theirs)
    model = build("autoencoder", pooling=ours)
    assert transfer(model, path) == part
    assert torch.equal(model.pool.query, donor["pool.query"]) == part.endswith("pooling")


@pytest.mark.parametrize(("source", "target", "options", "part"), [
    ("masked_b", "masked_b", {}, "whole model"), ("masked_b", "lin", {}, "encoder"),
    ("lin", "lin", {"new_head": True}, "encoder"), ("lin", "lin", {}, "whole model"),
])
def test_what_was_taken_is_said(source, target, options, part, saved):
    assert transfer(build(target), saved(source)[0], **options) == part


def test_a_last_layer_that_stays_behind_is_said(saved):
    path, _ = saved("lin", num_classes=2, classes=("sun", "rain"))
    assert transfer(build("lin"), path, new_classes=True) == "all but the last layer"


# a ViT of another size ----------------------------------------------------------------------------


def test_position_embedding_is_resampled(saved):
    path, donor = saved("mae")
    model = build("lin_vit", image_size=96)
    before, after = transferred(model, path)
    position, theirs = after.pop("encoder.pos_embed"), donor["masked_encoder.vit.pos_embed"]
    assert position.shape == (1, 1 + 36, 192) and theirs.shape == (1, 1 + 16, 192)
    assert torch.equal(position[:, 0], theirs[:, 0])  # the class token has no place
    grid, old = position[0, 1:].view(6, 6, -1), theirs[0, 1:].view(4, 4, -1)
    assert torch.allclose(grid.mean((0, 1)), old.mean((0, 1)), atol=0.1)
    similarity = torch.corrcoef(torch.cat([grid[::5, ::5].flatten(0, 1), old.flatten(0, 1)]))[:4, 4:]
    assert similarity.argmax(1).tolist() == [0, 3, 12, 15]  # the corners
    unplaced = {name.replace("masked_encoder.vit.", "encoder."): tensor for name, tensor in donor.items()}
    assert taken(before, after, unplaced) == set(floats(after, "encoder."))


# classes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lin", "tran1"])
@pytest.mark.parametrize("others", [("ant", "bee"), ("cat", "dog", "eel")])
def test_new_classes_on_demand(kind, others, saved):
    """All but the last layer is the donor's; the last is new, and small as a new one is."""
    path, donor = saved(kind)
    model = build(kind, num_classes=len(others), classes=others)
    transfer(model, path, new_classes=True)
    state = model.state_dict()
    last = {"head.fc.weight", "head.fc.bias"}
    kept = {name: tensor for name, tensor in donor.items() if name not in last}
    assert unequal({name: state[name] for name in kept}, kept) == []
    assert state["head.fc.weight"].shape[0] == len(others) and state["head.fc.weight"].abs().max() < 0.1
    assert not state["head.fc.bias"].any()
    assert model.config.classes == others


def test_leave_for_new_classes_changes_nothing_where_they_are_the_same(saved):
    path, donor = saved("tran1")
    model = build("tran1")
    assert taken(*transferred(model, path, new_classes=True), donor) == set(floats(donor))


def test_weights_without_names_go_with_any_names(saved):
    path, donor = saved("lin", classes=())
    model = build("lin")
    assert taken(*transferred(model, path), donor) == set(floats(donor))
    assert model.config.classes == CLASSES


@pytest.mark.parametrize(("source", "target"), [("lin", "tran1"), ("tran1", "tran1")])
def test_a_new_head_on_demand(source, target, saved):
    path, donor = saved(source)
    model = build(target, num_classes=2, classes=("ant", "bee"))
    assert taken(*transferred(model, path, new_head=True), donor) == set(floats(model.state_dict(), "encoder."))


# refusals -----------------------------------------------------------------------------------------


def refused(model, source, *both_sides, **options):
    """One line that names the file and both sides; the model is left as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(WeightsError) as error:
        transfer(model, source, **options)
    message = str(error.value)
    assert "\n" not in message and message.startswith(str(source))
    assert all(side in message for side in both_sides), message
    assert unequal(before, model.state_dict()) == []
    return message


@pytest.mark.parametrize("target", ["lin", "autoencoder", "masked_b", "moco"])
def test_another_encoder_is_refused(target, saved):
    path, _ = saved("masked_b", encoder="mobileformer_w1440")
    refused(build(target), path, "mobileformer_w1440", "mobileformer_w720")


def test_another_head_is_refused(saved):
    path, _ = saved("lin")
    assert "--new-head" in refused(build("tran1"), path, "head lin", "wants tran1")
    refused(build("tran1"), path, "head lin", "wants tran1", new_classes=True)


@pytest.mark.parametrize(("others", "sides"), [
    (("ant", "bee"), ("3 classes (cat, dog, owl)", "2 classes (ant, bee)")),
    (("cat", "dog", "eel"), ("3 classes (cat, dog, owl)", "3 classes (cat, dog, eel)")),
    (("dog", "cat", "owl"), ("3 classes (cat, dog, owl)", "3 classes (dog, cat, owl)")),
])
def test_other_classes_are_refused_without_leave(others, sides, saved):
    path, _ = saved("lin")
    message = refused(build("lin", num_classes=len(others), classes=others), path, *sides)
    assert f"--num-classes {len(others)}" in message and "--new-head" in message


def test_many_classes_are_cut_short(saved):
    path, _ = saved("lin", num_classes=9, classes=tuple("abcdefghi"))
    refused(build("lin"), path, "9 classes (a, b, c, ...)")


@pytest.mark.parametrize(("kind", "options", "sides"), [
    ("autoencoder", {"embed_dim": 256}, ("embed_dim 512 there", "256 in the recipe")),
    ("mae", {"image_size": 96}, ("image_size 64 there", "96 in the recipe")),
    ("tran1", {"head_width": 64}, ("(192, 720)", "(64, 720)", "head_width None there, 64 in the recipe")),
])
def test_another_architecture_of_the_same_kind_is_refused(kind, options, sides, saved):
    path, _ = saved(kind)
    refused(build(kind, **options), path, *sides)


def test_the_other_variant_of_masked_finola_is_refused(saved):
    path, _ = saved("masked_e")
    refused(build("masked_b"), path, "variant element there, block in the recipe")


def test_the_encoder_of_a_shipped_model():
    """The first run of someone who has installed the package and nothing else."""
    model = create_model("mobileformer_w720+lin", image_size=64, num_classes=3, classes=CLASSES)
    assert transfer(model, "finola_mfw720_c768_r8") == "encoder"
    assert not unequal(model.encoder.state_dict(), load_weights("finola_mfw720_c768_r8").encoder.state_dict())
    record = origin_of_weights("finola_mfw720_c768_r8", "encoder")
    assert record["file"] == "finola_mfw720_c768_r8" and len(record["sha256"]) == 64
