"""Rate and distortion: true sizes, the search of a rate, BD-rate, and what the command writes."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features
from tiny_codecs import picture, tiny_codec

from finola.cli import main as cli
from finola.codec import rd
from finola.codec.competitors import classical_codecs, jpeg2000
from finola.codec.literature import KODAK
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
    points = [rd.measure(codec, image, setting) for setting in codec.settings[::5]]
    assert points[0].bpp < points[-1].bpp and points[0].psnr < points[-1].psnr
    assert all(0 < point.ms_ssim <= 1 for point in points)
    assert points[0].bpp == 8 * len(codec.encode(image, codec.settings[0])) / (180 * 176)


CODECS = [*classical_codecs(), *rd.finola_codecs(tiny_codec())]


@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.name)
def test_the_search_of_a_rate_stays_below_it(codec):
    image = picture(90, 88)
    low, high = (rd.measure(codec, image, codec.every[i]).bpp for i in (0, -1))
    target = math.sqrt(low * high)
    found = rd.Trials(codec, lambda index: image, 1).per_image(target)
    chosen = found["chosen"]
    assert low <= chosen["bpp"] <= target
    next_setting = codec.every[list(codec.every).index(chosen["setting"]) + 1]
    above = rd.measure(codec, image, next_setting)
    assert above.bpp > target
    share = math.log(target / chosen["bpp"]) / math.log(above.bpp / chosen["bpp"])
    assert found["psnr"] == pytest.approx(chosen["psnr"] + share * (above.psnr - chosen["psnr"]))
    assert (found["above_target"], found["below_target"]) == (0, 0)


@pytest.mark.parametrize("rate, place, outside", [(0.01, 0, "above_target"), (1000.0, -1, "below_target")])
def test_a_rate_out_of_reach_is_said(rate, place, outside):
    codec, image = CODECS[0], picture(90, 88)
    trials = rd.Trials(codec, lambda index: image, 2)
    found, end = trials.per_image(rate), rd.measure(codec, image, codec.every[place])
    assert found[outside] == 2 and found["psnr"] == pytest.approx(end.psnr)
    assert found["chosen"]["setting"] == codec.every[place]
    fixed = trials.fixed(rate)
    assert fixed["psnr"] is None and (fixed["below"] is None) == (rate < 1)


def test_a_fixed_setting_is_one_for_all_images():
    """Means over images that take very different rates, interpolated in the logarithm of the mean rate."""
    codec, images = CODECS[0], [picture(90, 88), Image.new("RGB", (90, 88), "teal"), picture(60, 88, seed=3)]
    found = rd.Trials(codec, images.__getitem__, 3).fixed(1.5)
    below, above = found["below"], found["above"]
    assert above["setting"] == below["setting"] + 1 and below["bpp"] <= 1.5 < above["bpp"]
    for point in (below, above):
        points = [rd.measure(codec, image, int(point["setting"])) for image in images]
        assert point["bpp"] == pytest.approx(sum(p.bpp for p in points) / 3)
        assert point["psnr"] == pytest.approx(sum(p.psnr for p in points) / 3)
    share = math.log(1.5 / below["bpp"]) / math.log(above["bpp"] / below["bpp"])
    assert found["psnr"] == pytest.approx(below["psnr"] + share * (above["psnr"] - below["psnr"]))


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=60), st.floats(0.005, 20), st.integers(-1, 70))
def test_the_search_finds_the_highest_setting_below_a_rate(rates, target, start):
    rates, tried = sorted(rates), []

    def rate(setting):
        tried.append(setting)
        return rates[setting]

    assert rd.highest(range(len(rates)), target, rate, start) == sum(value <= target for value in rates) - 1
    assert len(set(tried)) == len(tried)


def test_payload_or_file_can_be_counted():
    """The paper's mode: 16 numbers of 4 bits on 32 x 32 pixels, and 28 bytes around them."""
    codec = next(codec for codec in CODECS if codec.name == "finola-paper")
    image, payload = picture(32, 32), 16 * 4 / 32**2
    point = rd.measure(codec, image, rd.PAPER_BITS)
    assert point.payload_bpp == payload and point.bpp == pytest.approx(payload + 28 * 8 / 32**2)
    bits = {count: rd.Trials(codec, lambda index: image, 1, count).per_image(payload)["chosen"]["setting"]
            for count in ("file", "payload")}
    assert bits == {"file": 1, "payload": 4}
    with pytest.raises(RecipeError, match="count"):
        rd.Trials(codec, lambda index: image, 1, "headers")


def with_more_metadata(name, data):
    """500 bytes that no decoder looks at, where the format has a place for them."""
    words = b"w" * 500
    if name == "jpeg":
        return data[:2] + b"\xff\xfe" + (502).to_bytes(2, "big") + words + data[2:]  # a comment
    if name == "jpeg2000":
        place = data.index(b"\xff\x90")  # the first tile
        return data[:place] + b"\xff\x64" + (502).to_bytes(2, "big") + words + data[place:]
    if name == "webp":
        return data[:12] + b"EXIF" + (500).to_bytes(4, "little") + words + data[12:]
    return data + (508).to_bytes(4, "big") + b"free" + words


@pytest.mark.parametrize("codec", classical_codecs(), ids=lambda codec: codec.name)
def test_a_payload_leaves_headers_and_metadata_out(codec):
    data = codec.encode(picture(90, 88), codec.settings[5])
    longer = with_more_metadata(codec.name, data)
    assert len(longer) > len(data) + 500
    assert codec.payload(data) == codec.payload(longer) < len(data)
    assert codec.payload(data) > len(data) / 3
    flat = codec.encode(Image.new("RGB", (90, 88), "teal"), codec.settings[5])
    assert codec.payload(flat) < codec.payload(data) / 2


@pytest.mark.skipif(not features.check("jpg_2000"), reason="a Pillow without JPEG 2000")
def test_jpeg_2000_has_its_colour_transform():
    """Pillow leaves it out unless asked: 2 dB on Kodak, as much as a quarter of the file."""
    image = picture(180, 176, "L").convert("RGB")
    with_it, without = (rd.Trials(jpeg2000(**options), lambda index: image, 1).fixed(0.5)["psnr"]
                        for options in ({}, {"mct": 0}))
    assert with_it > without + 0.5


def test_reported_figures_rise_with_the_rate_and_have_a_source():
    assert len({row.name for row in KODAK}) == len(KODAK)
    for row in KODAK:
        assert list(row.psnr) == sorted(row.psnr) and list(row.psnr.values()) == sorted(row.psnr.values())
        assert all(20 < psnr < 35 for psnr in row.psnr.values())
        assert row.source and row.paper


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


def test_curves_of_earlier_runs_are_taken_in(folder, weights, tmp_path, capsys, monkeypatch):
    """Those on the same images, ours with the same weights; other files in the folder are none of our business."""
    monkeypatch.setattr(rd, "ms_ssim", lambda a, b: None)
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    plotted = []
    monkeypatch.setattr(rd, "plot", lambda curves, *_, **__: plotted.append(set(curves)))
    for codec, limit in (("webp", 1), ("jpeg", 2), ("finola-paper", 2)):
        words = ["rd", str(folder), "--out", str(tmp_path), "--weights", weights, "--codecs", codec, "--json"]
        assert cli.main([*words, "--limit", str(limit)]) == 0
    assert plotted == [{"webp"}, {"jpeg"}, {"jpeg", "finola-paper"}]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    stored = json.loads((tmp_path / "jpeg.json").read_text())["results"]
    assert report["bd_rate_against_jpeg"]["finola-paper"] == pytest.approx(
        rd.bd_rate(rd.from_compressai(stored), report["curves"]["finola-paper"]))
    for name in ("jpeg", "finola-paper"):
        file = tmp_path / f"{name}.json"
        stored = json.loads(file.read_text())
        file.write_text(json.dumps(stored | {"record": stored["record"] | {"weights_id": "0" * 64}}))
    assert cli.main(["rd", str(folder), "--out", str(tmp_path), "--weights", weights, "--codecs", "webp",
                     "--limit", "2"]) == 0
    assert plotted[-1] == {"jpeg", "webp"}


def test_the_command_compares_at_rates(weights, tmp_path, capsys):
    for i in range(2):
        picture(90, 88, seed=i).save(tmp_path / f"{i}.png")
    words = ["rd", str(tmp_path), "--target", "1", "2", "--limit", "1", "--weights", weights, "--codecs", "finola",
             "jpeg"]
    assert cli.main([*words, "--json", "--out", str(tmp_path / "out")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out" / "target.json").read_text())
    assert report["images"] == 1 and list(report["targets"]) == ["1", "2"] and report["paper_mode"] is None
    for rate, rows in report["targets"].items():
        assert [row["codec"] for row in rows] == ["finola", "jpeg"]
        for row in rows:
            assert row["per_image"]["chosen"]["bpp"] <= float(rate) or row["per_image"]["above_target"] == 1
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert "1 bit per pixel of whole files" in printed and "2 bit per pixel of whole files" in printed
    assert "finola: unequal steps, entropy coded" in printed and printed.count("write + read, s") == 2


def test_rows_of_earlier_runs_stay(weights, tmp_path, monkeypatch):
    """Codecs and rates add up in one table, as long as the images are the same, and the weights for ours."""
    monkeypatch.setattr(rd, "ms_ssim", lambda a, b: None)
    picture(90, 88).save(tmp_path / "0.png")
    words = ["rd", str(tmp_path), "--weights", weights, "--out", str(tmp_path / "out"), "--codecs"]

    def table():
        report = json.loads((tmp_path / "out" / "target.json").read_text())
        return {rate: [row["codec"] for row in rows] for rate, rows in report["targets"].items()}, report

    assert cli.main([*words, "finola-paper", "--target", "2"]) == 0
    assert cli.main([*words, "jpeg", "--target", "1", "2"]) == 0
    names, report = table()
    assert names == {"1": ["jpeg"], "2": ["finola-paper", "jpeg"]} and report["paper_mode"]["setting"] == 4
    before = report["targets"]["2"][0]
    assert cli.main([*words, "finola-paper", "--target", "2"]) == 0
    names, report = table()
    assert names == {"1": ["jpeg"], "2": ["jpeg", "finola-paper"]}
    assert report["targets"]["2"][1]["fixed"]["psnr"] == before["fixed"]["psnr"]
    (tmp_path / "out" / "target.json").write_text(json.dumps(report | {"weights_id": "0" * 64}))
    assert cli.main([*words, "jpeg", "--target", "1"]) == 0
    names, report = table()
    assert names == {"1": ["jpeg"], "2": ["jpeg"]} and report["paper_mode"] is None  # ours was of other weights
    assert cli.main([*words, "jpeg", "--target", "2", "--crop", "64"]) == 0
    assert table()[0] == {"2": ["jpeg"]}  # other images


def test_the_command_cuts_squares_and_counts_payloads(weights, tmp_path, capsys):
    picture(90, 70, "L").save(tmp_path / "grey.png")
    words = ["rd", str(tmp_path), "--crop", "64", "--target", "0.0625", "--count", "payload", "--weights", weights]
    assert cli.main([*words, "--codecs", "finola-paper", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["crop"] == 64 and report["count"] == "payload"
    mode = report["paper_mode"]
    assert mode["payload_bpp"] == 0.0625 and mode["bpp"] == pytest.approx(0.0625 + 28 * 8 / 64**2)
    (row,) = report["targets"]["0.0625"]
    assert row["per_image"]["chosen"]["setting"] == 4
    assert row["per_image"]["psnr"] == pytest.approx(mode["psnr"])  # 4 bits hit the rate


def test_figures_of_papers_are_for_kodak_alone(folder, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rd, "ms_ssim", lambda a, b: None)  # slow
    words = ["rd", str(folder), "--target", "1", "--weights", weights, "--literature"]
    assert cli.main(words) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1
    for i in range(24):
        Image.new("RGB", (768, 512) if i % 2 else (512, 768), (9 * i, 100, 50)).save(tmp_path / f"{i}.png")
    words = ["rd", str(tmp_path), "--target", "0.19", "--weights", weights, "--literature", "--codecs", "jpeg"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert sum("reported" in line for line in printed.splitlines()) == len(KODAK)


def test_curves_are_printed_under_a_head_and_drawn_to_the_end(folder, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rd, "ms_ssim", lambda a, b: None)
    figures = []

    def keep(figure, path, **_):
        figures.append(figure)
        path.touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", keep)
    words = ["rd", str(folder), "--out", str(tmp_path), "--weights", weights, "--codecs", "finola-paper", "jpeg"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:2] == ["codec", "setting"] and "finola-paper: equal bits, fixed length" in printed
    (axes,) = figures[0].axes
    for line in axes.get_lines():  # every point of ours is inside; others leave the plot at its edge
        if line.get_label() == "finola-paper":
            assert max(line.get_xdata()) <= axes.get_xlim()[1]
    assert {line.get_label(): len(line.get_xdata()) for line in axes.get_lines()} == {"finola-paper": 7, "jpeg": 13}


def test_a_plot_takes_figures_of_papers(tmp_path):
    curves = {"jpeg": [{"bpp": 0.1, "psnr": 20.0, "ms_ssim": 0.8}, {"bpp": 0.3, "psnr": 25.0, "ms_ssim": 0.9}]}
    sizes = []
    for reported in ((), KODAK):
        rd.plot(curves, "test", tmp_path / "plot.png", reported=reported)
        with Image.open(tmp_path / "plot.png") as image:
            sizes.append(len(image.convert("RGB").getcolors(2**24)))
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize("bad", ["text.jpg", "missing"])
def test_the_command_names_what_it_cannot_read(bad, weights, tmp_path, capsys):
    folder = tmp_path / "images"
    if bad != "missing":
        folder.mkdir()
        (folder / bad).write_text("no image")
    assert cli.main(["rd", str(folder), "--target", "1", "--weights", weights]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("finola rd: ") and ("no such folder" in line or bad in line)


@pytest.mark.parametrize("words", [[], ["--target", "0"], ["--target", "1", "nan"], ["--target", "inf"]])
def test_the_command_refuses(folder, weights, words):
    assert cli.main(["rd", str(folder), "--weights", weights, *words]) == 2
