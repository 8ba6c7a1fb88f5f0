"""The benchmark of pre-training measures what can be built, and writes what it knows."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from scripts import load_script

pretraining = load_script("pretraining")


def test_without_lightly_its_models_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lightly", None)
    monkeypatch.setitem(sys.modules, "lightly.models.modules", None)
    runs, left_out = pretraining.build(["mae_vit_tiny"], 1, torch.device("cpu"))
    assert not runs and "lightly" in left_out["mae_vit_tiny"]
    assert "left out: mae_vit_tiny" in capsys.readouterr().err


class Turn:
    """A model that costs nothing; `left` turns until it breaks."""

    left = 5

    def __init__(self, name, batch_size, device):
        if name == "missing":
            raise ImportError("no such package")
        self.seconds, self.images, self.rounds = 0.0, 0, 0

    def round(self, timed):
        Turn.left -= 1
        if Turn.left < 0:
            raise KeyboardInterrupt
        self.seconds, self.images, self.rounds = self.seconds + timed, self.images + timed, self.rounds + timed


def test_what_is_known_is_written_after_each_turn(monkeypatch, tmp_path):
    """Two models warm up and take a turn each; then the first takes another, and the second breaks."""
    monkeypatch.setattr(pretraining, "Pretraining", Turn)
    monkeypatch.setattr(pretraining, "row", lambda name: SimpleNamespace(input="3x8x8", params=1, macs=1))
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["pretraining.py", "--models", "a", "missing", "b", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        pretraining.main()
    result = json.loads(out.read_text())
    assert result["left_out"] == {"missing": "no such package"} and result["rounds"] == 1
    assert [(row["model"], row["images_per_second"], row["of_mae_vit_base"]) for row in result["results"]] == [
        ("a", 1.0, None), ("b", 1.0, None)]


def test_none_that_can_be_built_is_an_error(monkeypatch):
    monkeypatch.setattr(pretraining, "Pretraining", Turn)
    monkeypatch.setattr(sys, "argv", ["pretraining.py", "--models", "missing"])
    with pytest.raises(SystemExit, match="none of the models"):
        pretraining.main()
