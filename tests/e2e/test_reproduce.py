"""`finola reproduce` in processes of its own: to the end, killed on the way, and with a run that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LONG = ["--optim.batch_size", "4", "--optim.epochs", "40", "--data.num_workers", "0",
        "--trainer.checkpoint_steps", "1"]


def start(images: Path, out: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "finola.cli", "reproduce", *words, "--scale", "pocket", "--data",
               str(images / "train"), "--val", str(images / "val"), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(what, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def finished(out: Path) -> dict[str, float]:
    """Folder of every finished run -> when its result was written."""
    results = {path.parent.name: path for path in out.glob("runs/*/*/result.json")}
    return {name: path.stat().st_mtime for name, path in results.items() if json.loads(path.read_text())["finished"]}


@pytest.mark.slow
def test_a_row_to_its_end_and_once_more(images, tmp_path):
    pytest.importorskip("lightning")
    process = start(images, tmp_path / "out", "resolution", "--rows", "resolution_64", *LONG)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "| (a) 64x64 | 64 px, map 16x16, 192 channels | 25.7 | " in printed
    assert "pocket/resolution_64, seed 0: finished" in errors
    found = json.loads((tmp_path / "out/resolution-pocket.json").read_text())
    assert found["rows"][0]["ours"]["psnr"]["values"] and found["overrides"] == LONG
    before = finished(tmp_path / "out")
    process = start(images, tmp_path / "out", "resolution", "--rows", "resolution_64", "--json", *LONG)
    again, errors = process.communicate(timeout=120)
    assert "1 row, 1 run, 1 done" in errors and json.loads(again)["rows"] == found["rows"]
    assert finished(tmp_path / "out") == before


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_in_mid_run_it_goes_on_where_it_stopped(images, tmp_path):
    """The run under way writes a checkpoint when its parent is gone, and is resumed; what is finished stays."""
    pytest.importorskip("lightning")
    out, words = tmp_path / "out", ["resolution", "--rows", "resolution_64", "resolution_32", *LONG]
    process = start(images, out, *words)
    wait_for(lambda: len(list(out.glob("runs/*/*/last.ckpt"))) == 2)  # in the second run
    process.kill()
    process.wait()
    wait_for(lambda: not _children_of(out))
    first = finished(out)
    assert len(first) == 1
    process = start(images, out, *words)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    last = finished(out)
    assert len(last) == 2 and first.items() <= last.items()
    log = next(out.glob("runs/pocket/resolution_32-*.log")).read_text()
    assert "from the start" in log and log.count("from step") == 1


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_and_a_table(images, tmp_path):
    pytest.importorskip("lightning")
    out = tmp_path / "out"
    process = start(images, out, "resolution", "--rows", "resolution_64", *LONG)
    wait_for(lambda: list(out.glob("runs/*/*/last.ckpt")))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    assert "under way" in (out / "resolution-pocket.md").read_text()
    assert not _children_of(out)


@pytest.mark.slow
def test_a_row_that_fails_does_not_stop_the_rest(images, tmp_path):
    """The folder of one run is a file."""
    pytest.importorskip("lightning")
    out, words = tmp_path / "out", ["resolution", "--rows", "resolution_64", "resolution_32", *LONG]
    process = start(images, out, *words, "--max-time", "0.001")
    process.communicate(timeout=120)
    assert process.returncode == 0
    (out / "runs/pocket").mkdir(parents=True, exist_ok=True)
    from finola.training import tables
    from finola.training.reproduce import Plan, choose

    stages = Plan.of(choose(tables.find_table("resolution"), ["resolution_64"]), "pocket", 1, LONG).stages
    (folder,) = (out / "runs/pocket" / f"resolution_64-{key}" for key in stages)
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.write_text("in the way")
    process = start(images, out, *words)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 3
    assert "resolution_64, seed 0: failed" in errors and "the rest goes on" in errors
    assert "| (a) 64x64 | 64 px, map 16x16, 192 channels | 25.7 | failed |" in printed
    assert "pocket/resolution_32, seed 0: finished" in errors


def _children_of(out: Path) -> list[int]:
    """The runs under way in a folder, by their command lines and open logs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            log = os.readlink(process / "fd/1")
        except OSError:
            continue
        if b"finola.training.jobs" in command and log.startswith(str(out)):
            found.append(int(process.name))
    return found
