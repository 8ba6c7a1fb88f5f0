"""The documented chain by the command line: pre-train, probe twice, fine-tune, eval, predict, and on to other classes.

The images are skies over ground: the class is the weather, told by the colours."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from training import unequal

from finola.cli.main import main
from finola.weights import load_weights

pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
pytestmark = pytest.mark.usefixtures("one_thread")

SKIES = {"fog": (200, 200, 205), "night": (15, 20, 45), "noon": (70, 140, 230), "sunset": (235, 120, 50)}
SHARED = ["--data.num_workers", "0", "--trainer.accelerator", "cpu", "--trainer.val_every", "5",
          "--optim.batch_size", "8"]

WIDE = ["--data.crop_scale", "[0.5, 1]"]  # so that sky and ground are in every crop


def make_skies(folder, classes, train=8, val=3):
    """JPEGs of 72x60 pixels: a sky that fades towards the horizon, hills, and the noise of a camera."""
    generator = np.random.default_rng(len(classes))
    for split, count in (("train", train), ("val", val)):
        for name in classes:
            for number in range(count):
                path = folder / split / name / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                _sky(SKIES[name], generator).save(path, quality=90)
    return folder


def _sky(colour, generator):
    rows, columns = np.mgrid[:60, :72]
    horizon = 35 + 8 * np.sin(columns / generator.uniform(5, 15) + generator.uniform(0, 6))
    sky = np.array(colour) * (1 - 0.4 * rows / 60)[..., None]
    picture = np.where((rows > horizon)[..., None], np.array([60, 70, 40]), sky) + generator.normal(0, 12, (60, 72, 3))
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def chain(tmp_path_factory, one_thread):
    """A folder with skies of three kinds of weather, and the runs of the chain."""
    folder = tmp_path_factory.mktemp("chain")
    make_skies(folder, ["fog", "night", "sunset"])
    steps = [
        ("train", "masked_e_w720", None, ["--data.image_size", "64", "--data.resident_size", "64",
                                          "--model.block_size", "2", "--optim.epochs", "2"]),
        ("probe", "lin_w720", "masked_e_w720", ["--data.image_size", "64", "--data.resident_size", "64",
                                                "--data.augment", "false", "--optim.epochs", "10",
                                                "--optim.base_lr", "5"]),
        ("probe", "tran1_w720", "masked_e_w720", ["--data.image_size", "64", "--optim.epochs", "8",
                                                  "--optim.base_lr", "0.05", *WIDE]),
        ("finetune", "tran1_ft_w720", "tran1_w720", ["--data.image_size", "64", "--optim.epochs", "5",
                                                     "--optim.base_lr", "0.01", *WIDE]),
    ]
    for command, name, source, options in steps:
        start = ["--weights", weights_of(folder, source)] if source else []
        finola(command, f"imagenette/{name}", *start, *sets(folder), "--out", folder / name, *SHARED, *options)
    return folder


def finola(*words):
    assert main([str(word) for word in words]) == 0


def sets(folder):
    return ["--data", folder / "train", "--val", folder / "val"]


def weights_of(folder, run):
    return folder / run / "weights.safetensors"


def result_of(folder, run):
    return json.loads((folder / run / "result.json").read_text())


@pytest.mark.parametrize("run", ["lin_w720", "tran1_w720", "tran1_ft_w720"])
def test_each_step_learns_the_weather(chain, run):
    assert result_of(chain, run)["val_top1"] > 80  # a third by chance


def test_the_pre_trained_encoder_is_passed_on(chain):
    """Unchanged through both probes, changed by fine-tuning."""
    pretrained, lin, tran1, tuned = (
        load_weights(weights_of(chain, run)).encoder.state_dict()
        for run in ("masked_e_w720", "lin_w720", "tran1_w720", "tran1_ft_w720"))
    assert unequal(pretrained, lin) == unequal(pretrained, tran1) == []
    assert len(unequal(pretrained, tuned)) > 100


@pytest.mark.parametrize("run", ["lin_w720", "tran1_w720", "tran1_ft_w720"])
def test_eval_finds_what_the_run_found(chain, run, tmp_path, capsys):
    """Training validates in bf16, eval in fp32: no image is near enough to the border for it to matter."""
    finola("eval", weights_of(chain, run), "--data", chain / "val", "--panel", tmp_path / "panel.png", "--json",
           "--workers", 0, "--device", "cpu")
    report = json.loads(capsys.readouterr().out)
    assert report["scores"]["top1"] == pytest.approx(result_of(chain, run)["val_top1"], abs=0.01)
    assert Image.open(tmp_path / "panel.png").size[0] > 100


def test_eval_finds_the_psnr_of_the_masked_prediction(chain, capsys):
    """In batches of the same size, and so by the same masks."""
    finola("eval", weights_of(chain, "masked_e_w720"), "--data", chain / "val", "--batch-size", 8, "--json",
           "--workers", 0, "--device", "cpu")
    report, result = json.loads(capsys.readouterr().out), result_of(chain, "masked_e_w720")
    assert report["scores"]["psnr"] == pytest.approx(result["val_psnr"], abs=0.05)
    assert report["scores"]["psnr_whole"] == pytest.approx(result["val_psnr_whole"], abs=0.05)


def test_eval_by_the_neighbours_of_the_pre_trained_encoder(chain, capsys):
    finola("eval", weights_of(chain, "masked_e_w720"), "--data", chain / "val", "--knn", "--train", chain / "train",
           "--json", "--workers", 0, "--device", "cpu")
    report = json.loads(capsys.readouterr().out)
    assert report["scores"]["knn_top1"] == pytest.approx(result_of(chain, "masked_e_w720")["val_knn"], abs=0.01)


def test_predict_names_the_weather(chain, tmp_path, capsys):
    finola("predict", chain / "val", "--weights", weights_of(chain, "tran1_ft_w720"), "--json", "--device", "cpu")
    images = json.loads(capsys.readouterr().out)["images"]
    assert len(images) == 9
    right = [image["predictions"][0]["name"] == image["file"].split("/")[-2] for image in images]
    assert 100 * sum(right) / len(right) == pytest.approx(result_of(chain, "tran1_ft_w720")["val_top1"], abs=0.01)


def test_on_to_other_classes(chain, tmp_path, capsys):
    """Refused without leave; with it the new classes are learnt and named."""
    skies = make_skies(tmp_path / "skies", ["noon", "sunset"])
    words = ["finetune", "imagenette/tran1_ft_w720", "--weights", weights_of(chain, "tran1_ft_w720"), *sets(skies),
             "--out", tmp_path / "run", *SHARED, "--data.image_size", "64", "--optim.epochs", "5",
             "--optim.base_lr", "0.01"]
    assert main([str(word) for word in words]) == 4
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and "3 classes (fog, night, sunset)" in error and "--num-classes 2" in error
    finola(*words, "--num-classes", 2)
    model = load_weights(tmp_path / "run/weights.safetensors")
    assert model.config.classes == ("noon", "sunset")
    assert json.loads((tmp_path / "run/result.json").read_text())["val_top1"] > 80
