"""`finola predict` with bad images, weights and folders: one clear line, the right exit code, the rest done."""

import json

import pytest
from commands import Command
from PIL import Image
from tiny_models import classifier

from finola.cli import main as cli
from finola.errors import DataError, FinolaError, WeightsError
from finola.factory import create_model
from finola.inference.classify import predict
from finola.registry import DEFAULT_MODEL
from finola.weights import save_weights

run = Command("predict", always=("--device", "cpu"))
fails = run.fails


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_weights(classifier(), tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_command_goes_on_past_bad_pictures_and_sums_up(pictures, weights, tmp_path, capsys, batch_size):
    out = tmp_path / "out"
    words = [pictures, pictures / "missing.png", "--weights", weights, "--out", out, "--batch-size", batch_size]
    code, printed, errors = run(capsys, *words)
    assert code == 3
    assert [line.partition(": ")[0] for line in printed.splitlines()] == [
        str(pictures / "good.png"), str(pictures / "other.jpg"),
    ]  # fmt: skip
    assert sorted(path.name for path in out.iterdir()) == ["good.png", "other.png"]
    for name in ("cut.png", "empty.png", "text.jpg", "missing.png"):
        assert any(line.startswith("failed: ") and name in line for line in errors)
    assert errors[-1].startswith("finola predict: 4 of 6 failed; the first: ") and "cut.png" in errors[-1]

    code, printed, errors = run(capsys, *words, "--json")
    report = json.loads(printed)
    assert code == 3 and len(report["images"]) == 2 and len(report["failed"]) == 4


def test_when_no_picture_is_left(pictures, weights, tmp_path, capsys):
    code, printed, errors = run(capsys, pictures / "text.jpg", "--weights", weights, "--out", tmp_path / "out")
    assert (code, printed) == (3, "") and len(errors) == 1 and errors[0].count("text.jpg") == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "bare").mkdir()
    assert "no image there" in fails(capsys, 3, tmp_path / "bare", "--weights", weights)


@pytest.mark.parametrize(
    "kind, name, options",
    [
        ("autoencoder", DEFAULT_MODEL, {"embed_dim": 16, "decoder_widths": (16, 8, 8), "start": "random"}),
        ("masked", "masked_finola_e_mfw720", {"image_size": 64, "block_size": 2}),
    ],
)
def test_weights_of_another_kind(pictures, tmp_path, capsys, kind, name, options):
    model = create_model(name, **{"image_size": 32, "pool_heads": 2, **options}).eval()
    weights = save_weights(model, tmp_path / f"{kind}.safetensors")
    error = fails(capsys, 4, pictures / "good.png", "--weights", weights, "--out", tmp_path / "out")
    assert f"{kind}.safetensors: got a model of kind '{kind}', expected a classifier" in error
    assert "finola probe" in error and not (tmp_path / "out").exists()
    with pytest.raises(WeightsError, match=f"kind '{kind}'"):
        predict(model, pictures / "good.png")


def test_weights_that_are_not_there_or_damaged(pictures, weights, tmp_path, capsys):
    assert "no such file" in fails(capsys, 4, pictures, "--weights", tmp_path / "gone.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(weights.read_bytes()[:5000])
    assert "not a whole safetensors file" in fails(capsys, 4, pictures, "--weights", tmp_path / "cut.safetensors")


def test_a_folder_for_charts_that_cannot_be_one(pictures, weights, capsys):
    good = pictures / "good.png"
    assert "expected a folder" in fails(capsys, 2, good, "--weights", weights, "--out", good)
    before = good.read_bytes()
    assert "holds good.png" in fails(capsys, 2, good, "--weights", weights, "--out", pictures)
    assert good.read_bytes() == before


def test_no_classifier_comes_along(capsys):
    assert "--weights is missing; no classifier and no detector comes along: finola probe" in fails(capsys, 2, "a.jpg")


@pytest.mark.parametrize("options", [["--weights", "w", "--top", "0"], ["--weights", "w", "--batch-size", "x"]])
def test_wrong_usage(capsys, options):
    with pytest.raises(SystemExit) as exit:
        cli.main(["predict", "photo.jpg", *options])
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


def test_bad_calls(pictures):
    model = classifier()
    with pytest.raises(FinolaError, match="training mode"):
        predict(model.train(), pictures / "good.png")
    with pytest.raises(FinolaError, match="top: got 0"):
        predict(model.eval(), pictures / "good.png", top=0)
    with pytest.raises(DataError, match="0x5 pixels"):
        predict(model, Image.new("RGB", (0, 5)))
