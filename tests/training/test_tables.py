"""The tables of the paper: every label of its source is here or named as left out, figures are those typed from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finola.cli.main import main
from finola.errors import RecipeError
from finola.training import tables
from finola.training.recipe import load_recipe

# all labels of tables and figures in the paper's source
LABELS = [
    "fig:appendix:element-vs-block", "fig:appendix:noise", "fig:appendix:recon-enc", "fig:appendix:recon-ftlin",
    "fig:appendix:recon-mean", "fig:appendix:recon-mixup", "fig:appendix:recon-num-channels",
    "fig:appendix:recon-pca", "fig:appendix:recon-pos", "fig:appendix:train-len", "fig:cls-od-sup",
    "fig:finola-parallel", "fig:masked-finola", "fig:masked-finola-gaussian", "fig:teaser1", "fig:teaser2",
    "table:ablation", "table:appendix:FINOLA", "table:appendix:ablation-tran-blocks",
    "table:appendix:finetune-setting", "table:appendix:finola-maskedfinola-probing",
    "table:appendix:finola-vs-self-sup", "table:appendix:finola-vs-sup-COCO", "table:appendix:finola-vs-sup-COCO-ft",
    "table:appendix:lin-tran-setting", "table:appendix:mf-enc-achs", "table:appendix:od-mf-dec-achs",
    "table:appendix:upsampler-achs", "table:coco-det-detr-cmp", "table:finola-maskfinola", "table:finola-mocov2",
    "table:finola-vs-mask-based-methods", "table:finola-vs-self-sup", "table:norm+linear", "table:recon-baselines",
    "table:resolution",
]
# those without rows to train, and why (docs/paper-map.md says it to readers)
LEFT_OUT = {
    "settings": {"table:appendix:FINOLA", "table:appendix:lin-tran-setting", "table:appendix:finetune-setting"},
    "architectures": {"table:appendix:mf-enc-achs", "table:appendix:upsampler-achs", "table:appendix:od-mf-dec-achs"},
    "drawings": {"fig:teaser1", "fig:teaser2", "fig:finola-parallel", "fig:masked-finola"},
    "looks into a trained model": {"fig:appendix:noise", "fig:appendix:recon-mean", "fig:appendix:recon-mixup",
                                   "fig:appendix:recon-pca"},
}
# typed from the paper: label -> row -> metric -> figure
TYPED = {
    "resolution": {f"resolution_{r}": {"psnr": psnr} for r, psnr in zip(
        (8, 16, 32, 64, 128, 256), (25.4, 25.8, 25.8, 25.7, 25.3, 24.6), strict=True)} | {
        f"image_size_{s}": {"psnr": psnr} for s, psnr in ((256, 25.8), (384, 24.5), (512, 24.2))},
    "norm+linear": {
        "autoregression_repeat_16": {"psnr": 16.1}, "autoregression_repeat_pos_16": {"psnr": 20.2},
        "autoregression_linear_16": {"psnr": 25.4}, "autoregression_norm_linear_16": {"psnr": 25.8},
        "autoregression_repeat_64": {"psnr": 13.3}, "autoregression_repeat_pos_64": {"psnr": 21.2},
        "autoregression_linear_64": {}, "autoregression_norm_linear_64": {"psnr": 25.7},
        "normalisation_batch": {"train_psnr": 25.1, "psnr": 16.3},
        "normalisation_layer": {"train_psnr": 25.5, "psnr": 25.8}},
    "ablation": {f"channels_{c}": {"psnr": psnr} for c, psnr in zip(
        (4096, 3072, 2048, 1024, 512, 256, 128, 64), (25.9, 25.8, 25.1, 23.7, 22.2, 20.8, 19.4, 18.2), strict=True)} | {
        f"encoder_w{w}": {"psnr": psnr} for w, psnr in zip(
            (5760, 4320, 2880, 1440, 720), (26.1, 26.0, 25.8, 25.1, 24.4), strict=True)},
    "appendix:ablation-tran-blocks": {f"masked_b_blocks_{n}": dict(zip(("lin", "tran1", "tran1_ft"), row, strict=True))
                                      for n, row in enumerate((
        (61.1, 74.4, 82.2), (62.6, 76.5, 82.3), (63.5, 77.3, 82.2), (63.8, 78.0, 82.3), (64.0, 78.1, 82.3),
        (65.0, 78.3, 82.4)), start=1)},
    "finola-maskfinola": {"finola": {"psnr": 25.8, "lin": 17.9, "tran1": 46.8, "tran1_ft": 81.9},
                          "masked_e": {"psnr": 16.7, "lin": 54.1, "tran1": 67.8, "tran1_ft": 82.2},
                          "masked_b": {"psnr": 17.3, "lin": 66.4, "tran1": 78.7, "tran1_ft": 82.5}},
    "finola-mocov2": {f"{start}_w{width}": dict(zip(
        ("lin", "tran1", "tran1_ft", "box_ap", "box_ap_ft", "mask_ap", "mask_ap_ft"), row, strict=True))
        for start, width, *row in (
            ("moco", 720, 51.6, 52.9, 74.3, 31.8, 39.9, 23.2, 25.3),
            ("masked_b", 720, 51.3, 65.5, 75.6, 40.0, 41.6, 26.3, 28.4),
            ("moco", 1440, 60.4, 58.5, 79.2, 30.3, 39.0, 25.6, 25.7),
            ("masked_b", 1440, 62.8, 75.2, 80.5, 42.6, 44.0, 30.6, 32.7),
            ("moco", 2880, 66.5, 63.8, 80.0, 25.5, 31.7, 27.8, 25.2),
            ("masked_b", 2880, 66.4, 78.7, 82.5, 43.3, 45.5, 33.3, 35.1))},
    "finola-vs-self-sup": {"masked_b_w720": {"ft": 78.4}, "masked_b_w1440": {"ft": 82.2},
                           "masked_b_w2880": {"ft": 83.9}, "mae_tiny": {"ft": 78.0}, "mae_small": {"ft": 82.1},
                           "mae_base": {"ft": 83.6}},
    "finola-vs-mask-based-methods": {"masked_b_w720": {"lin": 51.3}, "masked_b_w1440": {"lin": 62.8},
                                     "masked_b_w2880": {"lin": 66.4}, "mae_tiny": {"lin": 23.3},
                                     "mae_small": {"lin": 49.2}, "mae_base": {"lin": 68.0},
                                     "simmim_base": {"lin": 56.7}},
}
BOX_AP = {  # (table, head) -> width -> supervised, FINOLA, FINOLA after fine-tuning on ImageNet
    ("frozen", 522): {2880: (40.5, 43.3, 45.5), 1440: (38.3, 42.6, 44.0), 720: (35.2, 40.0, 41.6)},
    ("frozen", 211): {2880: (34.1, 36.7, 41.0), 1440: (31.2, 36.0, 39.2), 720: (27.8, 33.0, 35.8)},
    ("finetuned", 522): {2880: (48.1, 48.0, 49.0), 1440: (46.2, 46.8, 47.3), 720: (42.5, 43.3, 44.4)},
    ("finetuned", 211): {2880: (44.0, 44.4, 46.0), 1440: (42.5, 42.4, 43.8), 720: (37.6, 37.2, 39.3)},
}
SCALES = ("imagenet", "imagenette", "pocket")


def test_every_label_of_the_paper_is_listed_or_left_out():
    listed = {label for table in tables.tables() for label in (table.label, *table.shown_in)}
    left_out = set().union(*LEFT_OUT.values())
    assert listed | left_out == set(LABELS) and not listed & left_out


def test_labels_that_are_left_out_are_named_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "paper-map.md").read_text(encoding="utf-8")
    assert [label for label in set().union(*LEFT_OUT.values()) if label not in text] == []


@pytest.mark.parametrize("label", TYPED)
def test_figures_are_those_of_the_paper(label):
    found = {row.name: dict(row.paper) for row in tables.find_table(label).rows}
    published = {name for name in found if name.endswith("_published")}
    assert {name: found[name] for name in found if name not in published} == TYPED[label]
    assert all(found[name] == found[name.removesuffix("_published")] for name in published)


@pytest.mark.parametrize(("kind", "head"), BOX_AP)
def test_average_precisions_are_those_of_the_paper(kind, head):
    label = "appendix:finola-vs-sup-COCO" + ("-ft" if kind == "finetuned" else "")
    found = {row.name: row.paper["box_ap"] for row in tables.find_table(label).rows}
    for width, figures in BOX_AP[kind, head].items():
        names = [f"{kind}_{head}_w{width}_{start}" for start in ("supervised", "finola", "finola_ft")]
        assert tuple(found[name] for name in names) == figures


@pytest.mark.parametrize("scale", SCALES)
def test_the_runs_of_a_row_fit_together(scale):
    """Each metric of each row is a chain of runs that exist, and of one encoder."""
    encoder = {}
    for table in tables.tables():
        for row in table.rows:
            for metric in row.metrics:
                names = [f"{tables.scale_of(name, scale)}/{name}" for name in row.chain(metric, scale)]
                for name in names:
                    encoder[name] = encoder.get(name) or load_recipe(name).model_config().encoder
                assert len({encoder[name] for name in names}) == 1, (table.label, row.name, metric, names)


def test_bases_are_two_deep_at_most():
    def depth(name):
        base = tables.runs()[name].base
        return 1 + depth(base) if base else 0

    assert max(map(depth, tables.runs())) == 2


def test_chains_of_runs():
    rows = {row.name: row for row in tables.find_table("finola-mocov2").rows}
    assert rows["moco_w720"].chain("box_ap_ft", "imagenet") == [
        "moco_w720", "tran1_w720", "tran1_ft_w720", "frozen_522_w720_moco_ft"]
    rows = {row.name: row for row in tables.find_table("appendix:finola-vs-sup-COCO-ft").rows}
    assert rows["finetuned_522_w720_finola_ft"].chain("box_ap", "imagenet") == [
        "masked_b_w720", "tran1_w720", "tran1_ft_w720", "frozen_522_w720_finola_ft", "finetuned_522_w720_finola_ft"]
    masked = {row.name: row for row in tables.find_table("finola-maskfinola").rows}["masked_b"]
    assert masked.chain("lin", "imagenet") == ["masked_b_w2880", "lin_w2880"]
    assert masked.chain("lin", "pocket") == ["masked_b_w720", "lin_w720"]


@pytest.mark.parametrize("name", ["resolution", "table:resolution", "appendix:recon-pos", "fig:appendix:recon-pos"])
def test_a_table_is_known_by_its_label(name):
    assert name.endswith(tables.find_table(name).label.partition(":")[2])


def test_unknown_tables_and_rows_name_their_neighbours(capsys):
    with pytest.raises(RecipeError, match=r"resolutio: no such table; did you mean resolution"):
        tables.find_table("resolutio")
    assert main(["reproduce", "resolution", "--rows", "resolution_7"]) == 2
    assert "did you mean resolution_8" in capsys.readouterr().err


def test_list_as_json(capsys):
    assert main(["reproduce", "--list", "--json"]) == 0
    listed = {table["table"]: table for table in json.loads(capsys.readouterr().out)}
    row = next(row for row in listed["table:resolution"]["rows"] if row["name"] == "resolution_8")
    assert row["paper"] == {"psnr": 25.4}
    figures = [value for table in listed.values() for row in table["rows"] for value in row["paper"].values()]
    assert all(isinstance(value, float | int) for value in figures) and len(figures) > 300


@pytest.mark.parametrize("scale", ["imagenet", "imagenette", "pocket"])
@pytest.mark.parametrize("label", ["appendix:train-len", "appendix:element-vs-block"])
def test_longer_schedules_are_longer_at_every_scale(label, scale):
    """Rows of one model come in the order of their length."""
    lengths: dict[str, list[int]] = {}
    for row in tables.find_table(label).rows:
        model = row.title.partition(",")[0]
        run = row.chain("lin", scale)[0]
        lengths.setdefault(model, []).append(load_recipe(f"{scale}/{run}").optim.epochs)
    for epochs in lengths.values():
        assert len(epochs) == 5 and epochs == sorted(set(epochs))
