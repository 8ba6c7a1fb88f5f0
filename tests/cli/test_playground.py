"""`finola playground`: what its actions give, what it says of bad input, and the page itself in a real Chromium."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from io import BytesIO

import numpy as np
import pytest
import torch
from commands import Command
from pictures import good_and_bad
from PIL import Image
from scripts import load_script
from tiny_codecs import save_tiny_codec, tiny_codec
from tiny_models import autoencoder, classifier

try:
    from selenium.webdriver.common.keys import Keys
except ImportError:  # the page is not tested then
    Keys = None

import finola
from finola.analysis.statistics import KEPT, Statistics, components_path, load_components, save_components
from finola.cli.playground import open_playground, sweep
from finola.cli.playground.actions import LARGEST, MOST_PIXELS, Playground
from finola.codec.container import OVERHEAD
from finola.data.examples import example_images, example_paths
from finola.errors import DataError, FinolaError, WeightsError
from finola.weights import save_weights, weights_hash

fails = Command("playground").fails
browsing = load_script("playground")

NEEDS_GRADIO = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs the extra 'app'")


# --- actions -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """With the shipped model and what stands beside its weights."""
    from argparse import Namespace

    threads = torch.get_num_threads()
    args = Namespace(model=None, weights=None, device="cpu")
    yield open_playground(args, tmp_path_factory.mktemp("playground"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def parrots(shipped):
    return shipped.open(example_paths()["parrots"])


def bare(tmp_path, **options):
    """With an untrained model and nothing beside its weights."""
    return Playground(autoencoder(**options), None, None, tmp_path)


def pixels(image):
    return np.asarray(image, dtype=int)


def test_a_photograph_is_rebuilt_as_by_reconstruct(shipped, parrots):
    expected = finola.reconstruct(shipped.model, example_images()["parrots"])
    shown = shipped.rebuild(parrots)
    assert abs(pixels(shown.image) - pixels(expected.reconstruction)).max() <= 1
    assert np.array_equal(pixels(parrots.square), pixels(expected.original))
    assert f"**{expected.psnr:.2f} dB**" in shown.words and "from 768 numbers, 64 times fewer" in shown.words


@pytest.mark.parametrize("size, words, large", [
    ((600, 400), "the centre square was cut out and resized to 128×128 pixels", 400),
    ((128, 128), "photo.png: resized to 128×128 pixels", 128),
    ((50, 40), "the centre square was cut out and enlarged to 128×128 pixels", 128),
    ((700, 700), "photo.png: resized to 128×128 pixels", 128 * LARGEST),
])
def test_what_is_done_to_a_photograph_is_said(shipped, tmp_path, size, words, large):
    example_images()["caps"].resize(size).save(tmp_path / "photo.png")
    photo = shipped.open(tmp_path / "photo.png")
    assert words in photo.words and photo.square.size == (128, 128) and photo.large.size == (large, large)


def test_bad_photographs_are_one_line(shipped, tmp_path):
    folder = good_and_bad(tmp_path / "pictures")
    assert MOST_PIXELS < 6000 * 9000
    Image.new("L", (9000, 6000)).save(folder / "large.png")
    Image.MAX_IMAGE_PIXELS, before = None, Image.MAX_IMAGE_PIXELS
    Image.new("1", (20_000, 15_000)).save(folder / "huge.png")  # 300 megapixels
    Image.MAX_IMAGE_PIXELS = before
    for name in ("cut.png", "empty.png", "text.jpg", "large.png", "huge.png", "missing.png"):
        with pytest.raises(DataError, match=f"^{name}: ") as error:
            shipped.open(folder / name)
        assert "\n" not in str(error.value)


def test_sliding_begins_and_ends_at_the_photographs(shipped, parrots):
    caps = shipped.open(example_paths()["caps"])
    for share, photo in ((0.0, parrots), (1.0, caps)):
        assert np.array_equal(pixels(shipped.slide(parrots, caps, share).image), pixels(shipped.rebuild(photo).image))
    middle = shipped.slide(parrots, caps, 0.25)
    assert middle.words == "q = 0.75 · q₁ + 0.25 · q₂"


def test_moving_along_components_and_through_the_mean(shipped, parrots):
    def moved(line, *steps):
        return shipped.move(parrots, line, (*steps, *[0] * (KEPT - len(steps))))

    rebuilt = pixels(shipped.rebuild(parrots).image)
    assert abs(pixels(moved(1).image) - rebuilt).max() <= 1 and moved(1).words.startswith("q itself; ")
    assert pixels(moved(0).image).std(axis=(0, 1)).max() < 20  # the mean is nearly gray everywhere
    mirrored = pixels(moved(-1).image)
    assert np.corrcoef(mirrored.ravel(), rebuilt.ravel())[0, 1] < -0.5
    assert moved(-1).words == "the mirror, 2m − q; mean and components of " + shipped.axes.of
    assert moved(-0.5).words.startswith("m − 0.50 · (q − m); ")
    step = moved(1, 0, -2)
    assert step.words.startswith("q itself, -2.0 σ2; ") and abs(pixels(step.image) - rebuilt).max() > 20


def test_a_component_s_deviation_is_that_of_photographs(shipped):
    """Along each component the vectors of other photographs lie within a few of its deviations from the mean."""
    mean, components = shipped.axes.mean, shipped.axes.components
    for path in example_paths().values():
        scores = (shipped.open(path).q[0].double() - mean) @ components.vectors / components.variances[:KEPT].sqrt()
        assert scores.abs().max() < 5
    assert 0.2 < components.explained(KEPT) < 0.9


def test_growth_is_an_animation(shipped, parrots):
    path, words = shipped.grow(parrots)
    with Image.open(path) as gif:
        assert (gif.format, gif.n_frames) == ("GIF", 9)
    assert "8×8 positions, from one vector of 768 numbers" in words


def test_quantised_numbers_are_a_file(shipped, parrots):
    pytest.importorskip("constriction")
    sizes, scores = [], []
    for bits in (1, 4, 8):
        shown, path = shipped.quantise(parrots, bits, entropy=False)
        data = path.read_bytes()
        assert len(data) == 96 * bits + OVERHEAD and f"**{96 * bits} bytes**" in shown.words
        assert np.array_equal(pixels(finola.codec.decompress(data)), pixels(shown.image))
        coded, path = shipped.quantise(parrots, bits, entropy=True)
        assert np.array_equal(pixels(coded.image), pixels(shown.image))
        sizes.append(path.stat().st_size / len(data))
        scores.append(float(shown.words.split("**")[3].split()[0]))
    assert max(sizes[1:]) < 1 and scores == sorted(scores)
    assert f"**{scores[1]:.2f} dB**" in shipped.quantise(parrots, 4, False)[0].words


@pytest.mark.parametrize("grid", ["map", "pixels"])
def test_finer_grids_are_larger_images(shipped, parrots, grid):
    by_law, enlarged, original, words = shipped.finer(parrots, 2, grid)
    assert by_law.size == enlarged.size == original.size == (256, 256) and words.count(" dB") == 2
    assert finola.psnr(*(finola.data.to_tensor(image)[None] for image in (by_law, original))) > 15
    *_, words = shipped.finer(parrots, 3, grid)  # 384 pixels, and the photograph has 256
    assert "nothing to compare with" in words and "dB" not in words


def test_what_is_missing_beside_the_weights_is_named(tmp_path):
    playground = bare(tmp_path)
    photo = playground.open(example_paths()["caps"])
    for action, what in ((lambda: playground.move(photo, 0, [0]), "principal components"),
                         (lambda: playground.quantise(photo, 4, False), "calibration")):
        with pytest.raises(FinolaError, match=f"no {what} beside these weights; finola calibrate"):
            action()
    playground = bare(tmp_path, autoregression="repeat")
    for action in (playground.grow, lambda photo: playground.finer(photo, 2, "map")):
        with pytest.raises(FinolaError, match="obeys no differential equation"):
            action(photo)


# --- the file of components --------------------------------------------------------------------------------


def statistics_of(q):
    statistics = Statistics(q.shape[1])
    statistics.add(q)
    return statistics


def test_components_come_back_from_their_file(tmp_path):
    q = torch.randn(50, 16, dtype=torch.float64) * torch.linspace(3, 1, 16) + 1
    save_components(statistics_of(q), tmp_path / "c.safetensors", "abc", "somewhere")
    mean, components, of = load_components(tmp_path / "c.safetensors", "abc")
    assert torch.allclose(mean, q.mean(0)) and of == "50 images of somewhere"
    assert torch.allclose(components.vectors.T @ components.vectors, torch.eye(KEPT).double(), atol=1e-6)
    scores = (q - q.mean(0)) @ components.vectors
    assert torch.allclose(scores.var(0), components.variances[:KEPT], rtol=1e-4)
    assert (components.vectors.gather(0, components.vectors.abs().argmax(0, keepdim=True)) > 0).all()
    assert (tmp_path / "c.safetensors").stat().st_size < 2000


def test_components_of_other_weights_or_damaged_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = tmp_path / "c.safetensors"
    save_components(statistics_of(torch.randn(50, 16)), path, "abc", "somewhere")
    with pytest.raises(WeightsError, match="of the weights abc, expected"):
        load_components(path, "def")
    tensors, header = load_file(path), {"format": "finola-components/1", "weights_sha256": "abc"}
    for change in ({"mean": torch.full((16,), torch.nan)}, {"vectors": torch.zeros(16, 2)}):
        save_file({**tensors, **change}, path, header)
        with pytest.raises(WeightsError, match="make it again with finola calibrate"):
            load_components(path, "abc")
    path.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        load_components(path, "abc")


def test_calibrate_makes_both_files(tmp_path, capsys):
    weights = save_weights(tiny_codec().model, tmp_path / "mine.safetensors")
    for i in range(12):
        image = example_images()["caps"].rotate(30 * i).resize((40, 40))
        image.save(tmp_path / f"{i}.png")
    code, printed, _ = Command("calibrate")(capsys, "--weights", weights, "--data", tmp_path, "--json")
    assert code == 0 and json.loads(printed)["components"] == str(components_path(weights))
    mean, components, of = load_components(components_path(weights), weights_hash(weights))
    assert len(mean) == 16 and components.vectors.shape == (16, KEPT) and of.startswith("12 images of ")


def test_the_shipped_components_belong_to_the_shipped_weights(shipped):
    assert shipped.codec is not None and shipped.axes is not None


# --- the command -------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = fails(capsys, 2, "--port", port)
        assert f"--port: {port} on 127.0.0.1 cannot be used" in line and "choose another" in line


def test_old_images_are_swept(tmp_path):
    for name in ("old/a.png", "old/b.png", "new/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        if name.startswith("old"):
            os.utime(tmp_path / name, (0, 0))
    sweep(tmp_path, 60)
    assert [path.name for path in tmp_path.rglob("*.png")] == ["c.png"]


@pytest.mark.parametrize("port", ["80", "65536", "many"])
def test_ports_out_of_range(port, capsys):
    with pytest.raises(SystemExit) as error:
        finola.cli.main.main(["playground", "--port", port])
    assert error.value.code == 2 and "expected a port from 1024 to 65535" in capsys.readouterr().err


def test_without_gradio_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    for name in ("GRADIO_TEMP_DIR", "no_proxy", "NO_PROXY"):  # set by the command; this puts them back
        monkeypatch.setenv(name, "")
    assert "pip install 'finola[app]'" in fails(capsys, 2, "--port", browsing.free_port())


@pytest.mark.slow
@NEEDS_GRADIO
@pytest.mark.parametrize("which, message", [("classifier", "got a model of kind 'classifier', expected an autoencoder"),
                                            ("missing", "no such file"), ("other", "expected those of")])
def test_weights_that_do_not_serve_end_it(which, message, tmp_path):
    path = tmp_path / f"{which}.safetensors"
    if which == "classifier":
        save_weights(classifier(), path)
    if which == "other":
        path = save_tiny_codec(tmp_path)
        save_components(statistics_of(torch.randn(9, 16)), components_path(path), "other", "somewhere")
        message = "expected 'finola-components/1' of"
    words = ["-m", "finola.cli", "playground", "--port", str(browsing.free_port()), "--weights", str(path)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 4 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("finola playground: ") and message in done.stderr
    assert not list(tmp_path.glob("finola-playground-*"))


# --- the page in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the shipped model at 1280 pixels, its process, and its port; ended as by a user, which is checked."""
    pytest.importorskip("gradio", reason="needs the extra 'app'")
    pytest.importorskip("selenium", reason="needs the extra 'dev'")
    if not (browsing.CHROMIUM and browsing.DRIVER):
        pytest.skip("needs Debian's chromium and chromium-driver")
    folder, port = tmp_path_factory.mktemp("page"), browsing.free_port()
    surroundings = {"TMPDIR": str(folder), "HTTP_PROXY": "http://127.0.0.1:1", "GRADIO_SHARE": "true",
                    "GRADIO_ANALYTICS_ENABLED": "True", "GRADIO_SERVER_NAME": "0.0.0.0"}  # which must not matter
    with browsing.browser() as driver, browsing.playground(port, **surroundings) as process:
        browsing.visit(driver, port)
        yield driver
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert list(folder.iterdir()) == []  # what was dropped on the page is gone


@pytest.fixture
def fresh(page):
    """The page as it begins: parrots, rebuilt."""
    page.refresh()
    says(page, "times fewer than the square has")
    return page


def says(driver, text):
    """Wait for a line with this text, and return it."""
    return browsing.until(lambda: next((line for line in browsing.lines(driver) if text in line), None), text)


def click(driver, tag, text):
    next(element for element in driver.find_elements("tag name", tag) if element.text == text).click()


def figures(driver):
    """Label -> (file, width, height) of the images in sight."""
    return driver.execute_script("""return Object.fromEntries([...document.querySelectorAll(".figure")]
        .filter(block => block.offsetParent && block.querySelector("img")).map(block => {
            const image = block.querySelector("img");
            return [block.querySelector("label").innerText.trim(), [image.src, image.naturalWidth, image.naturalHeight]]
        }))""")


def downloaded(driver, label):
    """The file behind the download button of the image with this label."""
    link = driver.execute_script("""return [...document.querySelectorAll(".figure")].find(block => block.offsetParent
        && block.querySelector("label").innerText.trim() === arguments[0]).querySelector("a[download]").href""", label)
    with urllib.request.urlopen(link) as answer:
        return answer.read(), link.rsplit("/", 1)[1]


def image_of(driver, label):
    data, _ = downloaded(driver, label)
    return pixels(Image.open(BytesIO(data)))


@pytest.mark.slow
def test_a_photograph_is_rebuilt_on_the_page(fresh, shipped, parrots, tmp_path):
    assert says(fresh, "parrots.jpg") == "parrots.jpg: resized to 128×128 pixels."
    data, name = downloaded(fresh, "painted from q")
    assert name == "rebuilt.png"
    assert abs(pixels(Image.open(BytesIO(data))) - pixels(shipped.rebuild(parrots).image)).max() <= 1
    assert np.array_equal(image_of(fresh, "the photograph"), pixels(parrots.square))
    before = figures(fresh)
    fresh.find_elements("css selector", ".shelf button")[0].click()
    score = shipped.rebuild(shipped.open(example_paths()["caps"])).words.split("**")[1]
    assert says(fresh, "caps.jpg") and says(fresh, score)
    assert before.keys() == figures(fresh).keys() and before != figures(fresh)
    example_images()["lighthouse"].resize((900, 600)).save(tmp_path / "a_wide_ *one* <b>.jpg", quality=95)
    browsing.drop(fresh, tmp_path / "a_wide_ *one* <b>.jpg")
    assert says(fresh, "the centre square was cut out and resized to 128×128 pixels").startswith("a_wide_ ")
    assert fresh.find_elements("css selector", ".words b, .words em") == []


@pytest.mark.slow
def test_a_bad_upload_is_one_line(fresh, tmp_path):
    pictures = good_and_bad(tmp_path / "pictures")
    Image.MAX_IMAGE_PIXELS, before = None, Image.MAX_IMAGE_PIXELS
    Image.new("1", (20_000, 15_000)).save(pictures / "huge.png")
    Image.MAX_IMAGE_PIXELS = before
    (pictures / "notes.txt").write_text("no image")
    shown, line_before = figures(fresh), says(fresh, " dB")
    for name, fault in (("cut.png", "damaged image"), ("empty.png", "is empty"), ("text.jpg", "is not an image"),
                        ("notes.txt", "is not an image"), ("huge.png", "far more than 89,478,485 pixels")):
        browsing.drop(fresh, pictures / name)
        line = says(fresh, name)
        assert fault in line and "\n" not in line and "Traceback" not in line
        assert fresh.find_element("css selector", ".fault").text == line
        assert figures(fresh) == shown and says(fresh, " dB") == line_before  # what was there stays
    browsing.drop(fresh, pictures / "good.png")
    assert "enlarged to 128×128" in says(fresh, "good.png") and not fresh.find_elements("css selector", ".fault")
    with open(pictures / "long.jpg", "wb") as file:
        file.truncate(101 * 2**20)
    browsing.drop(fresh, pictures / "long.jpg")
    toast = "exceed the maximum allowed size"
    browsing.until(lambda: toast in fresh.find_element("tag name", "body").text, toast)


@pytest.mark.slow
def test_sliding_between_two_photographs(fresh, shipped, parrots, tmp_path):
    browsing.open_tab(fresh, "Slide")
    assert says(fresh, "q₂") == "q = 0.50 · q₁ + 0.50 · q₂"
    browsing.slide_to_end(fresh, "from the first", Keys.END)
    says(fresh, "1.00 · q₂")
    lighthouse = shipped.open(example_paths()["lighthouse"])
    end = pixels(shipped.rebuild(lighthouse).image)
    assert abs(image_of(fresh, "painted between the two") - end).max() <= 1
    browsing.slide_to_end(fresh, "from the first", Keys.HOME)
    says(fresh, "1.00 · q₁")
    assert abs(image_of(fresh, "painted between the two") - pixels(shipped.rebuild(parrots).image)).max() <= 1
    example_images()["caps"].rotate(90).save(tmp_path / "turned.png")
    browsing.drop(fresh, tmp_path / "turned.png", place=1)
    says(fresh, "turned.png: resized")
    turned = pixels(shipped.open(tmp_path / "turned.png").square)
    browsing.until(lambda: np.array_equal(image_of(fresh, "second"), turned), "the second photograph")
    assert np.array_equal(image_of(fresh, "first"), pixels(parrots.square))


@pytest.mark.slow
def test_moving_along_components(fresh, shipped, parrots):
    browsing.open_tab(fresh, "Components")
    says(fresh, f"q itself; mean and components of {shipped.axes.of}")
    rebuilt = image_of(fresh, "painted from the moved vector")
    browsing.slide_to_end(fresh, "component 2", Keys.END)
    says(fresh, "q itself, +3.0 σ2")
    assert abs(image_of(fresh, "painted from the moved vector") - rebuilt).max() > 20
    browsing.slide_to_end(fresh, "mirror", Keys.HOME)
    says(fresh, "the mirror, 2m − q, +3.0 σ2")
    click(fresh, "button", "Back to the photograph")
    says(fresh, "q itself; ")
    assert np.array_equal(image_of(fresh, "painted from the moved vector"), rebuilt)
    values = [s.get_attribute("value") for s in fresh.find_elements("css selector", "input[type=range]")
              if s.is_displayed()]
    assert values == ["1", *["0"] * KEPT]


@pytest.mark.slow
def test_the_map_grows(fresh):
    browsing.open_tab(fresh, "Grow")
    says(fresh, "8×8 positions")
    data, name = downloaded(fresh, "the law at work")
    with Image.open(BytesIO(data)) as gif:
        assert (name, gif.format, gif.n_frames) == ("growth.gif", "GIF", 9)
    (file, width, height), = figures(fresh).values()
    assert (width, height) == (524, 296)


@pytest.mark.slow
def test_quantising(fresh, shipped, parrots, tmp_path):
    pytest.importorskip("constriction")
    browsing.open_tab(fresh, "Quantise")
    coded = says(fresh, "768 of 4 bits, entropy coded")
    fresh.find_element("css selector", "input[type=checkbox]").click()
    plain = says(fresh, "384 bytes, 0.188 bit")
    score = shipped.quantise(parrots, 4, False)[0].words.split("**")[3]
    assert "412 bytes with its header" in plain and score in plain and score in coded
    browsing.slide_to_end(fresh, "bits for each", Keys.HOME)
    assert "96 bytes" in says(fresh, "768 of 1 bit")
    fresh.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    click(fresh, "button", "Download the .fnl file")
    file = tmp_path / "photograph.fnl"
    browsing.until(file.exists, "the file")
    restored = finola.codec.decompress(file.read_bytes())
    assert np.array_equal(pixels(restored), image_of(fresh, "painted from the quantised vector"))


@pytest.mark.slow
def test_finer_grids(fresh, tmp_path):
    browsing.open_tab(fresh, "Finer grid")
    assert says(fresh, "256×256 pixels from the same 768 numbers").count(" dB") == 2
    click(fresh, "label", "3×")
    assert "nothing to compare with" in says(fresh, "384×384 pixels")  # the photograph has 256
    browsing.until(lambda: {width for _, width, _ in figures(fresh).values()} == {384}, "384 pixels")
    click(fresh, "label", "finer map")
    example_images()["caps"].resize((600, 500)).save(tmp_path / "large.png")
    browsing.drop(fresh, tmp_path / "large.png")
    assert says(fresh, "by the law").count(" dB") == 2


@pytest.mark.slow
def test_the_page_fits_a_telephone_and_loads_nothing_from_elsewhere(page):
    screen = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    page.refresh()
    says(page, "times fewer than the square has")
    for title, text in zip(browsing.TABS, ("dB", "q₂", "q itself", "8×8", "dB", "by the law"), strict=True):
        browsing.open_tab(page, title)
        says(page, text)
        assert page.execute_script("return document.documentElement.scrollWidth") <= 400, title
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen | {"width": 1280})
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    asked = {url for url in asked if not url.startswith(("chrome", "data:", "blob:"))}
    assert len(asked) > 20 and all(url.startswith(page.current_url) for url in asked)
    assert not [entry for entry in page.get_log("browser") if "Content Security Policy" in entry["message"]]
