"""Weights that are damaged, foreign, hostile or not finite: refused by name; nothing is ever unpickled."""

from __future__ import annotations

import json
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from finola import AutoencoderConfig, FinolaAutoencoder, WeightsError, load_weights, save_weights
from finola.cli.main import main
from finola.factory import create_model
from finola.registry import KINDS
from finola.weights import find_weights, read_tensors

TINY = AutoencoderConfig(
    "mobileformer_w720", embed_dim=8, image_size=32, map_size=16, pool_heads=2, decoder_widths=(8, 8))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return FinolaAutoencoder(TINY).eval()


@pytest.fixture
def path(model, tmp_path):
    return save_weights(model, tmp_path / "tiny.safetensors", {"recipe": "none"})


@pytest.fixture
def rewrite(path):
    """rewrite(tensors -> None, **metadata): change the file's tensors or metadata in place."""

    def change(edit=lambda tensors: None, **metadata):
        tensors, header = read_tensors(path)
        edit(tensors)
        save_file(tensors, path, metadata=header | metadata)
        return path

    return change


def refused(path, *words: str) -> None:
    """WeightsError, one line, with the file's name and all the words."""
    with pytest.raises(WeightsError) as caught:
        load_weights(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (path.name, *words):
        assert word in message


def test_round_trip(model, path):
    copy = load_weights(path).eval()
    assert copy.config == model.config
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(copy.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(copy(x), model(x))
    assert read_tensors(path)[1]["recipe"] == "none"


def test_half_precision_file_is_read_as_fp32(model, tmp_path):
    full = save_weights(model, tmp_path / "full.safetensors")
    half = save_weights(model, tmp_path / "half.safetensors", dtype=torch.float16)
    assert half.stat().st_size < 0.55 * full.stat().st_size
    copy = load_weights(half)
    assert {p.dtype for p in copy.parameters()} == {torch.float32}
    for got, expected in zip(copy.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)


def test_start_and_every_other_field_survive(tmp_path):
    config = AutoencoderConfig("mobileformer_w720", embed_dim=16, image_size=32, map_size=2, origin=(0, 1),
                               pool_heads=4, start="shifts", decoder_widths=(8, 8, 8, 8, 8))
    model = FinolaAutoencoder(config).eval()
    copy = load_weights(save_weights(model, tmp_path / "shifts.safetensors")).eval()
    assert copy.config == config
    x = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(copy.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(copy(x), model(x))


# --- the file ---


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated(path, kept):
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    refused(path, "not a whole safetensors file")


def test_bytes_after_the_end(path):
    path.write_bytes(path.read_bytes() + b"more")
    refused(path, "not a whole safetensors file")


def test_header_length_beyond_any_file(path):
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    refused(path, "not a whole safetensors file")


def test_missing_file_and_folder(tmp_path):
    refused(tmp_path / "nowhere.safetensors", "no such file")
    refused(tmp_path, "holds no weights.safetensors, which a run writes at its end")


def test_the_folder_of_a_run(model, tmp_path):
    path = save_weights(model, tmp_path / "run" / "weights.safetensors")
    assert find_weights(tmp_path / "run") == path
    assert load_weights(tmp_path / "run").config == model.config


class Bomb:
    """Unpickling this writes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("name", ["model.pth", "model.safetensors"])
@pytest.mark.parametrize("kind", ["torch", "pickle", "zip"])
def test_hostile_pickle_is_not_executed(tmp_path, name, kind):
    path, target = tmp_path / name, tmp_path / "executed"
    if kind == "torch":
        torch.save({"state_dict": Bomb(target)}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Bomb(target)))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb(target)))
    refused(path, "pickled checkpoints are not opened")
    assert not target.exists()
    if kind == "pickle":
        pickle.loads(path.read_bytes()).close()
        assert target.exists()  # it was a live one


# --- the metadata ---


def test_file_of_another_program(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2, 2)}, path)
    refused(path, "got format None", *(f"finola-{kind}/1" for kind in KINDS))


def test_newer_format(rewrite):
    refused(rewrite(format="finola-autoencoder/9"), "finola-autoencoder/9", *(f"finola-{kind}/1" for kind in KINDS))


@pytest.mark.parametrize(("config", "words"), [
    ("", ["cannot be read"]),
    ("{", ["cannot be read"]),
    ("[]", ["cannot be read"]),
    ("7", ["cannot be read"]),
    ({"embed_dim": "8"}, ["cannot be read"]),
    ({"image_size": 33}, ["cannot be read", "image_size: got 33"]),
    ({"depth": 3}, ["depth", "newer finola"]),
    ({"embed_dim": 8.5}, ["cannot be read"]),
    ({"norm": "group"}, ["no model can be built", "'group'"]),
    ({"decoder_widths": [8]}, ["no model can be built", "decoder_widths"]),
    ({"encoder": "no_such_encoder"}, ["cannot be read", "'no_such_encoder'"]),
    ({"encoder": 7}, ["cannot be read", "encoder"]),
], ids=str)
def test_configuration_that_is_not_one(rewrite, config, words):
    text = config if isinstance(config, str) else json.dumps(TINY.to_dict() | config)
    refused(rewrite(config=text), *words)


def test_encoder_from_the_network_is_not_fetched(rewrite, monkeypatch):
    def connect(*args):
        raise AssertionError("a weights file opened a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    refused(rewrite(config=json.dumps(TINY.to_dict() | {"encoder": "hf-hub:someone/something"})), "hf-hub:someone")


@pytest.mark.parametrize("change", [{"embed_dim": 10**7, "pool_heads": 2}, {"embed_dim": 10**12}], ids=str)
def test_configuration_of_a_giant_takes_no_memory(rewrite, change):
    refused(rewrite(config=json.dumps(TINY.to_dict() | change)))


# --- the tensors ---


def test_other_architecture(rewrite):
    config = TINY.to_dict() | {"image_size": 64, "map_size": 32}
    refused(rewrite(config=json.dumps(config)), "pool.position", "(4, 720)", "(16, 720)", "another architecture")
    config = TINY.to_dict() | {"autoregression": "repeat"}
    refused(rewrite(config=json.dumps(config)), "4 unexpected tensors", "autoregression.down", "another architecture")


def test_missing_tensor(rewrite):
    path = rewrite(lambda tensors: tensors.pop("pool.query"))
    refused(path, "1 missing", "pool.query")


def test_unexpected_tensor(rewrite):
    refused(rewrite(lambda tensors: tensors.update(extra=torch.zeros(1))), "1 unexpected", "extra")


def test_misshapen_tensor(rewrite):
    path = rewrite(lambda tensors: tensors.update({"autoregression.right": torch.zeros(8, 9)}))
    refused(path, "autoregression.right", "(8, 9)", "(8, 8)")


def test_tensor_of_another_type(rewrite):
    path = rewrite(lambda tensors: tensors.update({"pool.query": torch.zeros(8, dtype=torch.int8)}))
    refused(path, "pool.query", "torch.int8", "torch.float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_value_that_is_not_finite(rewrite, value):
    path = rewrite(lambda tensors: tensors["decoder.to_rgb.weight"].view(-1)[5:6].fill_(value))
    refused(path, "decoder.to_rgb.weight", "not finite")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_compiled_and_distributed_models(model, rewrite, prefix):
    def rename(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    copy = load_weights(rewrite(rename)).eval()
    x = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(copy.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(copy(x), model(x))


def test_names_of_a_compiled_part(model, rewrite):
    def rename(tensors):
        for name in [name for name in tensors if name.startswith("decoder.")]:
            tensors[name.replace("decoder.", "decoder._orig_mod.", 1)] = tensors.pop(name)

    torch.testing.assert_close(load_weights(rewrite(rename)).decoder.to_rgb.weight, model.decoder.to_rgb.weight)


def test_a_tensor_twice_under_two_names(rewrite):
    path = rewrite(lambda tensors: tensors.update({"module.pool.query": torch.zeros(8)}))
    refused(path, "1 ambiguous", "module.pool.query")


# --- saving, and the names of shipped weights ---


def test_a_failed_save_leaves_the_old_file(model, path, monkeypatch):
    before = path.read_bytes()

    def disk_full(tensors, target, metadata):
        target.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finola.weights.save_file", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_weights(model, path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_save_makes_the_folder(model, tmp_path):
    assert save_weights(model, tmp_path / "new" / "tiny.safetensors").is_file()


def test_pretrained_without_weights_or_with_overrides(monkeypatch, tmp_path):
    monkeypatch.setattr("finola.registry.PRETRAINED_FOLDER", tmp_path)
    with pytest.raises(WeightsError, match="no weights are shipped for it"):
        create_model("finola_mfw2880_c64_r16", pretrained=True)
    (tmp_path / "finola_mfw2880_c64_r16.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="embed_dim"):
        create_model("finola_mfw2880_c64_r16", pretrained=True, embed_dim=128)


def test_the_command_line_exits_with_4(path, capsys):
    path.write_bytes(path.read_bytes()[:1000])
    images = path.parent / "images"
    images.mkdir()
    assert main(["eval", str(path), "--data", str(images)]) == 4
    error = capsys.readouterr().err
    assert path.name in error and len(error.splitlines()) == 1
