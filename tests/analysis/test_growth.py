"""The growth animation and the measurements of the equations, on tiny models and on the command line."""

import json

import pytest
import torch
from PIL import Image, ImageSequence
from tiny_models import COARSE, autoencoder

from finola.analysis.equations import BICUBIC, SCHEMES, measure_equations, off_axes, plot_equations, renderings_panel
from finola.analysis.growth import (
    GRAY,
    MOST_FRAMES,
    growth_frames,
    principal_colours,
    step_counts,
    write_gif,
)
from finola.cli import main as cli
from finola.data.examples import example_images
from finola.data.images import to_tensor
from finola.drawing import GAP, LABEL_HEIGHT, to_image
from finola.errors import DataError, FinolaError
from finola.evaluation.metrics import psnr
from finola.pde import render
from finola.weights import save_weights


def tiny(**changes):
    return autoencoder(**COARSE | changes)


def photograph(width, height):
    return example_images()["caps"].resize((width, height))


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    return str(save_weights(model, tmp_path_factory.mktemp("weights") / "tiny.safetensors"))


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    for name, picture in list(example_images().items())[:2]:
        picture.resize((100, 70)).save(tmp_path / "photos" / f"{name}.png")
    return tmp_path / "photos"


# growth

def test_steps_to_each_position():
    assert step_counts((3, 4), (1, 2)).tolist() == [[3, 2, 1, 2], [2, 1, 0, 1], [3, 2, 1, 2]]


def test_frames_fill_in_from_the_origin(model):
    frames = growth_frames(model, torch.randn(16))
    assert len(frames) == 5  # 0 to 4 steps in a 4x4 map from (2, 2)
    gray = (round(255 * GRAY),) * 3
    side = 64  # pixels of a position
    for k, frame in enumerate(frames):
        colours = {(y, x): frame.getpixel((GAP + side * x + 32, 2 * LABEL_HEIGHT + side * y + 32))
                   for y in range(4) for x in range(4)}
        missing = {position for position, colour in colours.items() if colour == gray}
        assert missing == {(y, x) for y, x in colours if abs(y - 2) + abs(x - 2) > k}


def test_the_last_frame_shows_what_the_model_decodes(model):
    q = torch.randn(16)
    with torch.no_grad():
        decoded = to_image(model.decode(q[None])[0]).resize((256, 256), Image.Resampling.BICUBIC)
    left, top = 2 * GAP + 256, 2 * LABEL_HEIGHT
    shown = growth_frames(model, q)[-1].crop((left, top, left + 256, top + 256))
    assert shown.tobytes() == decoded.tobytes()


def test_large_maps_have_a_bounded_number_of_frames(tmp_path):
    model = tiny(map_size=32, embed_dim=8, decoder_widths=(8,))
    frames = growth_frames(model, torch.randn(8))
    write_gif(frames, tmp_path / "large.gif")
    assert len(frames) <= MOST_FRAMES and (tmp_path / "large.gif").stat().st_size < 100_000 * MOST_FRAMES


def test_gif_is_endless_small_and_the_same_each_time(model, tmp_path):
    q = torch.randn(16)
    for name in ("a.gif", "b.gif"):
        write_gif(growth_frames(model, q), tmp_path / name)
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    assert (tmp_path / "a.gif").stat().st_size < 1_500_000
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.info["loop"] == 0
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert len(durations) == 5 and durations[-1] > durations[0]


def test_principal_colours_of_known_components():
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    z = torch.stack([9 * x, 3 * y, torch.zeros(4, 4)])  # the last component is flat
    red, green, blue = principal_colours(z)
    assert torch.allclose(red, x / 3, atol=1e-5) or torch.allclose(red, 1 - x / 3, atol=1e-5)
    assert torch.allclose(green, y / 3, atol=1e-5) or torch.allclose(green, 1 - y / 3, atol=1e-5)
    assert torch.equal(blue, torch.full((4, 4), 0.5))


def test_growth_needs_a_law():
    with pytest.raises(FinolaError, match="obeys no differential equation"):
        growth_frames(tiny(autoregression="repeat"), torch.randn(16))


# equations

def test_measurements_of_a_model(model):
    pictures = [photograph(100, 70), photograph(64, 64)]
    measured = measure_equations(model, pictures, [2, 3])
    assert measured.images == 2 and measured.horizontal.shape == (4, 3) and measured.vertical.shape == (3, 4)
    assert measured.horizontal[2].max() < 1e-5 and measured.horizontal[0].min() > 1e-5
    assert list(measured.commutators) == ["this model", "untrained (random start)"]
    # seed 0 is also what the fixture's model started from
    torch.testing.assert_close(*measured.commutators.values())
    assert {name: len(scores) for name, scores in measured.renderings[2].scores.items()} == {
        BICUBIC: 2, **{str(scheme): 2 for scheme in SCHEMES}}
    assert measured.renderings[3].scores == {}  # 96 pixels: neither image has as many
    assert plot_equations(measured).size == (990, 900)
    assert renderings_panel(measured.renderings[2]).width > 2 * 64


def test_scores_are_of_the_original_at_the_larger_size(model):
    picture = photograph(64, 64)
    found = measure_equations(model, [picture], [2]).renderings[2].scores
    original = to_tensor(picture)[None]
    with torch.no_grad():
        q = model.encode(to_tensor(picture.resize((32, 32), Image.Resampling.BICUBIC))[None])
        for scheme in SCHEMES:
            drawn = render(model, q, 2, grid=scheme.grid, method=scheme.method, step=0.5 if scheme.fine else 1)
            assert found[str(scheme)] == pytest.approx([psnr(drawn, original).item()], abs=1e-4)


def test_off_axes_leaves_out_what_is_zero_by_construction():
    values = torch.arange(12).view(3, 4)
    assert off_axes(values, (1, 2), "commutator").tolist() == [0, 1, 3, 8, 9, 11]
    assert off_axes(values, (1, 2), "horizontal").tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert off_axes(values, (1, 2), "vertical").tolist() == [0, 1, 3, 4, 5, 7, 8, 9, 11]


def test_a_model_with_q_in_the_corner():
    model = tiny(origin="top_left")
    measured = measure_equations(model, [photograph(64, 64)], [2])
    assert measured.horizontal[0].max() < 1e-5 and len(measured.renderings[2].scores) == 1 + len(SCHEMES)


def test_errors_of_measure(model):
    with pytest.raises(DataError, match="images: got none"):
        measure_equations(model, [], [2])
    with pytest.raises(FinolaError, match="single position"):
        measure_equations(tiny(map_size=1, decoder_widths=(16, 8, 8, 8, 8, 8)), [photograph(64, 64)], [2])


# commands

def test_growth_command(weights, photos, tmp_path, capsys):
    out = tmp_path / "growth.gif"
    assert cli.main(["inspect", "growth", str(photos / "caps.png"), "--weights", weights, "--out", str(out),
                     "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["frames"] == 5 and report["bytes"] == out.stat().st_size


def test_equations_command(weights, photos, tmp_path, capsys):
    out = tmp_path / "equations"
    line = ["inspect", "equations", "--data", str(photos), "--weights", weights, "--against", weights,
            "--factors", "2", "3", "--out", str(out)]
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    assert "commutator of tiny.safetensors" in shown and "residual: error of a step / its length" in shown
    assert "3 times larger, 96 px: nothing drawn, no image has 96 px a side" in shown
    result = json.loads((out / "equations.json").read_text())
    assert result["images"] == 2 and result["origin"] == [2, 2]
    two, three = result["renderings"]
    assert two["best"] in two["psnr"] and two["psnr"][two["best"]] == max(two["psnr"].values())
    assert three == {"factor": 3, "size": 96, "images": 0, "psnr": {}, "best": None}
    assert sorted(path.name for path in out.iterdir()) == ["equations.json", "equations.png", "renderings_x2.png"]


@pytest.mark.parametrize(("words", "code", "message"), [
    (["growth", "{photos}/caps.png", "--out", "growth.png"], 2, "expected a file ending in .gif"),
    (["growth", "{photos}/none.png", "--out", "growth.gif"], 3, "no such file"),
    (["equations", "--data", "{photos}", "--out", "{photos}"], 2, "choose another folder"),
    (["equations", "--data", "{photos}", "--out", "new", "--factors", "1"], 2, "--factors: got 1"),
    (["equations", "--data", "{photos}/none", "--out", "new"], 3, "none"),
    (["equations", "--data", "{photos}", "--out", "new", "--against", "{photos}/caps.png"], 4, "caps.png"),
])
def test_faults_are_one_line_and_leave_nothing(words, code, message, weights, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [word.format(photos=photos) for word in words]
    assert cli.main(["inspect", *words, "--weights", weights]) == code
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["photos"] and len(list(photos.iterdir())) == 2
