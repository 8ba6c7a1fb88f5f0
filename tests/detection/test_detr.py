"""DETR with each of its heads: shapes, gradients, boxes in the original's pixels, padded images, other classes,
weights files, bad configurations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from training import unequal

from finola.cli.main import build_parser
from finola.data.images import to_tensor
from finola.detection.detector import THRESHOLD
from finola.detection.detr import Detr, DetrConfig
from finola.detection.loader import padding_of
from finola.detection.mask_rcnn import MaskRcnnConfig
from finola.detection.predict import detect
from finola.errors import FinolaError, WeightsError
from finola.factory import create_model
from finola.training.transfer import transfer
from finola.weights import load_weights, save_weights

pytest.importorskip("scipy", reason="needs the extra 'detection'")

QUERIES, CLASSES = 7, 3
ENCODERS = {"mf_dec_211": "mobileformer_w720", "mf_dec_522": "mobileformer_w720", "transformer": "resnet18"}
LAYERS = {"mf_dec_211": 4, "mf_dec_522": 9, "transformer": 6}
EVERY_HEAD = pytest.mark.parametrize("head", ENCODERS)
HEADS = pytest.mark.parametrize("head", ["mf_dec_211", "transformer"])  # MF-Dec-522 is the same, deeper
SIZES = torch.tensor([[64, 96], [40, 33]])
NOTHING = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}


def tiny(head="mf_dec_211", **options):
    torch.manual_seed(0)
    return Detr(DetrConfig(ENCODERS[head], **{"image_size": 64, "max_size": 96, "num_classes": CLASSES, "head": head,
                                              "num_queries": QUERIES, **options}))


@pytest.fixture
def padding():
    return padding_of(SIZES, 64, 96)


@pytest.fixture
def targets():
    return [{"boxes": torch.tensor([[10.0, 5, 70, 50], [40, 20, 96, 64]]), "labels": torch.tensor([2, 0])},
            {"boxes": torch.tensor([[4.0, 6, 30, 28]]), "labels": torch.tensor([1])}]


def copy_of(state):
    return {name: tensor.clone() for name, tensor in state.items()}


# outputs ------------------------------------------------------------------------------------------


@EVERY_HEAD
def test_shapes(head, images, padding):
    """All blocks in training, so that each can be a loss; the last alone in evaluation."""
    model = tiny(head)
    for layers in (LAYERS[head], 1):
        logits, boxes = model(images, padding)
        assert logits.shape == (layers, 2, QUERIES, CLASSES + 1) and boxes.shape == (layers, 2, QUERIES, 4)
        assert boxes.min() > 0 and boxes.max() < 1
        model.eval()


def test_without_aux_loss_the_last_block_alone_is_trained(images, padding, targets):
    model = tiny(aux_loss=False, dropout=0.0)
    every = tiny(dropout=0.0)
    with torch.no_grad():
        (logits, boxes), (all_logits, all_boxes) = model(images, padding), every(images, padding)
        one, several = (m.losses(images, padding, SIZES, targets) for m in (model, every))
    assert len(logits) == 1
    torch.testing.assert_close((logits[0], boxes[0]), (all_logits[-1], all_boxes[-1]))
    assert all(one[name] < several[name] for name in one)


@EVERY_HEAD
@pytest.mark.parametrize("autocast", [False, True])
def test_every_parameter_gets_a_gradient(head, autocast, images, padding, targets):
    model = tiny(head)
    for name, parameter in model.encoder.named_parameters():
        if name.endswith("bn2.weight"):  # zero in a new ResNet, which cuts the gradients of its blocks
            torch.nn.init.ones_(parameter)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = model.losses(images, padding, SIZES, targets)
    assert set(losses) == {"class", "l1", "giou"}
    assert all(loss.dtype == torch.float32 and loss.isfinite() and loss > 0 for loss in losses.values())
    sum(losses.values()).backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # DETR's queries start without content: in the first self-attention each reads the same
    assert not {name for name in idle if not name.startswith("head.decoder.0.self_attention.")}


def test_a_frozen_encoder_gets_none(images, padding, targets):
    model = tiny()
    model.freeze_encoder()
    model.train()
    before = copy_of(model.encoder.state_dict())
    sum(model.losses(images, padding, SIZES, targets).values()).backward()
    assert all((p.grad is None) == name.startswith("encoder.") for name, p in model.named_parameters())
    assert unequal(model.encoder.state_dict(), before) == []


# detections ---------------------------------------------------------------------------------------


@HEADS
@pytest.mark.parametrize("autocast", [False, True])
def test_detections_lie_in_the_original(head, autocast, images, padding):
    model = tiny(head).eval()
    with torch.no_grad():
        model.outputs.box[-1].weight.mul_(100)  # boxes of all sizes, many of them partly outside
    originals = torch.tensor([[128, 192], [57, 50]])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = model.detect(images, padding, SIZES, originals)
    for objects, (height, width) in zip(found, originals.tolist(), strict=True):
        boxes = objects["boxes"]
        assert boxes.shape == (QUERIES, 4) and boxes.dtype == objects["scores"].dtype == torch.float32
        assert boxes.min() >= 0 and boxes[:, ::2].max() <= width and boxes[:, 1::2].max() <= height
        assert (boxes[:, :2] <= boxes[:, 2:]).all()
        assert objects["scores"].diff().max() <= 0 and objects["scores"].min() > 0 and objects["scores"].max() < 1
        assert objects["labels"].dtype == torch.int64 and set(objects["labels"].tolist()) <= {0, 1, 2}


def test_detections_are_every_query_s_likeliest_class(images, padding):
    model = tiny().eval()
    logits, boxes = (output[-1, 0] for output in model(images, padding))
    found = model.detect(images, padding, SIZES, SIZES)[0]
    rows = {round(score, 5): (label, box) for score, label, box in zip(
        found["scores"].tolist(), found["labels"].tolist(), found["boxes"], strict=True)}
    assert len(rows) == QUERIES
    for probabilities, (x, y, w, h) in zip(logits.softmax(-1), boxes, strict=True):
        label, box = rows[round(probabilities[:-1].max().item(), 5)]
        assert label == probabilities[:-1].argmax()
        corners = torch.stack([(x - w / 2) * 96, (y - h / 2) * 64, (x + w / 2) * 96, (y + h / 2) * 64])
        torch.testing.assert_close(box, corners.clamp(min=0).minimum(torch.tensor([96.0, 64, 96, 64])))


def test_what_is_exported_finds_what_is_detected():
    model = tiny(image_size=80).eval()
    with torch.no_grad():
        model.outputs.box[-1].weight.mul_(100)  # boxes of all sizes, many of them partly outside
    part = model.export_parts()["detector"]
    assert part.example.shape == (2, 3, 64, 64) and (part.argument, part.results) == ("image", ("scores", "boxes"))
    x, sizes = torch.rand(part.example.shape), torch.full((2, 2), 64)
    scores, boxes = part.function(x)
    assert scores.shape == (2, QUERIES, CLASSES)
    for found, score, box in zip(model.detect(x, None, sizes, sizes), scores, boxes, strict=True):
        order = score.max(-1).values.argsort(descending=True)
        torch.testing.assert_close((found["scores"], found["labels"]), tuple(score[order].max(-1)))
        torch.testing.assert_close(found["boxes"], 64 * box[order])


def test_boxes_follow_the_size_of_the_original(images, padding):
    model = tiny().eval()
    once, twice = (model.detect(images, padding, SIZES, times * SIZES) for times in (1, 2))
    for small, large in zip(once, twice, strict=True):
        torch.testing.assert_close(large["boxes"], 2 * small["boxes"])
        assert torch.equal(large["scores"], small["scores"])


def test_a_photograph_and_the_same_one_larger():
    """Both are shown to the model at 64 x 96; the larger one's boxes are three times as large."""
    model = tiny().eval()
    picture = Image.effect_mandelbrot((96, 64), (-2, -1, 1, 1), 50).convert("RGB")
    enlarged = picture.resize((288, 192), Image.Resampling.NEAREST)
    small, large = detect(model, picture, 0), detect(model, enlarged, 0)
    nearest = torch.cdist(3 * small["boxes"], large["boxes"]).argmin(dim=1)
    torch.testing.assert_close(large["boxes"][nearest], 3 * small["boxes"], atol=3, rtol=0)


def test_detect_gives_names_keeps_to_the_commands_threshold_and_takes_lists(monkeypatch):
    model, picture = tiny().eval(), Image.new("RGB", (96, 64), "red")
    found = {"boxes": torch.rand(3, 4), "scores": torch.tensor([0.9, 0.5, 0.4]), "labels": torch.tensor([2, 0, 1])}
    monkeypatch.setattr(type(model), "detect", lambda *_: [found])
    parser = build_parser()
    assert parser.parse_args(["detect", "predict", "a", "--weights", "w", "--out", "o"]).threshold == THRESHOLD
    one = detect(model, picture)
    assert one["scores"].tolist() == pytest.approx([0.9, 0.5]) and one["names"] == ["2", "0"]
    assert len(detect(model, picture, 0.45)["boxes"]) == 2 and len(detect(model, picture, 0)["names"]) == 3
    several = detect(model, [picture, np.asarray(picture), to_tensor(picture)])
    assert [objects["names"] for objects in several] == [["2", "0"]] * 3
    with pytest.raises(FinolaError, match="threshold: got 2, expected 0 to 1"):
        detect(model, picture, 2)


def test_truth_and_prediction_are_shown_side_by_side():
    from finola.detection.drawing import PAIR_WIDTH, beside_truth, told

    truth = {"boxes": torch.tensor([[5.0, 5, 30, 30]]), "labels": torch.tensor([1])}
    found = {"boxes": torch.tensor([[10.0, 10, 35, 35]]), "labels": torch.tensor([0]), "scores": torch.tensor([0.3])}
    white = Image.new("RGB", (40, 40), "white")
    pair = beside_truth(white, truth, found, ("dog", "cat"))
    left, right = (np.asarray(pair.crop((x, 30, x + PAIR_WIDTH, pair.height))) for x in (0, PAIR_WIDTH + 4))
    assert (left != 255).any() and (right == 255).all()  # the score is too low to be drawn
    assert told(found, ("dog", "cat"), 0.5) == "nothing of 0.5 or more, at best dog 0.30"
    assert told(found, ("dog", "cat"), 0.2) == "1 with a score of 0.2 or more"
    assert told({key: value[:0] for key, value in found.items()}, (), 0.5) == "nothing with a score of 0.5 or more"


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(FinolaError, match="training mode"):
        detect(tiny(), Image.new("RGB", (64, 64)))


# padding ------------------------------------------------------------------------------------------


@HEADS
def test_the_other_pictures_of_a_batch_do_not_matter(head, images, padding):
    model = tiny(head).eval()
    together, alone = model(images, padding), model(images[1:], padding[1:])
    for both, one in zip(together, alone, strict=True):
        torch.testing.assert_close(both[:, 1:], one, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", ["mf_dec_211", "mf_dec_522"])
def test_a_mobile_former_does_not_see_the_padding(head):
    model = tiny(head).eval()
    generator = torch.Generator().manual_seed(0)
    picture, room = torch.zeros(1, 3, 64, 96), torch.rand(1, 3, 96, 128, generator=generator)
    picture[:, :, :50, :70] = room[:, :, :50, :70]
    size = torch.tensor([[50, 70]])
    alone, beside = model(picture, padding_of(size, 64, 96)), model(room, padding_of(size, 96, 128))
    unmarked = model(room)
    for one, same, other in zip(alone, beside, unmarked, strict=True):
        torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-4)
        assert (one - other).abs().max() > 1e-3
    objects = [{"boxes": torch.tensor([[10.0, 5, 60, 45]]), "labels": torch.tensor([2])}]
    torch.testing.assert_close(model.losses(room, padding_of(size, 96, 128), size, objects),
                               model.losses(picture, padding_of(size, 64, 96), size, objects), atol=1e-4, rtol=1e-4)


def test_the_transformer_does_not_see_the_padding():
    """The blocks of a new ResNet are the identity, so that nothing from beside an image comes into its map: with and
    without padding the head finds the same. (Trained convolutions reach across.)"""
    model = tiny("transformer").eval()
    picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    room = torch.zeros(1, 3, 96, 128)
    room[:, :, :64, :64] = picture
    alone, beside = model(picture), model(room, padding_of(torch.tensor([[64, 64]]), 96, 128))
    unmarked = model(room)
    for one, same, other in zip(alone, beside, unmarked, strict=True):
        torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-4)
        assert (one - other).abs().max() > 1e-3


# losses -------------------------------------------------------------------------------------------


@HEADS
def test_pictures_without_objects_train(head, images, padding, targets):
    model = tiny(head)
    for batch in ([targets[0], NOTHING], [NOTHING, NOTHING]):
        losses = model.losses(images, padding, SIZES, batch)
        assert all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
    assert losses["l1"] == losses["giou"] == 0 < losses["class"]  # of the empty batch, the last


def test_losses_are_those_of_the_picture_s_own_pixels(images, padding, targets):
    """Boxes are taken relative to the image, not to the padded batch: the box of all of the second image costs
    nothing where the query says (0.5, 0.5, 1, 1)."""
    model = tiny(dropout=0.0).eval()
    with torch.no_grad():
        for parameter in model.outputs.box[-1].parameters():
            parameter.zero_()
        model.outputs.box[-1].bias[2:] = 50  # sigmoid: 1
    whole = [NOTHING, {"boxes": torch.tensor([[0.0, 0, 33, 40]]), "labels": torch.tensor([1])}]
    losses = model.losses(images, padding, SIZES, whole)
    assert losses["l1"].item() == pytest.approx(0, abs=1e-6) and losses["giou"].item() == pytest.approx(0, abs=1e-6)


def test_more_objects_than_queries(images, padding):
    boxes = torch.tensor([[0.0, 0, 20, 20]]) + 2 * torch.arange(QUERIES + 5)[:, None]
    crowded = [{"boxes": boxes, "labels": torch.zeros(QUERIES + 5, dtype=torch.long)}, NOTHING]
    assert all(loss.isfinite() for loss in tiny().losses(images, padding, SIZES, crowded).values())


# classes and weights ------------------------------------------------------------------------------


@HEADS
def test_other_classes_get_a_fresh_layer(head, images, padding, targets):
    model = tiny(head)
    kept = copy_of(model.state_dict())
    model.reset_classifier(5, classes=tuple("abcde"), category_ids=(1, 2, 3, 5, 8))
    config = model.config
    assert (config.num_classes, config.classes, config.category_ids) == (5, tuple("abcde"), (1, 2, 3, 5, 8))
    assert set(unequal(model.state_dict(), kept)) == {".outputs.classify.weight", ".outputs.classify.bias"}
    targets[0]["labels"][:] = 4
    sum(model.losses(images, padding, SIZES, targets).values()).backward()
    assert model(images, padding)[0].shape[-1] == 6


@HEADS
def test_weights_come_back_whole(head, images, padding, tmp_path):
    model = tiny(head, classes=("cat", "dog", "owl"), category_ids=(3, 7, 90), aux_loss=False, dropout=0.2).eval()
    back = load_weights(save_weights(model, tmp_path / "weights.safetensors")).eval()
    assert back.config == model.config
    for ours, theirs in zip(model(images, padding), back(images, padding), strict=True):
        assert torch.equal(ours, theirs)


def test_weight_decay_spares_the_embeddings():
    names = tiny().no_weight_decay()
    assert "encoder.tokens" in names and names <= dict(tiny().named_parameters()).keys()
    assert {name for name in names if name.startswith("head.")}


NAMED = {"classes": ("cat", "dog", "owl"), "category_ids": (3, 7, 90)}


@HEADS
def test_the_same_kind_takes_everything(head, tmp_path):
    donor = tiny(head, **NAMED)
    torch.manual_seed(1)
    model = Detr(donor.config)
    transfer(model, save_weights(donor, tmp_path / "weights.safetensors"))
    assert unequal(model.state_dict(), donor.state_dict()) == []


def test_other_classes_are_taken_with_leave_alone(tmp_path):
    """A new last layer with `new_classes`, the encoder alone with `new_head`; the model keeps its own classes."""
    donor = tiny(**NAMED)
    path = save_weights(donor, tmp_path / "weights.safetensors")
    config = DetrConfig("mobileformer_w720", num_classes=2, head="mf_dec_211", num_queries=QUERIES,
                        classes=("ant", "bee"), category_ids=(1, 5))
    torch.manual_seed(1)
    model = Detr(config)
    with pytest.raises(WeightsError, match=r"3 classes \(cat, dog, owl\).* 2 classes \(ant, bee\).*--num-classes 2"):
        transfer(model, path)
    for leave, prefix in (("new_head", "encoder."), ("new_classes", ("encoder.", "head.", "outputs.box."))):
        torch.manual_seed(1)
        model = Detr(config)
        transfer(model, path, **{leave: True})
        ours, theirs = dict(model.named_parameters()), dict(donor.named_parameters())
        constant = {name for name, p in theirs.items() if p.min() == p.max()}  # the ones and zeros of any start
        equal = {name for name in ours if torch.equal(ours[name], theirs[name])}
        assert equal - constant == {name for name in ours if name.startswith(prefix)} - constant
        assert model.config == config


@pytest.mark.parametrize("source", ["mobileformer_w720+lin", "mask_rcnn_mfw720", "finola_mfw720_c768_r8"])
def test_the_encoder_of_another_kind(source, tmp_path):
    options = {"mobileformer_w720+lin": {"num_classes": 2}, "mask_rcnn_mfw720": {"pyramid_channels": 16},
               "finola_mfw720_c768_r8": {"start": "random"}}[source]
    donor, model = create_model(source, **options), tiny()
    before = copy_of(model.state_dict())
    transfer(model, save_weights(donor, tmp_path / "weights.safetensors"))
    theirs = donor.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name] if name.startswith("encoder.") else before[name]), name


# configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "value"), [
    ("encoder", "no_such_model"), ("head", "mf_dec_999"), ("num_queries", 0), ("dropout", 1.0), ("dropout", -0.1),
])
def test_bad_configurations_are_named(field, value):
    with pytest.raises(FinolaError, match=f"^{field}: .*(expected|unknown)"):
        DetrConfig(**{field: value})


@pytest.mark.parametrize("config", [DetrConfig, MaskRcnnConfig])
@pytest.mark.parametrize(("options", "message"), [
    ({"image_size": 16}, "image_size: got 16, expected at least 32"),
    ({"image_size": 640, "max_size": 512}, "max_size: got 512, expected at least image_size, 640"),
    ({"num_classes": 0}, "num_classes: got 0"),
    ({"num_classes": 3, "classes": ("cat", "dog")}, "classes: got 2 for num_classes=3"),
    ({"num_classes": 3, "category_ids": (1, 2)}, "category_ids: got 2 for num_classes=3"),
])
def test_bad_detectors_are_named(config, options, message):
    with pytest.raises(FinolaError, match=f"^{message}"):
        config(**options)


def test_a_head_needs_its_maps():
    with pytest.raises(FinolaError, match="mf_dec_522"):
        Detr(DetrConfig("vit_tiny_patch16_224"))


def test_lists_of_json_become_tuples():
    config = DetrConfig(num_classes=2, classes=["a", "b"], category_ids=[1, 5])
    assert config == DetrConfig(**config.to_dict()) and config.category_ids == (1, 5)


def test_the_public_names_are_functions_and_classes():
    """A submodule of the same name would take a function's place once it is imported."""
    import finola.detection as package
    from finola.detection import evaluation, predict  # noqa: F401

    assert all(callable(getattr(package, name)) for name in package.__all__)


def test_overlapping_masks_are_drawn_over_each_other():
    from PIL import Image

    from finola.detection.drawing import draw, draw_small

    masks = torch.zeros(2, 40, 40, dtype=torch.bool)
    masks[0, :, :30], masks[1, :, 10:] = True, True
    found = {"boxes": torch.tensor([[0.0, 0, 30, 40], [10, 0, 40, 40]]), "labels": torch.tensor([0, 1]),
             "scores": torch.tensor([0.9, 0.3]), "masks": masks}
    white = Image.new("RGB", (40, 40), "white")
    both, one = draw(white, found, ("a", "b"), threshold=0.2), draw(white, found, ("a", "b"), threshold=0.5)
    assert both.getpixel((20, 35)) != one.getpixel((20, 35)) and max(both.getpixel((20, 35))) > 140  # not black
    assert one.getpixel((36, 35)) == (255, 255, 255) != both.getpixel((36, 35))
    small = draw_small(white, found, ("a", "b"))
    assert small.size == (320, 320) and small.getpixel((100, 280))[0] > small.getpixel((100, 280))[2]  # class 0 is red


def test_labels_are_drawn_inside_the_picture_with_their_letters():
    from PIL import Image

    from finola.detection.drawing import draw

    found = {"boxes": torch.tensor([[190.0, 60, 199, 90]]), "labels": torch.tensor([0]), "scores": torch.tensor([0.9])}
    white = Image.new("RGB", (200, 100), "white")
    umlaut, plain, unknown = (draw(white, found, (name,)) for name in ("ö", "o", "\uffff"))
    assert umlaut.tobytes() != plain.tobytes() != unknown.tobytes() != umlaut.tobytes()
    assert plain.getpixel((185, 52)) != (255, 255, 255)  # moved to the left, where all of it is seen
