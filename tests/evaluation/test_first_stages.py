"""First stages of diffusers: read from their folders, scored like our own models, and refused in one line."""

import json
import shutil

import numpy as np
import pytest
import torch
from commands import Command
from PIL import Image
from safetensors.torch import load_file, save_file

diffusers = pytest.importorskip("diffusers")

from finola.data import ImageFolder  # noqa: E402
from finola.data.loader import read_squares  # noqa: E402
from finola.errors import RecipeError, WeightsError  # noqa: E402
from finola.evaluation.complexity import cost_of_autoencoder  # noqa: E402
from finola.evaluation.first_stages import (  # noqa: E402
    CONFIG,
    WEIGHTS,
    FinolaStage,
    cost,
    latencies,
    open_first_stage,
)
from finola.evaluation.metrics import psnr  # noqa: E402

run = Command("eval", always=("--workers", "0", "--device", "cpu"))

SCALES = {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
          "up_block_types": ("UpDecoderBlock2D",) * 2, "layers_per_block": 1, "norm_num_groups": 4}
PAIR = ("ResBlock", "EfficientViTBlock")
TINY = {  # class -> its options, and the shape and bits of its code for an image of 32 px
    "AutoencoderKL": (SCALES, (4, 16, 16), 16 * 1024),
    "VQModel": ({**SCALES, "latent_channels": 3, "num_vq_embeddings": 64}, (16, 16), 6 * 256),
    "AutoencoderDC": ({
        "attention_head_dim": 4, "encoder_block_types": PAIR, "decoder_block_types": PAIR, "latent_channels": 4,
        "encoder_block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16),
        "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ())}, (4, 16, 16), 16 * 1024),
    "AutoencoderTiny": ({
        "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1)}, (4, 16, 16), 16 * 1024),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Class -> a folder as diffusers saves it, with random weights."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("stages")
    for name, (options, *_) in TINY.items():
        getattr(diffusers, name)(**options).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Four images: two RGB, a grey one, and one with transparency."""
    root = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 7, 3), dtype=np.uint8)
    for i, mode in enumerate(("RGB", "RGB", "L", "RGBA")):
        Image.fromarray(pixels[i]).resize((48, 40), Image.Resampling.BICUBIC).convert(mode).save(root / f"{i}.png")
    return root


@pytest.fixture
def copy(folders, tmp_path):
    """A folder of AutoencoderKL to spoil."""
    return shutil.copytree(folders / "AutoencoderKL", tmp_path / "spoilt")


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_a_folder_gives_the_model_that_was_saved(name, folders):
    """Images in [0, 1] go in and come out; the same as the model's own way through in [-1, 1]."""
    _, shape, bits = TINY[name]
    stage, x = open_first_stage(folders / name), torch.rand(2, 3, 32, 32)
    code = stage.encode(x)
    assert code.shape == (2, *shape) and stage(x).shape == x.shape
    model = getattr(diffusers, name).from_pretrained(folders / name, low_cpu_mem_usage=False).eval()
    found = model.encode(2 * x - 1)
    latents = found.latent_dist.mode() if name == "AutoencoderKL" else found[0]
    torch.testing.assert_close(stage(x), model.decode(latents).sample / 2 + 0.5, atol=1e-5, rtol=1e-4)
    counted = cost(stage, 32)
    assert counted.numbers == code[0].numel() and counted.bits == bits
    assert counted.params == sum(p.numel() for p in model.parameters())
    assert counted.encode_macs > counted.params and counted.decode_macs > counted.params
    assert 4 <= cost(stage, 64).decode_macs / counted.decode_macs < 16  # attention grows faster than the image


def test_multiply_adds_are_those_of_the_convolutions():
    """By hand, for the smallest model there is: 3 x 3 convolutions at two scales, without attention."""
    torch.manual_seed(0)
    options = TINY["AutoencoderTiny"][0]
    encoder = diffusers.AutoencoderTiny(**options).encoder
    counted = []
    for layer in encoder.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(
                lambda conv, _, out: counted.append(out[0].numel() * conv.weight[0].numel()))
    with torch.no_grad():
        encoder(torch.rand(1, 3, 32, 32))
    from finola.evaluation.first_stages import DiffusersStage

    assert cost(DiffusersStage(diffusers.AutoencoderTiny(**options), "tiny"), 32).encode_macs == sum(counted)


@torch.no_grad()
def test_our_model_takes_larger_images_square_by_square(model):
    stage, x = FinolaStage(model, "ours"), torch.rand(2, 3, 64, 64)
    code, x_hat = stage.encode(x), stage(x)
    assert code.shape == (2, 4, model.config.embed_dim)
    torch.testing.assert_close(code[:, 1], model.encode(x[..., :32, 32:]))
    torch.testing.assert_close(x_hat[..., 32:, :32], model(x[..., 32:, :32]))
    one, four = cost(stage, 32), cost(stage, 64)
    assert (four.numbers, four.encode_macs, four.decode_macs) == tuple(
        4 * value for value in (one.numbers, one.encode_macs, one.decode_macs))
    _, counted = cost_of_autoencoder(model.config)
    assert (one.params, one.encode_macs + one.decode_macs) == (counted.params, counted.macs)


def test_stages_take_turns(folders):
    stages, order = {name: open_first_stage(folders / name) for name in ("VQModel", "AutoencoderTiny")}, []
    for name, stage in stages.items():
        stage.register_forward_pre_hook(lambda *_: pytest.fail("not the halves by themselves"))
        stage.encode = lambda x, name=name, encode=stage.encode: (order.append(name), encode(x))[1]
    times = latencies(stages, torch.rand(1, 3, 32, 32), turns=2)
    assert order == [*stages] * 3  # one turn is not counted
    assert all(len(turns) == 2 and turn.both == turn.encode + turn.decode > 0
               for turns in times.values() for turn in turns)


def test_eval_scores_them_on_the_same_images(folders, photos, weights, tmp_path, capsys):
    """PSNR is that of the model on the very squares, grey and transparent images among them."""
    out, panel = tmp_path / "result.json", tmp_path / "panel.png"
    code, printed, _ = run(capsys, weights, "--first-stage", folders / "AutoencoderKL", folders / "VQModel", "--size",
                           64, "--data", photos, "--out", out, "--panel", panel)
    assert code == 0 and "AutoencoderKL" in printed
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["first_stages"]}
    assert list(rows) == ["tiny", "AutoencoderKL", "VQModel"] and result["images"] == 4
    (batch,) = read_squares(ImageFolder(photos), 64, batch_size=8, workers=0)
    stage = open_first_stage(folders / "AutoencoderKL")
    with torch.no_grad():
        expected = psnr(stage(batch["image"]), batch["image"]).mean().item()
    assert rows["AutoencoderKL"]["psnr"] == pytest.approx(expected, abs=1e-3)
    assert rows["tiny"]["numbers"] == 4 * 16 and rows["VQModel"]["bits"] == 6 * 32 * 32
    for row in rows.values():
        assert row["encode_ms"] > 0 and row["decode_ms"] > 0 and row["memory_mib"] > 0 and 0 < row["ssim"] < 1
    with Image.open(panel) as image:
        assert image.width > 4 * 64


def test_eval_scores_them_alone(folders, photos, capsys):
    code, printed, _ = run(capsys, "--first-stage", folders / "AutoencoderTiny", "--data", photos, "--size", 32,
                           "--json")
    result = json.loads(printed)
    assert code == 0 and result["weights"] is None and len(result["first_stages"]) == 1
    assert result["preprocessing"]["size"] == 32


def test_an_image_size_that_does_not_go_in(folders, photos, weights, capsys):
    words = "--first-stage", folders / "AutoencoderKL", "--data", photos
    assert "multiples of 2 pixels, got 33" in run.fails(capsys, 2, *words, "--size", 33)
    assert "multiples of 32 pixels, got 48" in run.fails(capsys, 2, weights, *words, "--size", 48)
    with pytest.raises(RecipeError, match="multiples of 2"):
        cost(open_first_stage(folders / "AutoencoderKL"), 31)


def test_options_that_do_not_go_together(folders, photos, weights, capsys):
    stage = folders / "AutoencoderKL"
    assert "--size" in run.fails(capsys, 2, weights, "--data", photos, "--size", 64)
    assert "WEIGHTS" in run.fails(capsys, 2, "--data", photos)
    assert "--baselines" in run.fails(capsys, 2, weights, "--first-stage", stage, "--data", photos, "--baselines")
    assert "rename" in run.fails(capsys, 2, "--first-stage", stage, stage, "--data", photos, "--size", 32)


def no_folder(copy):
    shutil.rmtree(copy)


def a_file(copy):
    no_folder(copy)
    copy.write_text("no folder")


def no_configuration(copy):
    (copy / CONFIG).unlink()


def a_pickle_alone(copy):
    torch.save(load_file(copy / WEIGHTS), copy / "diffusion_pytorch_model.bin")
    (copy / WEIGHTS).unlink()


def other_json(copy):
    (copy / CONFIG).write_text("[1, 2]")


def no_json(copy):
    (copy / CONFIG).write_text("{")


def configure(copy, **changes):
    config = json.loads((copy / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps(config | changes))


def another_class(copy):
    configure(copy, _class_name="UNet2DModel")


def grey_images(copy):
    configure(copy, in_channels=1, out_channels=1)


def another_width(copy):
    configure(copy, block_out_channels=[8, 32])


def impossible(copy):
    configure(copy, down_block_types=["NoSuchBlock", "NoSuchBlock"])


def cut_weights(copy):
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:5000])


def change_tensors(copy, change):
    tensors = load_file(copy / WEIGHTS)
    change(tensors)
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})


def a_tensor_less(copy):
    change_tensors(copy, lambda tensors: tensors.pop("decoder.conv_in.weight"))


def a_tensor_more(copy):
    change_tensors(copy, lambda tensors: tensors.update(extra=torch.zeros(1)))


def not_finite(copy):
    change_tensors(copy, lambda tensors: tensors["decoder.conv_in.weight"].fill_(torch.nan))


@pytest.mark.parametrize("spoil, words", [
    (no_folder, "no such folder"), (a_file, "is not a folder"), (no_configuration, "config.json is missing"),
    (a_pickle_alone, f"{WEIGHTS} is missing"), (other_json, "no configuration"), (no_json, "no configuration"),
    (another_class, "UNet2DModel"), (grey_images, "1 channels in and 1 out, expected 3"),
    (another_width, "cannot be read"), (impossible, "cannot be read"), (cut_weights, "cannot be read"),
    (a_tensor_less, "missing tensors, first decoder.conv_in.weight"), (a_tensor_more, "unexpected tensors"),
    (not_finite, "decoder.conv_in.weight has values that are not finite"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_no_first_stage_is_said_in_one_line(spoil, words, copy, photos, capsys):
    spoil(copy)
    line = run.fails(capsys, 4, "--first-stage", copy, "--data", photos, "--size", 32)
    assert words in line and "spoilt" in line
    with pytest.raises(WeightsError):
        open_first_stage(copy)
