"""Bad recipes and options: one line that names the file or option, the key, what was got and expected."""

from __future__ import annotations

import re

import pytest
import torch

from finola.cli.main import main
from finola.errors import RecipeError
from finola.models.decoder import ConvDecoder
from finola.training.recipe import load_recipe, parse_overrides


def write(folder, text, name="recipe.yaml"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(("text", "words"), [
    ("optim: {epoch: 3}", ["optim.epoch", "did you mean epochs"]),
    ("optim: {lr: 3}", ["optim.lr", "did you mean base_lr"]),
    ("data: {crop_scale: [0.9, 0.2]}\ntrainer: {accumulate: 3}\nmodel: {map_size: 7}\noptim: {mixup: 1.0}",
     ["data.crop_scale", "optim.batch_size", "map_size", "optim.mixup"]),  # all at once
    ("optimizer: {epochs: 3}", ["'optimizer'"]),
    ("model: {embed_dims: 64}", ["model.embed_dims", "did you mean embed_dim"]),
    ("model: {name: finola_mfw2880_c3072_r17}", ["finola_mfw2880_c3072_r17", "did you mean"]),
    ("model: {embed_dim: many}", ["model.embed_dim", "'many'", "a whole number"]),
    ("model: {map_size: 7}", ["map_size", "7", "divisor"]),
    ("model: {image_size: 128}", ["model.image_size", "data.image_size"]),
    ("optim: {epochs: ten}", ["optim.epochs", "'ten'", "a whole number"]),
    ("optim: {epochs: true}", ["optim.epochs", "a whole number"]),
    ("optim: {epochs: 2.5}", ["optim.epochs", "2.5"]),
    ("optim: {base_lr: -0.1}", ["optim.base_lr", "-0.1", "more than 0"]),
    ("optim: {base_lr: .nan}", ["optim.base_lr", "finite"]),
    ("optim: {betas: [0.9]}", ["optim.betas", "list of 2"]),
    ("optim: 5", ["optim", "a whole number"]),
    ("data: {crop_scale: [0.9, 0.2]}", ["data.crop_scale"]),
    ("data: {num_workers: -1}", ["data.num_workers", "at least 0"]),
    ("trainer: {precision: fp8}", ["trainer.precision", "bf16-mixed"]),
    ("trainer: {accumulate: 3}", ["optim.batch_size", "128", "3"]),
    ("trainer: {max_time: 5}\ntrainer: {max_time: 6}", ["trainer", "twice"]),
    ("seed: !!python/object/apply:os.getpid []", ["not valid YAML without tags"]),
    ("[1, 2", ["not valid YAML"]),
    ("- optim", ["a list"]),
    ("base: nowhere.yaml", ["base", "nowhere.yaml"]),
    ("base: recipe.yaml", ["circle"]),
    ("", ["null"]),
])
def test_bad_file(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert [word for word in words if word not in message] == []


def test_python_tag_is_not_run(tmp_path):
    path = write(tmp_path, f"seed: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'trap'}]")
    with pytest.raises(RecipeError):
        load_recipe(path)
    assert not (tmp_path / "trap").exists()


def test_binary_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        load_recipe(path)


def test_missing_recipe_names_its_neighbours():
    with pytest.raises(RecipeError, match=r"did you mean.*imagenet/resolution_16"):
        load_recipe("imagenet/resolution16")


@pytest.mark.parametrize("options", [
    ["--optim.epochs"], ["--optim.epochs", "--data.hflip", "true"], ["epochs", "3"],
])
def test_bad_option(options):
    with pytest.raises(RecipeError):
        parse_overrides(options)


def test_bad_value_of_an_option_is_blamed_on_the_command_line():
    with pytest.raises(RecipeError, match=r"command line: optim\.epochs: got 'few'"):
        load_recipe("imagenet/default", ["--optim.epochs", "few"])


def test_what_is_allowed(tmp_path):
    """No workers, numbers without a point, a base with its own base, names with and without .yaml, a path."""
    write(tmp_path, "base: second.yaml\noptim: {epochs: 7}")
    write(tmp_path, "base: third.yaml\noptim: {epochs: 8, batch_size: 64}", "second.yaml")
    write(tmp_path, "optim: {base_lr: 1e-4, weight_decay: 0}", "third.yaml")
    recipe = load_recipe(tmp_path / "recipe.yaml", ["--data.num_workers=0", "--optim.betas", "[0.8, 0.9]"])
    assert (recipe.optim.epochs, recipe.optim.batch_size, recipe.optim.base_lr) == (7, 64, 1e-4)
    assert (recipe.data.num_workers, recipe.optim.betas) == (0, (0.8, 0.9))
    assert load_recipe("imagenet/default") == load_recipe("imagenet/default.yaml")


@pytest.mark.parametrize("scale", ["imagenet", "imagenette"])
@pytest.mark.parametrize("row", [8, 16, 32, 64, 128, 256])
def test_both_readings_of_the_decoders_table(scale, row):
    """The printed layers are the default; a layer in front meets the published counts."""
    name = f"{scale}/resolution_{row}"
    config = load_recipe(name, ["--model.decoder_reduce", "published"]).model_config()
    assert load_recipe(name).model_config().decoder_reduce is None
    scale = config.image_size // config.map_size
    with torch.device("meta"):
        layers = ConvDecoder(config.embed_dim, scale, config.decoder_reduce, config.decoder_widths)
        assert layers(torch.rand(1, config.embed_dim, 2, 2)).shape == (1, 3, 2 * scale, 2 * scale)


def test_printed_recipe_is_a_recipe(tmp_path):
    recipe = load_recipe("imagenette/origin_top_left", ["--model.origin", "[1, 2]"])
    again = load_recipe(write(tmp_path, recipe.as_yaml()))
    assert again.as_dict() == recipe.as_dict()


@pytest.mark.parametrize(("words", "code", "message"), [
    (["imagenet/nothing"], 2, "no such recipe"),
    ([], 2, "RECIPE is missing"),
    (["imagenet/default"], 2, "--data is missing"),
    (["imagenet/default", "--optim.epoch", "3"], 2, "did you mean epochs"),
    (["imagenet/default", "--max-time", "soon", "--data", "x"], 2, "HH:MM:SS"),
    (["imagenet/default", "--data", "no/such/folder"], 3, "no/such/folder"),
])
def test_command_line(words, code, message, capsys, tmp_path, monkeypatch):
    if "no/such/folder" in words:
        pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == code
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left


def test_options_and_overrides_mix(capsys):
    assert main(["train", "--optim.epochs", "5", "imagenette/default", "--data.hflip=false", "--seed", "3",
                 "--max-time", "1:30:00", "--print-recipe"]) == 0
    printed = capsys.readouterr().out
    for line in ("  epochs: 5", "  hflip: false", "seed: 3", "  max_time: 90.0"):
        assert line in printed.splitlines()


@pytest.mark.parametrize(("recipe", "overrides", "faults"), [
    ("imagenette/default", ["--data.image_size", "72", "--model.pool_heads", "7"], 2),
    ("imagenette/default", ["--model.map_size", "5", "--model.pool_heads", "7"], 2),
    ("imagenette/masked_b_w720", ["--data.image_size", "64", "--model.decoder_heads", "7"], 2),
    ("imagenette/masked_e_w720", ["--data.image_size", "120"], 1),
    ("imagenette/masked_e_w720", ["--model.block_size", "8"], 1),
    ("imagenette/mae_tiny", ["--model.decoder_dim", "100", "--data.image_size", "130"], 2),
    ("imagenette/simmim_default", ["--model.mask_patch", "40"], 1),
    ("coco128/mask_rcnn_default", ["--model.max_size", "32"], 1),
])
def test_the_message_has_all_faults_of_a_model_and_what_mends_them(recipe, overrides, faults):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    mended = re.findall(r"\((--\S+ \S+?)[,)]", str(caught.value))  # the first key of each fault
    assert len(mended) == faults == str(caught.value).count("got ")
    load_recipe(recipe, [*overrides, *" ".join(mended).split()])
