"""Training that ends in the minutes it is given, and weights that come back in pieces."""

import hashlib
import subprocess
from pathlib import Path

import pytest
from scripts import BENCHMARKS, load_script

gpu_train = load_script("gpu_train")


def test_the_rate_is_that_of_the_epochs_after_the_first():
    clock = iter([30.0, 34.0, 38.0, 42.0, 46.0])
    lines = ["recipe: 80 images\n", *(f"epoch {n}/99  step {n}\n" for n in range(1, 9))]
    assert gpu_train.epoch_ends(lines, 10.0, lambda: next(clock)) == [30.0, 34.0, 38.0, 42.0]


@pytest.mark.parametrize("lines", [[], ["epoch 1/99\n"], ["finola train: CUDA out of memory\n"]])
def test_a_run_that_ends_early_has_no_rate(lines):
    with pytest.raises(SystemExit, match="before its rate was known"):
        gpu_train.epoch_ends(lines, 0.0)


@pytest.mark.parametrize(("seconds", "epochs"), [(110, 90), (16, 5), (12, 1)])
def test_epochs_fill_the_time_in_whole_validations(seconds, epochs):
    assert gpu_train.epochs_that_fit(seconds, startup=10.0, per_epoch=1.0) == epochs


def test_no_time_for_an_epoch_is_an_error():
    with pytest.raises(SystemExit, match="do not fit"):
        gpu_train.epochs_that_fit(20.0, startup=15.0, per_epoch=9.0)


def join(folder: Path) -> int:
    return subprocess.run(["bash", BENCHMARKS / "gpu_train.sh", "join", folder], capture_output=True).returncode


def test_pieces_are_joined_and_checked(tmp_path):
    whole = bytes(range(256)) * 10
    pieces = {f"weights.safetensors.{n:02}": whole[1000 * n:1000 * (n + 1)] for n in range(3)}
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}"
            for name, data in ({"weights.safetensors": whole} | pieces).items()]
    for name, data in pieces.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "sha256").write_text("\n".join(sums) + "\n")
    assert join(tmp_path) == 0
    assert (tmp_path / "weights.safetensors").read_bytes() == whole
    (tmp_path / "weights.safetensors.01").write_bytes(b"cut short")
    assert join(tmp_path) != 0
