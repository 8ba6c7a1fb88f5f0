"""Two processes equal one with the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from training import read_checkpoint

from finola.cli.main import main

pytest.importorskip("lightning", reason="needs the extra 'train'")


@pytest.fixture(scope="module", params=["layer", "batch"])
def runs(request, one_thread, recipe_file, images, tmp_path_factory):
    """The same recipe, with either norm of the operator, in one process and in two (DDP, gloo), in double precision: in
    single precision the batch norms of so small a model turn rounding into visible differences."""
    outs = []
    for processes in ("1", "2"):
        out = tmp_path_factory.mktemp(f"processes_{processes}")
        command = [
            "train", str(recipe_file), "--data", str(images / "train"), "--val", str(images / "val"),
            "--out", str(out), "--trainer.devices", processes,
            "--trainer.precision", "64-true", "--optim.base_lr", "1e-2", "--model.norm", request.param,
        ]
        if processes == "1":
            assert main(command) == 0
        else:
            done = subprocess.run([sys.executable, "-m", "finola.cli", *command], capture_output=True, text=True,
                                  timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
            assert done.returncode == 0, done.stderr
        outs.append(out)
    return outs


def test_weights_are_equal(runs):
    one, two = (read_checkpoint(out)["state_dict"] for out in runs)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(two[name], one[name], rtol=1e-6, atol=1e-8), name


def test_scores_are_equal(runs):
    """Means over images, not over processes: 4 validation images in batches of 4 and of 2."""
    one, two = (json.loads((out / "result.json").read_text()) for out in runs)
    assert "2 x" in two["hardware"]
    for key in ("val_psnr", "val_ssim"):
        assert two[key] == pytest.approx(one[key], rel=1e-5)
