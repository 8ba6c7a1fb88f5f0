"""The benchmark of first stages says where each figure comes from."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from scripts import load_script

diffusers = pytest.importorskip("diffusers")

stages = load_script("first_stages")


@pytest.fixture
def small(monkeypatch):
    """Images of 64 px, no processes, and a reference that is quick."""
    monkeypatch.setattr(stages, "SIZE", 64)
    monkeypatch.setattr(stages, "fresh_process", lambda function, name: 2**20)
    options = {"block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
               "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4}
    monkeypatch.setitem(stages.MODELS, stages.REFERENCE, lambda: diffusers.AutoencoderKL(**options))


def test_what_has_weights_is_measured_and_the_rest_is_literature(small, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    diffusers.AutoencoderTiny().save_pretrained(tmp_path / "mine")
    images = tmp_path / "images"
    images.mkdir()
    for i in range(3):
        noise = np.random.default_rng(i).integers(0, 256, (70, 80, 3), dtype=np.uint8)
        Image.fromarray(noise).save(images / f"{i}.png")
    out = tmp_path / "out.json"
    words = ["--models", "TAESD", "--first-stage", str(tmp_path / "mine"), "--data", str(images), "--limit", "2",
             "--turns", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["first_stages.py", *words])
    stages.main()
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    reference, tiny, mine = result["results"]
    assert reference["weights"] == tiny["weights"] == "random" and mine["weights"] == "its own"
    assert reference["measured"] is None and reference["literature"]["psnr"] == 24.19
    assert tiny["measured"] is tiny["literature"] is mine["literature"] is None
    assert mine["measured"]["images"] == 2 and 0 < mine["measured"]["psnr"] < 40
    assert "24.19 dB, literature" in printed and "dB, measured" in printed
    assert reference["reference_over_this"] == {"macs": 1, "latency": 1, "memory": 1}
    macs = {row["name"]: row["encode_macs"] + row["decode_macs"] for row in result["results"]}
    assert tiny["reference_over_this"]["macs"] == macs[reference["name"]] / macs["TAESD"]
    assert result["paper"]["Stable Diffusion"] == {"feature_dimension": "16x16x256", "psnr": 24.1}


def test_the_architectures_are_the_published_ones():
    """Parameters in millions and length of the code at 256 px."""
    published = {stages.REFERENCE: (83.7, 4096), "DC-AE f32c32": (323.4, 2048), "DC-AE f64c128": (676.9, 2048),
                 "TAESD": (2.45, 4096), "KL f16": (69.6, 4096), "VQGAN f16": (69.6, 256), "VQGAN f8": (67.7, 1024)}
    for name, (params, numbers) in published.items():
        with torch.device("meta"):
            stage = stages.DiffusersStage(stages.MODELS[name]().eval(), name)
        counted = stages.cost(stage, 256)
        assert (round(counted.params / 1e6, 2 if params < 10 else 1), counted.numbers) == (params, numbers), name


def test_every_row_of_literature_names_its_source():
    for entry in (*stages.LITERATURE.values(), *stages.NEVER_RUN.values()):
        assert entry.source and entry.data and entry.psnr
    assert set(stages.LITERATURE) <= set(stages.MODELS)
