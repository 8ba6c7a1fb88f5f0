"""Mask R-CNN: losses and gradients, frozen encoders, images without objects, coordinates, bad configurations."""

import pytest
import torch
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image

from finola.detection import mask_rcnn
from finola.detection.mask_rcnn import PYRAMID_STRIDES, Anchors, MaskRcnn, MaskRcnnConfig, RoiPool, paste_masks
from finola.errors import FinolaError

PARTS = {"objectness", "rpn_box_reg", "classifier", "box_reg", "mask"}
SIZES = torch.tensor([[64, 96], [40, 33]])


def tiny(**options):
    torch.manual_seed(0)
    return MaskRcnn(MaskRcnnConfig("mobileformer_w720", **{
        "image_size": 64, "max_size": 96, "num_classes": 3, "anchor_sizes": (8, 16, 32, 64, 128),
        "pyramid_channels": 16, "box_head_width": 32, "mask_head_width": 16, "rpn_batch": 32, "roi_batch": 32,
        "detections": 5, **options}))


def square(height, width, box, label):
    """The target of one rectangle of whole pixels."""
    left, top, right, bottom = box
    mask = torch.zeros(1, height, width, dtype=torch.uint8)
    mask[:, top:bottom, left:right] = 1
    return {"boxes": torch.tensor([box], dtype=torch.float32), "labels": torch.tensor([label]), "masks": mask}


def nothing(height, width):
    return {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long),
            "masks": torch.zeros(0, height, width, dtype=torch.uint8)}


@pytest.fixture
def targets():
    return [square(64, 96, (10, 5, 70, 50), 2), square(40, 33, (4, 6, 30, 28), 0)]


@pytest.mark.parametrize("autocast", [False, True])
def test_every_parameter_gets_a_gradient(images, targets, autocast):
    model = tiny()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = model.losses(images.contiguous(memory_format=torch.channels_last), None, SIZES, targets)
    assert set(losses) == PARTS
    assert all(loss.dtype == torch.float32 and loss.isfinite() and loss > 0 for loss in losses.values())
    sum(losses.values()).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_a_frozen_encoder_keeps_every_bit(images, targets):
    model = tiny()
    model.freeze_encoder()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        sum(model.losses(images, None, SIZES, targets).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert changed == trained and not any(name.startswith("encoder.") for name in changed)


def test_pictures_without_objects_train(images, targets):
    model = tiny()
    empty = [nothing(64, 96), nothing(40, 33)]
    for batch in ([targets[0], empty[1]], empty):
        losses = model.losses(images, None, SIZES, batch)
        assert all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
    assert losses["rpn_box_reg"] == losses["box_reg"] == losses["mask"] == 0  # of the empty batch, the last


def test_labels_are_shifted_past_the_background(images, targets):
    model = tiny()
    seen = []
    model.roi_heads.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[3]))
    model.losses(images, None, SIZES, targets)
    assert [target["labels"].tolist() for target in seen[0]] == [[3], [1]]
    assert [target["labels"].tolist() for target in targets] == [[2], [0]]


@pytest.mark.parametrize("autocast", [False, True])
def test_detections_lie_in_the_original(images, autocast):
    model = tiny().eval()
    originals = torch.tensor([[128, 192], [57, 50]])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = model.detect(images.contiguous(memory_format=torch.channels_last), None, SIZES, originals)
    for objects, (height, width) in zip(found, originals.tolist(), strict=True):
        boxes, n = objects["boxes"], len(objects["scores"])
        assert 0 < n <= 5 and boxes.shape == (n, 4) and boxes.dtype == torch.float32
        assert boxes.min() >= 0 and boxes[:, ::2].max() <= width and boxes[:, 1::2].max() <= height
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        assert objects["labels"].dtype == torch.int64 and set(objects["labels"].tolist()) <= {0, 1, 2}
        assert objects["scores"].diff().max() <= 0 and objects["scores"].dtype == torch.float32
        assert objects["masks"].shape == (n, height, width) and objects["masks"].dtype == torch.bool


def test_boxes_and_masks_follow_the_size_of_the_original(images):
    model = tiny().eval()
    once, twice = (model.detect(images, None, SIZES, times * SIZES) for times in (1, 2))
    for small, large in zip(once, twice, strict=True):
        torch.testing.assert_close(large["boxes"], 2 * small["boxes"])
        assert torch.equal(large["scores"], small["scores"])
        shrunk = torch.nn.functional.avg_pool2d(large["masks"].float(), 2) > 0.5
        assert (shrunk == small["masks"]).float().mean() > 0.9


@pytest.mark.parametrize("at_once", [1, 7, 100])
@pytest.mark.parametrize(("height", "width"), [(48, 64), (211, 90), (30, 1)])
def test_masks_are_pasted_as_one_by_one(height, width, at_once, monkeypatch):
    """Also in boxes that fill the image, are thinner than a pixel, or empty. The first ten masks are of quarters: where
    they are one half, their rounding decides, and it is the library's own."""
    monkeypatch.setattr(mask_rcnn, "PASTED_PIXELS", at_once * height * width)
    boxes = (torch.rand(60, 2, 2) * torch.tensor([width, height])).sort(1).values.flatten(1)
    boxes[0] = torch.tensor([0, 0, width, height])
    boxes[1:4, 2:] = boxes[1:4, :2] + torch.tensor([[0.0, 0.0], [0.4, 0.9], [0.0, 5.0]])
    boxes[4] = torch.tensor([width, height, width, height])
    masks = torch.rand(60, 28, 28)
    masks[:10] = masks[:10].mul(4).round().div(4)
    expected = torch.cat([paste_masks_in_image(m[None, None], b[None], (height, width))[0]
                          for m, b in zip(masks, boxes, strict=True)])
    differ = paste_masks(masks, boxes, height, width) != (expected > 0.5)
    assert not differ[10:].any() and ((expected[differ] - 0.5).abs() < 1e-6).all()


def test_pasting_waits_for_no_device():
    """Nothing can be read from the device meta."""
    pasted = paste_masks(torch.rand(3, 28, 28, device="meta"), torch.rand(3, 4, device="meta"), 40, 50)
    assert pasted.shape == (3, 40, 50) and pasted.dtype == torch.bool


def test_no_detection_is_an_empty_one(images):
    model = tiny().eval()
    model.roi_heads.score_thresh = 1.0
    found = model.detect(images, None, SIZES, SIZES)
    assert [objects["boxes"].shape for objects in found] == [(0, 4), (0, 4)]
    assert [objects["masks"].shape for objects in found] == [(0, 64, 96), (0, 40, 33)]


def test_anchors_stand_at_their_strides():
    images = ImageList(torch.zeros(1, 3, 96, 96), [(96, 96)])
    maps = [torch.zeros(1, 1, -(-96 // stride), -(-96 // stride), dtype=torch.bfloat16) for stride in PYRAMID_STRIDES]
    (anchors,) = Anchors(tuple((s,) for s in (8, 16, 32, 64, 128)), ((1.0,),) * 5)(images, maps)
    last = anchors[-4:]  # 2 x 2 at stride 64
    assert anchors.dtype == torch.float32
    assert ((last[:, :2] + last[:, 2:]) / 2).tolist() == [[0, 0], [64, 0], [0, 64], [64, 64]]


def test_pooling_knows_the_strides_of_padded_pictures():
    columns = {stride: torch.arange(64.0 // stride) for stride in (4, 8, 16, 32)}
    maps = {str(stride): c.expand(1, 1, len(c), len(c)).contiguous() for stride, c in columns.items()}
    pooled = RoiPool(2)(maps, [torch.tensor([[8.0, 8.0, 24.0, 24.0]])], [(33, 33)])
    assert pooled[0, 0].tolist() == [[3, 5], [3, 5]]  # the columns 2 ... 6 at stride 4


def test_other_classes_get_fresh_outputs(images, targets):
    model = tiny()
    kept = {name: value.clone() for name, value in model.state_dict().items() if "predictor" not in name}
    model.reset_classifier(2, classes=("cat", "dog"), category_ids=(17, 18))
    assert (model.config.num_classes, model.config.classes, model.config.category_ids) == (2, ("cat", "dog"), (17, 18))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in kept.items())
    targets[0]["labels"][:] = 1
    sum(model.losses(images, None, SIZES, targets).values()).backward()
    labels = torch.cat([objects["labels"] for objects in model.eval().detect(images, None, SIZES, SIZES)])
    assert len(labels) and set(labels.tolist()) <= {0, 1}


def test_a_square_is_learned():
    model = tiny(num_classes=1, detections=3)
    model.freeze_encoder()
    model.train()
    images, size = torch.full((1, 3, 64, 64), 0.5), torch.tensor([[64, 64]])
    images[0, :, 16:48, 8:40] = torch.tensor([1.0, 0.1, 0.1])[:, None, None]
    target = [square(64, 64, (8, 16, 40, 48), 0)]
    steps = 80
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=steps)
    for _ in range(steps):
        sum(model.losses(images, None, size, target).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    found = model.eval().detect(images, None, size, size)[0]
    assert found["scores"][0] > 0.9
    torch.testing.assert_close(found["boxes"][0], target[0]["boxes"][0], atol=3, rtol=0)
    mask, wanted = found["masks"][0], target[0]["masks"][0].bool()
    assert (mask & wanted).sum() / (mask | wanted).sum() > 0.85


def test_weight_decay_spares_the_tokens():
    assert tiny().no_weight_decay() == {"encoder.tokens"}


@pytest.mark.parametrize("field, value", [
    ("encoder", "no_such_model"), ("encoder", "vit_tiny_patch16_224"), ("anchor_sizes", (32, 64)),
    ("anchor_sizes", (0, 1, 2, 3, 4)), ("pyramid_channels", 0), ("box_head_width", 0), ("mask_head_width", -1),
    ("rpn_batch", 0), ("roi_batch", 0), ("detections", 0), ("num_classes", 0),
])
def test_bad_configurations_are_named(field, value):
    with pytest.raises(FinolaError, match=f"^{field}: .*expected|^{field}: .*(has no maps|unknown)"):
        MaskRcnn(MaskRcnnConfig(**{field: value}))


def test_lists_of_json_become_tuples():
    config = MaskRcnnConfig(anchor_sizes=[8, 16, 32, 64, 128], num_classes=2, classes=["a", "b"], category_ids=[1, 5])
    assert config == MaskRcnnConfig(**config.to_dict())
    assert (config.anchor_sizes, config.classes, config.category_ids) == ((8, 16, 32, 64, 128), ("a", "b"), (1, 5))
