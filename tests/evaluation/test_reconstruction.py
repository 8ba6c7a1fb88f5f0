"""The scores are what they are called, and `finola eval` says how it got them."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch
from commands import Command
from PIL import Image
from torchmetrics.image import StructuralSimilarityIndexMeasure

from finola.cli import main as cli
from finola.data import ImageFolder
from finola.data.datasets import Subset, spread
from finola.data.loader import read_squares
from finola.errors import DataError
from finola.evaluation.linear_codes import baselines
from finola.evaluation.metrics import psnr
from finola.evaluation.reconstruction import Scores, evaluate
from finola.factory import create_model
from finola.registry import DEFAULT_MODEL, pretrained_path
from finola.weights import load_weights, save_weights

run = Command("eval", always=("--workers", "0", "--device", "cpu"))

SIZE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """30 smooth 40x36 images in two classes."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for i in range(30):
        path = root / f"class_{i // 15}" / f"{i:02}.png"
        path.parent.mkdir(exist_ok=True)
        coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((40, 36), Image.Resampling.BICUBIC).save(path)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    options = {"image_size": SIZE, "embed_dim": 12, "decoder_widths": (16, 8, 8), "pool_heads": 2}
    model = create_model(DEFAULT_MODEL, start="random", **options)
    return save_weights(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


def squares(folder, batch_size=8):
    return read_squares(ImageFolder(folder), SIZE, batch_size=batch_size, workers=0)


def noisy(x):
    """A code whose error differs from image to image and leaves the range of pixels."""
    return x + 0.1 * x.mean((1, 2, 3), keepdim=True) + 0.3 * (x - 0.5)


# --- scores ------------------------------------------------------------------------------------------------


def test_a_perfect_code():
    x = torch.rand(3, 3, SIZE, SIZE)
    scores = Scores()
    scores.add(x, x, seconds=0.5)
    means = scores.means()
    assert means["psnr"] == means["psnr_pooled"] == pytest.approx(100)
    assert means["ssim"] == pytest.approx(1) and means["images_per_second"] == 6


def test_scores_follow_their_definitions(folder):
    scores, _ = evaluate({"noisy": noisy}, squares(folder), 30)
    x = torch.cat([batch["image"] for batch in squares(folder)])
    x_hat = noisy(x).clamp(0, 1)
    error = (x_hat - x).double().square().mean((1, 2, 3))
    means = scores["noisy"].means()
    assert scores["noisy"].images == 30
    assert means["psnr"] == pytest.approx((-10 * error.log10()).mean().item(), abs=1e-4)
    assert means["psnr_pooled"] == pytest.approx(-10 * math.log10(error.mean()), abs=1e-4)
    assert means["psnr_pooled"] < means["psnr"]  # Jensen
    rounded = (x_hat * 255).round() / 255
    assert means["psnr_8bit"] == pytest.approx(psnr(rounded, x).mean().item(), abs=1e-4)
    assert abs(means["psnr_8bit"] - means["psnr"]) > 1e-6
    expected = StructuralSimilarityIndexMeasure(data_range=1.0)(x_hat, x).item()
    assert means["ssim"] == pytest.approx(expected, abs=1e-5)


def test_scores_do_not_depend_on_the_batch_size(folder):
    means = [evaluate({"noisy": noisy}, squares(folder, n), 30)[0]["noisy"].means() for n in (1, 7, 30)]
    for other in means[1:]:
        for key in ("psnr", "psnr_pooled", "psnr_8bit", "ssim"):
            assert other[key] == pytest.approx(means[0][key], abs=1e-5)


def test_examples_are_spread_over_the_set(folder):
    _, examples = evaluate({"same": lambda x: x, "noisy": noisy}, squares(folder), 30)
    x = torch.cat([batch["image"] for batch in squares(folder)])
    chosen = [0, 3, 7, 11, 15, 18, 22, 26]
    assert torch.equal(torch.stack(examples.originals), x[chosen])
    assert torch.equal(torch.stack(examples.rows["noisy"]), noisy(x[chosen]))
    assert examples.psnr["noisy"] == pytest.approx(psnr(noisy(x), x)[chosen].tolist(), abs=1e-4)


@pytest.mark.parametrize("length, count", [(10, 3), (10, 10), (3, 8), (1, 1), (1000, 7)])
def test_spread_numbers(length, count):
    numbers = spread(length, count)
    assert len(set(numbers)) == len(numbers) == min(length, count)
    assert numbers[0] == 0 and numbers[-1] >= length - math.ceil(length / len(numbers))
    assert np.ptp(np.diff(numbers, append=length)) <= 1


def test_a_subset_is_a_data_set(folder):
    whole = ImageFolder(folder)
    subset = Subset(whole, 4)
    assert [subset.name(i) for i in range(len(subset))] == [whole.name(i) for i in (0, 7, 15, 22)]
    assert subset.labels.tolist() == [0, 0, 1, 1] and subset.classes == whole.classes
    assert subset.load(2).tobytes() == whole.load(15).tobytes()


# --- baselines ---------------------------------------------------------------------------------------------


def test_baselines_keep_at_most_as_many_numbers():
    codes = baselines(768, 128, None)
    assert {name: numbers for name, (numbers, _) in codes.items()} == {
        "zonal DCT": 753, "bicubic 16x16 thumbnail": 768,
    }  # fmt: skip


def test_pca_is_the_best_of_them_on_what_it_was_fitted_to(folder):
    codes = baselines(12, SIZE, (batch["image"] for batch in squares(folder)))
    scores, _ = evaluate({name: code for name, (_, code) in codes.items()}, squares(folder), 30)
    pooled = {name: score.means()["psnr_pooled"] for name, score in scores.items()}
    assert list(pooled) == ["PCA", "zonal DCT", "bicubic 2x2 thumbnail"]
    assert pooled["PCA"] > max(pooled["zonal DCT"], pooled["bicubic 2x2 thumbnail"]) + 2


# --- finola eval -------------------------------------------------------------------------------------------


def test_the_command_writes_result_and_panel(folder, weights, tmp_path, capsys):
    out, picture = tmp_path / "new" / "result.json", tmp_path / "new" / "panel.png"
    words = [weights, "--data", folder, "--baselines", "--train", folder, "--out", out, "--panel", picture]
    code, printed, errors = run(capsys, *words)
    assert (code, errors) == (0, [])
    result = json.loads(out.read_text())
    assert result["images"] == 30
    assert result["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert result["preprocessing"] == {"size": 32, "shorter_side": "antialiased bicubic", "crop": "centre",
                                       "crop_pct": 1.0}
    assert result["config"]["embed_dim"] == 12
    assert {"commit", "torch", "python", "hardware", "date"} <= result.keys()
    rows = {row["code"]: row for row in result["scores"]}
    assert {name: row["numbers"] for name, row in rows.items()} == {
        "model": 12, "PCA": 12, "zonal DCT": 11, "bicubic 2x2 thumbnail": 12,
    }  # fmt: skip
    for name, row in rows.items():
        assert f"{row['psnr']:8.3f}{row['psnr_pooled']:8.3f}" in printed, name
    assert "30 images" in printed and "antialiased bicubic" in printed
    assert Image.open(picture).size == (4 + 8 * 36, 4 + 5 * (18 + 32 + 18 + 4))


def test_the_models_score_is_that_of_its_own_output(folder, weights, capsys):
    code, printed, errors = run(capsys, weights, "--data", folder, "--json")
    model = load_weights(weights).eval()
    with torch.no_grad():
        scores = [psnr(model(batch["image"]), batch["image"]) for batch in squares(folder)]
    (row,) = json.loads(printed)["scores"]
    assert (code, errors) == (0, [])
    assert row["psnr"] == pytest.approx(torch.cat(scores).mean().item(), abs=1e-3)


def test_limit_resampling_and_pca_without_images(folder, weights, capsys):
    _, printed, _ = run(capsys, weights, "--data", folder, folder, "--limit", "7", "--baselines")
    assert ": 7 images" in printed and "PCA left out: it needs --train" in printed
    scores = []
    for resample in ("bicubic", "bilinear"):
        _, printed, _ = run(capsys, weights, "--data", folder, "--baselines", "--resample", resample, "--json")
        result = json.loads(printed)
        assert result["preprocessing"]["shorter_side"] == f"antialiased {resample}"
        scores.append(result["scores"][1]["psnr"])
    assert abs(scores[0] - scores[1]) > 1e-3


def test_a_bad_image_stops_the_evaluation_and_all_are_named(folder, weights, tmp_path, capsys):
    for i, path in enumerate(sorted(folder.glob("*/*.png"))[:6]):
        (tmp_path / f"{i}.png").write_bytes(path.read_bytes()[: 200 if i in (1, 4) else None])
    with pytest.raises(DataError, match=r"2 of 6 images .*1\.png: .*; .*4\.png: "):
        list(read_squares(ImageFolder(tmp_path), SIZE, batch_size=2, workers=0))
    out = tmp_path / "out" / "result.json"
    words = ["--out", out, "--panel", tmp_path / "out" / "panel.png"]
    code, printed, errors = run(capsys, weights, "--data", tmp_path, *words)
    assert (code, printed, len(errors)) == (3, "", 1)
    assert "1.png" in errors[0] and "4.png" in errors[0] and "\n" not in errors[0]
    assert not out.parent.exists()
    train = tmp_path / "train"
    train.mkdir()
    for i, path in enumerate(sorted(folder.glob("*/*.png"))[:6] * 3):
        (train / f"{i}.png").write_bytes(path.read_bytes()[: 200 if i in (1, 4) else None])
    code, printed, errors = run(capsys, weights, "--data", folder, "--baselines", "--train", train)
    assert (code, printed) == (3, "") and "2 of 18" in errors[0]


def test_what_is_not_there(folder, weights, tmp_path, capsys):
    for words, code, shown in [
        ([tmp_path / "gone.safetensors", "--data", folder], 4, "gone.safetensors: no such file"),
        (["finola_mfw720_c768_r9", "--data", folder], 4, "did you mean finola_mfw720_c768_r8"),
        ([weights, "--data", tmp_path / "gone"], 3, "gone"),
        ([weights, "--data", folder, "--train", folder], 2, "--baselines"),
        ([weights, "--data", folder, "--limit", "5", "--baselines", "--train", folder / "class_0"], 0, ""),
    ]:
        got, printed, errors = run(capsys, *words)
        assert got == code and (not code or (printed == "" and shown in errors[0])), words


def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(folder, weights, tmp_path, capsys):
    (tmp_path / "file").touch()
    for option in ("--out", "--panel"):
        code, printed, errors = run(capsys, weights, "--data", folder, option, tmp_path / "file" / "result.png")
        assert (code, printed) == (2, "") and f"{option}: {tmp_path / 'file'} is a file" in errors[0]


def test_the_scores_are_printed_even_if_they_cannot_be_written(folder, weights, tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finola.files.os.replace", full)
    code, printed, errors = run(capsys, weights, "--data", folder, "--out", tmp_path / "result.json")
    assert code == 3 and "images/s" in printed and len(errors) == 1


@pytest.mark.parametrize("options", [["--workers", "-1"], ["--limit", "0"], ["--resample", "nearest"], []])
def test_wrong_usage(folder, weights, capsys, options):
    data = ["--data", str(folder)] if options else []
    with pytest.raises(SystemExit) as exit:
        cli.main(["eval", str(weights), *data, *options])
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


def test_the_pca_is_left_out_where_there_are_too_few_images(folder, weights, tmp_path, capsys):
    for path in sorted(folder.glob("*/*.png"))[:5]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    words = (weights, "--data", folder, "--baselines", "--train", tmp_path)
    code, printed, errors = run(capsys, *words)
    assert (code, errors) == (0, [])
    assert "PCA left out: 12 components need at least 13 images in --train, got 5" in printed
    result = json.loads(run(capsys, *words, "--json")[1])
    assert [row["code"].split()[0] for row in result["scores"]] == ["model", "zonal", "bicubic"]
    assert result["pca_fitted_to"] is None and len(result["left_out"]) == 1


def test_a_shipped_model_by_its_name(folder, capsys):
    code, printed, errors = run(capsys, DEFAULT_MODEL, "--data", folder, "--baselines", "--json")
    assert (code, errors) == (0, [])
    result = json.loads(printed)
    assert result["sha256"] == hashlib.sha256(pretrained_path(DEFAULT_MODEL).read_bytes()).hexdigest()
    assert [row["numbers"] for row in result["scores"]] == [768, 753, 768]
    assert result["scores"][0]["psnr"] > 15  # these images are more colourful than any photograph
