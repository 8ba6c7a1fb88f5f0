"""Every shipped recipe loads, says what it is for, and every kind of it takes two steps."""

from __future__ import annotations

import json
import math
import re

import pytest

from finola.cli import main as cli
from finola.training.recipe import RECIPE_FOLDER, list_recipes, load_recipe
from finola.weights import load_weights

# the published rows of the tables on reconstruction, typed from the paper
PAPER = {
    "resolution": {8: 25.4, 16: 25.8, 32: 25.8, 64: 25.7, 128: 25.3, 256: 24.6},
    "image_size": {256: 25.8, 384: 24.5, 512: 24.2},
    "autoregression_repeat": {16: 16.1, 64: 13.3},
    "autoregression_repeat_pos": {16: 20.2, 64: 21.2},
    "autoregression_linear": {16: 25.4, 64: None},
    "autoregression_norm_linear": {16: 25.8, 64: 25.7},
    "normalisation": {"batch": 16.3, "layer": 25.8},
    "channels": {4096: 25.9, 3072: 25.8, 2048: 25.1, 1024: 23.7, 512: 22.2, 256: 20.8, 128: 19.4, 64: 18.2},
    "encoder": {"w5760": 26.1, "w4320": 26.0, "w2880": 25.8, "w1440": 25.1, "w720": 24.4},
    "origin": {"center": 25.8} | dict.fromkeys(["top_left", "top_right", "bottom_left", "bottom_right"]),
}
ROWS = {f"{kind}_{row}": value for kind, rows in PAPER.items() for row, value in rows.items()}


# of the tables on classification: top-1 in percent, by encoder width
TOP1 = {
    "lin": {"w720": 51.3, "w1440": 62.8, "w2880": 66.4, "vit_tiny": 23.3, "vit_small": 49.2, "vit_base": 68.0},
    "tran1": {"w720": 65.5, "w1440": 75.2, "w2880": 78.7},
    "tran1_ft": {"w720": 75.6, "w1440": 80.5, "w2880": 82.5},
    "tran4_ft": {"w720": 78.4, "w1440": 82.2, "w2880": 83.9},
    "ft": {"vit_tiny": 78.0, "vit_small": 79.5, "vit_base": 83.6},
}
PROBES = {f"{kind}_{encoder}": value for kind, rows in TOP1.items() for encoder, value in rows.items()}
WIDTHS = (720, 1440, 2880)
PRETRAINING = {
    *(f"{method}_w{width}" for method in ("masked_b", "masked_e", "moco", "supervised") for width in WIDTHS),
    *(f"masked_b_w{width}_epochs_{epochs}" for width in WIDTHS for epochs in (100, 200, 400, 800)),
    *(f"masked_b_blocks_{blocks}" for blocks in range(1, 7)),
    "mae_tiny", "mae_small", "mae_base", "simmim_base", "recon_masked_b", "recon_masked_e",
}
DEFAULTS = {f"{kind}_default" for kind in ("masked", "mae", "simmim", "moco", "supervised", "lin", "tran1", "finetune")}

# of the tables on COCO: AP in percent, by encoder width
BOX_AP = {
    "frozen_522": {2880: {"supervised": 40.5, "finola": 43.3, "finola_ft": 45.5, "moco": 25.5, "moco_ft": 31.7},
                   1440: {"supervised": 38.3, "finola": 42.6, "finola_ft": 44.0, "moco": 30.3, "moco_ft": 39.0},
                   720: {"supervised": 35.2, "finola": 40.0, "finola_ft": 41.6, "moco": 31.8, "moco_ft": 39.9}},
    "frozen_211": {2880: {"supervised": 34.1, "finola": 36.7, "finola_ft": 41.0},
                   1440: {"supervised": 31.2, "finola": 36.0, "finola_ft": 39.2},
                   720: {"supervised": 27.8, "finola": 33.0, "finola_ft": 35.8}},
    "finetuned_522": {2880: {"supervised": 48.1, "finola": 48.0, "finola_ft": 49.0},
                      1440: {"supervised": 46.2, "finola": 46.8, "finola_ft": 47.3},
                      720: {"supervised": 42.5, "finola": 43.3, "finola_ft": 44.4}},
    "finetuned_211": {2880: {"supervised": 44.0, "finola": 44.4, "finola_ft": 46.0},
                      1440: {"supervised": 42.5, "finola": 42.4, "finola_ft": 43.8},
                      720: {"supervised": 37.6, "finola": 37.2, "finola_ft": 39.3}},
}
MASK_AP = {
    720: {"moco": 23.2, "moco_ft": 25.3, "finola": 26.3, "finola_ft": 28.4},
    1440: {"moco": 25.6, "moco_ft": 25.7, "finola": 30.6, "finola_ft": 32.7},
    2880: {"moco": 27.8, "moco_ft": 25.2, "finola": 33.3, "finola_ft": 35.1},
}
DETRS = {f"{kind}_w{width}_{start}": value for kind, widths in BOX_AP.items() for width, row in widths.items()
         for start, value in row.items()} | {"finola_detr_frozen": 45.5, "finola_detr_finetuned": 49.0}
MASK_RCNNS = {f"mask_rcnn_w{width}_{start}": value for width, row in MASK_AP.items() for start, value in row.items()}
DETECTION_DEFAULTS = {"frozen_default", "finetuned_default", "mask_rcnn_default"}
FAMILIES = dict.fromkeys(["imagenet", "imagenette"], {*ROWS, "default", *PROBES, *PRETRAINING, *DEFAULTS})
FAMILIES |= dict.fromkeys(["coco", "coco128"], {*DETRS, *MASK_RCNNS, "detr_r50", *DETECTION_DEFAULTS})
DETECTING = [f"{family}/{row}" for family in ("coco", "coco128") for row in (*DETRS, *MASK_RCNNS)]


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_a_recipe_for_every_row(family):
    names = {name.removeprefix(f"{family}/") for name in list_recipes() if name.startswith(f"{family}/")}
    assert names == FAMILIES[family]


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_loads_and_explains_itself(name):
    recipe = load_recipe(name)
    family, _, row = name.partition("/")
    header = _header(name)
    assert any(f"finola {_command(recipe, row)} {name} --" in line for line in header)
    assert any(line.startswith("# Hours:") for line in header)
    if family in FAMILIES and row != "detr_r50":
        # the settings of detection stand in no table
        place = 'appendix "Training setup"' if row in ("frozen_default", "finetuned_default") else recipe.paper.table
        assert any(line.startswith("# Paper") and place in line for line in header)
        assert recipe.paper.psnr == ROWS.get(row, 25.8 if row == "default" else None)
        assert recipe.paper.top1 == PROBES.get(row)
        assert (recipe.paper.box_ap, recipe.paper.mask_ap) == (DETRS.get(row), MASK_RCNNS.get(row))
    else:
        assert any("Not a row of the paper" in line for line in header)
        assert {recipe.paper.psnr, recipe.paper.box_ap} == {None}


def _header(name: str) -> list[str]:
    lines = (RECIPE_FOLDER / f"{name}.yaml").read_text().splitlines()
    return [line for line in lines if line.startswith("#")]


def _command(recipe, row: str) -> str:
    """What `finola` is to be called with for a recipe."""
    config = recipe.model_config()
    if config.score == "objects":
        return "detect train"
    if config.kind != "classifier" or row.startswith("supervised"):
        return "train"
    return "probe" if recipe.optim.freeze_encoder else "finetune"


@pytest.mark.parametrize("name", DETECTING)
def test_header_of_a_detector_names_its_number_and_its_start(name):
    """The runs it starts from are those of recipes with its encoder, or of commands that stand in the header too."""
    recipe, header = load_recipe(name), "\n".join(_header(name))
    paper, config = recipe.paper, recipe.model_config()
    number = f"{paper.box_ap} box AP" if config.kind == "detr" else f"{paper.mask_ap} mask AP"
    assert f"{paper.table}, {paper.row}: {number}" in header
    starts, made = (set(re.findall(rf"--{option} runs/(\w+/\w+)", header)) for option in ("weights", "out"))
    used = set(re.findall(r"finola (?:probe|finetune) (\w+/\w+)", header)) | starts - made
    assert starts and made <= starts
    assert {load_recipe(other).model_config().encoder for other in used} == {config.encoder}
    if not recipe.optim.freeze_encoder:
        assert load_recipe(*starts).model_config() == config  # with the same head


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


@pytest.mark.parametrize("row", [*DETRS, *MASK_RCNNS, "detr_r50"])
def test_twin_of_a_detector_is_the_same_but_for_its_scale(row):
    full, twin = (load_recipe(f"{family}/{row}") for family in ("coco", "coco128"))
    assert full.optim.freeze_encoder == twin.optim.freeze_encoder == ("frozen" in row or "mask" in row)
    assert twin.data.image_size < full.data.image_size
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
