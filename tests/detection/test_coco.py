"""COCO-format data sets, the views of their images and the batches: promises and geometry."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from finola.data import Batches
from finola.detection.coco import CocoDetection
from finola.detection.loader import build_detection_loader, pad_batch, padding_of
from finola.detection.transforms import (
    View,
    ViewPolicy,
    random_view,
    resized,
    view_boxes,
    view_image,
    view_masks,
    view_target,
    whole_view,
)

mask_api = pytest.importorskip("faster_coco_eval.core.mask", reason="needs the extra 'detection'")

COCO128 = Path(__file__).parents[3] / "shared" / "data" / "coco128"
SIZES = [(60, 40), (40, 60), (50, 50), (90, 30), (64, 48), (33, 70), (48, 48)]  # width, height
CATEGORIES = [{"id": 90, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 17, "name": "emu"}]


def rectangle(x, y, w, h):
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def annotation(key, image, category, bbox, **more):
    return {"id": key, "image_id": image, "category_id": category, "bbox": bbox,
            "segmentation": rectangle(*bbox), "area": bbox[2] * bbox[3]} | more  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Seven grey images, a red rectangle on each for its first object; the last has none. One crowd."""
    root = tmp_path_factory.mktemp("coco")
    (root / "train").mkdir()
    (root / "annotations").mkdir()
    images, annotations = [], []
    for i, (width, height) in enumerate(SIZES):
        picture = Image.new("RGB", (width, height), (90, 90, 90))
        if i < 6:
            annotations.append(annotation(100 + i, 1000 + i, CATEGORIES[i % 3]["id"], [8 + i, 6, 14, 12 + i]))
            ImageDraw.Draw(picture).rectangle((8 + i, 6, 21 + i, 17 + i), fill=(255, 90, 90))
        picture.save(root / "train" / f"{i}.png")
        images.append({"id": 1000 + i, "file_name": f"{i}.png", "height": height, "width": width})
    crowd = {"size": [60, 40], "counts": [0, 600, 1800]}
    annotations.append(annotation(200, 1001, 3, [0, 0, 10, 60], iscrowd=1, area=600, segmentation=crowd))
    content = {"categories": CATEGORIES, "images": images, "annotations": annotations}
    (root / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def data(root):
    return CocoDetection(root / "annotations" / "instances_train.json")


# --- data sets ---------------------------------------------------------------------------------------------


def test_categories_with_gaps_become_labels_in_the_order_of_their_ids(data):
    assert data.category_ids == (3, 17, 90)
    assert data.classes == ("cat", "emu", "dog")
    assert [data.target(i)["labels"].tolist() for i in range(7)] == [[2], [0, 0], [1], [2], [0], [1], []]


def test_images_and_sizes(data, root):
    assert len(data) == 7 and data.image_ids == tuple(range(1000, 1007))
    assert data.sizes.tolist() == [[height, width] for width, height in SIZES]
    assert data.name(3) == str(root / "train" / "3.png")
    assert data.load(3).size == SIZES[3]


def test_a_target_holds_all_annotations_of_its_image(data):
    target = data.target(1, masks=True)
    assert target["boxes"].tolist() == [[9, 6, 23, 19], [0, 0, 10, 60]]
    assert target["area"].tolist() == [182, 600]
    assert target["iscrowd"].tolist() == [False, True]
    assert target["masks"].shape == (2, 60, 40)
    assert {key: value.dtype for key, value in target.items()} == {
        "boxes": torch.float32,
        "labels": torch.int64,
        "area": torch.float32,
        "iscrowd": torch.bool,
        "masks": torch.uint8,
    }
    assert "masks" not in data.target(1)


def test_an_image_without_annotations_has_an_empty_target(data):
    target = data.target(6, masks=True)
    assert target["boxes"].shape == (0, 4) and target["masks"].shape == (0, 48, 48)
    assert [len(target[key]) for key in ("labels", "area", "iscrowd")] == [0, 0, 0]


def test_changing_a_target_leaves_the_data_set_alone(data):
    data.target(0)["boxes"].zero_()
    assert data.target(0)["boxes"].tolist() == [[8, 6, 22, 18]]


def test_polygons_and_run_lengths_give_the_same_mask(root, tmp_path):
    expected = np.zeros((40, 60), dtype=np.uint8)
    expected[6:18, 8:22] = 1
    runs = [np.flatnonzero(np.diff(expected.T.ravel(), prepend=0)).tolist() + [expected.size]]
    counts = np.diff([0, *runs[0]]).tolist()
    compressed = mask_api.encode(np.asfortranarray(expected))["counts"].decode()
    kinds = [rectangle(8, 6, 14, 12), {"size": [40, 60], "counts": counts}, {"size": [40, 60], "counts": compressed}]
    content = {
        "categories": CATEGORIES,
        "images": [{"id": 5, "file_name": "0.png", "height": 40, "width": 60}],
        "annotations": [annotation(i, 5, 3, [8, 6, 14, 12], segmentation=kind) for i, kind in enumerate(kinds)],
    }
    (tmp_path / "masks.json").write_text(json.dumps(content))
    masks = CocoDetection(tmp_path / "masks.json", root / "train").target(0, masks=True)["masks"]
    assert all(np.array_equal(mask, expected) for mask in masks.numpy())


def test_what_annotations_may_leave_out(root, tmp_path):
    content = {
        "categories": CATEGORIES,
        "images": [{"id": 5, "file_name": "0.png", "height": 40, "width": 60}],
        "annotations": [{"id": 1, "image_id": 5, "category_id": 3, "bbox": [1, 2, 10, 20]}],
    }
    path = root / "train" / "plain.json"  # without a folder, the JSON's own
    path.write_text(json.dumps(content))
    target = CocoDetection(path).target(0)
    assert target["area"].tolist() == [200] and target["iscrowd"].tolist() == [False]
    del content["annotations"]
    path.write_text(json.dumps(content))
    assert len(CocoDetection(path).target(0)["boxes"]) == 0


def test_a_limit_takes_images_spread_over_the_set(data, root):
    few = CocoDetection(root / "annotations" / "instances_train.json", limit=2)
    second = len(data) // 2
    assert few.image_ids == (data.image_ids[0], data.image_ids[second])
    assert torch.equal(few.target(1)["boxes"], data.target(second)["boxes"])


# --- views -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "result"),
    [
        ((480, 640), (800, 1066)),
        ((640, 480), (1066, 800)),
        ((800, 1333), (800, 1333)),
        ((300, 1000), (400, 1333)),  # the longer side's limit
        ((1000, 1000), (800, 800)),
        ((1, 5000), (1, 1333)),
    ],
)
def test_sizes_of_resized_pictures(size, result):
    assert resized(*size, 800, 1333) == result


def test_the_evaluation_sees_all_of_a_picture():
    assert whole_view((480, 640), 800, 1333) == View((0, 0, 640, 480), (800, 1066))


POLICY = ViewPolicy((40, 56, 80), max_size=133, hflip=True, crop=True)


@pytest.mark.parametrize("index", range(12))
def test_picture_boxes_and_masks_stay_together(data, index):
    """The red rectangle, its box and its mask, cropped, resized and mirrored, still are at the same place."""
    target = data.target(index % 6, masks=True)
    picture = data.load(index % 6)
    view = random_view((picture.height, picture.width), index, seed=1, epoch=0, policy=POLICY)
    seen = view_target({key: value[:1] for key, value in target.items()}, view)
    image = np.asarray(view_image(picture, view)).astype(int)
    assert image.shape[:2] == view.size
    red = torch.from_numpy(image[..., 0] - image[..., 1] > 82)
    if len(seen["boxes"]) == 0:
        assert red.sum() == 0
        return
    assert (seen["masks"][0].bool() != red).float().mean() < 0.02
    rows, columns = red.nonzero().T
    edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert seen["boxes"][0].tolist() == pytest.approx([float(edge) for edge in edges], abs=1.01)


def test_a_mirrored_crop_by_hand():
    """The right half of a 4x2 image, doubled and mirrored."""
    view = View((2, 0, 4, 2), (4, 4), flip=True)
    boxes = torch.tensor([[3.0, 0, 4, 1], [0, 0, 3, 2], [0, 0, 1, 1]])
    assert view_boxes(boxes, view).tolist() == [[0, 0, 2, 2], [2, 0, 4, 4], [4, 0, 4, 2]]
    masks = torch.tensor([[[0, 0, 0, 1], [0, 0, 1, 0]]], dtype=torch.uint8)
    assert view_masks(masks, view)[0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    target = {"boxes": boxes, "labels": torch.tensor([5, 6, 7]), "iscrowd": torch.zeros(3, dtype=torch.bool)}
    assert view_target(target, view)["labels"].tolist() == [5, 6]  # the third is outside


def test_a_view_is_a_function_of_seed_epoch_and_index():
    draws = [dict(seed=s, epoch=e, index=i) for s, e, i in itertools.product((0, 1), (0, 1), range(8))]
    views = [random_view((480, 640), policy=POLICY, **draw) for draw in draws]
    assert views[::-1] == [random_view((480, 640), policy=POLICY, **draw) for draw in draws[::-1]]
    by_run = [tuple(views[i : i + 8]) for i in range(0, 32, 8)]  # of each seed and epoch
    assert len(set(by_run)) == 4 and all(len(set(run)) > 4 for run in by_run)


def test_the_views_never_change():
    """Resuming relies on it, in later versions too."""
    policy = ViewPolicy((480, 640, 800), max_size=1333, crop=True)
    whole, crop = (random_view((480, 640), index, seed=1, epoch=2, policy=policy) for index in (3, 6))
    assert whole == View((0, 0, 640, 480), (640, 853), flip=True)
    assert crop.box == pytest.approx((80.59970014992504, 41.28, 603.5382308845577, 456.0))
    assert (crop.size, crop.flip) == ((800, 1009), True)


def test_what_views_are_drawn():
    """DETR's own sizes: half mirrored, half cropped; crops of 384 ... 600 of shorter sides of 400, 500, 600."""
    policy = ViewPolicy((480, 640, 800), max_size=1333, crop=True)
    views = [random_view((480, 640), i, seed=0, epoch=0, policy=policy) for i in range(600)]
    assert 0.42 < np.mean([view.flip for view in views]) < 0.58
    crops = [view for view in views if view.box != (0, 0, 640, 480)]
    assert 0.42 < len(crops) / len(views) < 0.58
    assert {min(view.size) for view in views if view not in crops} == {480, 640, 800}
    assert all(max(view.size) <= 1333 for view in views)
    left, top, right, bottom = np.array([view.box for view in crops]).T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 640 and bottom.max() <= 480
    heights = bottom - top  # of an image resized by 400 / 480 ... 600 / 480
    assert 384 * 480 / 600 <= heights.min() < 330 and heights.max() == 480
    assert (right - left).max() <= 600 * 480 / 400
    aspects = np.array([view.size[1] / view.size[0] for view in crops])
    assert np.allclose(aspects, (right - left) / heights, rtol=0.01)


def test_views_without_crop_or_flip():
    policy = ViewPolicy((48,), max_size=80, hflip=False)
    views = {random_view((30, 40), i, seed=0, epoch=0, policy=policy) for i in range(20)}
    assert views == {View((0, 0, 40, 30), (48, 64))}


# --- batches -----------------------------------------------------------------------------------------------

BATCHES = Batches(2, train=True, seed=3)


def make(data, crop=True, num_workers=0, **options):
    return build_detection_loader(
        data, replace(BATCHES, **options), scales=(40, 48), image_size=48, max_size=80, crop=crop, masks=True,
        num_workers=num_workers)


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert all(torch.equal(x[key], y[key]) for key in x if key != "targets")
        for s, t in zip(x["targets"], y["targets"], strict=True):
            assert s.keys() == t.keys() and all(torch.equal(s[key], t[key]) for key in s)


@pytest.mark.parametrize("train", [True, False])
def test_a_batch(data, train):
    batches = list(make(data, train=train))
    assert len(batches) == (3 if train else 4)  # 7 images, 2 a batch
    for batch in batches:
        images, count = batch["image"], len(batch["index"])
        assert images.shape[:2] == (count, 3) and images.dtype == torch.float32
        assert images.shape[2] % 32 == 0 and images.shape[3] % 32 == 0
        assert images.min() >= 0 and images.max() <= 1
        assert batch["padding"].shape == (count, *images.shape[2:]) and batch["padding"].dtype == torch.bool
        for i, (height, width) in enumerate(batch["size"].tolist()):
            assert not batch["padding"][i, :height, :width].any()
            assert batch["padding"][i].sum() == batch["padding"][i].numel() - height * width
            assert images[i, :, :height, :width].min() > 0.3  # grey or red
        assert images.permute(0, 2, 3, 1)[batch["padding"]].sum() == 0
        assert batch["original"].tolist() == data.sizes[batch["index"].numpy()].tolist()


def test_training_targets_are_in_the_batchs_pixels_and_without_crowds(data):
    seen = {}
    for batch in make(data, batch_size=1, crop=False):
        (target,), (height, width) = batch["targets"], batch["size"][0].tolist()
        assert set(target) == {"boxes", "labels", "masks"}
        assert target["masks"].shape == (len(target["boxes"]), height, width)
        assert (target["boxes"] <= torch.tensor([width, height]).repeat(2)).all()
        seen[batch["index"].item()] = target["labels"].tolist()
    assert seen == {0: [2], 1: [0], 2: [1], 3: [2], 4: [0], 5: [1], 6: []}


def test_evaluation_targets_are_the_files(data):
    batches = list(make(data, train=False))
    indices = [i for batch in batches for i in batch["index"].tolist()]
    assert indices == list(range(7))
    for i, target in enumerate(target for batch in batches for target in batch["targets"]):
        assert all(torch.equal(target[key], value) for key, value in data.target(i, masks=True).items())


@pytest.mark.parametrize("train", [True, False])
def test_workers_change_nothing(data, train):
    assert_same(list(make(data, train=train)), list(make(data, train=train, num_workers=2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumed_in_the_middle_is_the_same(data, workers):
    loader = make(data)
    loader.set_epoch(4)
    whole = list(loader)
    loader = make(data, num_workers=workers)
    loader.set_epoch(4)
    first = next(iter(loader))
    state = loader.state_dict()
    resumed = make(data, num_workers=workers)
    resumed.load_state_dict(state)
    assert_same([first, *resumed], whole)
    resumed.set_epoch(5)
    assert not torch.equal(next(iter(resumed))["index"], whole[0]["index"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_images_out(data, world_size):
    shares = [list(make(data, train=False, rank=rank, world_size=world_size)) for rank in range(world_size)]
    indices = [i for share in shares for batch in share for i in batch["index"].tolist()]
    assert sorted(indices) == list(range(7))


def test_padding_rounds_up_to_multiples_of_32():
    pictures = [torch.ones(3, 32, 40, dtype=torch.uint8), torch.ones(3, 20, 64, dtype=torch.uint8)]
    batch = pad_batch(pictures)
    assert batch.shape == (2, 3, 32, 64) and batch.dtype == torch.uint8
    padding = padding_of(torch.tensor([[32, 40], [20, 64]]), 32, 64)
    assert torch.equal(padding, batch[:, 0] == 0)


# --- real annotations --------------------------------------------------------------------------------------


@pytest.mark.skipif(not COCO128.is_dir(), reason="needs ../shared/data/coco128")
def test_coco128():
    data = CocoDetection(COCO128 / "annotations" / "instances_train2017.json")
    assert (len(data), len(data.classes), data.dropped) == (128, 80, 0)
    assert data.category_ids[-1] == 90 and data.classes[0] == "person"
    targets = [data.target(i) for i in range(128)]
    assert sum(len(target["boxes"]) for target in targets) == 939
    assert sum(int(target["iscrowd"].sum()) for target in targets) == 10
    assert sum(len(target["boxes"]) == 0 for target in targets) == 2
    for i in range(0, 128, 16):
        target = data.target(i, masks=True)
        areas = target["masks"].sum(dim=(1, 2))
        assert torch.allclose(areas.float(), target["area"], rtol=0.15, atol=30)
        for mask, (left, top, right, bottom) in zip(target["masks"], target["boxes"].tolist(), strict=True):
            rows, columns = mask.nonzero().T
            edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert [float(edge) for edge in edges] == pytest.approx([left, top, right, bottom], abs=2)
    batch = next(iter(build_detection_loader(data, Batches(2, train=True), scales=(160,), crop=True, masks=True)))
    assert all((target["boxes"][:, 2:] > target["boxes"][:, :2]).all() for target in batch["targets"])
