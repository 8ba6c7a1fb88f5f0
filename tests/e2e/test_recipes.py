"""Every shipped recipe loads, says what it is for, and every kind of it takes two steps."""

from __future__ import annotations

import json
import math

import pytest

from finola.cli import main as cli
from finola.training.recipe import list_recipes, load_recipe
from finola.weights import load_weights


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_loads(name):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.model_config().kind


@pytest.mark.parametrize(("name", "command"), [
    ("imagenet/default", "finola train imagenet/default --data IMAGENET/train --val IMAGENET/val"),
    ("pocket/lin_w720", "finola probe pocket/lin_w720 --data IMAGENETTE/train --val IMAGENETTE/val"
                        " --weights runs/pocket/masked_b_w720/weights.safetensors"),
    ("imagenette/tran4_ft_w720", "finola finetune imagenette/tran4_ft_w720 --data IMAGENETTE/train --val"
                                 " IMAGENETTE/val --weights runs/imagenette/masked_b_w720/weights.safetensors"),
    ("imagenet/supervised_w720", "finola train imagenet/supervised_w720 --data IMAGENET/train --val IMAGENET/val"),
    ("coco128/frozen_522_w720_finola_ft", "--weights runs/imagenette/tran1_ft_w720/weights.safetensors"),
])
def test_printed_recipe_says_what_to_type(name, command, capsys):
    assert cli.main(["train", name, "--print-recipe"]) == 0
    assert command in [line for line in capsys.readouterr().out.splitlines() if line.startswith("# finola")][0]


def test_printed_recipe_says_what_the_paper_measures(capsys, tmp_path):
    assert cli.main(["train", "imagenet/lin_w720", "--print-recipe"]) == 0
    printed = capsys.readouterr().out
    assert "# paper, table:finola-mocov2, MoCo-V2, MF-W720: lin 51.6 after imagenet/moco_w720\n" in printed
    (tmp_path / "mine.yaml").write_text(printed)
    assert load_recipe(tmp_path / "mine.yaml").as_dict() == load_recipe("imagenet/lin_w720").as_dict()


def test_a_changed_recipe_is_not_the_paper_s_row(capsys):
    assert load_recipe("imagenet/channels_64", ["--trainer.devices", "2", "--data.num_workers", "1"]).shipped
    for words in (["--model.embed_dim", "128"], ["--optim.epochs", "5"], ["--data.crop_scale", "[0.5, 1]"]):
        assert not load_recipe("imagenet/channels_64", words).shipped
    assert cli.main(["train", "imagenet/channels_64", "--optim.epochs", "5", "--print-recipe"]) == 0
    assert "18.2" not in capsys.readouterr().out


def test_paper_settings():
    """Table `appendix:FINOLA`."""
    recipe = load_recipe("imagenet/default")
    assert (recipe.optim.batch_size, recipe.optim.epochs, recipe.optim.warmup_epochs) == (128, 100, 10)
    assert (recipe.optim.weight_decay, recipe.optim.lr) == (0.1, pytest.approx(7.5e-5))
    assert recipe.model_config().embed_dim == 3072 and recipe.model_config().map_size == 16


def test_paper_settings_of_classification():
    """Tables `appendix:FINOLA`, `appendix:lin-tran-setting` and `appendix:finetune-setting`."""
    masked, lin, tran1, ft = (load_recipe(f"imagenet/{name}") for name in (
        "masked_b_w2880", "lin_w2880", "tran1_w2880", "tran1_ft_w2880"))
    assert (masked.optim.batch_size, masked.optim.epochs, masked.optim.lr) == (1024, 1600, pytest.approx(6e-4))
    assert (lin.optim.optimizer, lin.optim.lr, lin.optim.weight_decay, lin.optim.epochs) == ("sgd", 1.6, 0, 90)
    assert (tran1.optim.lr, tran1.optim.weight_decay, tran1.optim.epochs) == (pytest.approx(8e-3), 0.1, 200)
    assert (tran1.optim.label_smoothing, tran1.optim.random_erasing, tran1.model_config().dropout) == (0.1, 0.25, 0.2)
    assert (ft.optim.lr, ft.optim.layer_decay, ft.optim.epochs) == (pytest.approx(1e-3), 0.85, 100)
    assert (ft.optim.mixup, ft.optim.cutmix, ft.optim.random_erasing) == (0.8, 1.0, 0.25)
    assert tran1.data.policy == ft.data.policy == "rand-m9-mstd0.5-inc1"


def test_paper_settings_of_detection():
    """Appendix "Training setup"; the table of Mask R-CNN says "1x" alone: 12 epochs."""
    frozen, tuned, masks = (load_recipe(f"coco/{name}") for name in (
        "frozen_522_w2880_finola", "finetuned_522_w2880_finola", "mask_rcnn_w2880_finola"))
    for recipe, lr, epochs, milestones in ((frozen, 1e-4, 500, (400,)), (tuned, 1e-5, 200, (150,))):
        optim, config = recipe.optim, recipe.model_config()
        assert (optim.optimizer, optim.batch_size, optim.weight_decay) == ("adamw", 16, 1e-4)
        assert (optim.lr, optim.epochs, optim.milestones, optim.warmup) == (pytest.approx(lr), epochs, milestones, 0)
        assert (config.head, config.num_queries, config.dropout) == ("mf_dec_522", 100, 0.1)
        assert (config.image_size, config.max_size) == (800, 1333)
    assert (frozen.optim.freeze_encoder, tuned.optim.freeze_encoder, masks.optim.freeze_encoder) == (True, False, True)
    assert (masks.optim.epochs, masks.optim.batch_size) == (12, 16)


@pytest.mark.parametrize("name", [name for name in list_recipes() if name.startswith("imagenet/")])
def test_twin_is_the_same_but_for_its_scale(name):
    full, twin = (load_recipe(n).model_config() for n in (name, name.replace("imagenet/", "imagenette/")))
    assert full.kind == twin.kind
    if full.kind == "autoencoder":
        assert full.image_size // full.map_size == twin.image_size // twin.map_size
        assert (full.autoregression, full.norm, full.origin) == (twin.autoregression, twin.norm, twin.origin)
    elif full.kind == "masked":
        assert full.image_size / full.block_size == twin.image_size / twin.block_size
        assert (full.variant, full.decoder_depth) == (twin.variant, twin.decoder_depth)
    elif full.kind == "classifier":
        assert full.head == twin.head


@pytest.mark.parametrize("name", [name for name in list_recipes() if name.startswith("coco/")])
def test_twin_of_a_detector_is_the_same_but_for_its_scale(name):
    full, twin = load_recipe(name), load_recipe(name.replace("coco/", "coco128/"))
    assert twin.data.image_size < full.data.image_size
    if not name.endswith("default"):
        assert full.optim.freeze_encoder == twin.optim.freeze_encoder
        full, twin = full.model_config(), twin.model_config()
        assert (full.kind, full.encoder) == (twin.kind, twin.encoder)
        assert full.kind == "mask_rcnn" or full.head == twin.head


@pytest.mark.parametrize("name", [
    "imagenet/resolution_256", "imagenet/normalisation_batch",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "imagenet/autoregression_repeat_16", "imagenet/autoregression_repeat_pos_16",
        "imagenet/autoregression_linear_16", "imagenette/origin_bottom_right")),
])
def test_two_steps(name, images, tmp_path, one_thread):
    """At debug size: 32-px images, a map of at most 8x8, 16 numbers in q."""
    fit = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'").fit
    recipe = load_recipe(name, [
        "--data.image_size", "32", "--data.num_workers", "0", "--model.encoder", "mobileformer_w720",
        "--model.map_size", "8", "--model.embed_dim", "16", "--model.pool_heads", "2",
        "--model.decoder_widths", "[16, 8, 8]", "--optim.epochs", "1", "--optim.batch_size", "6",
        "--trainer.accumulate", "3", "--trainer.accelerator", "cpu",
    ])
    result = fit(recipe, [images / "train"], [images / "val"], tmp_path / "run")
    assert result["step"] == result["total_steps"] == 2 and result["finished"]
    assert math.isfinite(result["val_psnr"])
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
    for name in ("weights.safetensors", "curve.png", "panel.png", "recipe.yaml", "csv/version_0/metrics.csv"):
        assert (tmp_path / "run" / name).stat().st_size


def test_two_steps_from_the_start_as_a_linear_code(images, tmp_path, one_thread):
    """The shipped model's recipe at debug size, at a rate too low to leave the start."""
    fit = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'").fit
    recipe = load_recipe("pretrained/finola_mfw720_c768_r8", [
        "--data.image_size", "32", "--data.resident_size", "32", "--model.map_size", "2", "--model.embed_dim", "48",
        "--model.pool_heads", "4", "--model.decoder_widths", "[24, 24, 16, 16, 16]", "--optim.epochs", "1",
        "--optim.batch_size", "6", "--optim.base_lr", "1e-6", "--trainer.val_every", "1",
    ])
    result = fit(recipe, [images / "train"], [images / "val"], tmp_path / "run")
    assert result["finished"] and math.isfinite(result["val_psnr"])
    stem = load_weights(tmp_path / "run/weights.safetensors").encoder.stem[0].weight
    assert stem[0, 0, 1, 1].item() == pytest.approx(1, abs=1e-3)  # `start_from_images` reads 2x2 blocks


def test_a_panel_shows_its_own_validation_alone(images, recipe_file, tmp_path, monkeypatch, one_thread):
    """With a panel at every second validation, what the one between saw is not kept for the next."""
    pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
    from finola.training.engine import fit
    from finola.training.tasks import reconstruction

    shown, panel = [], reconstruction.panel
    monkeypatch.setattr(reconstruction, "panel", lambda rows, **options: shown.append(rows) or panel(rows, **options))
    recipe = load_recipe(recipe_file, ["--optim.epochs", "3", "--trainer.panel_every", "2"])
    fit(recipe, [images / "train"], [images / "val"], tmp_path / "run")
    assert [len(row) for rows in shown for row in rows] == [4, 4, 4, 4]  # two rows of the four images, twice
    assert not shown[0][1].equal(shown[1][1])


def test_dotted_options_are_only_for_commands_that_take_a_recipe(capsys):
    assert cli.main(["train", "--optim.epochs", "7", "imagenette/default", "--print-recipe"]) == 0
    assert "epochs: 7" in capsys.readouterr().out
    for words in (["eval", "weights", "--data", "photos", "--optim.epochs", "7"], ["train", "x", "--epochs", "7"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 2 and "unrecognized arguments: --" in capsys.readouterr().err
