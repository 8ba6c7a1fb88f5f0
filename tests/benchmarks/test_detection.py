"""The benchmark of detectors times nothing but detectors, and writes what it knows."""

import json
import sys

import pytest
from scripts import load_script

detection = load_script("detection")


def test_garbage_is_collected_once_before_the_turns(monkeypatch):
    order = []
    monkeypatch.setattr(detection.gc, "collect", lambda: order.append("gc"))
    models = {name: lambda name=name: order.append(name) for name in "ab"}
    times = detection.latencies(models, "cpu", repeats=2)
    assert order == ["gc", *"ab" * 3]
    assert [len(turns) for turns in times.values()] == [2, 2]


def test_each_model_is_written_as_soon_as_it_is_measured(monkeypatch, tmp_path):
    row = {"model": "a", "precision": "fp32", "batch_size": 1, "params": 1, "macs": 1, "latency_ms": 1.0,
           "images_per_second": 1.0, "memory_mib": 1.0, "of_reference": {}}

    def measure(*args):
        yield row
        yield row
        raise KeyboardInterrupt

    monkeypatch.setattr(detection, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["detection.py", "--out", str(tmp_path / "out.json")])
    with pytest.raises(KeyboardInterrupt):
        detection.main()
    assert json.loads((tmp_path / "out.json").read_text())["results"] == [row, row]
