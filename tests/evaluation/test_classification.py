"""What `finola eval` says of classifiers, masked models and encoders is what its names say."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from commands import Command
from PIL import Image

from finola.data import ImageFolder, images, loader
from finola.data.loader import read_squares
from finola.evaluation.classification import evaluate_classifier
from finola.evaluation.masked import MASK_SEED, evaluate_masked
from finola.factory import create_model
from finola.registry import DEFAULT_MODEL
from finola.weights import load_weights, save_weights

run = Command("eval", always=("--workers", "0", "--device", "cpu"))
fails = run.fails

CLASSES = ("blue", "green", "red")
COLOURS = {"blue": (30, 40, 200), "green": (20, 190, 60), "red": (210, 30, 20)}
PER_CLASS = {"blue": 12, "green": 9, "red": 3}


def make_folder(root, seed):
    """24 images of 40x36 in three classes, each of its colour with some noise."""
    random = np.random.default_rng(seed)
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for i in range(PER_CLASS[name]):
            noise = random.integers(-25, 26, (36, 40, 3))
            pixels = (np.array(colour) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("val"), seed=0)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("train"), seed=1)


def save(tmp_path_factory, name, seed=0, **options):
    torch.manual_seed(seed)
    model = create_model(name, **options)
    if model.config.kind == "classifier":
        torch.nn.init.normal_(model.head.fc.weight, std=0.3)
    return save_weights(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def classifier(folder, tmp_path_factory):
    """Untrained, right about some images and wrong about others."""
    options = {"image_size": 32, "num_classes": 3, "classes": CLASSES}
    for seed in range(20):
        path = save(tmp_path_factory, "mobileformer_w720+lin", seed, **options)
        if 0 < rightness(path, folder)[0].float().mean() < 1:
            return path
    raise AssertionError("no seed gives such a classifier")


@torch.no_grad()
def rightness(weights, folder):
    """For each image whether the classifier is right, and its class."""
    batch = next(iter(squares(folder, batch_size=24, crop_pct=0.875)))
    return load_weights(weights).eval()(batch["image"]).argmax(1) == batch["label"], batch["label"]


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    options = {"image_size": 64, "block_size": 2, "decoder_dim": 64, "decoder_depth": 1}
    return save(tmp_path_factory, "masked_finola_b_mfw720", **options)


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    options = {"image_size": 32, "embed_dim": 12, "decoder_widths": (16, 8, 8), "pool_heads": 2, "start": "random"}
    return save(tmp_path_factory, DEFAULT_MODEL, **options)


def squares(folder, size=32, batch_size=8, crop_pct=1.0):
    return read_squares(ImageFolder(folder), size, batch_size=batch_size, workers=0, crop_pct=crop_pct)


# --- classifiers -------------------------------------------------------------------------------------------


def test_accuracies_by_hand():
    #                 right  5th                wrong, not of the five    right
    logits = torch.tensor([
        [9, 0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0, 0], [6, 5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0, 1],
    ]).float()  # fmt: skip
    labels = torch.tensor([0, 4, 5, 6])
    parts = slice(0, 3), slice(3, 4), slice(0, 1)
    batches = [{"image": logits[part], "label": labels[part]} for part in parts]
    accuracy = dataclasses.replace(evaluate_classifier(lambda x: x, 7, batches), seconds=2.5)
    means = accuracy.means()
    assert means == {
        "top1": pytest.approx(60), "top5": pytest.approx(80), "mean_per_class": pytest.approx(50),
        "images_per_second": pytest.approx(2),
    }  # fmt: skip
    expected = torch.zeros(7, 7, dtype=torch.int64)
    expected[0, 0], expected[4, 0], expected[5, 0], expected[6, 6] = 2, 1, 1, 1
    assert torch.equal(accuracy.confusion, expected)


def test_the_confusion_does_not_depend_on_the_batch_size(folder, classifier):
    model = load_weights(classifier).eval()
    whole = evaluate_classifier(model, 3, squares(folder, batch_size=24))
    parts = evaluate_classifier(model, 3, squares(folder, batch_size=5))
    assert torch.equal(whole.confusion, parts.confusion)
    assert whole.confusion.sum(1).tolist() == list(PER_CLASS.values())


def test_a_classifiers_accuracy_is_that_of_its_own_logits(folder, classifier, tmp_path, capsys):
    right, labels = rightness(classifier, folder)
    per_class = [right[labels == i].float().mean().item() for i in range(3)]
    out, picture = tmp_path / "new" / "result.json", tmp_path / "new" / "confusion.png"
    code, printed, errors = run(capsys, classifier, "--data", folder, "--out", out, "--panel", picture)
    assert (code, errors) == (0, [])
    result = json.loads(out.read_text())
    assert result["scores"].keys() == {"top1", "mean_per_class", "images_per_second"}  # top-5 of three is 100
    assert result["scores"]["top1"] == pytest.approx(100 * right.float().mean().item(), abs=1e-4)
    assert result["scores"]["mean_per_class"] == pytest.approx(100 * sum(per_class) / 3, abs=1e-4)
    assert result["images"] == 24 and result["kind"] == "classifier"
    assert {"weights", "sha256", "config", "data", "preprocessing", "commit", "torch", "date"} <= result.keys()
    assert f"{result['scores']['top1']:16.2f}" in printed and "24 images" in printed
    assert "top-5" not in printed  # of three classes, each is among the five likeliest
    assert "a guess among 3 classes is right in 33.33 %" in printed and result["chance"] == pytest.approx(100 / 3)
    assert Image.open(picture).width > 300


@pytest.mark.parametrize(("kind", "options", "crop_pct", "shown"), [
    ("classifier", (), 0.875, "shorter side to 36 px"),
    ("classifier", ("--crop-pct", "1"), 1.0, "shorter side to 32 px"),
    ("autoencoder", (), 1.0, "shorter side to 32 px"),
    ("autoencoder", ("--knn",), 0.875, "shorter side to 36 px"),
    ("masked", (), 1.0, "shorter side to 64 px"),
])
def test_where_classes_are_told_seven_eighths_are_seen(
    kind, options, crop_pct, shown, folder, train, tmp_path, capsys, request, monkeypatch
):
    """224 px of 256, the field's protocol, and nowhere else."""
    seen = []
    original = images.shorter_side
    for module in (images, loader):
        monkeypatch.setattr(module, "shorter_side", lambda size, pct: seen.append(pct) or original(size, pct))
    options = (*options, "--train", train) if "--knn" in options else options
    weights, out = request.getfixturevalue(kind), tmp_path / "result.json"
    code, printed, errors = run(capsys, weights, "--data", folder, "--out", out, *options)
    assert (code, errors) == (0, []) and set(seen) == {crop_pct} and shown in printed
    assert json.loads(out.read_text())["preprocessing"]["crop_pct"] == crop_pct


@pytest.mark.parametrize("share", ["0", "1.1", "much"])
def test_a_share_that_is_none(share, folder, classifier, capsys):
    with pytest.raises(SystemExit) as stop:
        run(capsys, classifier, "--data", folder, "--crop-pct", share)
    assert stop.value.code == 2
    assert f"--crop-pct: got '{share}', expected a number above 0, at most 1" in capsys.readouterr().err


def test_weights_without_names_go_with_any_names(folder, tmp_path_factory, capsys):
    for classes, code in ((3, 0), (4, 3)):
        weights = save(tmp_path_factory, "mobileformer_w720+lin", image_size=32, num_classes=classes)
        got, printed, errors = run(capsys, weights, "--data", folder, "--json")
        assert got == code and (json.loads(printed)["images"] == 24 if code == 0 else "3 classes in" in errors[0])


@pytest.mark.parametrize(
    "names, expected",
    [
        (("blue", "green", "yellow"), ("3 classes in", "3 in", "red and yellow")),
        (("blue", "green"), ("3 classes in", "2 in", "red and none")),
        (("azure", "blue", "green", "red"), ("3 classes in", "4 in", "blue and azure")),
    ],
)
def test_data_of_other_classes(folder, tmp_path_factory, tmp_path, capsys, names, expected):
    options = {"image_size": 32, "num_classes": len(names), "classes": names}
    weights = save(tmp_path_factory, "mobileformer_w720+lin", **options)
    error = fails(capsys, 3, weights, "--data", folder, "--out", tmp_path / "result.json")
    assert all(part in error for part in (*expected, str(folder), str(weights)))
    assert not (tmp_path / "result.json").exists()


def test_images_without_a_class(folder, train, classifier, capsys):
    error = fails(capsys, 3, classifier, "--data", folder / "blue")
    assert "12 of 12 images have no class" in error
    error = fails(capsys, 3, classifier, "--data", folder, folder / "red")
    assert "3 of 27 images have no class" in error
    for data, near in ((folder / "blue", train), (folder, train / "blue")):
        error = fails(capsys, 3, classifier, "--data", data, "--knn", "--train", near)
        assert "12 of 12 images have no class" in error


# --- masked models -----------------------------------------------------------------------------------------


def test_the_masked_psnr_is_that_of_the_masked_pixels(folder, masked, capsys):
    model, per_image, per_whole = load_weights(masked).eval(), [], []
    for number, batch in enumerate(squares(folder, 64, batch_size=10)):
        x = batch["image"]
        torch.manual_seed(MASK_SEED + number)
        with torch.no_grad():
            patches, mask = model(x)
        _, x_hat = model.paint(x, patches, mask)
        pixels = mask.repeat_interleave(16, 1).repeat_interleave(16, 2)  # (B, S, S)
        error = (x_hat.clamp(0, 1) - x).double().square().mean(1)  # (B, S, S)
        per_image += [-10 * error[i][pixels[i]].mean().log10().item() for i in range(len(x))]
        per_whole += (-10 * error.mean((1, 2)).log10()).tolist()
    words = [masked, "--data", folder, "--batch-size", "10"]
    code, printed, errors = run(capsys, *words, "--json")
    result = json.loads(printed)
    assert (code, errors, result["kind"]) == (0, [], "masked")
    assert result["masks"] == {"seed": MASK_SEED, "batch_size": 10}
    assert result["scores"]["psnr"] == pytest.approx(np.mean(per_image), abs=1e-3)
    assert result["scores"]["psnr_whole"] == pytest.approx(np.mean(per_whole), abs=1e-3)
    code, printed, _ = run(capsys, *words)
    assert code == 0 and f"{result['scores']['psnr']:12.3f}{result['scores']['psnr_whole']:12.3f}" in printed


def test_the_masks_are_the_same_each_time_and_the_callers_generator_is_left_alone(folder, masked):
    model, batches, means = load_weights(masked).eval(), list(squares(folder, 64)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        means.append(evaluate_masked(model, batches, 24).means())
        assert torch.equal(torch.get_rng_state(), before)
    assert means[0]["psnr"] == means[1]["psnr"] and means[0]["psnr_whole"] == means[1]["psnr_whole"]


def test_the_masked_panel(folder, masked, tmp_path, capsys):
    model = load_weights(masked).eval()
    rows = evaluate_masked(model, squares(folder, 64), 24).rows
    x = torch.cat([batch["image"] for batch in squares(folder, 64)])
    assert torch.equal(torch.stack([original for _, _, original in rows]), x[::3])
    for visible, prediction, original in rows:
        shown = (visible == original).all(0)
        assert shown.float().mean() == pytest.approx(0.25, abs=0.01)  # 2x2 of 4x4 patches
        assert torch.equal(prediction[:, shown], original[:, shown]) and (visible[:, ~shown] == 0.5).all()
    run(capsys, masked, "--data", folder, "--panel", tmp_path / "panel.png")
    assert Image.open(tmp_path / "panel.png").size == (4 + 8 * 68, 4 + 3 * (18 + 64 + 4))


@pytest.mark.parametrize("name", ["mae_vit_tiny", "simmim_vit_tiny"])
def test_the_masked_baselines(folder, tmp_path_factory, capsys, name):
    pytest.importorskip("lightly")
    weights = save(tmp_path_factory, name, image_size=64)
    code, printed, errors = run(capsys, weights, "--data", folder, "--json")
    result = json.loads(printed)
    assert (code, errors, result["kind"]) == (0, [], name.partition("_")[0])
    assert 0 < result["scores"]["psnr"] < result["scores"]["psnr_whole"] < 40


# --- nearest neighbours ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "masked", "autoencoder", "moco"])
def test_neighbours_of_any_encoder_tell_colours(folder, train, tmp_path_factory, capsys, request, kind):
    if kind == "moco":
        pytest.importorskip("lightly")
        weights = save(tmp_path_factory, "moco_mfw720", image_size=32)
        assert "add --knn --train" in fails(capsys, 2, weights, "--data", folder)
    else:
        weights = request.getfixturevalue(kind)
    code, printed, errors = run(capsys, weights, "--data", folder, "--knn", "--train", train, "--json")
    result = json.loads(printed)
    assert (code, errors, result["kind"]) == (0, [], kind)
    assert result["scores"] == {"knn_top1": pytest.approx(100)}
    assert result["neighbours"] == {"k": 20, "train": [str(train)], "images": 24}


def test_neighbours_of_false_classes_tell_nothing(folder, train, classifier, tmp_path, capsys):
    for name, other in zip(CLASSES, (*CLASSES[1:], CLASSES[0]), strict=True):
        (tmp_path / other).symlink_to(train / name)
    code, printed, _ = run(capsys, classifier, "--data", folder, "--knn", "--train", tmp_path)
    assert code == 0 and "k-NN top-1\n      0.00" in printed and "a guess among " in printed


def test_neighbours_of_other_classes_or_too_few(folder, train, classifier, tmp_path, capsys):
    words = [classifier, "--data", folder, "--knn", "--train", tmp_path]
    for name in ("blue", "green"):
        (tmp_path / name).symlink_to(train / name)
    assert "only in the second: red" in fails(capsys, 3, *words)
    (tmp_path / "green").unlink()
    for name in ("green", "red"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes((train / name / "00.png").read_bytes())
    assert "expected 1 to 14" in fails(capsys, 2, *words)


# --- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, options, shown",
    [
        ("classifier", ["--baselines"], ("--baselines", "'classifier'")),
        ("masked", ["--baselines", "--train", "x"], ("--baselines", "'masked'")),
        ("classifier", ["--train", "x"], ("--train", "--knn")),
        ("autoencoder", ["--knn"], ("--knn", "--train")),
        ("autoencoder", ["--knn", "--train", "x", "--baselines"], ("--baselines", "--knn")),
        ("classifier", ["--knn", "--train", "x", "--panel", "p.png"], ("--panel", "--knn")),
    ],
)
def test_options_that_do_not_go_together(folder, capsys, request, kind, options, shown):
    weights = request.getfixturevalue(kind)
    error = fails(capsys, 2, weights, "--data", folder, *options)
    assert all(word in error for word in shown)
