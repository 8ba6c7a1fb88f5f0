"""The codec: what goes in comes out, at the size and rate that the arithmetic says."""

import json
import sys
from dataclasses import replace

import constriction
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_codecs import CHANNELS, SIZE, picture, tiny_codec

from finola.cli import main as cli
from finola.codec import Calibration, Codec, calibration_path, find_calibration
from finola.codec.calibrate import sensitivity
from finola.codec.calibration import BINS, NOISE_AT_50, STEPS, model_id
from finola.codec.codec import choose_mode, choose_side, read_symbols
from finola.codec.container import OVERHEAD, Mode, pack, unpack
from finola.codec.entropy import PRECISION, Model, decode, encode
from finola.codec.quantiser import GRID, Quantiser, pack_bits, unpack_bits
from finola.codec.refine import CAUTION, FIRST, LONGEST, SHORTEST, ExpectedBits, bit_price, refine, step_length
from finola.codec.refine import decode_tiles as paint
from finola.data.examples import example_images
from finola.data.images import upright_rgb
from finola.errors import DataError, RecipeError, WeightsError
from finola.evaluation.metrics import image_psnr
from finola.factory import create_model
from finola.inference.precision import has_bf16_units
from finola.inference.tiles import SEAM, Tiling, soften
from finola.weights import save_weights

# a training run in this process may have switched subnormal numbers off
NUMBERS = st.lists(st.floats(-5000, 5000, allow_subnormal=False), min_size=1)
SIZES = [(1, 1), (1, 70), (70, 1), (15, 15), (33, 47), (32, 32), (64, 96), (1500, 20)]
WAYS = [{"bits": 1, "entropy": False}, {"bits": 4, "entropy": False}, {"bits": 8, "entropy": False}, {"bits": 4},
        {"bits": 8}, {"quality": 1}, {"quality": 50}, {"quality": 100}]


# --- round trips -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", [{"bits": 4, "entropy": False}, {"quality": 50}], ids=str)
def test_every_size_comes_back(codec, size, way):
    restored = codec.decompress(codec.compress(picture(*size), **way))
    assert restored.size == size and restored.mode == "RGB"


@pytest.mark.parametrize("side", [1, 4, 8, 32])
def test_flat_squares_keep_their_colour_at_every_size(side):
    codec, image = Codec(), Image.new("RGB", (side, side), (200, 30, 30))
    assert image_psnr(codec.decompress(codec.compress(image)), image) > 30


def test_a_stream_of_version_1_is_the_top_left_part_of_its_tile(codec):
    """Until version 2 an image smaller than a tile was padded."""
    header, symbols = read_symbols(codec.compress(picture(SIZE, SIZE), bits=4, entropy=False, side=SIZE),
                                   codec.calibration)
    whole, small = (pack(replace(header, width=side, height=side), pack_bits(symbols, 4)) for side in (SIZE, 9))
    assert unpack(small)[0].version == 1
    assert codec.decompress(small).tobytes() == codec.decompress(whole).crop((0, 0, 9, 9)).tobytes()


@pytest.mark.parametrize("size, version", [((32, 32), 1), ((31, 60), 2), ((60, 31), 2), ((1, 1), 2)])
def test_version_2_is_written_where_it_is_needed_alone(codec, size, version):
    assert unpack(codec.compress(picture(*size), side=SIZE))[0].version == version


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_comes_back_as_rgb(codec, mode):
    image = picture(40, 36, mode)
    restored = codec.decompress(codec.compress(image))
    assert restored.size == (40, 36) and restored.mode == "RGB"
    assert codec.compress(image) == codec.compress(upright_rgb(image))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_decoder_sees_the_encoders_symbols(codec, way):
    image = picture(70, 50)
    data = codec.compress(image, side=SIZE, refine=0, **way)
    header, symbols = read_symbols(data, codec.calibration)
    quantiser = codec.calibration.quantiser(header.mode.bits, header.mode.level)
    x = torch.cat([squares for _, squares in Tiling(70, 50, SIZE).cut(image, SIZE, 100)])
    with torch.no_grad():
        expected = quantiser.symbols(codec.calibration.positions(codec.model.encode(x)))
    # another batch size may move a value across an edge, by rounding alone
    assert (symbols != expected.numpy()).mean() < 0.01
    assert np.abs(symbols - expected.numpy()).max() <= 1


def test_the_paper_s_rate_is_exact(codec):
    data = codec.compress(picture(96, 64), bits=4, entropy=False)
    assert len(data) - OVERHEAD == 6 * CHANNELS * 4 / 8
    assert OVERHEAD == 28  # 0.0006 bit per pixel of a 768 x 512 photograph


def test_the_shipped_model_s_rate_is_the_paper_s():
    """3072 numbers of 4 bits for 256² pixels = 768 for 128² = 0.1875 bit per pixel (Table "Image compression")."""
    calibration = find_calibration(create_model(pretrained=True))
    tiles = Tiling(768, 512, 128)
    rows, columns = tiles.covers()
    symbols = np.zeros((len(rows.starts) * len(columns.starts), calibration.channels), np.int64)
    assert 8 * len(pack_bits(symbols, 4)) / (768 * 512) == 0.1875


def test_a_stream_does_not_depend_on_the_batch_size_it_is_read_with(codec):
    image = picture(100, 70)
    other = Codec(codec.model, codec.calibration, batch_size=3)
    data = codec.compress(image)
    assert image_psnr(other.decompress(data), codec.decompress(data)) > 50


@pytest.mark.skipif(not has_bf16_units(), reason="this CPU has no units for bf16")
@pytest.mark.parametrize("way", [{"bits": 4, "entropy": False}, {"quality": 50}], ids=str)
def test_fast_costs_a_grey_level_or_two(way):
    image = next(iter(example_images().values())).crop((100, 100, 484, 356))
    exact, fast = Codec(), Codec(fast=True)
    data = exact.compress(image, **way)
    painted = exact.decompress(data)
    assert 100 > image_psnr(fast.decompress(data), painted) > 40
    assert image_psnr(exact.decompress(fast.compress(image, **way)), painted) > 35


def test_fast_where_nothing_would_be_is_refused(monkeypatch):
    monkeypatch.setattr("finola.inference.precision.has_bf16_units", lambda: False)
    with pytest.raises(RecipeError, match="fast: this cpu has no units for bf16; leave it out"):
        Codec(fast=True)


def test_more_bits_are_nearer(codec):
    image = picture(64, 64)
    x = torch.cat([squares for squares, _ in Tiling(64, 64, SIZE).cut(image, SIZE, 4)])
    with torch.no_grad():
        q = codec.model.encode(x)
    errors = []
    for bits in range(1, 9):
        quantiser = codec.calibration.quantiser(bits=bits)
        positions = codec.calibration.positions(q)
        errors.append(float((quantiser.centres(quantiser.symbols(positions)) - positions).square().mean()))
    assert all(later < earlier for earlier, later in zip(errors, errors[1:], strict=False))


def test_refinement_comes_nearer(codec):
    image = picture(64, 32)
    plain, refined = (codec.compress(image, bits=3, refine=steps) for steps in (0, 15))
    assert len(refined) < 1.3 * len(plain)
    errors = {}
    for name, data in (("plain", plain), ("refined", refined)):
        header, symbols = read_symbols(data, codec.calibration)
        q = codec.calibration.vectors(codec.calibration.quantiser(bits=3).centres(torch.from_numpy(symbols)))
        x = torch.cat([squares for squares, _ in Tiling(64, 32, SIZE).cut(image, SIZE, 4)])
        with torch.no_grad():
            errors[name] = (paint(codec.model, q, SIZE) - x).square().flatten(1).mean(1)
    assert (errors["refined"] < errors["plain"]).all()


@pytest.mark.parametrize(("way", "expected"), [({}, 1), ({"quality": 70}, 1), ({"bits": 4}, 0),
                                               ({"bits": 4, "entropy": False}, 0), ({"refine": 0}, 0),
                                               ({"bits": 4, "refine": 3}, 3)], ids=str)
def test_a_quality_is_refined_by_one_step_and_the_papers_mode_is_not(codec, monkeypatch, way, expected):
    taken = []
    monkeypatch.setattr("finola.codec.codec.refine",
                        lambda *arguments: taken.append(arguments[5]) or refine(*arguments))
    codec.compress(picture(64, 32), **way)
    assert set(taken or [0]) == {expected}


def test_a_quarter_of_a_batch_is_refined_at_once(codec, monkeypatch):
    taken = []
    monkeypatch.setattr("finola.codec.refine.decode_tiles",
                        lambda model, q, side: taken.append(len(q)) or paint(model, q, side))
    data = Codec(codec.model, codec.calibration, batch_size=8).compress(picture(3 * SIZE, 3 * SIZE), side=SIZE)
    assert taken == [2, 2, 2, 2, 1]
    header, symbols = read_symbols(data, codec.calibration)
    assert header.tiles == len(symbols) == 9


@pytest.fixture
def tiles(codec):
    """Two squares and their q."""
    x = torch.cat([squares for squares, _ in Tiling(64, 32, SIZE).cut(picture(64, 32), SIZE, 4)])
    with torch.no_grad():
        return x, codec.model.encode(x)


def test_refinement_trades_error_for_bits_where_symbols_are_coded(codec, tiles):
    (x, q), calibration = tiles, codec.calibration
    quantiser, bits = calibration.quantiser(level=50), ExpectedBits(calibration, q.device)
    found = {coded: refine(codec.model, calibration, quantiser, q, x, 15, coded, 2) for coded in (True, False)}
    own, coded, uncoded = (quantiser.centres(symbols) for symbols in
                           (quantiser.symbols(calibration.positions(q)), found[True], found[False]))

    def error(positions):
        with torch.no_grad():
            return (paint(codec.model, calibration.vectors(positions), SIZE) - x).square().flatten(1).sum(1)

    price = bit_price(calibration, quantiser, x[0].numel())
    assert bits(coded.float()).sum() < bits(uncoded.float()).sum() - 1
    assert (error(coded) + price * bits(coded.float()) < error(own) + price * bits(own.float())).all()
    assert (error(uncoded) < error(own)).all()


def test_refinement_descends_as_it_says(codec, tiles, monkeypatch):
    """The first step, found again by hand; and two steps from numbers that nobody draws."""
    (x, q), calibration = tiles, codec.calibration
    quantiser, found = calibration.quantiser(level=50), []
    monkeypatch.setattr(type(quantiser), "symbols", lambda self, positions: found.append(positions) or positions.long())
    refine(codec.model, calibration, quantiser, q, x, 1, coded=False, at_once=2)
    start = calibration.positions(q).requires_grad_()
    error = (paint(codec.model, calibration.vectors(start), SIZE) - x).square().sum()
    (slope,) = torch.autograd.grad(error, start)
    sensitivity = 12 * NOISE_AT_50 * x[0].numel() / CHANNELS / calibration.step**2
    expected = start.detach() - FIRST * slope / torch.from_numpy(2 * sensitivity).float()
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-2)
    for seed in (1, 2):
        torch.manual_seed(seed)
        refine(codec.model, calibration, quantiser, q, x, 2, coded=True, at_once=1)
    assert torch.equal(*found[1:])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_refinement_takes_its_gradients_wherever_it_is_called(codec, context):
    image = picture(64, 32)
    expected = codec.compress(image, bits=6, refine=2)
    with context():
        assert codec.compress(image, bits=6, refine=2) == expected


def test_a_step_brings_photographs_nearer_for_no_more_bytes():
    codec, gains, sizes = Codec(), [], []
    for image in example_images().values():
        image = image.crop((100, 100, 356, 292))
        plain, refined = (codec.compress(image, refine=steps) for steps in (0, 1))
        gains.append(image_psnr(codec.decompress(refined), image) - image_psnr(codec.decompress(plain), image))
        sizes.append(len(refined) / len(plain))
    assert min(gains) > 0.1 and sum(sizes) / len(sizes) < 1.005


def test_a_step_is_as_long_as_the_last_one_suggests():
    """On a surface that bends `times` as much as is believed, in every channel, the minimum lies at 1 / times."""
    curvature, move = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([[1.0, -2.0, 0.5]])
    for times in (2.0, 5.0, 50.0):
        length = step_length(move, times * curvature * move, curvature)
        assert length.item() == pytest.approx(CAUTION / times)
    assert step_length(move, 0.1 * curvature * move, curvature).item() == pytest.approx(LONGEST)
    assert step_length(move, 500 * curvature * move, curvature).item() == pytest.approx(SHORTEST)
    for bend in (-curvature * move, torch.zeros_like(move)):
        assert step_length(move, bend, curvature).item() == FIRST


def test_expected_bits_are_those_of_the_mean_table(codec):
    """Between two bins in proportion, beyond the outermost as there; up to a constant."""
    numbers = np.random.default_rng(0)
    tables = numbers.integers(1, 1000, codec.calibration.tables.shape)
    calibration = replace(codec.calibration, tables=tables)
    positions = numbers.normal(0, 3000, (50, CHANNELS)).astype(np.float32)
    expected = np.zeros(50)
    for channel, parents in enumerate(calibration.parents):
        guess = sum(weight / 256 * positions[:, parent]
                    for weight, parent in zip(calibration.weights[channel], parents, strict=True) if parent >= 0)
        bins = (positions[:, channel] - guess) * calibration.gain[channel] / 1024 + (BINS - 1) / 2
        expected += np.interp(bins, np.arange(BINS), -np.log2(tables.sum(0) + 1))
    found = ExpectedBits(calibration, torch.device("cpu"))(torch.from_numpy(positions)).numpy()
    np.testing.assert_allclose(np.diff(found), np.diff(expected), atol=0.05)


# --- quantiser ---------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 900).map(lambda half: 2 * half), NUMBERS)
def test_symbols_are_the_nearest_centres(bits, step, values):
    quantiser = Quantiser.from_bits(bits, np.array([step]))
    positions = torch.tensor(values, dtype=torch.float64)[:, None]
    centres = quantiser.centres(torch.arange(1 << bits)[:, None])
    chosen = quantiser.centres(quantiser.symbols(positions))
    nearest = (positions - centres.T).abs().min(1, keepdim=True).values
    assert torch.allclose((positions - chosen).abs(), nearest.to(positions))


@given(st.integers(1, 9000))
def test_a_level_has_a_symbol_at_the_mean(step):
    quantiser = Quantiser.from_steps(np.array([step]))
    assert GRID // 16 <= quantiser.steps[0] <= 22 * GRID
    levels = int(quantiser.levels[0])
    centres = quantiser.centres(torch.arange(levels)[:, None])[:, 0]
    assert levels % 2 == 1 and centres[levels // 2] == 0
    assert centres[-1] >= 10 * GRID and (centres.diff() == int(quantiser.steps[0])).all()
    edges = quantiser.edges(0)
    assert ((centres[:-1].numpy() <= edges) & (edges < centres[1:].numpy())).all()


def test_levels_halve_the_squared_error_every_ten():
    assert STEPS[50] == 4096 and len(STEPS) == 101
    ratios = np.array(STEPS[10:]) / np.array(STEPS[:-10])
    assert np.allclose(ratios, 0.5**0.5, rtol=2e-3)


@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 9), st.randoms(use_true_random=False))
def test_bits_are_packed_without_loss(bits, tiles, channels, random):
    symbols = np.array([[random.randrange(1 << bits) for _ in range(channels)] for _ in range(tiles)])
    payload = pack_bits(symbols, bits)
    assert len(payload) == -(-tiles * channels * bits // 8)
    assert (unpack_bits(payload, symbols.shape, bits) == symbols).all()


# --- entropy coding ----------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.sampled_from([{"bits": 1}, {"bits": 4}, {"bits": 8}, {"level": 1}, {"level": 50}, {"level": 100}]),
       st.integers(1, 300), st.integers(0, 2**31))
def test_any_symbols_are_decoded(way, tiles, seed):
    """However improbable: uniform symbols, over several groups."""
    calibration = tiny_codec().calibration
    quantiser = calibration.quantiser(**way)
    symbols = np.random.RandomState(seed % 2**31).randint(0, quantiser.levels, (tiles, CHANNELS))
    payload = encode(symbols, calibration, quantiser)
    assert (decode(payload, tiles, calibration, quantiser) == symbols).all()


@pytest.mark.parametrize("way", [{"bits": 1}, {"bits": 8}, {"level": 1}, {"level": 100}], ids=str)
def test_probabilities_are_exact_in_fp32(codec, way):
    quantiser = codec.calibration.quantiser(**way)
    model = Model(codec.calibration, quantiser, 7)
    for channel in range(CHANNELS):
        frequencies = model.frequencies(channel)
        exact = frequencies.astype(np.int64)
        assert (frequencies == exact).all() and (exact >= 0).all()
        assert (exact.sum(1) == (1 << PRECISION) - exact.shape[1]).all()
        model.update(channel, np.arange(7) % quantiser.levels[channel])


def test_constriction_uses_the_probabilities_it_is_handed():
    """A symbol of frequency f with c below it takes a coder of state s to (s // f) 2^24 + s % f + c: that they come out
    of the state shows that nothing was rounded."""
    frequencies = np.array([1, 100, 2**24 - 111, 7, 3])
    assert frequencies.sum() == 2**24
    family = constriction.stream.model.Categorical(perfect=False)
    for symbol, frequency in enumerate(frequencies):
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(np.array([123, 45], np.int32), constriction.stream.model.Uniform(2**20))
        before = _state(coder)
        coder.encode_reverse(np.array([symbol], np.int32), family, (frequencies - 1).astype(np.float32)[None])
        quotient, remainder = divmod(before, int(frequency))
        assert _state(coder) == (quotient << 24) + remainder + int(frequencies[:symbol].sum())


def test_coding_saves_on_what_the_calibration_saw(codec):
    image = picture(320, 320, seed=3)
    fixed, coded = (codec.compress(image, bits=5, entropy=entropy) for entropy in (False, True))
    assert len(coded) < len(fixed)


# --- tiles -------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 150), st.integers(1, 150), st.integers(16, 64), st.integers(0, 8))
def test_tiles_paint_what_was_cut(width, height, side, overlap):
    row, column = np.arange(width)[None, :, None], np.arange(height)[:, None, None]
    pixels = (row + column / 2 + np.zeros(3)).astype(np.uint8)  # a slope has no step that softening could touch
    tiling = Tiling(width, height, side, overlap)
    painted = tiling.paint(tile for x, _ in tiling.cut(Image.fromarray(pixels), side, 7) for tile in x)
    assert painted.size == (width, height)
    assert np.abs(np.asarray(painted, np.int16) - pixels).max() <= 1


def test_a_small_step_between_tiles_is_spread_and_an_edge_is_kept():
    pixels = np.full((8, 64, 3), 100, np.uint8)
    pixels[:, 32:] = 108
    small, large = Image.fromarray(pixels), Image.fromarray(np.where(pixels == 108, 200, pixels).astype(np.uint8))
    before = np.asarray(large).copy()
    for image in (small, large):
        soften(image, [32], vertical=True)
    row = np.asarray(small)[0, :, 0].astype(int)
    assert np.abs(np.diff(row)).max() <= 2 and (row[: 32 - SEAM] == 100).all() and (row[32 + SEAM :] == 108).all()
    assert (np.asarray(large) == before).all()


def test_a_quality_chooses_tiles_that_fit_the_picture():
    assert choose_side(50, 768, 512) in range(80, 96)
    assert choose_side(75, 768, 512) < choose_side(50, 768, 512) < choose_side(25, 768, 512)
    for quality in (10, 50, 90):
        side = choose_side(quality, 768, 512)
        assert -(-768 // side) * -(-512 // side) * side**2 < 1.2 * 768 * 512


# --- options and calibration -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"bits": 0}, {"bits": 9}, {"quality": 0}, {"quality": 101},
                                     {"bits": 4, "quality": 50}, {"entropy": False},
                                     {"side": 15}, {"side": 2000}, {"overlap": -1}, {"overlap": 200}])
def test_options_out_of_range_are_refused(codec, options):
    with pytest.raises(RecipeError):
        codec.compress(picture(20, 20), **options)


def test_pictures_beyond_the_limits_are_refused(codec):
    with pytest.raises(RecipeError, match="65,535"):
        codec.compress(Image.new("RGB", (65_536, 1)))


def test_modes_are_written_and_read():
    modes = [choose_mode(bits, None, entropy) for bits in range(1, 9) for entropy in (True, False)]
    modes += [Mode(None, level, True) for level in range(1, 101)]
    assert [Mode.from_byte(mode.to_byte()) for mode in modes] == modes
    assert len({mode.to_byte() for mode in modes}) == len(modes)


def test_a_calibration_is_the_same_from_its_file(codec, tmp_path):
    path = codec.calibration.save(tmp_path / "a.codec.safetensors")
    loaded = Calibration.load(path)
    assert loaded.identity == codec.calibration.identity
    data = codec.compress(picture(50, 40))
    assert image_psnr(Codec(codec.model, loaded).decompress(data), codec.decompress(data)) > 50


def test_a_calibration_of_other_weights_is_refused(codec, tmp_path):
    other = replace(codec.calibration, weights_id="0" * 64)
    path = other.save(tmp_path / "a.codec.safetensors")
    with pytest.raises(WeightsError, match=f"{model_id(codec.model)[:16]}.*0000000000000000"):
        find_calibration(codec.model, path)
    with pytest.raises(WeightsError, match="no calibration"):
        Codec(codec.model)


@pytest.mark.parametrize("name", ["parents", "tables", "unit", "gain", "bit_steps"])
def test_a_damaged_calibration_is_refused(codec, tmp_path, name):
    damaged = getattr(codec.calibration, name).copy()
    damaged[0] = 1 if name in ("parents", "bit_steps") else 0
    path = replace(codec.calibration, **{name: damaged}).save(tmp_path / "a.codec.safetensors")
    with pytest.raises(WeightsError, match=name):
        Calibration.load(path)


def test_sensitivity_is_what_a_small_change_does_to_the_picture(codec):
    q = torch.randn(64, CHANNELS, generator=torch.Generator().manual_seed(0))
    found = sensitivity(codec.model, q)
    with torch.no_grad():
        base, nudges = codec.model.decode(q), 0.01 * torch.eye(CHANNELS)
        changes = [(codec.model.decode(q + nudge) - base).square().flatten(1).sum(1) for nudge in nudges]
    expected = np.array([float(change.mean()) / 0.01**2 for change in changes])
    assert np.corrcoef(found, expected)[0, 1] > 0.9
    assert np.abs(np.log(found / expected)).max() < 0.5


# --- commands ----------------------------------------------------------------------------------------------


def test_the_commands_write_and_read_a_file(weights, tmp_path, capsys):
    photo, stream, restored = (str(tmp_path / name) for name in ("a.png", "a.fnl", "b.png"))
    picture(61, 37).save(photo)
    options = ["--weights", str(weights), "--json"]
    assert cli.main(["compress", photo, stream, "--bits", "4", "--no-entropy", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes"] == OVERHEAD + 2 * 2 * CHANNELS // 2 and report["bpp"] == 8 * report["bytes"] / (61 * 37)
    assert cli.main(["decompress", stream, restored, *options]) == 0
    with Image.open(restored) as image:
        assert image.size == (61, 37)
    assert unpack((tmp_path / "a.fnl").read_bytes())[0].mode == Mode(4, None, False)


def test_compress_says_how_near_the_image_comes_back(tmp_path, capsys):
    picture(40, 36).save(tmp_path / "a.png")
    words = ["compress", str(tmp_path / "a.png"), str(tmp_path / "a.fnl"), "--psnr"]
    assert cli.main(words) == 0 and " dB" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    restored = Codec().decompress((tmp_path / "a.fnl").read_bytes())
    expected = image_psnr(restored, picture(40, 36))
    assert json.loads(capsys.readouterr().out)["psnr"] == pytest.approx(expected, abs=0.01)


def test_a_target_is_met_by_the_highest_quality_that_fits(codec):
    image = picture(96, 64)
    sizes = {quality: len(codec.compress(image, quality=quality)) for quality in (1, 40, 100)}
    data, quality = codec.compress_to(image, sizes[40])
    assert len(data) <= sizes[40] and quality >= 40 and data == codec.compress(image, quality=quality)
    assert codec.compress_to(image, sizes[100])[1] == 100
    with pytest.raises(RecipeError, match="expected at least .* which quality 1 takes"):
        codec.compress_to(image, sizes[1] - 1)


def test_the_command_keeps_to_a_target_and_says_what_is_lost(tmp_path, capsys):
    picture(200, 160, "RGBA").save(tmp_path / "a.png")
    for option, most in (("--target-size", 1500), ("--target-bpp", 0.3)):
        words = ["compress", str(tmp_path / "a.png"), str(tmp_path / "a.fnl"), option, str(most)]
        assert cli.main(words) == 0
        printed = capsys.readouterr().out
        assert "quality " in printed and printed.count("transparency is laid over white") == 1
        size = (tmp_path / "a.fnl").stat().st_size
        assert size <= (most if option == "--target-size" else most * 200 * 160 / 8)
    assert cli.main([*words, "--no-entropy"]) == 2


def test_calibrate_makes_the_codec_ready_for_new_weights(codec, tmp_path, capsys):
    weights = save_weights(codec.model, tmp_path / "mine.safetensors")
    for i in range(12):
        picture(40 + i, 36, seed=i).save(tmp_path / f"{i}.png")
    photo, stream, restored = (str(tmp_path / name) for name in ("0.png", "a.fnl", "b.png"))
    options = ["--weights", str(weights), "--device", "cpu"]
    assert cli.main(["compress", photo, stream, *options]) == 4
    assert "mine.codec.safetensors: no such file; finola calibrate makes it" in capsys.readouterr().err
    command = ["calibrate", *options, "--data", str(tmp_path), "--json"]
    assert cli.main(command) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 12
    made = Calibration.load(calibration_path(weights))
    assert made.weights_id == model_id(codec.model)
    assert cli.main(command) == 0  # the seed decides
    again = Calibration.load(calibration_path(weights)).tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in made.tensors().items())
    assert cli.main(["compress", photo, stream, *options]) == 0 == cli.main(["decompress", stream, restored, *options])
    assert Image.open(restored).size == (40, 36)


def test_the_commands_name_their_faults(weights, tmp_path, capsys):
    photo, stream = tmp_path / "a.png", tmp_path / "a.fnl"
    picture(20, 20).save(photo)
    stream.write_bytes(b"FNL")
    options = ["--weights", str(weights)]
    assert cli.main(["compress", str(photo), str(photo), *options]) == 2
    assert cli.main(["compress", str(photo), str(tmp_path / "other.jpg"), *options]) == 2
    assert cli.main(["compress", str(photo), str(tmp_path), *options]) == 2
    assert cli.main(["compress", str(tmp_path / "none.png"), str(stream), *options]) == 3
    assert cli.main(["decompress", str(stream), str(tmp_path / "b.png"), *options]) == 4
    assert cli.main(["decompress", str(stream), str(tmp_path / "b.nothing"), *options]) == 2
    assert cli.main(["decompress", str(tmp_path / "none.fnl"), str(tmp_path / "b.png"), *options]) == 4
    assert not (tmp_path / "b.png").exists()
    assert all(line.startswith("finola ") for line in capsys.readouterr().err.splitlines())


def test_only_entropy_coding_needs_constriction(codec, weights, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "constriction", None)
    monkeypatch.delitem(sys.modules, "finola.codec.entropy")
    assert codec.decompress(codec.compress(picture(40, 30), bits=4, entropy=False)).size == (40, 30)
    picture(20, 20).save(tmp_path / "a.png")
    words = ["compress", str(tmp_path / "a.png"), str(tmp_path / "a.fnl"), "--weights", str(weights)]
    assert cli.main(words) == 2
    assert "finola[codec]" in capsys.readouterr().err and not (tmp_path / "a.fnl").exists()


def test_a_photograph_is_read_from_a_path(codec, tmp_path):
    picture(40, 30).save(tmp_path / "a.png")
    assert codec.decompress(codec.compress(tmp_path / "a.png")).size == (40, 30)
    with pytest.raises(DataError):
        codec.compress(tmp_path / "b.png")


def _state(coder) -> int:
    return sum(int(word) << (32 * i) for i, word in enumerate(coder.get_compressed()))
