"""ONNX files: they give what torch gives, for batches of any size; what cannot be exported is said in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import autoencoder, classifier

from finola.cli.main import main
from finola.errors import FinolaError
from finola.factory import create_model
from finola.inference.classify import predict
from finola.weights import save_weights

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
from finola.inference.export import export  # noqa: E402


def run(path, x):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(value) for value in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


@pytest.fixture(scope="module")
def exported(model, weights, images, tmp_path_factory):
    """The command's folder and what it prints, of a tiny autoencoder."""
    out = tmp_path_factory.mktemp("onnx")
    return out, ["export", "--weights", str(weights), "--data", str(images / "val"), "--out", str(out), "--json"]


@pytest.mark.slow
def test_an_autoencoder(exported, model, images, capsys):
    out, words = exported
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [file["file"] for file in report["files"]] == ["encoder.onnx", "decoder.onnx"]
    assert max(file["difference"] for file in report["files"]) < 1e-4 and report["images"] == 4
    for batch in (1, 3):
        x = torch.rand(batch, 3, 32, 32)
        with torch.no_grad():
            (q,) = run(out / "encoder.onnx", x)
            torch.testing.assert_close(q, model.eval().encode(x), atol=1e-4, rtol=1e-4)
            (y,) = run(out / "decoder.onnx", q)
            torch.testing.assert_close(y, model(x), atol=1e-3, rtol=0)
    assert "| encoder.onnx | image (B, 3, 32, 32) | q (B, 16) |" in (out / "README.md").read_text()
    assert run_card(out, "encoder.onnx", next(images.glob("val/*/*")))["q"].shape == (1, 16)


def run_card(out, file, photo):
    """The names that the Python in the card of an export leaves."""
    code = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
    scope: dict = {}
    exec(code.replace(f'"{file}"', repr(str(out / file))).replace('"photo.jpg"', repr(str(photo))), scope)
    return scope


@pytest.mark.slow
def test_the_card_of_a_classifier_predicts(tmp_path):
    """What its README shows, without torch, gives the classes and probabilities of `finola predict`."""
    model = classifier(classes=("cat", "dog", "horse")).eval()
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 101, 3), dtype=np.uint8)).save(photo)
    weights, out = save_weights(model, tmp_path / "weights.safetensors"), tmp_path / "onnx"
    assert main(["export", "--weights", str(weights), "--data", str(photo), "--out", str(out)]) == 0
    found = run_card(out, "classifier.onnx", photo)
    ours = dict(zip(found["classes"], torch.from_numpy(found["logits"]).softmax(1)[0].tolist(), strict=True))
    theirs = {prediction.label: prediction.probability for prediction in predict(model, photo)}
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert "shorter side resized to 36 px" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_classifier_and_a_detr(tmp_path):
    model, x = classifier().eval(), torch.rand(3, 3, 32, 32)
    (found,) = export(model, tmp_path, x)
    assert found.path.name == "classifier.onnx" and found.results == {"logits": ("B", 3)} and found.difference < 1e-4
    detr = create_model("detr_mf_dec_211_mfw720", image_size=64, max_size=64, num_classes=3).eval()
    (found,) = export(detr, tmp_path, torch.rand(2, 3, 64, 64))
    assert found.results == {"scores": ("B", 100, 3), "boxes": ("B", 100, 4)} and found.difference < 1e-3
    scores, boxes = run(tmp_path / "detector.onnx", torch.rand(1, 3, 64, 64))
    assert scores.shape == (1, 100, 3) and bool((boxes >= 0).all() and (boxes <= 1).all())


def test_what_has_no_file():
    with pytest.raises(FinolaError, match="kind 'masked', expected an autoencoder, a classifier or a DETR"):
        create_model("masked_finola_b_mfw720", image_size=64, block_size=2).export_parts()
    with pytest.raises(FinolaError, match="training mode"):
        export(autoencoder().train(), "nowhere", torch.zeros(2, 3, 32, 32))


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--weights", "no/such.safetensors"], 4, "no/such.safetensors"),
    (["--data", "no/such"], 3, "no/such"),
])
def test_bad_input(words, code, message, weights, tmp_path, capsys):
    start = [] if "--weights" in words else ["--weights", str(weights)]
    assert main(["export", *start, *words, "--out", str(tmp_path / "out")]) == code
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_other_weights_are_refused(tmp_path, capsys):
    path = save_weights(create_model("masked_finola_b_mfw720", image_size=64, block_size=2), tmp_path / "m.safetensors")
    assert main(["export", "--weights", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "kind 'masked'" in capsys.readouterr().err


def test_the_operator_is_as_it_was_after_an_export(model, tmp_path, monkeypatch):
    from finola.inference import export as module

    seen = []
    monkeypatch.setattr(module, "_write", lambda model, part, path: seen.append(model.autoregression.implementation))
    monkeypatch.setattr(module, "_compare", lambda part, path, value: (None, [np.zeros(1)]))
    module.export(model.eval(), tmp_path, torch.zeros(2, 3, 32, 32))
    assert seen == ["plain", "plain"] and model.autoregression.implementation == "auto"
