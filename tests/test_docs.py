"""What README, docs/ and --help show is true: Python is run, commands are parsed with recipes and overrides, names and
links lead somewhere. Commands are not run here: each has tests of its own."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch
from pictures import photo

import finola
from finola.cli.main import build_parser
from finola.cli.options import split_overrides
from finola.errors import RecipeError
from finola.factory import create_model
from finola.training.recipe import load_recipe
from finola.training.tables import find_table
from finola.weights import save_weights

ROOT = Path(finola.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


if not (ROOT / "README.md").exists():
    pytest.skip("runs in a clone, which has README and docs", allow_module_level=True)


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(text: str) -> list[str]:
    """The lines of a text that are commands of finola, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    plain = [line.strip().removeprefix("$ ") for line in lines]
    return [line for line in plain if line.startswith("finola ")]


def shown() -> list[tuple[str, str]]:
    """(where, command) of every command in a block, in README's table of commands, and in the examples of --help."""
    found = [(page.name, line) for page in PAGES for block in blocks(page, "", "sh") for line in commands(block)]
    rows = re.findall(r"^\| (`finola .*?`) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    found += [("README.md", line) for row in rows for line in re.findall("`(.*?)`", row)]
    found += [("--help", line) for parser in parsers(build_parser()) for line in commands(parser.epilog or "")]
    return list(dict.fromkeys(found))


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and those of its sub-commands."""
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(deeper for sub in subs for inner in sub.choices.values() for deeper in parsers(inner))]


@pytest.mark.parametrize(("where", "line"), shown())
def test_a_command_parses_and_its_recipe_is_there(where, line):
    line = re.split(r"\s{3,}|  #", line)[0]  # what is written beside it
    words, overrides = split_overrides(shlex.split(re.split(" && | > ", line)[0])[1:])
    args = build_parser().parse_args(words)
    assert "overrides" in args or not overrides
    if getattr(args, "recipe", None) not in (None, "RECIPE"):
        load_recipe(args.recipe, overrides)
    if args.command == "reproduce" and args.table not in (None, "TABLE"):
        find_table(args.table)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    """All blocks of a page one after the other, in a folder with a photograph and the weights of a tiny detector."""
    code = blocks(page, "python")
    if not code:
        pytest.skip("shows no Python")
    monkeypatch.chdir(tmp_path)
    photo(200, 150).save("photo.jpg")
    if "finola.detect(" in "".join(code):
        pytest.importorskip("scipy", reason="needs the extra 'detection'")
        small = create_model("detr_mf_dec_211_mfw720", image_size=64, max_size=96, num_queries=8)
        save_weights(small, "weights.safetensors")
    matrices = {name: torch.zeros(768, 768) for name in ("A", "A_", "B", "B_")}
    names = {"finola": finola, "torch": torch, "x": torch.rand(1, 3, 128, 128), "data": b"", **matrices}
    for block in code:
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_and_names_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for name in re.findall(r"`(finola(?:\.\w+)+)`", text):
        found = finola
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_no_page_names_files_that_a_clone_alone_has():
    """Weights by path: an installed package has them elsewhere."""
    by_path = re.compile(r"finola/pretrained/(?!LICENSE)")
    assert [page.name for page in PAGES if by_path.search(page.read_text(encoding="utf-8"))] == []


def test_a_recipe_that_is_not_there_would_be_noticed():
    with pytest.raises(RecipeError):
        load_recipe("imagenette/no_such_row")
