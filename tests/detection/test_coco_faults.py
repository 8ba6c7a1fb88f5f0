"""COCO-format files with faults: what is wrong is named in one line, or left out and counted."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from finola.data import Batches
from finola.detection.coco import CocoDetection, decode_mask
from finola.detection.loader import build_detection_loader
from finola.detection.transforms import ViewPolicy
from finola.errors import DataError, RecipeError

pytest.importorskip("faster_coco_eval", reason="needs the extra 'detection'")

NAN, INFINITY = math.nan, math.inf


def box(key, image, bbox, **more):
    return {"id": key, "image_id": image, "category_id": 3, "bbox": bbox, "iscrowd": 0} | more


def content():
    return {
        "categories": [{"id": 3, "name": "cat"}, {"id": 90, "name": "dog"}],
        "images": [
            {"id": 11, "file_name": "a.png", "height": 30, "width": 40},
            {"id": 12, "file_name": "b.png", "height": 30, "width": 40},
        ],
        "annotations": [box(1, 11, [5, 5, 10, 10]), box(2, 12, [0, 0, 40, 30], category_id=90)],
    }


@pytest.fixture
def write(tmp_path):
    """Writes the data set with changes of its sections; returns the JSON's path."""
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 30), "grey").save(tmp_path / name)

    def write(**changes):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(content() | changes))
        return path

    return write


def refused(path, images=None):
    """The message, which must be one line that names the file."""
    with pytest.raises(DataError) as error:
        CocoDetection(path, images)
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    return message


def test_the_data_set_itself_is_good(write):
    data = CocoDetection(write())
    assert (len(data), data.dropped) == (2, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "not JSON"), ("{", "not JSON"), ("[]", "list may be a file of results"), ("3", "got a JSON int")],
)
def test_what_is_no_annotation_file(tmp_path, text, says):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert says in refused(path)


def test_a_file_that_cannot_be_read(tmp_path):
    assert "no such file" in refused(tmp_path / "absent.json")
    assert "cannot be read" in refused(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "not JSON" in refused(tmp_path / "binary.json")


@pytest.mark.parametrize("section", ["images", "categories"])
@pytest.mark.parametrize(("value", "got"), [([], "an empty one"), ({}, "a dict"), (None, "a NoneType")])
def test_sections_that_must_be_there(write, section, value, got):
    assert f"section {section!r}: got {got}" in refused(write(**{section: value}))
    without = content()
    del without[section]
    path = write()
    path.write_text(json.dumps(without))
    assert f"section {section!r}: got none" in refused(path)


@pytest.mark.parametrize("section", ["images", "categories", "annotations"])
def test_an_id_twice(write, section):
    entries = content()[section]
    assert f"{section}[2] (id {entries[0]['id']}): another" in refused(write(**{section: [*entries, entries[0]]}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image_id": 99}, "image_id: 99 is not among the 2 images"),
        ({"category_id": 4}, "category_id: 4 is not among the 2 categories"),
        ({"category_id": "cat"}, "category_id: got 'cat', expected a whole number"),
        ({"id": None}, "id: got None"),
        ({"bbox": [1, 2, 3]}, "bbox: got [1, 2, 3], expected [left, top, width, height]"),
        ({"bbox": [1, 2, 3, "4"]}, "bbox: got"),
        ({"bbox": None}, "bbox: got None"),
        ({"iscrowd": 2}, "iscrowd: got 2, expected 0 or 1"),
        ({"area": "large"}, "area: got 'large'"),
    ],
)
def test_annotations_that_make_no_sense(write, change, says):
    message = refused(write(annotations=[box(1, 11, [5, 5, 10, 10]) | change]))
    assert "annotations[0]" in message and says in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"file_name": "../b.png"}, "leaves the folder"),
        ({"file_name": "/b.png"}, "leaves the folder"),
        ({"file_name": ""}, "file_name: got ''"),
        ({"height": 0}, "got 40x0"),
        ({"width": None}, "width: got None"),
        ({"width": 10**30}, "expected 1 to"),
    ],
)
def test_images_that_make_no_sense(write, change, says):
    images = content()["images"]
    message = refused(write(images=[images[0], images[1] | change]))
    assert "images[1] (id 12)" in message and says in message


def test_entries_that_are_no_objects(write):
    assert "annotations[0]: got a int, expected an object" in refused(write(annotations=[5]))


def test_missing_pictures_are_counted_at_opening(write, tmp_path):
    images = [{"id": i, "file_name": f"sub/{i}.png", "height": 1, "width": 1} for i in (11, 12)]
    message = refused(write(images=images))
    assert f"2 of 2 images are missing, the first is {tmp_path / 'sub' / '11.png'}" in message
    message = refused(write(), tmp_path / "elsewhere")
    assert "2 of 2 images are missing" in message and f"folders tried: {tmp_path / 'elsewhere'};" in message


def test_the_message_names_every_folder_tried(tmp_path):
    path = tmp_path / "annotations" / "instances_val.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content()))
    assert f"folders tried: {tmp_path / 'val'}, {tmp_path / 'annotations'};" in refused(path)


BAD_BOXES = [
    [5, 5, 0, 10],  # no width
    [5, 5, 10, 0],
    [15, 15, -10, -10],  # inverted
    [5, 5, NAN, 10],
    [5, 5, INFINITY, 10],
    [-20, 5, 10, 10],  # outside
    [40, 5, 10, 10],
    [5, 30, 10, 10],
]


def test_bad_boxes_are_dropped_and_reported_once(write):
    annotations = [box(i, 11, bbox) for i, bbox in enumerate(BAD_BOXES)]
    annotations += [box(90, 11, [5, 5, 10, 10]), box(91, 12, [1, 2, 3, 4])]
    with pytest.warns(UserWarning) as warned:
        data = CocoDetection(write(annotations=annotations))
    assert [str(each.message) for each in warned] == [
        f"{data.source}: 8 of 10 boxes left out: no area inside their images"
    ]
    assert data.dropped == 8
    assert data.target(0)["boxes"].tolist() == [[5, 5, 15, 15]]
    assert data.target(1)["boxes"].tolist() == [[1, 2, 4, 6]]


def test_boxes_partly_outside_are_clipped(write):
    data = CocoDetection(write(annotations=[box(1, 11, [-5, 20, 15, 30]), box(2, 11, [30, -3, 99, 5])]))
    assert data.target(0)["boxes"].tolist() == [[0, 20, 10, 30], [30, 0, 40, 2]]
    assert data.dropped == 0


def test_a_picture_of_another_size_names_both(write, tmp_path):
    data = CocoDetection(write())
    Image.new("RGB", (30, 40)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"b.png: the image is 30x40, .*mine.json says 40x30"):
        data.load(1)


# --- masks -------------------------------------------------------------------------------------------------


def test_masks_asked_of_annotations_without(write):
    polygon = [[5, 5, 15, 5, 15, 15]]
    annotations = [box(1, 11, [5, 5, 10, 10], segmentation=polygon), box(2, 12, [1, 1, 2, 2], segmentation=[])]
    data = CocoDetection(write(annotations=annotations))
    assert len(data.target(1)["boxes"]) == 1
    with pytest.raises(DataError, match="1 of 2 annotations have no segmentation, the first is annotation 2"):
        build_detection_loader(data, Batches(1, train=True), masks=True)
    with pytest.raises(DataError, match="annotation 2: segmentation"):
        data.target(1, masks=True)


@pytest.mark.parametrize(
    "segmentation",
    [
        None,
        [],
        "text",
        [[1, 2, 3, 4]],
        [[1, 2, 3, 4, 5, 6, 7]],
        [[1, 2, 3, 4, 5, "6"]],
        [[1, 2, 3, 4, 5, NAN]],
        [1, 2, 3, 4, 5, 6],
        {"size": [30, 40]},
        {"size": [40, 30], "counts": [1200]},
        {"size": [30, 40], "counts": [3]},
        {"size": [30, 40], "counts": [10, -5, 1195]},
        {"size": [30, 40], "counts": [10, 5000]},
        {"size": [30, 40], "counts": "P"},
        {"size": [30, 40], "counts": "zzzz"},
        {"size": [30, 40], "counts": "nonsense äöü"},
    ],
)
def test_malformed_masks(segmentation):
    with pytest.raises(DataError, match="^mine: segmentation: expected polygons .* run lengths of 30x40, got") as error:
        decode_mask(segmentation, 30, 40, "mine")
    assert "\n" not in str(error.value)


def test_a_polygon_outside_the_picture_covers_nothing():
    assert decode_mask([[100, 100, 200, 100, 200, 200]], 30, 40, "mine").sum() == 0


# --- loaders -----------------------------------------------------------------------------------------------


@pytest.fixture
def one_bad(write, tmp_path):
    """... b.png is cut short."""
    data = CocoDetection(write())
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "b.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:1000])
    return data


SMALL = dict(scales=(32,), image_size=32, max_size=64)


def test_training_leaves_a_bad_picture_out(one_bad):
    loader = build_detection_loader(one_bad, Batches(2, train=True), **SMALL)
    with pytest.warns(UserWarning, match="image left out of training: .*b.png: damaged"):
        (batch,) = loader
    assert batch["index"].tolist() == [0] and loader.skipped == 1


def test_evaluation_stops_at_a_bad_picture(one_bad):
    with pytest.raises(DataError, match="b.png: damaged"):
        list(build_detection_loader(one_bad, Batches(2, train=False), **SMALL))


def test_a_batch_larger_than_the_data(write):
    with pytest.raises(DataError, match="2 images do not fill a batch of 3"):
        build_detection_loader(CocoDetection(write()), Batches(3, train=True), **SMALL)


@pytest.mark.parametrize("scales", [(), (0,), (100, 200)])
def test_scales_out_of_range(scales):
    with pytest.raises(RecipeError, match="scales: got"):
        ViewPolicy(scales, max_size=150)
