"""Where a result comes from: the code's commit, the machine, the versions, the day."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def record(device: torch.device, result: Mapping[str, Any]) -> dict[str, Any]:
    """A result as it is printed and written: with its surroundings and the date, for JSON."""
    return {**result, **environment(device), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def environment(device: torch.device) -> dict[str, Any]:
    """What results/*.json say of a run's surroundings: hardware, torch, python, commit."""
    return {
        "hardware": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads)"


def commit() -> str | None:
    """The commit of the repository that holds this file, "-dirty" if it is changed; outside one, as in a copy of the
    work tree alone, what the environment variable FINOLA_COMMIT says; None where it says nothing."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # another project's repository does not count
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FINOLA_COMMIT") or None
