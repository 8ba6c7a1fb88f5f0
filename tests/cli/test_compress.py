"""`finola compress` and `decompress` on many files and folders: what is left out, what is refused, what is said."""

import json
import shutil

import pytest
from commands import Command
from pictures import good_and_bad, photo
from PIL import Image
from tiny_codecs import save_tiny_codec

compress, decompress = Command("compress"), Command("decompress")


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Of a tiny codec, with the calibration beside them."""
    return save_tiny_codec(tmp_path_factory.mktemp("codec"))


@pytest.fixture
def holidays(tmp_path):
    """holidays/{a.png, day1/a.jpg, day2/b.png, .hidden/c.png, notes.txt}."""
    top = tmp_path / "holidays"
    for i, name in enumerate(["a.png", "day1/a.jpg", "day2/b.png", ".hidden/c.png"]):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        photo(40 + i, 36, seed=i).save(top / name)
    (top / "notes.txt").write_text("no image")
    return top


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_folders_keep_their_subfolders_there_and_back(holidays, weights, tmp_path, capsys):
    single = tmp_path / "single.webp"
    photo(33, 50).save(single)
    packed, restored = tmp_path / "packed", tmp_path / "restored"
    code, printed, errors = compress(capsys, holidays, single, "--out", packed, "--weights", weights)
    assert (code, errors) == (0, [])
    assert files(packed) == ["a.fnl", "day1/a.fnl", "day2/b.fnl", "single.fnl"]
    lines = printed.splitlines()
    size = sum(path.stat().st_size for path in packed.rglob("*.fnl"))
    assert len(lines) == 5 and lines[-1] == f"4 images in {size:,} bytes; in {packed}"
    assert lines[0].startswith(f"{packed / 'a.fnl'}: 40x36 pixels in ")
    code, printed, errors = decompress(capsys, packed, "--out", restored, "--weights", weights)
    assert (code, errors) == (0, []) and printed.splitlines()[-1] == f"4 images in {restored}"
    assert files(restored) == ["a.png", "day1/a.png", "day2/b.png", "single.png"]
    assert Image.open(restored / "day1" / "a.png").size == (41, 36)


def test_the_same_bytes_as_one_by_one(holidays, weights, tmp_path, capsys):
    assert compress(capsys, holidays / "a.png", tmp_path / "one.fnl", "--weights", weights)[0] == 0
    assert compress(capsys, holidays, "--out", tmp_path / "many", "--weights", weights)[0] == 0
    assert (tmp_path / "one.fnl").read_bytes() == (tmp_path / "many" / "a.fnl").read_bytes()


def test_bad_images_are_left_out(weights, tmp_path, capsys):
    pictures, out = good_and_bad(tmp_path / "pictures"), tmp_path / "out"
    (tmp_path / "nothing").mkdir()
    words = [pictures, pictures / "missing.png", tmp_path / "nothing", "--out", out, "--weights", weights]
    code, printed, errors = compress(capsys, *words)
    assert code == 3 and files(out) == ["good.fnl", "other.fnl"] and "2 images in" in printed
    for name in ("cut.png", "empty.png", "text.jpg", "missing.png", "nothing"):
        assert sum(line.startswith("failed: ") and name in line for line in errors) == 1
    assert len(errors) == 6 and errors[-1].startswith("finola compress: 5 of 7 failed; the first: ")
    code, printed, errors = compress(capsys, *words, "--json")
    report = json.loads(printed)
    assert code == 3 and report["images"] == 2 and len(report["failed"]) == 5
    assert report["bytes"] == sum(file["bytes"] for file in report["files"])
    assert {file["image"] for file in report["files"]} == {str(pictures / "good.png"), str(pictures / "other.jpg")}


def test_the_exit_code_is_that_of_the_worst(holidays, weights, tmp_path, capsys):
    packed, restored = tmp_path / "packed", tmp_path / "restored"
    assert compress(capsys, holidays, "--out", packed, "--weights", weights)[0] == 0
    (packed / "damaged.fnl").write_bytes((packed / "a.fnl").read_bytes()[:-3])
    (tmp_path / "nothing").mkdir()  # no file there: 3; a damaged one: 4
    code, printed, errors = decompress(capsys, tmp_path / "nothing", packed, "--out", restored, "--weights", weights,
                                       "--json")
    assert code == 4 and files(restored) == ["a.png", "day1/a.png", "day2/b.png"]
    assert "2 of 5 failed; the first: " in errors[-1] and "no .fnl file there" in errors[-1]
    report = json.loads(printed)
    assert [len(report["files"]), len(report["failed"])] == [3, 2]
    # an image that cannot become so small is left out too
    words = ["--out", tmp_path / "small", "--weights", weights, "--target-size", 5]
    assert compress(capsys, holidays, *words)[0] == 2 and not (tmp_path / "small").exists()


@pytest.mark.parametrize("names", [("a.png", "a.jpg"), ("one/a.png", "two/a.png"), ("one/a.png", "two/A.jpg")])
def test_two_images_of_one_name_are_refused_before_any_work(names, weights, tmp_path, capsys):
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        photo().save(path)
    line = compress.fails(capsys, 2, *paths, "--out", tmp_path / "out", "--weights", weights)
    assert all(str(path) in line for path in paths) and "would both become" in line
    assert not (tmp_path / "out").exists()


def test_an_image_named_twice_is_one(holidays, weights, tmp_path, capsys):
    words = [holidays, holidays / "a.png", "--out", tmp_path / "out", "--weights", weights]
    code, printed, _ = compress(capsys, *words)
    assert code == 0 and printed.splitlines()[-1].startswith("3 images")


def test_what_was_photographed_is_never_overwritten(holidays, weights, tmp_path, capsys):
    packed = tmp_path / "packed"
    assert compress(capsys, holidays, "--out", packed, "--weights", weights)[0] == 0
    for path in packed.rglob("*.fnl"):
        shutil.copy(path, holidays / path.relative_to(packed))
    before = {path: path.read_bytes() for path in holidays.rglob("*") if path.is_file()}
    for command in (compress, decompress):
        assert "choose another folder" in command.fails(capsys, 2, holidays, "--out", holidays, "--weights", weights)
    line = decompress.fails(capsys, 2, holidays / "day1", holidays / "day2" / "b.fnl", "--out", holidays / "day1",
                            "--weights", weights)
    assert "choose another folder" in line
    assert before == {path: path.read_bytes() for path in holidays.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", [["a.png"], ["a.png", "b.png", "c.fnl"]])
def test_without_a_folder_it_is_one_pair(words, weights, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, names in ((compress, "PHOTO OUT.fnl"), (decompress, "IN.fnl PHOTO.png")):
        line = command.fails(capsys, 2, *words, "--weights", weights)
        assert f"expected {names}; or --out DIR" in line


def test_options_are_checked_before_anything_is_read(holidays, weights, tmp_path, capsys):
    words = [holidays, "--out", tmp_path / "out", "--weights", weights]
    assert "expected 1 to 8" in compress.fails(capsys, 2, *words, "--bits", 9)
    assert "quality: got 200" in compress.fails(capsys, 2, *words, "--quality", 200)
    assert "--no-entropy" in compress.fails(capsys, 2, *words, "--target-bpp", 1, "--no-entropy")
    (tmp_path / "file").touch()
    assert "is a file" in compress.fails(capsys, 2, holidays, "--weights", weights, "--out", tmp_path / "file")
