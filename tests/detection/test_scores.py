"""COCO's scores: the same as pycocotools gives for the same detections, on one process and on two."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from finola.detection.coco import CocoDetection

pytest.importorskip("torchmetrics", reason="needs the extra 'train'")
mask_api = pytest.importorskip("faster_coco_eval.core.mask", reason="needs the extra 'detection'")
scores = pytest.importorskip("finola.detection.scores")

COCO128 = Path(__file__).parents[3] / "shared" / "data" / "coco128"
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "ar_1", "ar_10", "ar_100")
CATEGORIES = [{"id": key, "name": name} for key, name in ((2, "ant"), (5, "bee"), (6, "cat"), (40, "dog"), (41, "emu"))]
HEIGHT, WIDTH = 160, 200


def blob(generator, height, width):
    """The run lengths of an ellipse of any size somewhere in the image, its box (x, y, w, h) and its area."""
    a, b = np.exp(generator.uniform(np.log(4), np.log(80))) * generator.uniform(0.7, 1, 2)
    y, x = generator.uniform(0, height), generator.uniform(0, width)
    rows, columns = np.mgrid[:height, :width]
    shape = ((rows - y) / a) ** 2 + ((columns - x) / b) ** 2 <= 1
    runs = mask_api.encode(np.asfortranarray(shape.astype(np.uint8)))
    return runs, mask_api.toBbox(runs).tolist(), int(shape.sum())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """15 images with up to 9 objects of four of five classes, all sizes, one in seven a crowd."""
    root = tmp_path_factory.mktemp("made")
    generator = np.random.default_rng(0)
    images, annotations = [], []
    for i in range(15):
        Image.new("L", (WIDTH, HEIGHT)).save(root / f"{i}.png")
        images.append({"id": 7 * i, "file_name": f"{i}.png", "height": HEIGHT, "width": WIDTH})
        for _ in range(generator.integers(0, 10)):
            runs, box, area = blob(generator, HEIGHT, WIDTH)
            if min(box[2:]) < 1:
                continue
            runs["counts"] = runs["counts"].decode()
            annotations.append({
                "id": len(annotations) + 1, "image_id": 7 * i, "bbox": box, "area": area, "segmentation": runs,
                "category_id": int(generator.choice([2, 5, 6, 40])), "iscrowd": int(generator.random() < 1 / 7),
            })  # fmt: skip
    content = {"info": {}, "categories": CATEGORIES, "images": images, "annotations": annotations}
    (root / "made.json").write_text(json.dumps(content))
    return CocoDetection(root / "made.json")


def noisy(target, classes, generator):
    """Detections: most objects shifted, some twice, some of a wrong class, and random boxes."""
    picked = generator.permutation(np.repeat(np.arange(len(target["boxes"])), 2))
    picked = torch.from_numpy(picked[generator.random(len(picked)) < 0.6])
    boxes, masks, labels = target["boxes"][picked], target["masks"][picked].bool(), target["labels"][picked]
    sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    boxes = boxes + sides * torch.from_numpy(generator.normal(0, 0.05, sides.shape)).float()
    shifts = generator.integers(-3, 4, (len(masks), 2))
    masks = [mask.roll(tuple(shift), (0, 1)) for mask, shift in zip(masks, shifts.tolist(), strict=True)]
    empty = torch.zeros(0, *target["masks"].shape[1:], dtype=torch.bool)
    wrong = torch.from_numpy(generator.random(len(labels)) < 0.15)
    labels = torch.where(wrong, torch.from_numpy(generator.integers(0, classes, len(labels))), labels)
    surely = torch.from_numpy(generator.random(len(labels))).float()
    return {"boxes": boxes, "labels": labels, "scores": surely, "masks": torch.stack(masks) if masks else empty}


def pycoco(source, results, kind):
    """pycocotools' scores of results, and the AP of each class by the order of their ids."""
    coco = pytest.importorskip("pycocotools.coco").COCO
    evaluation = pytest.importorskip("pycocotools.cocoeval").COCOeval
    if kind == "segm":  # with both there, pycocotools takes the boxes' areas for the masks'
        results = [{key: value for key, value in result.items() if key != "bbox"} for result in results]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco(source)
        evaluation = evaluation(truth, truth.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (thresholds, recalls, classes)
    per_class = [float(values.mean()) if values.max() >= 0 else None for values in precision.transpose(2, 0, 1)]
    return evaluation.stats, per_class


def detect_all(data, classes=()):
    metric, results = scores.CocoScores(masks=True, classes=classes), []
    generator = np.random.default_rng(1)
    for i in range(len(data)):
        target = data.target(i, masks=True)
        found = noisy(target, len(data.classes), generator)
        metric.update([found], [target])
        results += scores.coco_results(found, data.image_ids[i], data.category_ids)
    return metric, json.loads(json.dumps(results))


def check_parity(data):
    metric, results = detect_all(data, data.classes)
    ours = metric.compute()
    for name, kind in (("box", "bbox"), ("mask", "segm")):
        stats, per_class = pycoco(data.source, results, kind)
        assert min(stats) > 0.1  # there are objects of all sizes, and some are found
        for key, theirs in zip(NAMES, stats, strict=False):
            assert ours[f"{name}_{key}"] == pytest.approx(theirs, abs=1e-3), (name, key)
        own = [ours[f"{name}_ap_per_class"][each] for each in data.classes]
        assert [value is None for value in own] == [value is None for value in per_class]
        assert [v for v in own if v is not None] == pytest.approx([v for v in per_class if v is not None], abs=2e-3)


def test_parity_with_pycocotools(made):
    check_parity(made)


@pytest.mark.skipif(not COCO128.is_dir(), reason="needs ../shared/data/coco128")
def test_parity_with_pycocotools_on_coco128(tmp_path):
    """The first 24 images and one that has a crowd."""
    content = json.loads((COCO128 / "annotations" / "instances_train2017.json").read_text())
    crowd = next(each["image_id"] for each in content["annotations"] if each["iscrowd"])
    kept = {image["id"] for image in content["images"][:24]} | {crowd}
    for section, key in (("images", "id"), ("annotations", "image_id")):
        content[section] = [entry for entry in content[section] if entry[key] in kept]
    (tmp_path / "part.json").write_text(json.dumps(content))
    check_parity(CocoDetection(tmp_path / "part.json", COCO128 / "train2017"))


# --- corner cases ------------------------------------------------------------------------------------------


def target(boxes=(), labels=(), crowds=None):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    masks = torch.zeros(len(boxes), 50, 60, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return {
        "boxes": boxes,
        "labels": torch.tensor(labels, dtype=torch.int64),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.tensor(crowds or [False] * len(boxes), dtype=torch.bool),
        "masks": masks,
    }


def found(boxes=(), labels=(), surely=()):
    same = target(boxes, labels)
    return {
        "boxes": same["boxes"],
        "labels": same["labels"],
        "scores": torch.tensor(surely, dtype=torch.float32),
        "masks": same["masks"].bool(),
    }


SOME = [[5, 5, 20, 20], [30, 10, 55, 45]]


def score(detections, targets, **options):
    metric = scores.CocoScores(**{"masks": True} | options)
    metric.update(detections, targets)
    return metric.compute()


def test_perfect_detections():
    result = score([found(SOME, [0, 2], [0.9, 0.8])], [target(SOME, [0, 2])], classes=("ant", "bee", "cat"))
    assert result["box_ap"] == result["mask_ap"] == pytest.approx(1)
    assert result["box_ap_small"] == result["box_ap"] and result["box_ap_large"] is None
    assert result["mask_ap_per_class"] == {"ant": pytest.approx(1), "bee": None, "cat": pytest.approx(1)}


def test_boxes_alone_need_no_masks():
    detections, targets = found(SOME, [0, 2], [0.9, 0.8]), target(SOME, [0, 2])
    del detections["masks"], targets["masks"]
    result = score([detections], [targets], masks=False)
    assert set(result) == {f"box_{name}" for name in NAMES}
    assert result["box_ap"] == pytest.approx(1)


def test_nothing_found_is_zero():
    result = score([found(), found()], [target(SOME, [0, 2]), target()])
    assert all(result[f"{kind}_{name}"] == 0 for kind in ("box", "mask") for name in ("ap", "ap50", "ar_100"))


@pytest.mark.parametrize("detections", [found(), found(SOME, [0, 2], [0.9, 0.8])])
def test_nothing_to_find_has_no_score(detections):
    for there in (target(), target(SOME, [0, 2], [True, True])):  # nothing, or only crowds
        assert set(score([detections], [there]).values()) == {None}


def test_a_detection_in_a_crowd_is_no_error():
    there = target([*SOME, [0, 0, 60, 50]], [0, 0, 0], [False, False, True])
    inside = [[20, 20, 28, 28]]
    hit = score([found([*inside, *SOME], [0, 0, 0], [0.9, 0.8, 0.7])], [there])
    missed = score([found([*inside, *SOME], [0, 0, 0], [0.9, 0.8, 0.7])], [target(SOME, [0, 0])])
    assert hit["box_ap"] == pytest.approx(1) and missed["box_ap"] < 0.7


def test_the_annotations_areas_tell_small_objects_from_large():
    """Not their boxes or masks: COCO's areas are those of the polygons."""
    there = target(SOME, [0, 0])
    there["area"] = torch.tensor([100.0, 10_000.0])
    result = score([found(SOME[:1], [0], [0.9])], [there])
    for kind in ("box", "mask"):
        assert result[f"{kind}_ap_small"] == pytest.approx(1)
        assert result[f"{kind}_ap_medium"] is None
        assert result[f"{kind}_ap_large"] == 0


def test_a_metric_can_be_used_again():
    metric = scores.CocoScores()
    for detections, expected in ((found(SOME, [0, 0], [0.9, 0.8]), 1), (found(), 0)):
        metric.update([detections], [target(SOME, [0, 0])])
        assert metric.compute()["box_ap"] == pytest.approx(expected)
        metric.reset()


# --- results -----------------------------------------------------------------------------------------------


def test_results_in_cocos_format():
    detections = found(SOME, [0, 2], [0.912345678, 0.5])
    first, second = scores.coco_results(detections, 77, (3, 17, 90))
    assert (first["image_id"], first["category_id"], second["category_id"]) == (77, 3, 90)
    assert first["bbox"] == [5, 5, 15, 15] and first["score"] == pytest.approx(0.912346)
    assert first["segmentation"]["size"] == [50, 60] and isinstance(first["segmentation"]["counts"], str)
    assert np.array_equal(mask_api.decode(first["segmentation"]), detections["masks"][0].numpy())
    assert detections["boxes"].tolist() == SOME


def test_results_of_an_empty_picture():
    assert scores.coco_results(found(), 1, (3,)) == []


# --- several processes -------------------------------------------------------------------------------------


def share(rank, file, queue, data):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    metric, generator = scores.CocoScores(masks=True), np.random.default_rng(1)
    for i in range(len(data)):
        there = data.target(i, masks=True)
        detections = noisy(there, len(data.classes), generator)
        if (i % 3 == 0) == (rank == 0):
            metric.update([detections], [there])
    queue.put(metric.compute())
    torch.distributed.destroy_process_group()


def test_processes_with_different_numbers_of_images_agree_with_one(made, tmp_path):
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    arguments = [(rank, tmp_path / "meet", queue, made) for rank in range(2)]
    processes = [context.Process(target=share, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    one = detect_all(made)[0].compute()
    for _ in processes:
        assert queue.get() == pytest.approx(one, abs=1e-6)
