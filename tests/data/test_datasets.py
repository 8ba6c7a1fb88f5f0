"""Folders, shards and packing: faults are named, nothing is replaced silently, nothing half-written stays."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from finola.cli import main as cli
from finola.data import Augment, Batches, ImageFolder, Shards, build_loader, check_same_classes, open_data
from finola.data.in_memory import ResidentImages, ResidentLoader
from finola.data.pack import Encoding, pack
from finola.errors import DataError, RecipeError


def make_images(folder, count, side=12):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (side + i, side), (i * 20, 0, 0)).save(folder / f"{i:02d}.png")
    return folder


@pytest.fixture
def folder(tmp_path):
    """Two classes of four images."""
    for name in ("cat", "dog"):
        make_images(tmp_path / "data" / name, 4)
    return tmp_path / "data"


@pytest.fixture
def one_bad(folder):
    """... of which dog/01.png is cut short."""
    path = folder / "dog" / "01.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    path.write_bytes(path.read_bytes()[:1000])
    return folder


# --- folders -----------------------------------------------------------------------------------------------


def test_missing_and_empty_folders_are_named(tmp_path):
    with pytest.raises(DataError, match="absent: no such folder"):
        ImageFolder(tmp_path / "absent")
    with pytest.raises(DataError, match="0 images in 0 sub-folders; .*png"):
        ImageFolder(tmp_path)
    (tmp_path / "notes.md").write_text("no image")
    with pytest.raises(DataError, match="0 images"):
        ImageFolder(tmp_path)


def test_an_empty_class_folder_is_named_with_counts(folder):
    (folder / "emu").mkdir()
    with pytest.raises(DataError, match=r"1 of 3 class folders hold no image \(emu\)"):
        ImageFolder(folder)


def test_class_mismatch_shows_both_sides(folder, tmp_path):
    make_images(tmp_path / "val" / "dog", 1)
    make_images(tmp_path / "val" / "emu", 1)
    make_images(tmp_path / "val" / "fox", 1)
    train, val = ImageFolder(folder), ImageFolder(tmp_path / "val")
    with pytest.raises(DataError, match=r"2 in .*data, 3 in .*val; .*first: cat; .*second: emu, fox"):
        check_same_classes(train, val)
    check_same_classes(train, ImageFolder(folder))


def test_a_link_that_leads_back_is_not_followed(folder):
    (folder / "cat" / "again").symlink_to(folder)
    assert len(ImageFolder(folder)) == 8


def test_linked_folders_and_files_are_followed(folder, tmp_path):
    make_images(tmp_path / "elsewhere", 2)
    (folder / "emu").symlink_to(tmp_path / "elsewhere")
    assert ImageFolder(folder).labels.tolist() == [0] * 4 + [1] * 4 + [2] * 2


# --- images that cannot be decoded -------------------------------------------------------------------------


def loader_of(kind, data, train):
    if kind == "resident":
        images = ResidentImages(data, 8, skip_bad=train, progress=False)
        return ResidentLoader(images, Batches(4, train), image_size=8)
    return build_loader(data, Batches(4, train), image_size=8, num_workers=2 if kind == "workers" else 0)


@pytest.mark.filterwarnings("ignore:image left out")
@pytest.mark.parametrize("kind", ["folder", "workers", "resident"])
def test_training_leaves_a_bad_image_out_and_counts_it(one_bad, kind):
    data = ImageFolder(one_bad)
    loader = loader_of(kind, data, train=True)
    with pytest.warns(UserWarning, match="dog/01.png: damaged"):
        batches = list(loader)
    assert sorted(len(batch["image"]) for batch in batches) == [3, 4]
    assert sorted(i for batch in batches for i in batch["index"].tolist()) == [0, 1, 2, 3, 4, 6, 7]
    assert loader.skipped == 1


@pytest.mark.parametrize("kind", ["folder", "resident"])
def test_evaluation_stops_at_a_bad_image(one_bad, kind):
    with pytest.raises(DataError, match="dog/01.png: damaged") as error:
        list(loader_of(kind, ImageFolder(one_bad), train=False))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:image left out")
@pytest.mark.parametrize("kind", ["folder", "resident"])
def test_training_stops_if_nothing_of_a_batch_is_left(tmp_path, kind):
    for i in range(4):
        (tmp_path / f"{i}.jpg").write_text("not an image")
    with pytest.raises(DataError, match="no image of a batch of 4"):
        list(loader_of(kind, ImageFolder(tmp_path), train=True))


def test_too_few_images_for_a_batch(folder):
    with pytest.raises(DataError, match="8 images do not fill a batch of 9"):
        build_loader(ImageFolder(folder), Batches(9, train=True), image_size=8)


@pytest.mark.parametrize("scale", [(0, 1), (0.5, 0.2), (0.2, 1.1)])
def test_a_crop_scale_out_of_range_is_refused(scale):
    with pytest.raises(RecipeError, match="crop_scale: got"):
        Augment(scale)


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch_size": 2}])
def test_resuming_with_other_batches_is_refused(folder, change):
    options = dict(batch_size=4, train=True)
    state = build_loader(ImageFolder(folder), Batches(**options), image_size=8).state_dict()
    with pytest.raises(RecipeError, match="seed was 0, is 1|global_batch was 4, is 2"):
        build_loader(ImageFolder(folder), Batches(**options | change), image_size=8).load_state_dict(state)


def test_resuming_with_other_images_is_refused(folder):
    state = build_loader(ImageFolder(folder), Batches(4, train=True), image_size=8).state_dict()
    make_images(folder / "dog", 5)
    with pytest.raises(RecipeError, match="images was 8, is 9"):
        build_loader(ImageFolder(folder), Batches(4, train=True), image_size=8).load_state_dict(state)


def test_evaluation_at_another_size_than_the_stored_one_is_refused(folder):
    images = ResidentImages(ImageFolder(folder), 10, progress=False)
    with pytest.raises(RecipeError, match="at 8 px images stored at 10 px"):
        ResidentLoader(images, Batches(4, train=False), image_size=8)


# --- shards ------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(folder, tmp_path):
    """The eight images in three shards."""
    pack(ImageFolder(folder), tmp_path / "shards", Encoding(8), shard_size=3, progress=False)
    return tmp_path / "shards"


def test_a_folder_without_shards_is_named(tmp_path):
    with pytest.raises(DataError, match="no shard"):
        Shards(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 700, 2048])
def test_a_shard_cut_short_anywhere_is_named(shards, keep, indexed):
    path = shards / "shards-000001.tar"
    path.write_bytes(path.read_bytes()[:keep])
    if not indexed:
        (shards / "index.json").unlink()
    with pytest.raises(DataError, match="shards-000001.tar: "):
        Shards(shards)


def test_a_damaged_header_within_a_shard_is_not_taken_for_its_end(shards):
    (shards / "index.json").unlink()
    path = shards / "shards-000000.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"000000001.jpg") + 124] ^= 0xFF  # in the size field of the second image
    path.write_bytes(data)
    with pytest.raises(DataError, match="shards-000000.tar: damaged"):
        Shards(shards)


def test_a_damaged_image_within_a_shard_is_named(shards):
    path = shards / "shards-000000.tar"
    data = bytearray(path.read_bytes())
    start = data.index(b"\xff\xd8\xff")
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(DataError, match="shards-000000.tar, byte 512: "):
        Shards(shards).load(0)


def test_a_missing_shard_is_named(shards):
    (shards / "shards-000002.tar").unlink()
    with pytest.raises(DataError, match="shards-000002.tar: no bytes, index.json says"):
        Shards(shards)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"shards": [1]}'])
def test_a_damaged_index_is_named(shards, text):
    (shards / "index.json").write_text(text)
    with pytest.raises(DataError, match="index.json: damaged index"):
        Shards(shards)


@pytest.mark.parametrize(
    "row", [(3, 0, 9, 0), (0, 10**9, 9, 0), (0, 0, 2**62, 0), (0, -1, 9, 0), (0, 0, 9, 2)]
)
def test_an_index_that_points_elsewhere_is_named(shards, row):
    samples = np.load(shards / "index.npy")
    samples[0] = row
    np.save(shards / "index.npy", samples)
    with pytest.raises(DataError, match="index.npy: damaged"):
        Shards(shards)


def test_a_compressed_tar_is_refused(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"\x1f\x8b\x08" + bytes(2000))
    with pytest.raises(DataError, match="a.tar: damaged tar file"):
        open_data([path])


# --- finola pack -------------------------------------------------------------------------------------------


@pytest.fixture
def finola(monkeypatch):
    """The command line with `pack` alone."""
    monkeypatch.setattr(cli, "COMMANDS", ("pack",))
    return lambda *args: cli.main(["pack", *map(str, args)])


def left_behind(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "data")


def test_pack_goes_on_past_a_bad_image_and_exits_3(one_bad, tmp_path, finola, capsys):
    assert finola(one_bad, "--out", tmp_path / "out", "--json") == 3
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["images"] == 7 and len(report["bad"]) == 1
    assert "dog/01.png" in err and "1 of 8 images could not be decoded" in err
    assert Shards(tmp_path / "out").labels.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_pack_refuses_a_folder_that_is_not_empty(folder, tmp_path, finola, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    assert finola(folder, "--out", out) == 3
    assert "out: not empty" in capsys.readouterr().err
    assert left_behind(out) == ["precious"]


def test_pack_writes_nothing_if_nothing_can_be_packed(tmp_path, finola, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jpg").write_text("not an image")
    assert finola(tmp_path / "data", "--out", tmp_path / "out") == 3
    assert "none of the 1 images" in capsys.readouterr().err
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("option", ["--size", "--quality", "--shard-size", "--workers"])
def test_pack_refuses_numbers_out_of_range(folder, tmp_path, finola, capsys, option):
    assert finola(folder, "--out", tmp_path / "out", option, 0) == 2
    assert f"{option[2:].replace('-', '_')}: got 0" in capsys.readouterr().err
    assert left_behind(tmp_path) == []


def test_a_full_disk_leaves_nothing(folder, tmp_path, finola, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert finola(folder, "--out", tmp_path / "out") == 3
    assert "No space left on device" in capsys.readouterr().err
    assert left_behind(tmp_path) == []


def test_an_output_folder_that_cannot_be_made_is_named(folder, tmp_path, finola, capsys):
    (tmp_path / "file").touch()
    assert finola(folder, "--out", tmp_path / "file" / "out") == 3
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_half_written(tmp_path, number, code):
    (tmp_path / "data").mkdir()
    Image.effect_noise((1000, 1000), 50).convert("RGB").save(tmp_path / "data" / "0.bmp")
    for i in range(1, 300):
        os.link(tmp_path / "data" / "0.bmp", tmp_path / "data" / f"{i}.bmp")
    arguments = ["pack", tmp_path / "data", "--out", tmp_path / "out", "--size", "900", "--shard-size", "5"]
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)  # a job in the background ignores SIGINT
    process = subprocess.Popen([sys.executable, "-m", "finola.cli", *arguments], stderr=subprocess.PIPE, text=True,
                               preexec_fn=heard)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out-*/*.tar")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert left_behind(tmp_path) == []
