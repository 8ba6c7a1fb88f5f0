"""Wherever weights are asked for, a shipped model's name does as well as a file."""

import pytest
from commands import Command
from pictures import photo
from PIL import Image

from finola.data.images import load_square
from finola.registry import DEFAULT_MODEL, pretrained_path

run = Command()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two photographs."""
    folder = tmp_path_factory.mktemp("photos")
    for name in ("a", "b"):
        photo(40, 40).save(folder / f"{name}.png")
    return folder


@pytest.mark.parametrize("command", [
    "reconstruct {photos}/a.png --out {out} --weights {name}",
    "eval {name} --data {photos} --workers 0",
    "inspect growth {photos}/a.png --out {out}/growth.gif --weights {name}",
    "inspect curvature --data {photos} --out {out} --workers 0 --weights {name}",
    "inspect equations --data {photos} --out {out} --factors 2 --weights {name} --against {name}",
])
def test_commands_for_autoencoders_take_a_shipped_name(folder, tmp_path, capsys, command):
    words = command.format(photos=folder, out=tmp_path, name=DEFAULT_MODEL).split()
    code, _, errors = run(capsys, *words, "--device", "cpu")
    assert code == 0, errors


def test_a_stream_is_read_with_the_weights_it_was_written_with(folder, tmp_path, capsys):
    stream = tmp_path / "a.fnl"
    for words in (("compress", folder / "a.png", stream), ("decompress", stream, tmp_path / "a.png")):
        assert run(capsys, *words, "--weights", DEFAULT_MODEL, "--device", "cpu")[0] == 0
    assert Image.open(tmp_path / "a.png").size == (40, 40)


@pytest.mark.parametrize("command", [
    "predict {photos} --weights {name}",
    "detect predict {photos} --out {out} --weights {name}",
    "detect eval {name} --data {photos}",
])
def test_commands_for_other_kinds_say_what_kind_it_is(folder, tmp_path, capsys, command):
    code, _, errors = run(capsys, *command.format(photos=folder, out=tmp_path, name=DEFAULT_MODEL).split())
    assert code == 4 and f"{DEFAULT_MODEL}: got a model of kind 'autoencoder'" in errors[-1]


def test_a_name_that_is_nearly_right(folder, capsys):
    code, _, errors = run(capsys, "predict", folder, "--weights", "finola_mfw720_c768_r9")
    assert code == 4 and len(errors) == 1
    assert "no such file" in errors[0] and f"did you mean {DEFAULT_MODEL}?" in errors[0]


def test_the_shipped_calibration_is_not_made_again(folder, capsys):
    path = pretrained_path(DEFAULT_MODEL).with_suffix(".codec.safetensors")
    before = path.read_bytes()
    code, _, errors = run(capsys, "calibrate", "--weights", DEFAULT_MODEL, "--data", folder)
    assert code == 2 and "with its calibration" in errors[0] and path.read_bytes() == before


def test_a_folder_of_the_same_name_is_no_file(tmp_path, monkeypatch):
    from finola import load_weights

    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    model = load_weights(DEFAULT_MODEL).eval()
    assert model(load_square(photo(40, 40), 128)[None]).shape == (1, 3, 128, 128)
