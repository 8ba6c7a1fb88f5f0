"""The benchmark of pre-training methods: every stage is run once and kept, and the table has means over seeds."""

import json
import subprocess
import sys

import pytest
import selfsupervised
from pictures import photo

STAGES = {"pretraining", "lin", "tran1", "finetuning"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stages_are_run_and_kept(tmp_path):
    for part, count in (("train", 260), ("val", 12)):  # the linear probe's batch is 512
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                photo(seed=i).save(tmp_path / part / name / f"{i}.jpg")
    command = [sys.executable, selfsupervised.__file__, "--data", tmp_path / "train", "--val", tmp_path / "val",
               "--out", tmp_path / "out", "--epochs", "1", "--methods", "untrained ViT-tiny"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout
    assert "| untrained ViT-tiny | - | " in printed
    folder = tmp_path / "out" / "untrained_vit-tiny" / "seed0"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == STAGES
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == before


def test_the_table_has_means_over_seeds(tmp_path):
    for seed, (psnr, top1) in enumerate([(13.0, 40.0), (14.0, 42.0)]):
        folder = selfsupervised.folder_of("masked FINOLA-B", seed, tmp_path)
        for stage, scores in (("pretraining", {"val_psnr": psnr}), ("lin", {"val_top1": top1})):
            (folder / stage).mkdir(parents=True)
            result = {"finished": stage != "lin" or seed == 0, "commit": "c", "seconds": 1800, "history": [scores]}
            (folder / stage / "result.json").write_text(json.dumps(result))
    found = selfsupervised.collect(tmp_path, 2, "imagenette/train")
    (row,) = found["methods"]
    assert row["scores"]["PSNR, dB"] == [13.0, 14.0] and row["scores"]["lin"] == [40.0]  # the other one is under way
    assert selfsupervised.cells(found)[1] == ["masked FINOLA-B", "13.5 ± 0.7", "-", "40.0", "-", "-", "-", "2", "1.5"]


def test_rows_stay_when_their_runs_are_gone(tmp_path):
    earlier = {"name": "MoCo-v2", "scores": {column: [50.0] for column in selfsupervised.COLUMNS}, "hours": 1.0}
    (tmp_path / "pretraining.json").write_text(json.dumps({"epochs": 10, "methods": [earlier]}))
    assert selfsupervised.collect(tmp_path, 10, "imagenette/train")["methods"] == [earlier]
    assert selfsupervised.collect(tmp_path, 20, "imagenette/train")["methods"] == []  # another budget
    selfsupervised.folder_of("MoCo-v2", 0, tmp_path).mkdir(parents=True)
    assert selfsupervised.collect(tmp_path, 10, "imagenette/train")["methods"] == []  # under way anew
