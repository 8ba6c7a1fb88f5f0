"""The documentation site: docs/build_site.py builds all of it, and nothing where a page is at fault."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import PAGES, ROOT, in_clone

import finola

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not in_clone, reason="runs in a clone, which has README and docs"),
    pytest.mark.skipif(not all(map(find_spec, ("zensical", "mkdocstrings_handlers"))), reason="needs the extra 'docs'"),
]


def build(clone: Path, out: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(clone / "docs/build_site.py"), str(out)], capture_output=True, text=True,
                          timeout=250)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "site"
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def clone(tmp_path):
    """What the site is made of, but for the API's docstrings, which take the longest."""
    for name in ("docs", "examples", "finola", "results"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for path in (*PAGES, ROOT / "LICENSE"):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    api = tmp_path / "docs/api.md"
    api.write_text(re.sub("^:::.*(\n .*)*", "", api.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")
    return tmp_path


def test_every_page_and_public_name_is_there(site):
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert {path.relative_to(ROOT).with_suffix(".html").as_posix() for path in PAGES if path.stem != "README"} <= pages
    assert {"index.html", "finola/autoregression.py.html", "finola/recipes.html"} <= pages  # home, code, a folder
    api = (site / "docs/api.html").read_text(encoding="utf-8")
    assert [name for name in finola.__all__ if f'id="finola.{name}"' not in api] == []


@pytest.mark.parametrize(("line", "complaint"), [
    ("[here](nowhere.md)", "docs/codec.md: links to nowhere.md, which is not there"),
    ("![plot](../results/nowhere.png)", "docs/codec.md: links to ../results/nowhere.png, which is not there"),
    ("[there](operator.md#nowhere)", "anchor does not exist"),
    ("[`finola.nowhere`][finola.nowhere]", "finola.nowhere"),
    ('<img src="nowhere.png">', "docs/codec.html: links to nowhere.png, which is not there"),
    ('<img src="https://example.org/plot.png">', "docs/codec.html: fetches https://example.org/plot.png"),
], ids=["page", "image", "anchor", "name", "image of HTML", "another host"])
def test_a_page_at_fault_ends_the_build(clone, line, complaint):
    page = clone / "docs/codec.md"
    page.write_text(page.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = build(clone, clone / "site")
    assert done.returncode != 0
    assert complaint in re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert not (clone / "site").exists()
