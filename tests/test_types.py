"""What a type checker sees of the public names: `make lint` runs it over the package, this file over wrong uses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import finola
from finola.factory import AutoencoderName

ROOT = Path(__file__).parents[1]
WRONG = ROOT / "tests" / "wrong_uses.py"


def test_type_checkers_know_every_autoencoder_by_its_name():
    assert sorted(get_args(AutoencoderName)) == sorted(finola.list_models("finola_*"))


def test_wrong_uses_are_refused():
    pytest.importorskip("mypy", reason="needs the extra 'dev'")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(WRONG)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    expected = {str(number): line.partition("# E: ")[2] for number, line in enumerate(WRONG.read_text().splitlines(), 1)
                if "# E: " in line}
    got = dict(re.findall(r"wrong_uses\.py:(\d+): error: .* \[([\w-]+)\]", found.stdout))
    assert got == expected, found.stdout + found.stderr
