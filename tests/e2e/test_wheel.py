"""The wheel, installed in an environment of its own and run outside the clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from pictures import photo
from PIL import Image

import finola

ROOT = Path(finola.__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="runs in a clone"),
    pytest.mark.skipif(Version(version("setuptools")) < Version("77"), reason="setuptools is too old to build it"),
]


def run(*words, **options) -> str:
    """What a command prints; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=250, env=environment,
                          **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder with the environment's commands; it has the wheel, and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "finola", folder / "source/finola", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, folder / "source")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source")
    venv.create(folder / "venv", symlinks=True)
    site = next(folder.glob("venv/lib/python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    run(*pip, "--python", folder / "venv/bin/python", "install", "--no-deps", "--no-index", *folder.glob("*.whl"))
    return folder / "venv/bin"


def test_the_installed_package_is_whole(installed, tmp_path):
    code = """if True:
        import json, finola
        from importlib.metadata import distribution
        found = distribution("finola")
        print(json.dumps([finola.__file__, found.metadata["License-Expression"], [str(file) for file in found.files]]))
    """
    where, licence, files = json.loads(run(installed / "python", "-c", code, cwd=tmp_path))
    assert Path(where).is_relative_to(installed.parent)
    assert licence == "Apache-2.0 AND LicenseRef-finola-weights"
    assert {"finola/py.typed", "finola/pretrained/LICENSE", "finola/recipes/resolution.yaml"} <= set(files)
    assert len([file for file in files if "dist-info/licenses/" in file]) == 2
    assert not [file for file in files if file.startswith(("tests/", "benchmarks/", "results/"))]


def test_the_installed_commands_run_anywhere(installed, tmp_path):
    def command(*words) -> str:
        return run(installed / "finola", *words, cwd=tmp_path)

    photo(150, 140).save(tmp_path / "photo.png")
    assert any(row["name"] == "finola_mfw720_c768_r8" for row in json.loads(command("info", "--json")))
    assert "768 numbers" in command("demo") and (tmp_path / "finola-demo.png").stat().st_size
    command("compress", "photo.png", "photo.fnl")
    command("decompress", "photo.fnl", "again.png")
    assert Image.open(tmp_path / "again.png").size == (150, 140)
    assert "resolution" in command("reproduce", "--list")
