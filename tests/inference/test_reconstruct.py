"""Any photograph comes back whole: sizes, tiles, seams, names, and the commands that write panels."""

import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from pictures import photo
from PIL import Image
from torch import nn

import finola
from finola.cli.images import find_images, name_panels
from finola.data import Batches, ImageFolder, build_loader, example_images
from finola.data.examples import example_paths
from finola.data.images import fit, to_tensor
from finola.factory import create_model
from finola.inference.reconstruct import reconstruct
from finola.inference.tiles import cover
from finola.registry import DEFAULT_MODEL

run = Command()  # any command

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = [(1, 1), (1, 300), (300, 1), (15, 15), (33, 47), (32, 32), (97, 64), (10_000, 40)]


class Squares(nn.Module):
    """Stands for a model of 32-px squares: passes each batch to `paint` and remembers the batch sizes."""

    def __init__(self, paint=lambda x: x):
        super().__init__()
        self.config = SimpleNamespace(image_size=32)
        self.unused, self.paint, self.batches = nn.Parameter(torch.zeros(1)), paint, []
        self.eval()

    def forward(self, x):
        self.batches.append(len(x))
        return self.paint(x)


# --- tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_tiles_of_a_perfect_model_give_back_every_pixel(size):
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    result = reconstruct(Squares(), Image.fromarray(noise), tile=True)
    assert np.array_equal(np.asarray(result.original), noise)
    if min(size) in (1, 32, 40, 64):  # other sides shorter than a tile are enlarged, and shrunk again
        assert np.array_equal(np.asarray(result.reconstruction), noise)
        assert result.psnr == pytest.approx(100)
    assert result.reconstruction.size == size and result.psnr > 18  # of white noise


@pytest.mark.parametrize("side", [1, 4, 8, 32])
def test_flat_squares_keep_their_colour_at_every_size(side):
    model = create_model(pretrained=True).eval()
    assert reconstruct(model, Image.new("RGB", (side, side), (200, 30, 30)), tile=True).psnr > 30


@given(length=st.integers(1, 1000), size=st.sampled_from([16, 32, 128]))
def test_tiles_cover_a_side_with_weights_that_sum_to_one(length, size):
    side = cover(length, size)
    assert side.length == max(length, size)
    assert side.starts[0] == 0 and side.starts[-1] + size == side.length
    total = torch.zeros(side.length)
    for start, weights in zip(side.starts, side.weights, strict=True):
        total[start : start + size] += weights
    assert torch.allclose(total, torch.ones(side.length), atol=1e-6)
    assert all(b - a <= size - size // 8 for a, b in zip(side.starts, side.starts[1:], strict=False))
    fewer = len(side.starts) - 1  # as few as cover the side with that overlap
    assert fewer == 0 or fewer * (size - size // 8) + size // 8 < side.length


def test_there_are_no_seams():
    number = iter(range(1000))

    def checkerboard(x):  # neighbouring tiles differ by 0.4; there are 5 in a row
        return torch.stack([torch.full_like(one, 0.3 + 0.4 * (next(number) % 2)) for one in x])

    result = reconstruct(Squares(checkerboard), photo(140, 60), tile=True)
    assert result.tiles == (2, 5)
    values = np.asarray(result.reconstruction)[..., 0].astype(float) / 255
    assert np.ptp(values) > 0.39
    assert max(abs(np.diff(values, axis=axis)).max() for axis in (0, 1)) < 0.4 / 3


def test_squares_go_through_the_model_in_batches_of_the_asked_size(model):
    picture, squares = photo(200, 70), Squares()
    result = reconstruct(squares, picture, tile=True, batch_size=5)
    assert sum(squares.batches) == result.tiles[0] * result.tiles[1] == 3 * 7
    assert max(squares.batches) == 5
    one, many = (reconstruct(model, picture, tile=True, batch_size=n).reconstruction for n in (1, 21))
    assert abs(np.asarray(one, dtype=int) - np.asarray(many, dtype=int)).max() <= 1


def test_tiles_are_used_where_they_lie():
    picture = photo(90, 150)
    shifted = reconstruct(Squares(lambda x: 1 - x), picture, tile=True)
    assert np.array_equal(np.asarray(shifted.reconstruction), 255 - np.asarray(picture))


# --- fitted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(48, 40), (40, 48), (20, 90), (32, 32), (7, 9)])
def test_a_fitted_picture_is_the_one_that_eval_scores(tmp_path, size):
    photo(*size).save(tmp_path / "photo.png")
    loader = build_loader(ImageFolder(tmp_path), Batches(1, train=False), image_size=32)
    assert torch.equal(to_tensor(fit(photo(*size), 32)), next(iter(loader))["image"][0])


@pytest.mark.parametrize("size", [(1, 1), (1, 10_000_000), (10_000_000, 1)])
def test_pictures_of_any_shape_are_fitted(size):
    assert fit(Image.new("RGB", size, (10, 20, 30)), 32).getpixel((16, 16)) == (10, 20, 30)
    assert reconstruct(Squares(), Image.new("RGB", size), tile=False).reconstruction.size == (32, 32)


def test_the_psnr_is_that_of_the_two_pictures(model):
    for tile in (False, True):
        result = reconstruct(model, photo(150, 75), tile)
        pair = [to_tensor(image)[None] for image in (result.reconstruction, result.original)]
        assert result.psnr == pytest.approx(finola.psnr(*pair).item(), abs=1e-4)
        assert 3 < result.psnr < 40


def test_one_square_is_the_models_own_output(model):
    result = reconstruct(model, photo())
    x = to_tensor(fit(photo(), 32))[None]
    with torch.no_grad():
        expected = model(x)[0].clamp(0, 1)
    assert result.tiles == (1, 1)
    assert (to_tensor(result.reconstruction) - expected).abs().max() <= 0.5 / 255 + 1e-6


def test_any_mode_and_orientation_becomes_upright_rgb(tmp_path):
    sideways = Image.Exif()
    sideways[0x0112] = 6
    photo(40, 20).save(tmp_path / "turned.jpg", exif=sideways)
    for image in (tmp_path / "turned.jpg", str(tmp_path / "turned.jpg"), Image.open(tmp_path / "turned.jpg")):
        assert reconstruct(Squares(), image, tile=True).original.size == (20, 40)
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16"):
        grey = np.full((9, 11), 1000, dtype=np.uint16)
        image = Image.fromarray(grey) if mode == "I;16" else photo(11, 9).convert(mode)
        result = reconstruct(Squares(), image, tile=True)
        assert (result.original.mode, result.reconstruction.mode) == ("RGB", "RGB")
        assert result.reconstruction.size == (11, 9)


@pytest.mark.parametrize("size, second", [((300, 200), "beside"), ((900, 40), "below")])
def test_panels_show_both_pictures_whole(size, second):
    result = reconstruct(Squares(lambda x: 1 - x), photo(*size), tile=True)
    panel, left, top = result.panel(), 4, 4 + 18  # a gap, and a caption above
    corners = [(left, top), (left + size[0] + 4, top) if second == "beside" else (left, top + size[1] + 4 + 18)]
    for picture, (x, y) in zip((result.original, result.reconstruction), corners, strict=True):
        assert np.array_equal(np.asarray(panel.crop((x, y, x + size[0], y + size[1]))), np.asarray(picture))


def test_a_panel_has_room_for_its_captions():
    panel = reconstruct(Squares(), Image.new("RGB", (1, 1)), tile=True).panel()
    assert panel.width > 2 * 100


def test_lists_are_reconstructed_one_by_one(model, tmp_path):
    image = photo(40, 50)
    image.save(tmp_path / "a.png")
    results = reconstruct(model, [image, tmp_path / "a.png", np.asarray(image), to_tensor(image)], tile=True)
    assert len({result.reconstruction.tobytes() for result in results}) == 1 and len(results) == 4
    assert reconstruct(model, []) == []


def test_it_is_a_public_name():
    assert finola.reconstruct is reconstruct


# --- finola reconstruct ------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    """a.png and trip/{a.jpg, A.png, b.jpg, .hidden/c.png, notes.txt}."""
    trip = tmp_path / "pictures" / "trip"
    (trip / ".hidden").mkdir(parents=True)
    for i, name in enumerate(["a.png", "trip/a.jpg", "trip/A.png", "trip/b.jpg", "trip/.hidden/c.png"]):
        photo(60 + i, 45, seed=i).save(trip.parent / name)
    (trip / "notes.txt").write_text("not an image")
    return trip.parent


def test_files_folders_and_patterns_are_found_once(pictures):
    everything = ["a.png", "trip/A.png", "trip/a.jpg", "trip/b.jpg"]
    for words in (["."], ["a.png", "trip"], ["a.png", "trip/*.png", "trip/*.jpg"], ["**/*.png", ".", "a.png"]):
        paths, faults = find_images([str(pictures / word) for word in words])
        assert sorted(str(path.relative_to(pictures)) for path in paths) == everything
        assert faults == []
    strange = pictures / "photo[1].png"
    photo().save(strange)
    assert find_images([str(strange)]) == ([strange], [])


def test_equal_names_are_told_apart(tmp_path):
    names = ["x/a.png", "y/a.jpg", "y/A.gif", "z/a-2.png", "z/b.png"]
    panels = name_panels([tmp_path / name for name in names], tmp_path / "out")
    assert [panel.name for panel in panels.values()] == ["a.png", "a-2.png", "A-3.png", "a-2-2.png", "b.png"]


@pytest.mark.parametrize("tile", [False, True])
def test_the_command_writes_panels_and_prints_psnr(pictures, weights, tmp_path, capsys, tile):
    out = tmp_path / "new" / "panels"
    words = ["reconstruct", pictures, "--out", out, "--weights", weights, "--device", "cpu"]
    code, printed, errors = run(capsys, *words, *(["--tile"] if tile else []))
    assert (code, errors) == (0, [])
    lines = printed.splitlines()
    assert len(lines) == (5 if tile else 6) and ("--tile" in lines[-1]) != tile
    scores = [float(line.split(": ")[1].split(" dB")[0]) for line in lines[:4]]
    assert f"panels in {out}" in lines[4]
    assert float(lines[4].split(": ")[1].split(" dB")[0]) == pytest.approx(np.mean(scores), abs=0.011)
    assert sorted(path.name for path in out.iterdir()) == ["A-2.png", "a-3.png", "a.png", "b.png"]
    width = 60 if tile else 32
    first = Image.open(out / "a.png")
    original = photo(60, 45) if tile else fit(photo(60, 45), 32)
    assert np.array_equal(np.asarray(first)[22 : 22 + original.height, 4 : 4 + width], np.asarray(original))


def test_the_command_reports_for_machines(pictures, weights, tmp_path, capsys):
    words = ["reconstruct", pictures / "a.png", "--out", tmp_path / "out", "--weights", weights, "--tile", "--json"]
    code, printed, errors = run(capsys, *words)
    report = json.loads(printed)
    assert (code, errors, report["failed"]) == (0, [], [])
    (image,) = report["images"]
    assert image["tiles"] == [2, 2] and image["numbers"] == 4 * 16
    assert (image["width"], image["height"]) == (60, 45)
    assert report["mean_psnr"] == image["psnr"] and Path(image["panel"]).exists()


# --- finola demo and the shipped model ---------------------------------------------------------------------


def test_the_demo_writes_one_panel(weights, tmp_path, capsys):
    code, printed, _ = run(capsys, "demo", "--out", tmp_path / "new", "--weights", weights)
    assert code == 0
    assert Image.open(tmp_path / "new" / "finola-demo.png").width > 3 * 32
    assert all(name in printed for name in ("caps", "lighthouse", "parrots"))
    assert "finola-demo.png" in printed
    code, printed, _ = run(capsys, "demo", "--out", tmp_path, "--weights", weights, "--json")
    assert set(json.loads(printed)["psnr"]) == set(example_images())


def test_the_photographs_that_come_along():
    images = example_images()
    assert list(images) == ["caps", "lighthouse", "parrots"]
    assert all((image.mode, image.size) == ("RGB", (256, 256)) for image in images.values())
    assert all(path.stat().st_size <= 40_000 for path in example_paths().values())


def test_the_shipped_model_reconstructs_the_demo_photographs(tmp_path, capsys):
    code, printed, errors = run(capsys, "demo", "--out", tmp_path, "--json")
    assert (code, errors) == (0, [])
    scores = json.loads(printed)["psnr"]
    assert min(scores.values()) > 23 and np.mean(list(scores.values())) > 24


def test_the_shipped_model_reconstructs_whole_pictures(tmp_path):
    model = create_model(DEFAULT_MODEL, pretrained=True).eval()
    picture = example_images()["caps"]
    result = reconstruct(model, picture, tile=True)
    assert result.tiles == (3, 3) and result.reconstruction.size == picture.size
    assert result.psnr > 24


def test_the_example_reconstructs_a_photograph(tmp_path):
    printed = run_example("reconstruct_photo.py", example_paths()["caps"], tmp_path / "out.png")
    assert float(printed.split(", ")[1].split(" dB")[0]) > 24
    assert Image.open(tmp_path / "out.png").width > 2 * 128


def test_the_example_fits_its_pictures():
    lines = run_example("operator_in_your_model.py").splitlines()
    scores = [float(line.split(": ")[1].split(" dB")[0]) for line in lines]
    assert len(scores) == 7 and scores[-1] > scores[0] + 10


def run_example(name, *words):
    """What an example prints."""
    before, sys.argv, sys.stdout = (sys.argv, sys.stdout), [name, *map(str, words)], io.StringIO()
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return sys.stdout.getvalue()
    finally:
        sys.argv, sys.stdout = before


def test_the_demo_needs_no_extra(weights, tmp_path):
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['lightning', 'torchmetrics', 'tensorboard', 'rich']));"
        "from finola.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["demo", "--weights", weights, "--out", str(tmp_path)]
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)
    assert (tmp_path / "finola-demo.png").exists()


def test_help_needs_no_torch():
    code = "import sys, finola.cli.main; finola.cli.main.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
