"""Bad images, folders, models and disks: one clear line, the right exit code, nothing half-written."""

import errno
import json
from types import SimpleNamespace

import pytest
import torch
from commands import Command
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from finola.cli import main as cli
from finola.errors import DataError, FinolaError
from finola.inference.reconstruct import reconstruct

run = Command("reconstruct")
fails = run.fails


def test_the_command_goes_on_past_bad_pictures_and_sums_up(pictures, weights, tmp_path, capsys):
    out = tmp_path / "out"
    words = [pictures, pictures / "missing.png", "--out", out, "--weights", weights]
    code, printed, errors = run(capsys, *words)
    assert code == 3
    assert sorted(path.name for path in out.iterdir()) == ["good.png", "other.png"]
    assert "mean of 2" in printed
    for name in ("cut.png", "empty.png", "text.jpg", "missing.png"):
        assert any(line.startswith("failed: ") and name in line for line in errors)
    assert errors[-1].startswith("finola reconstruct: 4 of 6 failed; the first: ")

    code, printed, errors = run(capsys, *words, "--json")
    assert code == 3
    report = json.loads(printed)
    assert len(report["images"]) == 2 and len(report["failed"]) == 4


def test_when_every_picture_is_bad(pictures, weights, tmp_path, capsys):
    code, printed, errors = run(capsys, pictures / "text.jpg", "--out", tmp_path / "out", "--weights", weights)
    assert (code, printed) == (3, "") and len(errors) == 1 and errors[0].count("text.jpg") == 1
    assert not list(tmp_path.glob("out/*"))


def test_a_folder_or_a_pattern_without_pictures(pictures, weights, tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    for word in (tmp_path / "nothing", pictures / "*.webp"):
        code, _, errors = run(capsys, word, pictures / "good.png", "--out", tmp_path / "out", "--weights", weights)
        assert code == 3 and str(word) in errors[-1] and "no image there" in errors[-1]
        assert (tmp_path / "out" / "good.png").exists()


@pytest.mark.parametrize("out", ["pictures", "pictures/../pictures", "link"])
def test_pictures_are_never_overwritten(pictures, weights, capsys, out):
    (pictures.parent / "link").symlink_to(pictures)
    before = {path: path.read_bytes() for path in pictures.iterdir()}
    line = fails(capsys, 2, pictures, "--out", pictures.parent / out, "--weights", weights)
    assert "choose another folder" in line
    assert {path: path.read_bytes() for path in pictures.iterdir()} == before


def test_a_file_in_place_of_the_folder(pictures, weights, tmp_path, capsys):
    (tmp_path / "file").touch()
    words = [pictures / "good.png", "--weights", weights, "--out"]
    assert "is a file" in fails(capsys, 2, *words, tmp_path / "file")
    assert "file is a file" in fails(capsys, 2, *words, tmp_path / "file" / "below")


def test_a_full_disk_leaves_nothing_half_written(pictures, weights, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "good.png").write_text("from an earlier run")

    def save(image, path, *args, **kwargs):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Image.Image, "save", save)
    line = fails(capsys, 3, pictures / "good.png", "--out", out, "--weights", weights)
    assert "No space left" in line
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("good.png", "from an earlier run")]


@pytest.mark.parametrize(("option", "value", "code", "shown"), [
    ("--model", "finola_mfw720_c768_r9", 2, "did you mean finola_mfw720_c768_r8"),
    ("--model", "finola_mfw2880_c64_r16", 4, "no weights are shipped"),
    ("--weights", "missing.safetensors", 4, "missing.safetensors: no such file"),
    ("--device", "cuda:99", 2, "--device: 'cuda:99' cannot be used on this machine"),
    ("--device", "toaster", 2, "--device: 'toaster' cannot be used on this machine"),
])  # fmt: skip
def test_models_and_devices_that_are_not_there(pictures, tmp_path, capsys, option, value, code, shown):
    line = fails(capsys, code, pictures / "good.png", "--out", tmp_path / "out", option, value)
    assert shown in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [
    [], ["--batch-size", "0"], ["--batch-size", "two"], ["--model", "a", "--weights", "b"],
])  # fmt: skip
def test_wrong_usage(pictures, tmp_path, capsys, options):
    out = ["--out", str(tmp_path)] if options else []
    with pytest.raises(SystemExit) as exit:
        cli.main(["reconstruct", str(pictures / "good.png"), *out, *options])
    assert exit.value.code == 2 and "usage:" in capsys.readouterr().err


def test_damaged_weights(pictures, weights, tmp_path, capsys):
    (tmp_path / "cut.safetensors").write_bytes(weights.read_bytes()[:5000])
    words = [pictures / "good.png", "--out", tmp_path / "out", "--weights"]
    assert "cut.safetensors" in fails(capsys, 4, *words, tmp_path / "cut.safetensors")
    with safe_open(weights, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(weights)
    tensors["decoder.to_rgb.weight"].view(-1)[0] = torch.nan
    save_file(tensors, tmp_path / "nan.safetensors", metadata)
    line = fails(capsys, 4, *words, tmp_path / "nan.safetensors")
    assert "decoder.to_rgb.weight" in line and "not finite" in line


class Squares(nn.Module):
    def __init__(self, value=0.5):
        super().__init__()
        self.config, self.value = SimpleNamespace(image_size=32), nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return x * 0 + self.value


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(FinolaError, match=r"call model.eval\(\) first"):
        reconstruct(Squares(), Image.new("RGB", (40, 40)))


def test_a_picture_without_pixels_is_refused():
    with pytest.raises(DataError, match="0x7 pixels"):
        reconstruct(Squares().eval(), Image.new("RGB", (0, 7)))


@pytest.mark.parametrize("tile", [False, True])
def test_output_that_is_not_finite_is_no_picture(tile):
    with pytest.raises(DataError, match="not finite"):
        reconstruct(Squares(torch.nan).eval(), Image.new("RGB", (40, 40)), tile)
