"""DETR and Mask R-CNN on images of coloured rectangles, by the command line: training with a frozen encoder and on
from there, scores, results in COCO's format, photographs, resume in mid-epoch bit for bit."""

from __future__ import annotations

import json
import math
import signal

import pytest
import torch
from coco_data import COLOURS, RECIPES, make_coco
from PIL import Image
from training import read_checkpoint, signal_at, unequal

from finola.cli.main import main
from finola.detection.coco import decode_mask
from finola.factory import create_model
from finola.training.recipe import load_recipe
from finola.weights import load_weights, save_weights

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
from finola.detection.task import DetectionTask  # noqa: E402

pytest.importorskip("faster_coco_eval", reason="needs the extra 'detection'")
pytest.importorskip("scipy", reason="needs the extra 'detection'")
pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = pytest.mark.parametrize("kind", RECIPES)
LONG_ENOUGH = {  # for a few boxes to be found
    "detr": ["--optim.epochs", "4", "--trainer.val_every", "2"],
    "mask_rcnn": ["--optim.epochs", "10", "--trainer.val_every", "5", "--optim.batch_size", "2",
                  "--optim.base_lr", "0.64"],
}
COLUMNS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")  # of the paper's tables
SCORES = {"detr": [f"val_box_{name}" for name in COLUMNS],
          "mask_rcnn": [f"val_{what}_{name}" for what in ("box", "mask") for name in COLUMNS]}


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """Split -> annotations."""
    folder = tmp_path_factory.mktemp("coco")
    return {"train": make_coco(folder), "val": make_coco(folder, "val", pictures=6)}


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    """Weights of an autoencoder whose BatchNorm statistics are not those of a new one."""
    torch.manual_seed(0)
    model = create_model("finola_mfw720_c768_r8", image_size=64, start="random", embed_dim=16, pool_heads=2,
                         decoder_widths=(16, 8, 8, 8))
    with torch.no_grad():
        for _ in range(3):
            model(torch.rand(4, 3, 64, 64))
    return save_weights(model, tmp_path_factory.mktemp("autoencoder") / "weights.safetensors")


@pytest.fixture(scope="module")
def frozen(recipes, coco, autoencoder, tmp_path_factory):
    """A function: the folder of a detector's run with the autoencoder's encoder frozen."""
    runs = {}

    def run(kind):
        if kind not in runs:
            out = tmp_path_factory.mktemp("frozen") / kind
            assert main(["detect", "train", str(recipes[kind]), "--data", str(coco["train"]), "--val", str(coco["val"]),
                         "--out", str(out), "--weights", str(autoencoder), "--optim.freeze_encoder", "true",
                         *LONG_ENOUGH[kind]]) == 0
            runs[kind] = out
        return runs[kind]

    return run


def read_json(path):
    return json.loads(path.read_text())


def states(model):
    """The tensors of the encoder and the others, by name."""
    state = model.state_dict()
    inside = {name for name in state if name.startswith("encoder.")}
    return {name: state[name] for name in inside}, {name: state[name] for name in state.keys() - inside}


# training -----------------------------------------------------------------------------------------


@KINDS
def test_a_run_writes_its_folder(kind, frozen):
    out = frozen(kind)
    result = read_json(out / "result.json")
    assert result["finished"] and result["converged"] and result["step"] == result["total_steps"]
    assert result["images"] == {"train": 10, "val": 6}
    assert {split: record["files"] for split, record in result["files"].items()} == {"train": 11, "val": 7}
    assert result["weights"]["part"] == "encoder"
    assert [key for key in result if key.startswith("val_")] == SCORES[kind]
    assert len(result["history"]) == 2
    for point in result["history"]:
        found = [point[name] for name in SCORES[kind] if point[name] is not None]  # None: no objects of that size
        assert all(0 <= value <= 100 for value in found) and math.isfinite(point["train_loss"])
    assert {name: result["history"][-1][name] for name in SCORES[kind]} == {name: result[name] for name in SCORES[kind]}
    assert min(result[name] for name in SCORES[kind] if name.endswith(("_ap", "_ap50"))) > 0
    assert result["history"][1]["train_loss"] < result["history"][0]["train_loss"]
    written = {path.name for path in out.iterdir()}
    assert written == {"recipe.yaml", "last.ckpt", "csv", "tensorboard", "panels", "weights.safetensors", "result.json",
                       "curve.png", "panel.png"}
    config = load_weights(out / "weights.safetensors").config
    assert (config.kind, config.num_classes) == (kind, 3)
    assert (config.classes, config.category_ids) == (tuple(COLOURS.values()), tuple(COLOURS))


@KINDS
def test_a_frozen_encoder_keeps_every_bit(kind, frozen, autoencoder):
    """Weights and BatchNorm statistics are the autoencoder's; every parameter of the rest is no more what it was."""
    trained = load_weights(frozen(kind) / "weights.safetensors")
    encoder, rest = states(trained)
    assert unequal(encoder, states(load_weights(autoencoder))[0]) == []
    torch.manual_seed(0)
    new = trained.config.build().state_dict()
    assert [name for name, _ in trained.named_parameters() if name in rest and torch.equal(rest[name], new[name])] == []


@KINDS
def test_fine_tuning_changes_the_encoder(kind, frozen, recipes, coco, tmp_path):
    recipe = load_recipe(recipes[kind], ["--optim.epochs", "1", "--optim.batch_size", "8"])
    before = frozen(kind) / "weights.safetensors"
    engine.fit(recipe, [coco["train"]], None, tmp_path / "run", init_from=before)
    (old, _), (new, _) = (states(load_weights(path)) for path in (before, tmp_path / "run/weights.safetensors"))
    # a tensor may stay as it is where a ReLU cuts every gradient of it; none of the layers' statistics does
    unchanged = [name for name in old if torch.equal(old[name], new[name])]
    assert not [name for name in unchanged if name.endswith(("running_mean", "running_var"))]
    assert len(unchanged) < len(old) / 10


# scores -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(frozen, coco, tmp_path_factory):
    """A function: the folder that finola detect eval writes for a run on its validation images, in the same batches:
    what is beside an image depends on the size of the largest one."""
    folders = {}

    def evaluate(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("evaluated") / kind
            size = read_json(frozen(kind) / "result.json")["settings"]["optim"]["batch_size"]
            assert main(["detect", "eval", str(frozen(kind) / "weights.safetensors"), "--data", str(coco["val"]),
                         "--batch-size", str(size), "--workers", "0", "--device", "cpu",
                         "--out", str(folders[kind])]) == 0
        return folders[kind]

    return evaluate


@KINDS
def test_scores_are_those_of_the_last_validation(kind, evaluated, frozen):
    report, result = read_json(evaluated(kind) / "scores.json"), read_json(frozen(kind) / "result.json")
    for name in SCORES[kind]:
        share = report[name.removeprefix("val_")]  # None where there is no object of that size
        assert result[name] == (None if share is None else pytest.approx(100 * share, abs=1e-3))
    assert report["images"] == 6 and report["latency_ms"] > 0 and report["images_per_second"] > 0
    with Image.open(evaluated(kind) / "panel.png") as panel:
        assert panel.width > 600


@KINDS
def test_pycocotools_agrees(kind, evaluated, coco):
    """On detections.json, which has rounded boxes and scores, and the annotations as they were written."""
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    report, truth = read_json(evaluated(kind) / "scores.json"), COCO(coco["val"])
    found = truth.loadRes(str(evaluated(kind) / "detections.json"))
    for what, iou_type in (("box", "bbox"), ("mask", "segm")):
        if f"{what}_ap" not in report:
            continue
        scores = COCOeval(truth, found, iou_type)
        scores.evaluate()
        scores.accumulate()
        scores.summarize()
        ours = [report[f"{what}_{name}"] for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")]
        assert [-1 if score is None else score for score in ours] == pytest.approx(scores.stats[:6].tolist(), abs=1e-3)


def test_scores_as_json_and_in_percent(frozen, coco, capsys):
    command = ["detect", "eval", str(frozen("mask_rcnn") / "weights.safetensors"), "--data", str(coco["val"]),
               "--workers", "0", "--device", "cpu"]
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "6 images" in first and "in %" in first
    for what, line in zip(("box", "mask"), lines[:2], strict=True):
        assert line.split()[:3] == [what, "ap", f"{100 * report[f'{what}_ap']:.1f}"]
    for what, line in zip(("box", "mask"), lines[2:4], strict=True):
        of_class = report[f"{what}_ap_per_class"]
        assert line.split()[1:] == [word for name in of_class for word in (name, f"{100 * of_class[name]:.1f}")]
    assert "ms for a batch of 1" in lines[4]


# photographs --------------------------------------------------------------------------------------


@pytest.fixture
def photographs(coco, tmp_path):
    """Three images of different sizes, in some modes, and a damaged one between them."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    source = coco["val"].parent.parent / "val"
    with Image.open(source / "01.png") as picture:
        picture.resize((200, 160)).save(folder / "a.jpg")
        picture.convert("P").save(folder / "d.png")
    (folder / "b.png").write_bytes((source / "02.png").read_bytes()[:100])
    with Image.open(source / "03.png") as picture:
        picture.convert("RGBA").save(folder / "c.png")
    return folder


@KINDS
def test_photographs(kind, frozen, photographs, tmp_path, capsys):
    """The good images are drawn in spite of the damaged one; detections.json is in COCO's results format."""
    out, weights = tmp_path / "found", str(frozen(kind) / "weights.safetensors")
    capsys.readouterr()  # of the training, if this test is the first to want it
    assert main(["detect", "predict", str(photographs), "--weights", weights, "--out", str(out), "--threshold", "0.1",
                 "--device", "cpu"]) == 3
    lines = capsys.readouterr()
    assert lines.err.splitlines()[-1].startswith("finola detect: 1 of 4 failed; the first: ")
    assert "b.png" in lines.err.splitlines()[-1] and len(lines.out.splitlines()) == 3
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "c.png", "d.png", "detections.json"]

    rows = read_json(out / "detections.json")
    fields = {"image_id", "category_id", "bbox", "score", "file_name", "category"}
    assert rows and all(set(row) == fields | ({"segmentation"} if kind == "mask_rcnn" else set()) for row in rows)
    numbers = {1: "a.jpg", 3: "c.png", 4: "d.png"}
    for row in rows:
        path = photographs / numbers[row["image_id"]]
        with Image.open(path) as picture:
            width, height = picture.size
        left, top, wide, high = row["bbox"]
        assert row["file_name"] == str(path) and row["category"] == COLOURS[row["category_id"]]
        assert 0.1 <= row["score"] <= 1
        assert min(row["bbox"]) >= 0 and left + wide <= width + 1e-3 and top + high <= height + 1e-3
        if "segmentation" in row:
            assert decode_mask(row["segmentation"], height, width, "mask").shape == (height, width)
    for name in ("a", "c", "d"):
        with Image.open(out / f"{name}.png") as drawn, Image.open(next(photographs.glob(f"{name}.*"))) as picture:
            assert drawn.size == picture.size
    with Image.open(out / "a.png") as drawn, Image.open(photographs / "a.jpg") as picture:
        assert drawn.tobytes() != picture.tobytes()


# resume -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "overrides"), [
    ("detr", ["--data.scales", "[48, 64]", "--data.random_crop", "true", "--data.hflip", "true",
              "--model.dropout", "0.1"]),
    ("mask_rcnn", ["--data.hflip", "true"]),
])
def test_resume_in_mid_epoch(kind, overrides, recipes, coco, autoencoder, tmp_path, monkeypatch):
    """Stopped after the first of two steps of the second epoch, by a run whose views, dropout and proposals are drawn
    at random."""
    recipe = load_recipe(recipes[kind], overrides)
    data, options = ([str(coco["train"])], [str(coco["val"])]), {"init_from": autoencoder}
    engine.fit(recipe, *data, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        signal_at(patch, DetectionTask, 2)
        with pytest.raises(SystemExit) as stop:
            engine.fit(recipe, *data, tmp_path / "run", **options)
    assert stop.value.code == 128 + signal.SIGTERM
    assert read_checkpoint(tmp_path / "run")["global_step"] == 3
    engine.fit(recipe, *data, tmp_path / "run", **options, resume=True)
    assert unequal(read_checkpoint(tmp_path / "whole"), read_checkpoint(tmp_path / "run")) == []
