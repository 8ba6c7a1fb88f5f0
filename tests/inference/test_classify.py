"""Photographs of any size get the classifier's own probabilities, under names that people can read."""

import json

import numpy as np
import pytest
import torch
from commands import Command
from pictures import photo
from PIL import Image
from tiny_models import classifier

import finola
from finola.data.images import to_tensor
from finola.inference.classify import BAR, Prediction, chart, predict, readable_names
from finola.weights import save_weights

run = Command("predict", always=("--device", "cpu"))

CLASSES = ("n03028079", "n01440764", "n02012849", "n03126707", "my cat", "n99999999")
NAMES = ["church", "tench", "crane (n02012849)", "crane (n03126707)", "my cat", "n99999999"]
SIZE = 32


@pytest.fixture(scope="module")
def model():
    return classifier(num_classes=len(CLASSES), classes=CLASSES)


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    return save_weights(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i, size in enumerate([(48, 40), (31, 90), (700, 400), (32, 32), (5, 5)]):
        photo(*size, seed=i).save(folder / f"{i}.png")
    return folder


def test_the_probabilities_are_the_models_softmax(model):
    """Of the centre 32 of 36 pixels, in the proportion of 224 to 256."""
    resized = photo(48, 40).resize((43, 36), Image.Resampling.BICUBIC).crop((5, 2, 5 + SIZE, 2 + SIZE))
    expected = softmax(model, resized)
    predictions = predict(model, photo(48, 40), top=len(CLASSES))
    order = expected.argsort(descending=True).tolist()
    assert [p.label for p in predictions] == [CLASSES[i] for i in order]
    assert [p.name for p in predictions] == [NAMES[i] for i in order]
    assert [p.probability for p in predictions] == pytest.approx(expected[order].tolist(), abs=1e-5)
    assert predictions[0].probability - predictions[1].probability > 0.01  # or the order would say nothing


def softmax(model, image):
    with torch.no_grad():
        return model(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 255).softmax(1)[0]


def test_the_share_that_is_seen_is_an_option(model, weights, pictures, capsys):
    whole = photo(48, 40, seed=0).resize((38, SIZE), Image.Resampling.BICUBIC).crop((3, 0, 3 + SIZE, SIZE))
    expected = softmax(model, whole).max().item()
    assert predict(model, photo(48, 40, seed=0), crop_pct=1.0)[0].probability == pytest.approx(expected, abs=1e-6)
    code, printed, _ = run(capsys, pictures / "0.png", "--weights", weights, "--crop-pct", "1", "--json")
    best = json.loads(printed)["images"][0]["predictions"][0]
    assert code == 0 and best["probability"] == pytest.approx(expected, abs=1e-6)


def test_top_is_a_limit(model):
    everything = predict(model, photo(), top=100)
    assert len(everything) == len(CLASSES) and sum(p.probability for p in everything) == pytest.approx(1)
    assert predict(model, photo(), top=2) == everything[:2] and predict(model, photo()) == everything[:5]


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P"])
def test_pictures_of_any_mode(model, mode):
    picture = photo().convert(mode)
    assert predict(model, picture) == predict(model, picture.convert("RGB"))


def test_a_picture_that_lies_on_its_side(model, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    photo().transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    assert predict(model, tmp_path / "turned.png") == predict(model, photo())


def test_classes_without_names_are_numbers(model):
    unnamed = classifier(num_classes=len(CLASSES), classes=())
    numbers = {p.label: p.probability for p in predict(unnamed, photo(), top=6)}
    named = {p.label: p.probability for p in predict(model, photo(), top=6)}
    assert numbers == {str(i): named[name] for i, name in enumerate(CLASSES)}


def test_readable_names():
    assert readable_names(CLASSES) == NAMES
    assert readable_names(["n02012849", "n0144076", "N01440764"]) == ["crane", "n0144076", "N01440764"]


def test_the_command_prints_a_line_for_each_picture(model, weights, pictures, capsys):
    code, printed, _ = run(capsys, pictures, "--weights", weights, "--top", "2")
    lines = printed.splitlines()
    assert code == 0 and len(lines) == 5
    for path, line in zip(sorted(pictures.iterdir()), lines, strict=True):
        first, second = predict(model, path, top=2)
        assert line == f"{path}: {first.name} {100 * first.probability:.1f} %, {second}"


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_the_report_does_not_depend_on_the_batch_size(model, weights, pictures, capsys, batch_size):
    code, printed, errors = run(capsys, pictures, "--weights", weights, "--json", "--batch-size", batch_size)
    report = json.loads(printed)
    assert (code, errors, report["failed"]) == (0, [], [])
    assert [image["file"] for image in report["images"]] == [str(path) for path in sorted(pictures.iterdir())]
    for image in report["images"]:
        for shown, p in zip(image["predictions"], predict(model, image["file"]), strict=True):
            assert (shown["class"], shown["name"]) == (p.label, p.name)
            assert shown["probability"] == pytest.approx(p.probability, abs=1e-5)


def test_charts_are_named_after_the_pictures(weights, pictures, tmp_path, capsys):
    photo().save(pictures / "0.jpg")
    out = tmp_path / "new" / "charts"
    code, _, _ = run(capsys, pictures, "--weights", weights, "--out", out, "--top", "3")
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["0-2.png", "0.png", "1.png", "2.png", "3.png", "4.png"]
    below = 3 * (18 + 4)
    assert Image.open(out / "2.png").size == (512 + 8, 293 + 8 + below)  # 700 x 400 shrunk
    assert Image.open(out / "3.png").size == (240 + 8, 32 + 8 + below)


def test_the_bars_of_a_chart_are_as_long_as_the_classes_are_probable():
    picture = photo(400, 100)
    drawn = chart(picture, [Prediction("a", "", 0.75), Prediction("b", "a name too long for its bar " * 9, 0.25)])
    pixels, bar = np.asarray(drawn), np.array(Image.new("RGB", (1, 1), BAR))[0, 0]
    assert np.array_equal(pixels[4:104, 4:404], np.asarray(picture))
    for top, share in ((108, 0.75), (130, 0.25)):
        assert (pixels[top] == bar).all(-1).sum() == pytest.approx(400 * share, abs=2)
    assert (pixels[:, :4] == 255).all() and (pixels[:, 404:] == 255).all()  # nothing leaves the frame


def test_lists_arrays_and_tensors(model):
    image = photo(60, 50)
    one = predict(model, image)
    assert predict(model, [image, np.asarray(image), to_tensor(image)]) == [one] * 3


def test_the_public_face(model):
    assert finola.predict is predict and finola.Prediction is Prediction
    assert isinstance(model, finola.Classifier) and isinstance(model.config, finola.ClassifierConfig)
    assert finola.MaskedFinola(finola.MaskedConfig("mobileformer_w720", image_size=64, block_size=2)).config.kind
    assert "lin" in finola.heads.HEADS
    assert finola.masking.patchify(torch.zeros(1, 3, 32, 32), 16).shape == (1, 2, 2, 768)
