"""`finola inspect` on bad images, statistics, models and options: one clear line and nothing half-written."""

import json

import numpy as np
import pytest
import torch
from commands import Command
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_models import CHANNELS, autoencoder

from finola.analysis.embedding import embedding_space
from finola.analysis.statistics import FORMAT, Statistics, save_statistics
from finola.cli import main as cli
from finola.cli.options import tell_apart
from finola.errors import DataError, FinolaError
from finola.factory import create_model
from finola.weights import save_weights, weights_hash

run = Command("inspect")
fails = run.fails



@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


@pytest.fixture
def statistics(weights, tmp_path):
    """A file of statistics for `weights`, of 40 vectors."""
    made = Statistics(CHANNELS)
    made.add(torch.randn(40, CHANNELS, generator=torch.Generator().manual_seed(0)))
    path = tmp_path / "statistics.safetensors"
    save_statistics(made, path, weights_hash(weights), {"data": "somewhere"})
    return path


def embedding(pictures, weights, out, *words):
    return "embedding", "--images", pictures, "--weights", weights, "--workers", 0, "--out", out, *words


def curvature(pictures, out, *words):
    return "curvature", "--data", pictures, "--workers", 0, "--out", out, *words


# --- statistics --------------------------------------------------------------------------------------------


def rewrite(path, metadata=None, **tensors):
    header = {"format": FORMAT, "weights_sha256": "", **(metadata or {})}
    save_file({**load_file(path), **tensors}, path, metadata=header)


def test_statistics_of_other_weights(pictures, weights, statistics, tmp_path, capsys):
    out = tmp_path / "out"
    rewrite(statistics, {"weights_sha256": "0123456789abcdef"})
    line = fails(capsys, 4, *embedding(pictures, weights, out, "--statistics", statistics))
    assert "statistics.safetensors: statistics of the weights 0123456789ab, expected those of " in line
    assert weights_hash(weights)[:12] in line and "--data" in line and not out.exists()


@pytest.mark.parametrize(("tensors", "shown"), [
    ({"mean": torch.zeros(CHANNELS + 1, dtype=torch.float64)}, "'mean': (17,)"),
    ({"more": torch.zeros(1)}, "'more': (1,)"),
    ({"mean": torch.full((CHANNELS,), torch.inf, dtype=torch.float64)}, "not finite"),
    ({"count": torch.tensor(-1)}, "negative count"),
])  # fmt: skip
def test_damaged_statistics(pictures, weights, statistics, tmp_path, capsys, tensors, shown):
    rewrite(statistics, {"weights_sha256": weights_hash(weights)}, **tensors)
    words = embedding(pictures, weights, tmp_path / "out", "--statistics", statistics)
    assert shown in fails(capsys, 4, *words)


def test_files_that_are_no_statistics(pictures, weights, statistics, tmp_path, capsys):
    words = embedding(pictures, weights, tmp_path / "out", "--statistics")
    assert "got format 'finola-autoencoder/1'" in fails(capsys, 4, *words, weights)
    assert "no such file" in fails(capsys, 4, *words, tmp_path / "missing.safetensors")
    statistics.write_bytes(statistics.read_bytes()[:500])
    assert "not a whole safetensors file" in fails(capsys, 4, *words, statistics)


@pytest.mark.parametrize(("count", "shown"), [(0, "0 images"), (1, "1 images")])
def test_statistics_of_too_few_images(weights, count, shown):
    statistics = Statistics(CHANNELS)
    statistics.add(torch.zeros(count, CHANNELS))
    with pytest.raises(DataError, match=f"got {shown}, expected at least 2"):
        embedding_space(autoencoder(), statistics, ["a", "b"], torch.zeros(2, 3, 32, 32))


def test_spaces_that_do_not_fit_together():
    x = torch.zeros(2, 3, 32, 32)
    with pytest.raises(FinolaError, match="of vectors of 17 numbers, expected 16"):
        embedding_space(autoencoder(), Statistics(17), ["a", "b"], x)
    with pytest.raises(DataError, match="got 1 images, expected at least 2"):
        embedding_space(autoencoder(), Statistics(CHANNELS), ["a"], x[:1])
    with pytest.raises(FinolaError, match=r"model.eval\(\)"):
        embedding_space(autoencoder().train(), Statistics(CHANNELS), ["a", "b"], x)


# --- components --------------------------------------------------------------------------------------------


def test_more_components_than_the_vector_has_or_the_images_tell_apart(pictures, weights, tmp_path, capsys):
    out = tmp_path / "out"
    words = embedding(pictures, weights, out, "--data", pictures, "--components")
    assert "components: got 17, expected 1 to 16" in fails(capsys, 2, *words, 2, 17)
    line = fails(capsys, 3, *words, 5)
    assert "components: 5 of 16 need statistics of at least 6 images, got 5" in line and not out.exists()


def test_components_that_nobody_asked_for_are_left_out(pictures, weights, tmp_path, capsys):
    words = embedding(pictures, weights, tmp_path / "out", "--data", pictures)
    code, printed, errors = run(capsys, *words)
    assert (code, errors) == (0, [])
    assert "8 components: left out, they need statistics of at least 9 images, not 5" in printed
    components = json.loads((tmp_path / "out" / "embedding.json").read_text())["components"]
    assert [row["components"] for row in components["counts"]] == [1, 2, 4, 16] and components["left_out"] == [8]


def test_statistics_on_file_bound_the_components_too(pictures, weights, statistics, tmp_path, capsys):
    rewrite(statistics, {"weights_sha256": weights_hash(weights)}, count=torch.tensor(4))
    words = embedding(pictures, weights, tmp_path / "out", "--statistics", statistics, "--components", 4)
    assert "at least 5 images, got 4" in fails(capsys, 3, *words)


# --- images and folders ----------------------------------------------------------------------------------


def test_examples_that_are_too_few_damaged_or_missing(pictures, weights, statistics, tmp_path, capsys):
    rest = ("--weights", weights, "--statistics", statistics, "--out", tmp_path / "out")
    assert "got 1 images, expected at least 2" in fails(
        capsys, 3, "embedding", "--images", pictures / "0.png", *rest)  # fmt: skip
    (tmp_path / "text.png").write_text("no image")
    line = fails(capsys, 3, "embedding", "--images", pictures, tmp_path / "text.png", *rest)
    assert "text.png: is not an image" in line
    assert "no image there" in fails(capsys, 3, "embedding", "--images", tmp_path / "*.webp", *rest)
    assert not (tmp_path / "out").exists()


def test_a_damaged_picture_among_the_data(pictures, weights, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    for path in pictures.iterdir():
        (data / path.name).write_bytes(path.read_bytes())
    (data / "3.png").write_bytes((data / "3.png").read_bytes()[:1000])
    line = fails(capsys, 3, *embedding(pictures, weights, tmp_path / "out", "--data", data, "--components", 2))
    assert "1 of 5 images cannot be decoded" in line and "3.png" in line and not (tmp_path / "out").exists()
    line = fails(capsys, 3, *curvature(data, tmp_path / "out", "--weights", weights, "--top", 2))
    assert "3.png" in line and not (tmp_path / "out").exists()


def test_results_never_take_the_place_of_pictures(pictures, weights, statistics, tmp_path, capsys):
    words = embedding(pictures, weights, pictures, "--statistics", statistics)
    assert "choose another folder" in fails(capsys, 2, *words)
    (tmp_path / "file").touch()
    for words in (embedding(pictures, weights, tmp_path / "file", "--statistics", statistics),
                  curvature(pictures, tmp_path / "file")):  # fmt: skip
        assert "is a file, expected a folder" in fails(capsys, 2, *words)


# --- models and options ------------------------------------------------------------------------------------


def test_models_of_another_kind(pictures, statistics, tmp_path, capsys):
    classifier = save_weights(create_model("mobileformer_w720+lin", num_classes=2, image_size=32), tmp_path / "c.st")
    words = embedding(pictures, classifier, tmp_path / "out", "--statistics", statistics)
    assert "c.st: got a model of kind 'classifier'" in fails(capsys, 4, *words)
    line = fails(capsys, 4, *curvature(pictures, tmp_path / "out", "--weights", classifier))
    assert "c.st: got a model of kind 'classifier'" in line


@pytest.mark.parametrize(("files", "names"), [
    (["a/b.safetensors"], ["b"]),
    (["runs/e/weights.safetensors"], ["e"]),
    (["e/seed0/pretraining/weights.safetensors", "e/seed1/pretraining/weights.safetensors"],
     ["seed0/pretraining", "seed1/pretraining"]),
    (["e/seed0/weights.safetensors", "b/seed0/weights.safetensors", "b.safetensors"],
     ["e/seed0", "b/seed0", "{here}/b"]),
    (["b.safetensors", "b.safetensors", "c.safetensors"], ["b (1)", "b (2)", "c"]),
])  # fmt: skip
def test_models_are_told_apart(files, names, tmp_path):
    expected = [name.format(here=tmp_path.name) for name in names]
    assert tell_apart([tmp_path / file for file in files]) == expected


def test_curvature_of_two_runs_of_one_name(pictures, weights, tmp_path, capsys):
    runs = [tmp_path / f"seed{seed}" / "pretraining" / "weights.safetensors" for seed in (0, 1)]
    for path in runs:
        path.parent.mkdir(parents=True)
        path.write_bytes(weights.read_bytes())
    code, printed, _ = run(capsys, *curvature(pictures, tmp_path / "out", "--top", 2, "--json", "--weights", *runs))
    labels = [model["label"] for model in json.loads(printed)["models"]]
    assert code == 0 and labels == ["FINOLA, seed0/pretraining", "FINOLA, seed1/pretraining"]


def test_the_last_model_is_tried_before_the_first_sees_the_data(pictures, weights, tmp_path, capsys):
    small = save_weights(autoencoder(map_size=2, decoder_widths=(16, 8, 8, 8, 8)), tmp_path / "small.safetensors")
    words = curvature(tmp_path / "missing", tmp_path / "out", "--top", 2, "--weights", weights, small)
    assert "H and W of at least 3" in fails(capsys, 2, *words)


def test_more_ranks_than_channels(pictures, weights, tmp_path, capsys):
    line = fails(capsys, 2, *curvature(pictures, tmp_path / "out", "--weights", weights, "--top", 17))
    assert "top: got 17, expected 1 to 16" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [
    [], ["nothing"], ["embedding", "--images", "a", "--out", "b"],
    ["embedding", "--images", "a", "--out", "b", "--data", "c", "--statistics", "d"],
    ["embedding", "--images", "a", "--out", "b", "--data", "c", "--components", "0"],
    ["curvature", "--data", "a"],
])  # fmt: skip
def test_wrong_usage(capsys, words):
    with pytest.raises(SystemExit) as exit:
        cli.main(["inspect", *words])
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


def test_debug_shows_the_traceback_from_either_place(pictures, tmp_path):
    words = curvature(pictures, tmp_path / "out", "--weights", "missing.safetensors")
    for line in (["inspect", *words, "--debug"], ["inspect", "--debug", *words]):
        with pytest.raises(FinolaError, match="missing.safetensors"):
            cli.main([str(word) for word in line])


def test_a_full_disk_leaves_nothing_half_written(pictures, weights, statistics, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "embedding.json").write_text(json.dumps("from an earlier run"))

    def save(image, path, *args, **kwargs):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Image.Image, "save", save)
    words = embedding(pictures, weights, out, "--statistics", statistics, "--components", 2)
    assert "No space left" in fails(capsys, 3, *words)
    assert [path.name for path in out.iterdir()] == ["embedding.json"]
    assert json.loads((out / "embedding.json").read_text()) == "from an earlier run"
