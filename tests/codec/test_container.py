"""Streams that were damaged, cut, grown or forged: a BitstreamError, or the right image.

The checksum catches what chance does. What someone does on purpose, with a checksum that fits, must still end in a
BitstreamError or in an image of at most `MAX_PIXELS`; only the header is trusted for the size, and is checked first.
"""

import random
import struct
import tracemalloc
import zlib
from dataclasses import replace

import pytest
from PIL import Image
from tiny_codecs import SIZE, picture

from finola.codec import Codec
from finola.codec.codec import read_symbols
from finola.codec.container import HEAD, MAX_PIXELS, MAX_SIDE, OVERHEAD, Header, Mode, pack, unpack
from finola.errors import BitstreamError

FIELDS = {"magic": 0, "version": 3, "width": 4, "height": 6, "side": 8, "overlap": 10, "mode": 11, "identity": 12,
          "length": 20}


@pytest.fixture(scope="module", params=[{"bits": 4, "entropy": False}, {"quality": 60}], ids=["fixed", "coded"])
def stream(request, codec):
    return codec.compress(picture(50, 40), side=SIZE, **request.param)


def sealed(data: bytes) -> bytes:
    """The bytes with a checksum that fits."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


def survives(codec, data: bytes, original: bytes) -> None:
    """BitstreamError, or the symbols of the original where the bytes are its own."""
    try:
        read_symbols(data, codec.calibration)
    except BitstreamError as error:
        assert "\n" not in str(error)
    else:
        assert data == original


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_any_byte_is_noticed(codec, stream, bit):
    for i in range(len(stream)):
        damaged = bytearray(stream)
        damaged[i] ^= 1 << bit
        with pytest.raises(BitstreamError):
            read_symbols(bytes(damaged), codec.calibration)


def test_a_stream_cut_anywhere_is_noticed(codec, stream):
    for length in range(len(stream)):
        with pytest.raises(BitstreamError):
            read_symbols(stream[:length], codec.calibration)


@pytest.mark.parametrize("tail", [b"\0", b"\xff" * 4, b"x" * 1000], ids=["one", "four", "thousand"])
def test_what_follows_a_stream_is_noticed(codec, stream, tail):
    for data in (stream + tail, stream + stream, sealed(stream[:-4] + tail + stream[-4:])):
        with pytest.raises(BitstreamError, match="length"):
            codec.decompress(data)


@pytest.mark.parametrize(("data", "word"), [(b"", "0 bytes"), (b"FNL\x01", "4 bytes"), (b"\xff" * 200, "magic"),
                                            (b"\x89PNG" + bytes(100), "magic")], ids=["empty", "short", "ones", "png"])
def test_other_files_are_named(codec, data, word):
    with pytest.raises(BitstreamError, match=word):
        codec.decompress(data)


@pytest.mark.parametrize(("field", "form", "value", "word"), [
    ("version", "<B", 3, "update finola"), ("width", "<H", 0, "size"), ("height", "<H", 0, "size"),
    ("side", "<H", 0, "side"), ("side", "<H", 65_535, "side"), ("overlap", "<B", 17, "overlap"),
    ("mode", "<B", 0, "mode"), ("mode", "<B", 9, "mode"), ("mode", "<B", 128, "mode"), ("mode", "<B", 229, "mode"),
    ("length", "<I", 2**32 - 1, "length"), ("length", "<I", 0, "length"), ("identity", "<Q", 2**64 - 1, "weights"),
])
def test_a_forged_field_is_named(codec, stream, field, form, value, word):
    forged = bytearray(stream)
    struct.pack_into(form, forged, FIELDS[field], value)
    with pytest.raises(BitstreamError, match=word):
        codec.decompress(sealed(bytes(forged)))


@pytest.mark.parametrize("size", [(MAX_SIDE, MAX_SIDE), (MAX_SIDE, 2000), (10_000, 9_000)])
@pytest.mark.parametrize("mode", [Mode(8), Mode(None, 50, True)], ids=["fixed", "coded"])
def test_a_forged_size_costs_no_memory(codec, size, mode):
    data = pack(Header(*size, SIZE, 0, mode, codec.calibration.identity), b"1234")
    tracemalloc.start()
    with pytest.raises(BitstreamError):
        codec.decompress(data)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_other_weights_are_refused_by_name(codec, stream):
    other = replace(codec.calibration, weights_id="0" * 64)
    with pytest.raises(BitstreamError, match=f"{codec.calibration.identity.hex()}.*{other.identity.hex()}"):
        Codec(codec.model, other).decompress(stream)


def test_a_forged_payload_gives_a_picture_or_an_error(codec, stream):
    """With a checksum that fits there may be nothing wrong with it, so an image of the header's size is right too."""
    numbers, errors = random.Random(0), 0
    for _ in range(100):
        forged = bytearray(stream)
        for _ in range(numbers.randint(1, 8)):
            forged[numbers.randrange(HEAD.size, len(forged) - 4)] = numbers.randrange(256)
        try:
            header, symbols = read_symbols(sealed(bytes(forged)), codec.calibration)
        except BitstreamError:
            errors += 1
        else:
            quantiser = codec.calibration.quantiser(header.mode.bits, header.mode.level)
            assert (header.width, header.height) == (50, 40)
            assert (symbols >= 0).all() and (symbols < quantiser.levels).all()
    assert errors == 0 or unpack(stream)[0].mode.entropy


def test_a_decoded_forgery_is_painted(codec, stream):
    forged = bytearray(stream)
    forged[HEAD.size] ^= 0xFF
    try:
        image = codec.decompress(sealed(bytes(forged)))
    except BitstreamError:
        return
    assert isinstance(image, Image.Image) and image.size == (50, 40)


def mutated(stream: bytes, numbers: random.Random) -> bytes:
    """A stream after one accident: bits flipped, cut, grown, a length of 2³² - 1, parts doubled or exchanged."""
    data, kind = bytearray(stream), numbers.randrange(6)
    if kind == 0:
        for _ in range(numbers.randint(1, 10)):
            data[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
    elif kind == 1:
        del data[numbers.randrange(len(data)) :]
    elif kind == 2:
        data += numbers.randbytes(numbers.randint(1, 100))
    elif kind == 3:
        place = numbers.randrange(len(data) - 3)
        data[place : place + 4] = b"\xff" * 4
    elif kind == 4:
        a, b = sorted(numbers.randrange(len(data)) for _ in range(2))
        data += data[a:b]
    else:
        a, b = numbers.randrange(len(data)), numbers.randrange(len(data))
        data[a], data[b] = data[b], data[a]
    return bytes(data)


def fuzz(codec, stream: bytes, count: int, seed: int) -> None:
    numbers = random.Random(seed)
    for _ in range(count):
        data = mutated(stream, numbers)
        survives(codec, data, stream)
        if len(data) > OVERHEAD:
            forge(codec, sealed(data), numbers)


def forge(codec, data: bytes, numbers: random.Random) -> None:
    """The same with a checksum and a length that fit, and the right weights: only sizes and payload can be wrong."""
    forged = bytearray(data)
    struct.pack_into("<3sB", forged, 0, b"FNL", 1)
    forged[FIELDS["identity"] : FIELDS["length"]] = codec.calibration.identity
    struct.pack_into("<I", forged, FIELDS["length"], len(data) - OVERHEAD)
    try:
        header, _ = unpack(sealed(bytes(forged)))
    except BitstreamError:
        return
    assert header.width * header.height <= MAX_PIXELS
    if header.tiles > 2000:  # honest work, but minutes of it
        return
    try:
        _, symbols = read_symbols(sealed(bytes(forged)), codec.calibration)
        assert len(symbols) == header.tiles
    except BitstreamError as error:
        assert "\n" not in str(error)


def test_some_hundred_mutations(codec, stream):
    fuzz(codec, stream, 300, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_mutations(codec, stream, seed):
    fuzz(codec, stream, 500, seed=100 + seed)  # for each of the two streams
