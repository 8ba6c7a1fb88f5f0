"""Training for the codec's rate."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_codecs import SIZE, save_tiny_codec, tiny_codec
from training import read_checkpoint

from finola.codec.rate import TileCost
from finola.codec.refine import bit_price
from finola.errors import RecipeError, WeightsError
from finola.inference.tiles import resize
from finola.training.recipe import load_recipe
from finola.weights import load_weights

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
pytestmark = pytest.mark.usefixtures("one_thread")
RECIPE = """
model: {name: finola_mfw720_c768_r8, start: random, pool_heads: 2, embed_dim: 16, decoder_widths: [16, 8, 8]}
data: {image_size: 32, num_workers: 0}
optim: {base_lr: 0.01, batch_size: 6, epochs: 2, warmup_epochs: 0, rate: 1.0}
trainer: {accelerator: cpu, devices: 1, precision: 32-true}
"""


@pytest.fixture
def cost():
    return TileCost(tiny_codec().calibration, 2.0, torch.device("cpu"))


def photographs(count: int, size: int) -> torch.Tensor:
    """(count, 3, size, size), every pixel another colour."""
    return torch.rand(count, 3, size, size)


def test_tiles_are_cut_as_the_codec_s(cost):
    x, sides = photographs(4, 128), set()
    for _ in range(60):
        tiles = cost.cut(x)
        side = tiles.pixels.shape[-1]
        assert tiles.pixels.shape == (4, 3, side, side) and torch.equal(tiles.squares, resize(tiles.pixels, 128))
        sides.add(side)
        for image, tile in zip(x, tiles.pixels, strict=True):  # a part of its photograph
            assert (image[0].unfold(0, side, 1).unfold(1, side, 1)[..., 0, 0] == tile[0, 0, 0]).any()
    assert 63 <= min(sides) < 75 and 105 < max(sides) <= 116


def test_noise_is_as_wide_as_a_step_and_bits_have_a_gradient(cost):
    quantiser = cost.calibration.quantiser(level=63)
    q = (torch.randn(500, 16) * torch.from_numpy(cost.calibration.unit) * 256).requires_grad_()
    noisy, bits = cost.quantise(q, quantiser)
    moved = (cost.calibration.positions(noisy) - cost.calibration.positions(q)).detach()
    share = moved / torch.from_numpy(quantiser.steps)
    assert -0.501 < share.min() < -0.49 and 0.49 < share.max() < 0.501
    assert abs(share.std() - math.sqrt(1 / 12)) < 0.01
    bits.sum().backward()
    assert (q.grad != 0).any()


def test_the_cost_is_error_and_priced_bits(cost):
    tiles = cost.cut(photographs(3, SIZE))
    bits = torch.tensor([100.0, 200.0, 300.0])
    perfect = cost(tiles.squares, bits, tiles).item()
    values = tiles.pixels[0].numel()
    assert perfect == pytest.approx(2.0 * bit_price(cost.calibration, tiles.quantiser, values) * 200 / values)
    assert cost(tiles.squares + 0.1, bits, tiles).item() == pytest.approx(perfect + 0.01, rel=1e-4)


@pytest.fixture
def start(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return save_tiny_codec(tmp_path)


def train(start, images, out, *overrides, **options):
    recipe = load_recipe(start.with_name("recipe.yaml"), overrides)
    return engine.fit(recipe, [images / "train"], [images / "val"], out, **options)


def test_a_run_stopped_and_resumed_ends_as_one(start, images, tmp_path):
    whole = train(start, images, tmp_path / "whole", init_from=start)
    assert whole["finished"] and math.isfinite(whole["history"][-1]["train_loss"])
    train(start, images, tmp_path / "parts", "--trainer.max_time", "0.0001", init_from=start)
    assert 0 < read_checkpoint(tmp_path / "parts")["global_step"] < whole["step"]
    train(start, images, tmp_path / "parts", resume=True, init_from=start)
    one, other = (load_weights(tmp_path / name / "weights.safetensors").state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_price_tells(start, images, tmp_path):
    """Dear bits make the vectors shorter: fewer bits of the same tables."""
    codec = tiny_codec()
    x = torch.rand(8, 3, SIZE, SIZE)
    taken = []
    for rate in ("0.001", "1000.0"):
        out = tmp_path / rate
        train(start, images, out, "--optim.rate", rate, "--optim.epochs", "10", init_from=start)
        with torch.no_grad():
            q = load_weights(out / "weights.safetensors").eval().encode(x)
        taken.append(TileCost(codec.calibration, 1.0, torch.device("cpu"))._bits(codec.calibration.positions(q)).mean())
    assert taken[1] < taken[0]


def test_what_a_rate_needs(start, images, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RecipeError, match="--weights is missing; name calibrated ones"):
        train(start, images, out)
    codec = start.with_suffix(".codec.safetensors")
    codec.rename(tmp_path / "away")
    with pytest.raises(WeightsError, match="finola calibrate"):
        train(start, images, out, init_from=start)
    (tmp_path / "away").rename(codec)
    with pytest.raises(RecipeError, match="trainer.compile: got true, expected false with optim.rate"):
        train(start, images, out, "--trainer.compile", "true", init_from=start)
    with pytest.raises(RecipeError, match="optim.rate: got 1.0, which only autoencoders have"):
        load_recipe("imagenette/masked_e_w720", ["--optim.rate", "1.0"])
    assert not out.exists()
