"""Every kind of image becomes one defined RGB image, or a DataError that names the file."""

import contextlib
import io
import os
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from finola.data.images import (
    SUFFIXES,
    center_crop,
    decode_image,
    lost,
    resize_shorter,
    to_rgb,
    to_tensor,
    to_uint8,
    upright_rgb,
)
from finola.drawing import to_image
from finola.errors import DataError, RecipeError


def photo(width=48, height=32):
    """A smooth RGB image in which all pixels differ."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 5, y * 7, x * 2 + y * 3], axis=-1).astype(np.uint8))


def saved(image, path, **options):
    image.save(path, **options)
    return path


def pixel(image, xy=(0, 0)):
    assert image.mode == "RGB"
    return image.getpixel(xy)


# --- damaged and missing files -------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".gif", ".tif", ".avif"])
def test_a_body_cut_short_is_an_error_that_names_the_file(tmp_path, suffix):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    path = saved(noise, tmp_path / f"cut{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=f"cut{suffix}") as error:
        decode_image(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_a_file_cut_or_changed_anywhere_gives_an_image_or_a_data_error(tmp_path, suffix):
    whole = saved(photo(24, 16), tmp_path / f"whole{suffix}").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(whole[: rng.integers(len(whole) + 1)])
        for place in rng.integers(len(data), size=min(2, len(data))) if data else ():
            data[place] ^= 1 << rng.integers(8)
        with contextlib.suppress(DataError):
            assert decode_image(bytes(data)).mode == "RGB"


def test_what_is_not_an_image_is_named(tmp_path):
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "dangling.jpg").symlink_to(tmp_path / "gone")
    expected = {
        "text.jpg": "not an image",
        "empty.jpg": "is empty",
        "folder.jpg": "is a directory",
        "dangling.jpg": "link to a file that is not there",
        "missing.jpg": "no such file",
    }
    for name, what in expected.items():
        with pytest.raises(DataError, match=rf"{name}: .*{what}"):
            decode_image(tmp_path / name)


@pytest.mark.parametrize("data, what", [(b"", "is empty"), (b"abc", "not an image")])
def test_bytes_and_open_files_are_checked_alike(data, what):
    with pytest.raises(DataError, match=what):
        decode_image(data)
    with pytest.raises(DataError, match=f"upload.jpg: .*{what}"):
        decode_image(io.BytesIO(data), name="upload.jpg")


def test_a_file_without_read_permission_is_named():
    as_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = saved(photo(), Path(folder) / "secret.png")
        path.chmod(0)
        if as_root:  # root reads everything, so be nobody for a moment
            os.seteuid(65534)
        try:
            with pytest.raises(DataError, match="secret.png: no permission"):
                decode_image(path)
        finally:
            if as_root:
                os.seteuid(0)


# --- oversized images ---------------------------------------------------------------------------


def png_header(width, height):
    """A PNG of a few bytes that declares width x height pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 16)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 60_000])  # within the band where Pillow only warns, and beyond it
def test_a_decompression_bomb_is_refused_before_its_pixels_are_allocated(tmp_path, side, monkeypatch):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(side, side))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("the body was decoded"))
    with pytest.raises(DataError, match="bomb.png: .*pixels"):
        decode_image(path)


def test_the_limit_is_an_argument(tmp_path):
    path = saved(photo(48, 32), tmp_path / "a.png")
    assert decode_image(path, max_pixels=48 * 32).size == (48, 32)
    with pytest.raises(DataError, match=r"48x32 .*1,535 pixels"):
        decode_image(path, max_pixels=48 * 32 - 1)


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [s for s in SUFFIXES if s not in (".jpg", ".jpeg", ".avif", ".gif")])
def test_lossless_formats_come_back_exactly(tmp_path, suffix):
    options = {"lossless": True} if suffix == ".webp" else {}
    path = saved(photo(), tmp_path / f"a{suffix}", **options)
    assert np.array_equal(decode_image(path), photo())
    assert np.array_equal(decode_image(path.read_bytes()), photo())
    with open(path, "rb") as file:
        assert np.array_equal(decode_image(file), photo())


@pytest.mark.parametrize(
    "image, expected",
    [
        (Image.new("1", (2, 2), 1), (255, 255, 255)),
        (Image.new("L", (2, 2), 77), (77, 77, 77)),
        (Image.new("LA", (2, 2), (0, 0)), (255, 255, 255)),
        (Image.new("LA", (2, 2), (77, 255)), (77, 77, 77)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (2, 2), (255, 0, 0, 51)), (255, 204, 204)),
        (Image.new("RGBA", (2, 2), (1, 2, 3, 255)), (1, 2, 3)),
        (Image.new("CMYK", (2, 2), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.new("I;16", (2, 2), 257 * 77), (77, 77, 77)),
        (Image.new("I;16", (2, 2), 65535), (255, 255, 255)),
        (Image.new("I", (2, 2), 257 * 77 + 100), (77, 77, 77)),
        (Image.new("F", (2, 2), 0.2), (51, 51, 51)),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_every_mode_has_one_conversion(image, expected):
    assert pixel(to_rgb(image)) == expected


@pytest.mark.parametrize(
    "image", [Image.new("I", (2, 2), 65536), Image.new("I", (2, 2), -1), Image.new("F", (2, 2), 255.0),
              Image.new("F", (2, 2), float("nan")), Image.new("F", (2, 2), float("inf"))],
)  # fmt: skip
def test_values_outside_of_the_mode_s_range_are_refused(image):
    with pytest.raises(DataError, match=r"scan\.tif: mode [IF] .*expected 0 to"):
        to_rgb(image, "scan.tif")


def test_16_bit_png_keeps_its_high_byte(tmp_path):
    ramp = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    path = saved(Image.fromarray(ramp), tmp_path / "a.png")
    assert np.array_equal(np.asarray(decode_image(path))[..., 1].ravel(), np.arange(256))


def test_palette_with_and_without_a_transparent_colour(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    opaque = decode_image(saved(image, tmp_path / "opaque.png"))
    assert (pixel(opaque), pixel(opaque, (1, 0))) == ((255, 0, 0), (0, 0, 255))
    clear = decode_image(saved(image, tmp_path / "clear.png", transparency=0))
    assert (pixel(clear), pixel(clear, (1, 0))) == ((255, 255, 255), (0, 0, 255))


@pytest.mark.parametrize("suffix, options", [(".gif", {}), (".webp", {"lossless": True}), (".png", {})])
def test_an_animation_gives_its_first_frame(tmp_path, suffix, options):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = saved(frames[0], tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], **options)
    assert Image.open(path).n_frames == 2
    assert pixel(decode_image(path)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(photo(), tmp_path / "a.png", exif=exif)
    upright = decode_image(path)
    assert upright.size == ((48, 32) if orientation < 5 else (32, 48))
    tagged = photo()
    tagged.getexif()[0x0112] = orientation
    assert np.array_equal(upright, ImageOps.exif_transpose(tagged))
    if orientation == 6:  # the camera was turned: what is stored at the left bottom belongs at the left top
        assert pixel(upright) == photo().getpixel((0, 31))


# --- sizes and tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (300, 3), (15, 15), (33, 47)])
def test_any_size_becomes_a_centre_crop(size):
    image = center_crop(resize_shorter(photo(*size), 16), 16)
    assert image.size == (16, 16)


def test_the_shorter_side_is_resized_antialiased():
    stripes = Image.fromarray(np.tile(np.array([0, 255], dtype=np.uint8), (64, 64))).convert("RGB")
    small = np.asarray(resize_shorter(stripes, 16), dtype=float)
    assert small.shape == (16, 32, 3)
    assert abs(small[:, 4:-4] - 127.5).max() < 4  # one that skips pixels would show black or white
    with pytest.raises(RecipeError, match="bilinear, bicubic"):
        resize_shorter(stripes, 16, "nearest")


def test_the_centre_is_the_centre():
    assert np.array_equal(center_crop(photo(48, 32), 16), np.asarray(photo(48, 32))[8:24, 16:32])


def test_draft_decodes_large_jpegs_smaller_but_never_too_small(tmp_path):
    path = saved(photo(640, 480), tmp_path / "a.jpg", quality=95)
    assert decode_image(path, draft=60).size == (160, 120)
    assert decode_image(path, draft=200).size == (640, 480)


def test_tensor_and_image_are_inverse():
    tensor = to_tensor(photo())
    assert tensor.shape == (3, 32, 48) and tensor.dtype == torch.float32
    assert tensor[:, 3, 5].mul(255).round().int().tolist() == list(photo().getpixel((5, 3)))
    assert np.array_equal(to_image(tensor), photo())


def test_to_image_clamps_rounds_and_refuses_nan():
    values = torch.tensor([-0.5, 1.5, 100.6 / 255]).view(3, 1, 1)
    assert pixel(to_image(values)) == (0, 255, 101)
    with pytest.raises(DataError, match="not finite"):
        to_image(torch.full((3, 2, 2), float("nan")))


def test_arrays_and_tensors_are_taken_where_an_image_is():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8))
    pixels = np.asarray(image)
    for same in (pixels, pixels / 255, (pixels / 255).astype(np.float32), to_tensor(image), to_uint8(image)):
        assert upright_rgb(same).tobytes() == image.tobytes()
    grey = upright_rgb(pixels[..., 0])
    assert grey.tobytes() == upright_rgb(pixels[..., :1]).tobytes() == upright_rgb(to_uint8(image)[:1]).tobytes()


@pytest.mark.parametrize(("wrong", "message"), [
    (np.zeros((4, 4, 2), np.uint8), r"array of shape \(4, 4, 2\), expected \(H, W, 3\)"),
    (np.zeros((0, 4, 3), np.uint8), "4x0 pixels"),
    (np.zeros((4, 4, 3), np.int64), "array of int64, expected 8-bit"),
    (np.full((4, 4, 3), 255.0), "values from 255 to 255, expected 0 to 1"),
    (np.full((4, 4, 3), np.nan), "values from nan to nan, expected 0 to 1"),
    (torch.zeros(2, 3, 4, 4), r"tensor of shape \(2, 3, 4, 4\), expected \(3, H, W\).*list\(batch\)"),
    (torch.zeros(4, 4, 3), r"tensor of shape \(4, 4, 3\)"),
])
def test_arrays_and_tensors_that_are_no_image(wrong, message):
    with pytest.raises(DataError, match=message):
        upright_rgb(wrong)


def test_what_is_lost_of_a_file_is_said(tmp_path):
    flat = Image.new("RGB", (4, 4))
    assert lost(saved(flat, tmp_path / "plain.jpg")) == []
    assert lost(saved(flat.convert("RGBA"), tmp_path / "alpha.png")) == ["transparency is laid over white"]
    assert lost(saved(Image.new("I;16", (4, 4)), tmp_path / "deep.png")) == ["rounded to 8 bits"]
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    saved(frames[0], tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert lost(tmp_path / "moving.gif") == ["the first of 2 frames is kept"]
    with pytest.raises(DataError, match="no such file"):
        lost(tmp_path / "none.png")
