"""A run's folder says what it started from; a resumed run has the same; a result has its own row's figures alone."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
import yaml
from training import make_images, read_checkpoint

from finola.data import open_data
from finola.data.fingerprint import fingerprint
from finola.data.pack import Encoding, pack
from finola.errors import RecipeError
from finola.training.recipe import load_recipe
from finola.weights import read_tensors, save_weights

engine = pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
from finola.training.origin import UNKNOWN, origin_of_weights, own_figures, runs_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def train(recipe_file, images, out, *overrides, val=True, **options):
    recipe = load_recipe(recipe_file, ["--optim.epochs", "1", *overrides])
    return engine.fit(recipe, [images / "train"], [images / "val"] if val else None, out, **options)


@pytest.fixture(scope="module")
def finished(one_thread, recipe_file, images, weights, tmp_path_factory):
    """A run from the weights of another."""
    out = tmp_path_factory.mktemp("finished")
    train(recipe_file, images, out, init_from=weights)
    return out


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


# the record ---------------------------------------------------------------------------------------


def test_the_record_is_the_same_in_all_places(finished, images, weights):
    result = json.loads((finished / "result.json").read_text())
    assert result["weights"] == {"file": str(weights), "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
                                 "recipe": None, "runs": None, "part": "whole model"}
    for split, count in (("train", 12), ("val", 4)):
        record = result["files"][split]
        assert record["paths"] == [str(images / split)] and record["files"] == count and len(record["sha256"]) == 64
    identity = read_checkpoint(finished)["identity"]
    metadata = read_tensors(finished / "weights.safetensors")[1]
    comments = dict(line[2:].split(": ", 1) for line in (finished / "recipe.yaml").read_text().splitlines()
                    if line.startswith(("# weights: ", "# files: ")))
    for key in ("weights", "files"):
        assert identity[key] == json.loads(metadata[key]) == json.loads(comments[key]) == result[key]


def test_a_runs_recipe_is_a_recipe(finished, recipe_file):
    assert load_recipe(finished / "recipe.yaml").as_dict() == load_recipe(
        recipe_file, ["--optim.epochs", "1"]).as_dict()
    assert yaml.safe_load((finished / "recipe.yaml").read_text()).keys() == {
        "model", "data", "optim", "trainer", "seed"}


def test_the_weights_of_a_run_name_its_recipe(finished, recipe_file, images, tmp_path):
    result = train(recipe_file, images, tmp_path / "next", init_from=finished / "weights.safetensors", val=False)
    assert result["weights"]["recipe"] == "tiny" and result["files"]["val"] is None
    assert train(recipe_file, images, tmp_path / "other")["weights"] is None


# resuming -----------------------------------------------------------------------------------------


def refused(recipe_file, images, run, **options):
    before = (run / "recipe.yaml").read_text()
    with pytest.raises(RecipeError, match="is of another run") as error:
        train(recipe_file, images, run, resume=True, **options)
    assert "\n" not in str(error.value) and "--allow-changes" in str(error.value)
    assert (run / "recipe.yaml").read_text() == before
    return str(error.value)


def test_resume_with_the_same_or_without_naming_the_weights(recipe_file, images, run, weights, tmp_path):
    record = json.loads((run / "result.json").read_text())["weights"]
    copy = shutil.copy(weights, tmp_path / "renamed.safetensors")
    for init_from in (None, weights, copy, tmp_path / "gone.safetensors"):
        assert train(recipe_file, images, run, resume=True, init_from=init_from)["weights"] == record


def test_resume_with_other_weights_is_refused(recipe_file, images, run, finished):
    other = finished / "weights.safetensors"
    assert "weights.sha256: " in refused(recipe_file, images, run, init_from=other)
    result = train(recipe_file, images, run, resume=True, allow_changes=True, init_from=other)
    assert result["weights"]["part"] == "whole model"  # the start remains what it was


def test_resume_with_weights_of_a_run_that_had_none_is_refused(recipe_file, images, weights, tmp_path):
    train(recipe_file, images, tmp_path / "run", val=False)
    assert "weights: None then, {'file':" in refused(recipe_file, images, tmp_path / "run", init_from=weights)


def test_resume_with_other_data_is_refused(recipe_file, images, run, tmp_path):
    moved = shutil.copytree(images, tmp_path / "moved")
    train(recipe_file, moved, run, resume=True)
    first = sorted((moved / "train").rglob("*.png"))[0]
    first.write_bytes(first.read_bytes() + b"\0")
    assert "files.train.sha256: " in refused(recipe_file, moved, run)
    first.rename(first.with_name("renamed.png"))
    assert "files.train.sha256: " in refused(recipe_file, moved, run)


def test_validation_may_be_left_out_on_resume_but_not_changed(recipe_file, images, run, tmp_path):
    train(recipe_file, images, run, resume=True, val=False)
    train(recipe_file, images, run, resume=True)
    other = make_images(tmp_path / "images", val=6)
    assert "files.val.sha256: " in refused(recipe_file, other, run)


def test_a_checkpoint_from_before_this_record_resumes(recipe_file, images, run, weights):
    checkpoint = read_checkpoint(run)
    for key in ("weights", "files"):
        del checkpoint["identity"][key]
    del checkpoint["identity"]["data"]["crop_pct"]
    checkpoint["identity"]["paper"] = {"table": None, "psnr": None}
    torch.save(checkpoint, run / "last.ckpt")
    result = train(recipe_file, images, run, resume=True, init_from=weights)
    assert result["weights"] == "unknown" and result["files"]["train"]["files"] == 12


# the hash -----------------------------------------------------------------------------------------


def test_a_hash_of_names_and_sizes(images, tmp_path):
    paths = sorted((images / "train").rglob("*.png"))
    lines = "".join(f"{path.relative_to(images / 'train')}\0{path.stat().st_size}\n" for path in paths)
    train_set = open_data([images / "train"])
    assert fingerprint(train_set) == (12, hashlib.sha256(lines.encode()).hexdigest())
    copy = open_data([shutil.copytree(images / "train", tmp_path / "copy")])
    assert fingerprint(copy) == fingerprint(train_set)
    both = open_data([images / "train", images / "val"])
    assert fingerprint(both)[0] == 16 and fingerprint(both)[1] != fingerprint(train_set)[1]


def test_shards_count_as_their_files(images, tmp_path):
    pack(open_data([images / "train"]), tmp_path / "packed", Encoding(32), shard_size=5, progress=False)
    shards = open_data([tmp_path / "packed"])
    assert fingerprint(shards)[0] == 3
    one = open_data([tmp_path / "packed/packed-000000.tar"])
    assert [name for name, _ in one.file_sizes()] == ["packed-000000.tar"]


def test_a_link_to_nowhere_is_counted(images, tmp_path):
    folder = shutil.copytree(images / "train", tmp_path / "train")
    whole = fingerprint(open_data([folder]))
    (folder / "class_0/zz.png").symlink_to(tmp_path / "nowhere.png")
    assert fingerprint(open_data([folder]))[0] == whole[0] + 1


# the paper's figures ------------------------------------------------------------------------------


@pytest.mark.parametrize(("overrides", "kept"), [
    ([], True), (["--trainer.val_every", "2"], True), (["--data.num_workers", "1"], True), (["--seed", "3"], True),
    (["--data.resident", "true", "--data.resident_size", "40"], True), (["--optim.batch_size", "128"], True),
    (["--model.embed_dim", "32"], False), (["--optim.epochs", "3"], False), (["--data.crop_scale", "[0.3, 1]"], False),
    (["--data.crop_pct", "0.9"], False),
])
def test_a_changed_run_has_none_of_the_rows_figures(overrides, kept):
    figures = own_figures(load_recipe("imagenet/resolution_8", overrides), None)
    assert [figure["value"] for figure in figures] == ([25.4] if kept else [])


@pytest.mark.parametrize(("runs", "found"), [
    (["imagenet/masked_b_w720"], {51.3}), (["imagenet/moco_w720"], {51.6}), (["imagenette/moco_w720"], set()),
    (["imagenet/channels_64"], set()), (["imagenet/masked_b_w720", "imagenet/lin_w720"], set()), (None, set()),
])
def test_figures_hold_after_certain_runs(runs, found):
    figures = own_figures(load_recipe("imagenet/lin_w720"), {"runs": runs})
    assert {figure["value"] for figure in figures} == found


@pytest.mark.parametrize("weights", [None, UNKNOWN])
def test_a_probe_of_unknown_weights_has_no_figures(weights):
    assert own_figures(load_recipe("imagenet/lin_w2880"), weights) == []


def test_a_chain_lasts_as_long_as_each_run_is_a_row():
    tran1, ft = load_recipe("imagenet/tran1_w720"), load_recipe("imagenet/tran1_ft_w720")
    runs = runs_of(tran1, {"runs": ["imagenet/moco_w720"]})
    assert runs == ["imagenet/moco_w720", "imagenet/tran1_w720"]
    assert [figure["value"] for figure in own_figures(ft, {"runs": runs})] == [74.3]
    changed = load_recipe("imagenet/tran1_w720", ["--optim.epochs", "5"])
    assert runs_of(changed, {"runs": ["imagenet/moco_w720"]}) is None
    assert own_figures(ft, {"runs": runs_of(changed, {"runs": ["imagenet/moco_w720"]})}) == []


def test_a_recipe_of_ones_own_is_no_row(finished):
    result = json.loads((finished / "result.json").read_text())
    assert result["runs"] is None and result["paper"] == []
    metadata = read_tensors(finished / "weights.safetensors")[1]
    assert metadata["runs"] == "null" and metadata["paper"] == "[]"


def test_weights_name_the_runs_behind_them(model, tmp_path):
    metadata = {"recipe": '"imagenet/default"', "runs": '["imagenet/default"]'}
    path = save_weights(model, tmp_path / "w.safetensors", metadata)
    assert origin_of_weights(path, "encoder")["runs"] == ["imagenet/default"]
