"""Reproducing a table: the plan of runs, what stands in the way of one, the folder, and the report."""

from __future__ import annotations

import importlib.util
import json

import pytest
from PIL import Image

from finola.cli.main import main
from finola.errors import DataError, RecipeError
from finola.training import tables
from finola.training.jobs import Job
from finola.training.report import cells, markdown, report, write
from finola.training.reproduce import Data, Plan, Reproduction, choose, opened

HERE = Data(["train"], ["val"], ["coco"], ["coco_val"])


def plan(label: str, *rows: str, scale: str = "pocket", seeds: int = 1, overrides: tuple[str, ...] = ()) -> Plan:
    return Plan.of(choose(tables.find_table(label), rows), scale, seeds, overrides)


def finish(reproduction: Reproduction, stage, **scores: float) -> None:
    """As if the run had been trained."""
    folder = reproduction.folder(stage)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"finished": True, "converged": True, "seconds": 1800, "commit": "0123456789", "hardware": "a machine",
              "history": [{f"val_{name}": value for name, value in scores.items()}]}
    (folder / "result.json").write_text(json.dumps(result))


def test_rows_share_what_they_can():
    """The same settings under other names, and the pre-training of several metrics, are one run."""
    assert len(plan("resolution", "resolution_16", "image_size_256").stages) == 1
    assert len(plan("norm+linear", "autoregression_norm_linear_16", "normalisation_layer").stages) == 1
    found = plan("finola-maskfinola", "masked_b", "finola")
    names = [stage.recipe.name.partition("/")[2] for stage in found.stages.values()]
    assert names == ["masked_b_w720", "lin_w720", "tran1_w720", "tran1_ft_w720"] + ["default", "lin_w720", "tran1_w720",
                                                                                    "tran1_ft_w720"]
    lin, ft = (found.measured["finola", metric, 0] for metric in ("lin", "tran1_ft"))
    assert lin.start is ft.start.start and lin.start.recipe.name == "pocket/default"
    assert len(found.stages_of(found.rows[0])) == 4


def test_seeds_and_settings_make_another_run():
    keys = [stage.key for stage in plan("resolution", "resolution_8", seeds=3).stages.values()]
    keys += plan("resolution", "resolution_8", overrides=("--optim.epochs", "5")).stages
    assert len(set(keys)) == 4
    same = plan("resolution", "resolution_8", overrides=("--data.num_workers", "1", "--trainer.max_time", "5")).stages
    assert set(same) < set(keys)


def test_detectors_take_their_own_data():
    found = plan("finola-mocov2", "masked_b_w720", scale="imagenette")
    data = {stage.recipe.name: HERE.of(stage.recipe) for stage in found.stages.values()}
    assert data["imagenette/masked_b_w720"] == (["train"], ["val"])
    assert data["coco128/frozen_522_w720_finola"] == (["coco"], ["coco_val"])


def test_what_lacks_data_or_a_package_is_left_out_and_the_rest_goes_on(tmp_path, monkeypatch):
    found = Reproduction(plan("finola-mocov2", "masked_b_w720", "moco_w720"), Data(["train"], ["val"]), tmp_path)
    left_out = {found.plan.stages[key].recipe.name: reason for key, (_, reason) in found.reasons.items()}
    assert set(left_out.values()) == {"needs --coco, images to train on"}
    assert all(name.startswith("coco128/") for name in left_out)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightly" else object())
    found = Reproduction(plan("finola-mocov2", "masked_b_w720", "moco_w720"), HERE, tmp_path)
    reasons = {reason for _, reason in found.reasons.values()}
    assert reasons == {"needs the package lightly; pip install 'finola[ssl]'"}
    assert {stage.recipe.name for stage in found.ready()} == {"pocket/masked_b_w720"}
    assert len(found.reasons) == 8  # MoCo's pre-training and all that starts from it


def test_nothing_to_train_is_said_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "resolution"]) == 2
    assert "needs --data" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(["reproduce", "resolution", "--data", "no/such", "--val", "no/such"]) == 3
    assert "no/such" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_data_are_checked_before_the_first_run(images, tmp_path):
    """Too few images for a batch, and images without labels where a probe will need them."""
    data = Data([str(images / "train")], [str(images / "val")])
    with pytest.raises(DataError, match="do not fill one batch"):
        Reproduction(plan("resolution"), data, tmp_path).check_data()
    plain = Data([str(images / "train" / "class_0")], [str(images / "val" / "class_0")])
    small = ("--optim.batch_size", "4")
    Reproduction(plan("resolution", overrides=small), plain, tmp_path).check_data()
    with pytest.raises(DataError, match="label|class"):
        Reproduction(plan("finola-maskfinola", overrides=small), plain, tmp_path).check_data()


def test_folder_is_for_one_process_one_scale_and_one_set_of_data(images, tmp_path):
    out, small = tmp_path / "out", ("--optim.batch_size", "4")

    def found(train="train"):
        data = Data([str(images / train)], [str(images / "val")])
        return Reproduction(plan("resolution", overrides=small), data, out).check_data()

    inner = opened(out, "pocket", found())
    with (opened(out, "pocket", found()), pytest.raises(RecipeError, match="another finola reproduce works in"), inner):
        pass
    with opened(out, "pocket", found()):
        pass
    with pytest.raises(RecipeError, match="is of the scale pocket, not imagenette"), opened(out, "imagenette", found()):
        pass
    with (pytest.raises(RecipeError, match=r"other data \(images: 12 files of .*train, not 4 of .*val\)"),
          opened(out, "pocket", found("val"))):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RecipeError, match="holds other files"), opened(tmp_path / "full", "pocket", found()):
        pass


def test_the_next_run_is_one_whose_start_is_finished(tmp_path):
    found = Reproduction(plan("finola-maskfinola", "masked_b"), HERE, tmp_path)
    (first,) = found.ready()
    assert first.recipe.name == "pocket/masked_b_w720"
    finish(found, first, psnr=12)
    assert [stage.recipe.name for stage in found.ready()] == ["pocket/lin_w720", "pocket/tran1_w720"]


def test_report(tmp_path):
    """Mean and deviation over the seeds that are finished, the paper's figures, hours, and what is missing."""
    table = tables.find_table("resolution")
    found = Reproduction(plan("resolution", "resolution_8", "resolution_32", "resolution_64", seeds=3), HERE, tmp_path)
    for seed, psnr in enumerate((20.0, 21.0, 22.0)):
        finish(found, found.plan.measured["resolution_8", "psnr", seed], psnr=psnr)
    finish(found, found.plan.measured["resolution_32", "psnr", 0], psnr=23)
    broken = found.plan.measured["resolution_64", "psnr", 0]
    found.reasons[broken.key] = ("failed", "no space left")
    content = report(table, found)
    rows = {row["name"]: row for row in content["rows"]}
    assert rows["resolution_8"]["ours"]["psnr"] == {"mean": 21, "deviation": 1, "values": [20, 21, 22],
                                                    "seeds": 3, "state": "finished"}
    assert rows["resolution_8"]["hours"] == 1.5 and rows["resolution_8"]["commits"] == ["0123456789"]
    assert [line[1:5] for line in cells(content)[1:]] == [
        ["64 px, map 2x2, 192 channels", "25.4", "21.00 ± 1.00", "1.50"],
        ["64 px, map 8x8, 192 channels", "25.8", "23.00 (1 of 3)", "0.50"],
        ["64 px, map 16x16, 192 channels", "25.7", "failed", "-"]]
    assert "| (a) 8x8 | 64 px, map 2x2, 192 channels | 25.4 | 21.00 ± 1.00 | 1.50 | 0123456 |" in markdown(content)
    assert "(a) 64x64: no space left" in markdown(content)
    path = write(content, tmp_path)
    assert path.name == "resolution-pocket.md"
    assert json.loads(path.with_suffix(".json").read_text()) == content
    with Image.open(path.with_suffix(".png")) as image:
        assert image.width > 400


def test_the_title_of_a_narrow_table_is_whole(tmp_path):
    found = Reproduction(plan("norm+linear", "autoregression_repeat_16"), HERE, tmp_path)
    path = write(report(tables.find_table("norm+linear"), found), tmp_path).with_suffix(".png")
    with Image.open(path) as image:
        grey = image.convert("L")
        sides = [grey.crop((x, 0, x + 1, grey.height)).getextrema() for x in (0, grey.width - 1)]
    assert sides == [(255, 255)] * 2  # nothing reaches the border


def test_a_run_that_waits_says_what_for(tmp_path):
    table = tables.find_table("finola-maskfinola")
    found = Reproduction(plan("finola-maskfinola", "finola"), HERE, tmp_path)
    start = found.plan.measured["finola", "psnr", 0]
    folder = found.folder(start)
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({
        "finished": True, "converged": False, "seconds": 1, "commit": None, "hardware": "here", "history": []}))
    (row,) = report(table, found)["rows"]
    assert {metric: ours["state"] for metric, ours in row["ours"].items()} == dict.fromkeys(row["ours"], "diverged")
    assert cells({"rows": [row]})[1][3] == "did not converge"
    assert not list(found.ready())


def test_rows_of_an_earlier_call_stay(tmp_path):
    first, second = (row.name for row in tables.find_table("resolution").rows[:2])

    def rows(name: str, *overrides: str) -> list[str]:
        reproduction = Reproduction(plan("resolution", name, overrides=overrides), HERE, tmp_path)
        path = write(report(tables.find_table("resolution"), reproduction), tmp_path)
        return [row["name"] for row in json.loads(path.with_suffix(".json").read_text())["rows"]]

    assert rows(second) == [second]
    assert rows(first) == [first, second]  # in the table's order
    assert rows(first, "--optim.epochs", "2") == [first]  # other settings make another table


def test_a_log_is_read_in_whole_lines(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("of an earlier call\n")
    request = {"recipe": "no/such", "overrides": [], "data": [], "val": [], "out": str(tmp_path / "run"), "start": None}
    job = Job(request, log, threads=1)
    job.wait()
    (line,) = job.new_lines()
    assert "no/such: no such recipe" in line and job.new_lines() == []
    with open(log, "a") as file:
        file.write("epoch 1\nepo")
        file.flush()
        assert job.new_lines() == ["epoch 1"]
        file.write("ch 2\n")
    assert job.new_lines() == ["epoch 2"]


@pytest.mark.parametrize("words, message", [
    ([], "COMMAND"), (["recontsruct"], "recontsruct: no such command; did you mean reconstruct"),
    (["reproduce", "resolutions"], "did you mean resolution or ablation?"),
    (["reproduce", "resolution", "--data", "a", "--val", "b", "--max-time", "0"], "--max-time: got '0', expected"),
], ids=str)
def test_wrong_words(words, message, capsys):
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2 and message in capsys.readouterr().err
