"""Faulty annotations, images, weights and recipes given to finola detect: the right exit code and one line that says
what to do, or it works."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from coco_data import COLOURS, RECIPES, annotation, make_coco

from finola.cli.main import main
from finola.detection.drawing import listed
from finola.factory import create_model
from finola.weights import load_weights, save_weights

pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
pytest.importorskip("faster_coco_eval", reason="needs the extra 'detection'")
pytest.importorskip("scipy", reason="needs the extra 'detection'")
pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", RECIPES)
SHORT = ["--optim.epochs", "1", "--optim.batch_size", "6"]  # one step
NAMED = {"num_classes": 3, "classes": tuple(COLOURS.values()), "category_ids": tuple(COLOURS)}
SMALL = {  # name in the tests -> registered name and what makes it small
    "detr": ("detr_mf_dec_211_mfw720", {"image_size": 64, "max_size": 96, "num_queries": 8}),
    "mask_rcnn": ("mask_rcnn_mfw720", {
        "image_size": 64, "max_size": 96, "anchor_sizes": (8, 16, 32, 64, 128), "pyramid_channels": 16,
        "box_head_width": 32, "mask_head_width": 16, "rpn_batch": 32, "roi_batch": 16, "detections": 5}),
    "classifier": ("mobileformer_w720+lin", {"image_size": 64, "num_classes": 3}),
    "autoencoder": ("finola_mfw720_c768_r8", {"image_size": 64, "start": "random", "embed_dim": 16, "pool_heads": 2,
                                              "decoder_widths": (16, 8, 8, 8)}),
}


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """Annotations of six images, not to be changed."""
    return make_coco(tmp_path_factory.mktemp("coco"), pictures=6)


@pytest.fixture
def spoilt(coco, tmp_path):
    """A function: a copy of the data set, whose JSON `change` has spoilt."""
    def spoil(change):
        folder = shutil.copytree(coco.parent.parent, tmp_path / "coco")
        path = folder / "annotations" / coco.name
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        return path

    return spoil


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A function: weights of a small model."""
    folder = tmp_path_factory.mktemp("weights")

    def save(kind, file=None, **options):
        path = folder / f"{file or kind}.safetensors"
        if not path.exists():
            torch.manual_seed(0)
            name, small = SMALL[kind]
            classes = NAMED if kind in RECIPES else {}
            save_weights(create_model(name, **(small | classes | options)), path)
        return path

    return save


def evaluation(weights, data, *words):
    return ["eval", weights, "--data", data, "--workers", "0", "--device", "cpu", *words]


@pytest.fixture
def run(tmp_path, capsys):
    """Run finola detect, for training in the folder `run`: exit code, what it printed, the lines on stderr."""
    def call(command, *words):
        if command == "train":
            words = (*words, "--out", tmp_path / "run")
        capsys.readouterr()
        code = main(["detect", command, *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("finola ")]

    return call


@pytest.fixture
def refused(run, tmp_path):
    """Run a command that must end with `code` and one line that holds all `parts`; no folder is left."""
    def call(code, parts, *words):
        got, _, lines = run(*words)
        assert got == code and len(lines) == 1 and lines[0].startswith("finola detect: ")
        assert all(str(part) in lines[0] for part in parts), lines[0]
        assert not (tmp_path / "run").exists()

    return call


# annotations that are odd, but allowed ------------------------------------------------------------


def without_annotations(content):
    content["annotations"] = []


def with_crowds_alone(content):
    for entry in content["annotations"]:
        entry["iscrowd"] = 1


def with_bad_boxes(content):
    """Zero area, inverted, outside, partly outside; and in one image more than the queries of the DETR and the
    detections of the Mask R-CNN."""
    for box in ([5, 5, 0, 10], [40, 40, -10, -10], [500, 500, 10, 10], [50, 50, 400, 400]):
        entry = annotation(len(content["annotations"]) + 1, 100, 3, (0, 0, 10, 10))
        content["annotations"].append(entry | {"bbox": box})
    for i in range(30):
        content["annotations"].append(annotation(1000 + i, 100, 7, (i, i, i + 12, i + 12)))


@KINDS
@pytest.mark.parametrize("change", [
    without_annotations, with_bad_boxes, pytest.param(with_crowds_alone, marks=pytest.mark.slow),
])
@pytest.mark.filterwarnings("ignore:.*boxes left out")
def test_odd_annotations_are_trained_on_and_scored(kind, change, recipes, spoilt, coco, run, tmp_path):
    """Only images are odd that have no object: they may be validated on, and trained on among others."""
    data, nothing_to_find = spoilt(change), change in (without_annotations, with_crowds_alone)
    code, _, lines = run("train", recipes[kind], "--data", coco if nothing_to_find else data, "--val", data, *SHORT)
    assert (code, lines) == (0, [])
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["finished"] and (result["val_box_ap"] is None) == nothing_to_find
    assert load_weights(tmp_path / "run/weights.safetensors").config.category_ids == tuple(COLOURS)


@KINDS
@pytest.mark.parametrize("change", [without_annotations, with_crowds_alone])
def test_training_without_any_object_is_refused(kind, change, recipes, spoilt, refused):
    data = spoilt(change)
    refused(3, [data, "no object on any image"], "train", recipes[kind], "--data", data)


def test_a_frozen_encoder_needs_weights(recipes, coco, refused):
    refused(2, ["--weights", "is missing"], "train", recipes["detr"], "--data", coco, "--optim.freeze_encoder", "true")


def test_a_bad_polygon_is_found_before_training(recipes, spoilt, coco, refused):
    """Also in the validation data, which would be read after an epoch."""
    def spoil(content):
        content["annotations"][-1]["segmentation"] = [[1, 2, 3]]

    data = spoilt(spoil)
    refused(3, [data, "expected polygons"], "train", recipes["mask_rcnn"], "--data", coco, "--val", data)


@pytest.mark.filterwarnings("ignore:.*boxes left out")
@pytest.mark.parametrize("change", [without_annotations, with_bad_boxes])
@KINDS
def test_odd_annotations_are_scored_by_the_command(kind, change, weights, spoilt, run):
    code, out, lines = run(*evaluation(weights(kind), spoilt(change), "--batch-size", 6))
    assert (code, lines) == (0, []) and ("ap -" in out) == (change is without_annotations)


@KINDS
def test_a_detector_that_finds_nothing(kind, weights, coco, run, tmp_path):
    """At a threshold of 1 nothing is drawn; a Mask R-CNN that finds nothing at all has an average precision of 0."""
    pictures = coco.parent.parent / "train"
    code, out, lines = run("predict", pictures, "--weights", weights(kind), "--out", tmp_path / "found",
                           "--threshold", "1", "--device", "cpu")
    assert (code, lines) == (0, [])
    assert [": nothing of 1 or more, at best " in line for line in out.splitlines()] == [True] * 6
    assert json.loads((tmp_path / "found/detections.json").read_text()) == []
    assert len(list((tmp_path / "found").glob("*.png"))) == 6


def test_many_objects_are_told_in_a_line():
    assert listed(["dog", "cat", "dog", "dog"], [0.5, 0.8, 0.91, 0.7]) == "3 x dog 0.91 ... 0.50, cat 0.80"
    assert listed([], []) == ""


def test_a_mask_rcnn_that_finds_nothing_scores_0(weights, coco, run, tmp_path):
    model = load_weights(weights("mask_rcnn"))
    with torch.no_grad():
        model.roi_heads.box_predictor.cls_score.bias[0] = 1e4  # all is background
    path = save_weights(model, tmp_path / "weights.safetensors")
    code, out, lines = run(*evaluation(path, coco, "--json", "--out", tmp_path / "scores"))
    assert (code, lines) == (0, [])
    report = json.loads(out)
    assert report["box_ap"] == report["mask_ap"] == 0
    assert json.loads((tmp_path / "scores/detections.json").read_text()) == []


# annotations and images that are refused --------------------------------------------------------


def test_missing_pictures(recipes, weights, spoilt, refused):
    data = spoilt(lambda content: None)
    (data.parent.parent / "train/03.png").unlink()
    parts = [data, "1 of 6 images are missing", "03.png"]
    refused(3, parts, "train", recipes["detr"], "--data", data, *SHORT)
    refused(3, parts, *evaluation(weights("detr"), data))


def test_a_damaged_picture(weights, spoilt, refused):
    data = spoilt(lambda content: None)
    (data.parent.parent / "train/03.png").write_bytes(b"no image")
    refused(3, ["03.png"], *evaluation(weights("detr"), data))


def test_annotations_that_are_no_json(recipes, weights, tmp_path, refused):
    data = tmp_path / "mine.json"
    data.write_text("images: []")
    for words in (["train", recipes["detr"], "--data", data], evaluation(weights("detr"), data)):
        refused(3, [data, "not JSON"], *words)
    for words in (["train", recipes["detr"], "--data", tmp_path / "no.json"],
                  evaluation(weights("detr"), tmp_path / "no.json")):
        refused(3, ["no.json", "no such file"], *words)


def without_segmentation(content):
    for entry in content["annotations"]:
        del entry["segmentation"]


def test_masks_need_segmentations(recipes, weights, coco, spoilt, refused):
    data = spoilt(without_segmentation)
    parts = [data, "have no segmentation"]
    refused(3, parts, "train", recipes["mask_rcnn"], "--data", data, *SHORT)
    refused(3, parts, "train", recipes["mask_rcnn"], "--data", coco, "--val", data, *SHORT)
    refused(3, parts, *evaluation(weights("mask_rcnn"), data))


def test_boxes_need_no_segmentations(recipes, spoilt, run, tmp_path):
    """Nor images in the standard place, if their folder is named."""
    data = spoilt(without_segmentation)
    pictures = (data.parent.parent / "train").rename(tmp_path / "pictures")
    assert run("train", recipes["detr"], "--data", data, pictures, *SHORT)[0] == 0


def test_other_classes_in_validation(recipes, coco, spoilt, refused):
    data = spoilt(lambda content: content["categories"][0].update(name="orange"))
    refused(3, [data, "only in the first: red", "only in the second: orange"], "train", recipes["detr"], "--data", coco,
            "--val", data, *SHORT)


# weights ------------------------------------------------------------------------------------------


def two_classes(content):
    content["categories"] = content["categories"][:2]
    content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] != 90]


@pytest.mark.parametrize(("kind", "leave"), [("detr", ["--new-head"]), ("mask_rcnn", ["--num-classes", "2"])])
def test_weights_for_other_classes(kind, leave, recipes, weights, spoilt, refused, run, tmp_path):
    """Refused unless --num-classes or --new-head gives leave; never scored."""
    data, path = spoilt(two_classes), weights(kind)
    words = [recipes[kind], "--data", data, "--weights", path, *SHORT]
    sides = [path, "3 classes (red, green, blue)", "2 classes (red, green)"]
    refused(4, [*sides, "--num-classes 2", "--new-head"], "train", *words)
    refused(3, [data, "holds 2 classes, expected 3"], "train", *words, "--num-classes", "3")
    refused(4, ["3 classes (red, green, blue", "holds 2 (red, green"], *evaluation(path, data))
    assert run("train", *words, *leave)[0] == 0
    config = load_weights(tmp_path / "run/weights.safetensors").config
    assert (config.classes, config.category_ids) == (("red", "green"), (3, 7))


@pytest.mark.parametrize("count", [2, 5])
def test_weights_without_names_need_as_many_classes(count, weights, coco, refused, run):
    options = {"num_classes": count, "classes": (), "category_ids": ()}
    path = weights("detr", f"detr_{count}", **options)
    refused(4, [coco, "holds 3 classes", f"know {count}"], *evaluation(path, coco))
    path = weights("detr", "detr_unnamed", **(options | {"num_classes": 3}))
    assert run(*evaluation(path, coco, "--batch-size", 6))[0] == 0


@pytest.mark.parametrize("kind", ["classifier", "autoencoder"])
def test_weights_of_no_detector(kind, weights, coco, refused, tmp_path):
    path, parts = weights(kind), [weights(kind), repr(kind), "expected a detector"]
    refused(4, parts, *evaluation(path, coco))
    refused(4, parts, "predict", coco.parent.parent / "train", "--weights", path, "--out", tmp_path / "run",
            "--device", "cpu")


def test_weights_of_another_head(recipes, weights, coco, refused):
    path = weights("detr", "detr_522", head="mf_dec_522")
    refused(4, [path, "head mf_dec_522", "wants mf_dec_211", "--new-head"], "train", recipes["detr"], "--data", coco,
            "--weights", path, *SHORT)


@pytest.mark.parametrize(("kind", "override", "sides"), [
    ("detr", ["--model.num_queries", "9"], "num_queries 8 there, 9 in the recipe"),
    ("mask_rcnn", ["--model.pyramid_channels", "24"], "pyramid_channels 16 there, 24 in the recipe"),
])
def test_weights_of_another_architecture(kind, override, sides, recipes, weights, coco, refused):
    refused(4, [weights(kind), sides], "train", recipes[kind], "--data", coco, "--weights", weights(kind), *override,
            *SHORT)


def test_missing_weights(recipes, coco, refused, tmp_path):
    path = tmp_path / "no.safetensors"
    refused(4, [path, "no such file"], "train", recipes["detr"], "--data", coco, "--weights", path, *SHORT)
    refused(4, [path, "no such file"], *evaluation(path, coco))


# recipes and options ------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "parts"), [
    (["--data.policy", "rand-m9-mstd0.5-inc1"], ["data.policy: got rand-m9", "detectors do not have", "'detr'"]),
    (["--data.resident", "true"], ["data.resident: got True", "detectors do not have"]),
    (["--optim.mixup", "0.8"], ["optim.mixup: got 0.8", "only classifiers"]),
    (["--data.augment", "false"], ["data.augment: got false", "needs a classifier"]),
    (["--data.scales", "[48, 128]"], ["scales: got (48, 128)", "max_size (96)"]),
    (["--data.crop_pct", "0.875"], ["data.crop_pct: got 0.875, expected none"]),
    (["--data.scales", "[8]"], ["data.scales: got [8]", "at least 32"]),
    (["--data.image_size", "128"], ["max_size: got 96", "image_size, 128"]),
    (["--model.num_classes", "91"], ["holds 3 classes, expected 91"]),
    (["--model.classes", "[a, b]"], ["classes: got 2"]),
    (["--new-head"], ["--new-head", "none are given"]),
    (["--optim.batch_size", "7"], ["6 images do not fill one batch of 7"]),
])
def test_what_does_not_go_together(words, parts, recipes, coco, refused):
    data_fault = any("holds" in part or "fill" in part for part in parts)
    refused(3 if data_fault else 2, parts, "train", recipes["detr"], "--data", coco, *words)


def test_recipes_of_other_tasks(coco, images, refused, run, capsys, tmp_path):
    refused(2, ["imagenette/default", "no recipe for a detector"], "train", "imagenette/default", "--data", coco)
    refused(2, ["RECIPE is missing"], "train", "--data", coco)
    assert main(["train", "imagenette/supervised_w720", "--data", str(images / "train"), "--data.scales", "[32]",
                 "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "data.scales: got (32,)" in error and "only detectors" in error


def test_words_of_data(recipes, weights, coco, refused):
    refused(2, ["--data is missing"], "train", recipes["detr"])
    three = [coco, coco.parent.parent / "train", "third"]
    for option, words in (("--data", ["--data", *three]), ("--val", ["--data", coco, "--val", *three])):
        refused(2, [f"{option}: got 3 words"], "train", recipes["detr"], *words, *SHORT)
    refused(2, ["--data: got 3 words"], "eval", weights("detr"), "--data", *three)


def test_the_folder_of_the_pictures(recipes, coco, refused, tmp_path):
    refused(3, [coco, "6 of 6 images are missing", tmp_path / "empty"], "train", recipes["detr"],
            "--data", coco, tmp_path / "empty", *SHORT)


def test_resume_with_other_data(recipes, coco, run, tmp_path):
    """Refused in one line, and the run is left as it was."""
    words = [recipes["detr"], *SHORT, "--optim.epochs", "2", "--trainer.max_time", "1e-9"]
    assert run("train", *words, "--data", coco)[0] == 0
    before = (tmp_path / "run/last.ckpt").read_bytes()
    more = make_coco(tmp_path / "more", pictures=7)
    code, _, lines = run("train", *words, "--data", more, "--resume")
    assert code == 2 and len(lines) == 1 and "images: 6 then, 7 now" in lines[0], lines
    assert (tmp_path / "run/last.ckpt").read_bytes() == before


@pytest.mark.parametrize("colours", [COLOURS | {90: "yellow"}, {3: "red", 7: "green"}])
def test_resume_with_other_classes(colours, recipes, coco, run, tmp_path):
    """As many images, but of other classes, as many or fewer."""
    words = [recipes["detr"], *SHORT, "--optim.epochs", "2", "--trainer.max_time", "1e-9"]
    assert run("train", *words, "--data", coco)[0] == 0
    others = make_coco(tmp_path / "others", colours=colours, pictures=6)
    code, _, lines = run("train", *words, "--data", others, "--resume")
    assert code == 2 and len(lines) == 1 and "classes: ['red', 'green', 'blue'] then" in lines[0], lines


def test_other_commands_say_that_it_is_a_detector(weights, coco, capsys):
    """finola eval, predict and reconstruct; the images are not even looked at."""
    picture = next((coco.parent.parent / "train").glob("*.png"))
    detector = weights("mask_rcnn")
    for words, code, part in ((["eval", detector, "--data", picture.parent], 2, "finola detect eval"),
                              (["predict", picture, "--weights", detector], 4, "expected a classifier"),
                              (["reconstruct", picture, "--weights", detector, "--out", "panels"], 4, "mask_rcnn")):
        assert main(list(map(str, words))) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and part in lines[0], lines
