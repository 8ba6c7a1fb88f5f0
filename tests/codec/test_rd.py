"""Rate and distortion: true sizes, the search of a rate, BD-rate, and what the command writes."""

import json
import math

import pytest
from PIL import Image
from tiny_codecs import picture, tiny_codec

from finola.cli import main as cli
from finola.codec import rd
from finola.codec.competitors import classical_codecs
from finola.errors import RecipeError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures")
    for i in range(2):
        picture(180, 176, seed=i).save(path / f"{i}.png")
    return path


@pytest.mark.parametrize("codec", classical_codecs(), ids=lambda codec: codec.name)
def test_a_higher_setting_takes_more_bytes_and_is_nearer(codec):
    image = picture(180, 176)
    points = [rd.measure(codec, image, setting) for setting in codec.settings]
    assert points[0].bpp < points[-1].bpp and points[0].psnr < points[-1].psnr
    assert all(0 < point.ms_ssim <= 1 for point in points)
    assert points[-1].bpp == 8 * len(codec.encode(image, codec.settings[-1])) / (180 * 176)


@pytest.mark.parametrize("codec", [*classical_codecs(), *rd.finola_codecs(tiny_codec())], ids=lambda c: c.name)
def test_the_search_of_a_rate_stays_below_it(codec):
    image = picture(90, 88)
    low, high = (rd.measure(codec, image, codec.every[i]).bpp for i in (0, -1))
    target = math.sqrt(low * high)
    point = rd.at_most(codec, image, target)
    assert low <= point.bpp <= target
    above = codec.every[list(codec.every).index(point.setting) + 1]
    assert 8 * len(codec.encode(image, above)) / (90 * 88) > target
    assert rd.at_most(codec, image, low / 2).setting == codec.every[0]


def test_small_pictures_have_no_ms_ssim():
    assert rd.ms_ssim(picture(175, 300), picture(175, 300)) is None
    assert rd.ms_ssim(picture(176, 300), picture(176, 300)) == pytest.approx(1)


def test_bd_rate_of_half_the_bytes_is_minus_fifty():
    anchor = [{"bpp": 2.0**i, "psnr": 20 + 3 * i} for i in range(5)]
    half = [{"bpp": point["bpp"] / 2, "psnr": point["psnr"]} for point in anchor]
    assert rd.bd_rate(anchor, anchor) == pytest.approx(0)
    assert rd.bd_rate(anchor, half) == pytest.approx(-50)
    assert rd.bd_rate(half, anchor) == pytest.approx(100)
    shifted = [{"bpp": point["bpp"], "psnr": point["psnr"] + 1.5} for point in anchor]  # half a doubling of the rate
    assert rd.bd_rate(anchor, shifted) == pytest.approx(100 * (2**-0.5 - 1))
    assert rd.bd_rate(anchor, [{"bpp": 1.0, "psnr": 50.0}, {"bpp": 2.0, "psnr": 55.0}]) is None


def test_an_unknown_codec_is_named():
    with pytest.raises(RecipeError, match="bpg"):
        rd.choose(classical_codecs(), ["bpg"])


def test_the_command_draws_curves(folder, weights, tmp_path, capsys):
    words = ["rd", str(folder), "--out", str(tmp_path), "--weights", weights, "--codecs", "finola-paper", "jpeg"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"] == 2 and set(report["curves"]) == {"finola-paper", "jpeg"}
    assert report["bd_rate_against_jpeg"]["jpeg"] == pytest.approx(0)
    for name in ("finola-paper", "jpeg"):
        stored = json.loads((tmp_path / f"{name}.json").read_text())
        results = stored["results"]
        assert set(results) == {"q", "bpp", "psnr", "ms-ssim", "encoding_time", "decoding_time"}
        assert len({len(values) for values in results.values()}) == 1
        assert stored["name"] == name and stored["record"]["weights_id"] == tiny_codec().calibration.weights_id
    with Image.open(tmp_path / "rd.png") as image:
        assert image.width > 1000 and len(image.convert("RGB").getcolors(2**24)) > 50


def test_the_command_compares_at_a_rate(weights, tmp_path, capsys):
    for i in range(2):
        picture(90, 88, seed=i).save(tmp_path / f"{i}.png")
    words = ["rd", str(tmp_path), "--target", "1", "--limit", "1", "--weights", weights, "--codecs", "finola", "jpeg"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["images"] == 1 and report["target"] == 1
    for row in report["codecs"].values():
        assert row["bpp"] <= 1 or row["above_target"] == 1
    assert cli.main(words) == 0
    assert "dB" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--target", "0"], ["--target", "nan"]])
def test_the_command_refuses(folder, weights, words):
    assert cli.main(["rd", str(folder), "--weights", weights, *words]) == 2
