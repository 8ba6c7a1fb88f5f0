"""Bad input to pre-training, probing and fine-tuning by the command line: the right exit code, one line that names
both sides, and nothing written."""

from __future__ import annotations

import shutil
import tarfile

import pytest
import torch

from finola.cli.main import main
from finola.data import open_data
from finola.data.pack import Encoding, pack
from finola.factory import create_model
from finola.weights import save_weights

pytest.importorskip("finola.training.engine", reason="needs the extra 'train'")
pytestmark = pytest.mark.usefixtures("one_thread")

DEBUG = ["--data.image_size", "32", "--data.num_workers", "0", "--optim.epochs", "1", "--optim.batch_size", "6",
         "--trainer.accelerator", "cpu"]
LIN, TRAN1, FT = "imagenette/lin_w720", "imagenette/tran1_w720", "imagenette/tran1_ft_w720"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A function: weights of a registered model at debug size."""
    folder = tmp_path_factory.mktemp("weights")

    def save(name, **options):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            torch.manual_seed(0)
            save_weights(create_model(name, **options), path)
        return path

    return save


@pytest.fixture(scope="module")
def pretrained(weights):
    return weights("masked_finola_e_mfw720", image_size=64, block_size=2)


@pytest.fixture
def refused(tmp_path, capsys):
    """Run a command that must end with `code` and one line that holds all `parts`; no run's folder is left."""
    def run(code, parts, command, *words):
        out = tmp_path / "run"
        assert main([command, *DEBUG, "--out", str(out), *map(str, words)]) == code
        error = capsys.readouterr().err.strip()
        assert error.startswith(f"finola {command}: ") and "\n" not in error
        assert all(str(part) in error for part in parts), error
        assert not out.exists()

    return run


def sets(images, val=None):
    return ["--data", images / "train", "--val", val or images / "val"]


@pytest.fixture
def copy(images, tmp_path):
    """The images, to be spoilt."""
    return shutil.copytree(images, tmp_path / "images")


# recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "parts"), [
    ("masked_b_w720", ["image_size: got 32", "at least 48"]),
    ("masked_b_w720 --data.image_size 96", ["block_size: got 4", "half of the 6x6 patches"]),
    ("masked_b_w720 --data.image_size 100", ["image_size: got 100", "a multiple of 16"]),
    ("masked_e_w720 --data.image_size 64 --model.block_size 5", ["block_size: got 5", "from 1 to 3"]),
    ("masked_e_w720 --data.image_size 64 --model.block_size 4", ["block_size: got 4", "from 1 to 3"]),
    ("mae_tiny --data.image_size 40", ["image_size: got 40", "a multiple of 16"]),
    ("mae_tiny --model.mask_ratio 1.0", ["mask_ratio: got 1.0"]),
    ("simmim_base --data.image_size 48", ["image_size: got 48", "a multiple of 32"]),
    ("default --optim.layer_decay 0.5", ["optim.layer_decay: got 0.5", "only classifiers"]),
    ("moco_w720 --optim.mixup 0.5", ["optim.mixup: got 0.5", "only classifiers"]),
    ("supervised_w720 --data.augment false", ["data.augment: got false", "freeze_encoder: true"]),
    ("recon_masked_b --data.augment false", ["data.augment: got false", "needs a classifier"]),
    ("default --num-classes 2", ["--num-classes: is for classifiers", "'autoencoder'"]),
    ("supervised_w720 --new-head", ["--new-head", "none are given"]),
])
def test_what_does_not_go_together(words, parts, images, refused):
    recipe, *options = words.split()
    refused(2, parts, "train", f"imagenette/{recipe}", *sets(images), *options)


def test_faults_of_the_recipe_and_of_the_data_are_one_message(images, refused):
    """With the flag and the value that mend each."""
    parts = ["--model.block_size 2", "images do not fill one batch of 256", "--optim.batch_size 12 or less"]
    refused(2, parts, "train", "imagenette/masked_b_w720", "--data.image_size", "64", *sets(images),
            "--optim.batch_size", "256")


@pytest.mark.parametrize("option", [
    ("optim.mixup", "0.8"), ("optim.cutmix", "1.0"), ("optim.random_erasing", "0.25"), ("data.policy", "moco"),
])
def test_features_computed_once_allow_no_augmentation(option, images, refused, pretrained):
    key, value = option
    refused(2, [f"{key}: got {value}", "data.augment: false"], "probe", LIN, *sets(images), "--weights", pretrained,
            "--data.augment", "false", f"--{key}", value)


def test_probing_and_fine_tuning_are_told_apart(images, refused, pretrained):
    refused(2, [FT, "not for probing", "freeze_encoder"], "probe", FT, *sets(images), "--weights", pretrained)
    refused(2, [LIN, "not for fine-tuning"], "finetune", LIN, *sets(images), "--weights", pretrained)
    for command in ("probe", "finetune"):
        refused(2, ["imagenette/masked_e_w720", "needs a classifier"], command, "imagenette/masked_e_w720",
                *sets(images), "--weights", pretrained, "--data.image_size", "64", "--model.block_size", "2")


@pytest.mark.parametrize(("command", "recipe"), [("probe", LIN), ("finetune", FT)])
def test_missing_words(command, recipe, images, refused, pretrained):
    refused(2, ["--weights is missing"], command, recipe, *sets(images))
    refused(2, ["--data is missing"], command, recipe, "--weights", pretrained)
    refused(2, ["RECIPE is missing"], command, "--weights", pretrained)


# weights ------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit(images, refused, weights, tmp_path):
    wide = weights("masked_finola_e_mfw1440", image_size=64, block_size=2)
    refused(4, [wide, "mobileformer_w1440", "mobileformer_w720"], "probe", LIN, *sets(images), "--weights", wide)
    lin = weights("mobileformer_w720+lin", image_size=32, num_classes=2, classes=("class_0", "class_1"))
    refused(4, [lin, "head lin", "tran1", "--new-head"], "finetune", FT, *sets(images), "--weights", lin)
    refused(4, ["missing.safetensors: no such file"], "probe", LIN, *sets(images),
            "--weights", tmp_path / "missing.safetensors")


def test_weights_for_other_classes(images, refused, weights):
    """Counts and names of both sides, and what to add."""
    probed = weights("mobileformer_w720+tran1", image_size=32, num_classes=3, classes=("ant", "bee", "cat"))
    refused(4, ["3 classes (ant, bee, cat)", "2 classes (class_0, class_1)", "--num-classes 2"],
            "finetune", FT, *sets(images), "--weights", probed)
    refused(3, [images / "train", "holds 2 classes, expected 3", "--num-classes"],
            "finetune", FT, *sets(images), "--weights", probed, "--num-classes", "3")


# data ---------------------------------------------------------------------------------------------


def test_class_counts_of_recipe_and_data(images, refused, pretrained):
    refused(3, [images / "train", "holds 2 classes, expected 10", "model.num_classes"],
            "probe", LIN, *sets(images), "--weights", pretrained, "--model.num_classes", "10")


def test_classes_of_training_and_validation(copy, refused, pretrained):
    (copy / "val/class_1").rename(copy / "val/other")
    refused(3, [copy / "train", copy / "val", "only in the first: class_1", "only in the second: other"],
            "probe", LIN, *sets(copy), "--weights", pretrained)
    shutil.rmtree(copy / "val/other")
    refused(3, ["2 in", "1 in", copy / "val"], "probe", LIN, *sets(copy), "--weights", pretrained)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_folder(split, copy, refused, pretrained):
    (copy / split / "class_2").mkdir()
    refused(3, [copy / split, "1 of 3 class folders hold no image", "class_2"],
            "probe", LIN, *sets(copy), "--weights", pretrained)


def test_a_single_class(copy, refused, pretrained):
    for split in ("train", "val"):
        shutil.rmtree(copy / split / "class_1")
    refused(3, [copy / "train", "holds 1 class (class_0)", "at least 2"],
            "probe", LIN, *sets(copy), "--weights", pretrained, "--optim.batch_size", "3")


@pytest.mark.parametrize("split", ["train", "val"])
def test_unlabelled_images(split, copy, refused, pretrained):
    for path in (copy / split).glob("*/*.png"):
        shutil.move(path, copy / split)
    refused(3, [copy / split, "images have no class"], "probe", LIN, *sets(copy), "--weights", pretrained)


@pytest.mark.parametrize(("label", "parts"), [
    ("7", ["8 in", "2 in"]),  # eight classes, as the largest label says
    ("-1", ["different classes", "-1"]),  # no number of a class: taken for a name
    ("", ["different classes"]),
])
def test_labels_out_of_range_in_a_shard(label, parts, images, tmp_path, refused, pretrained):
    """Shards without an index, whose last label is wrong."""
    for split in ("train", "val"):
        pack(open_data([images / split]), tmp_path / split, Encoding(size=32), progress=False)
        for name in ("index.json", "index.npy"):
            (tmp_path / split / name).unlink()
    shard = tmp_path / "train/train-000000.tar"
    with tarfile.open(shard) as tar:
        tar.extractall(tmp_path / "samples", filter="data")
    (tmp_path / "samples/000000011.cls").write_text(label)
    with tarfile.open(shard, "w") as tar:
        for path in sorted((tmp_path / "samples").iterdir()):
            tar.add(path, path.name)
    refused(3, parts, "probe", LIN, *sets(tmp_path), "--weights", pretrained)
