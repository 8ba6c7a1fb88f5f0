"""What README, CONTRIBUTING, docs/ and --help show is true: Python is run, commands are parsed with recipes and
overrides, names, files and links lead somewhere. The commands are run by tests/e2e/test_docs.py."""

from __future__ import annotations

import argparse
import pkgutil
import re
import shlex
import tomllib
from importlib.util import find_spec

import pytest
import torch
from pages import PAGES, ROOT, SHELL, blocks, in_clone, shell_lines
from pictures import photo

import finola
from finola.cli.main import build_parser
from finola.cli.options import split_overrides
from finola.errors import RecipeError
from finola.factory import create_model
from finola.training.recipe import load_recipe
from finola.training.tables import find_table
from finola.weights import save_weights

if not in_clone:
    pytest.skip("runs in a clone, which has README and docs", allow_module_level=True)

LANGUAGES = {*SHELL, "python", "text", "bibtex"}
NOT_CHECKED = {  # beginnings of lines, and why nothing can be said of them here
    "git": "wants a network, or a clone with its history",
    "mutmut": "is in no extra, and takes minutes",
    "OMP_NUM_THREADS=1 mutmut": "the same",
    "sed": "of what git has cloned",
    "pytest": "of what git has cloned",
    "pip download": "wants a network",
}


def shown() -> list[tuple[str, str]]:
    """(where, line) of every line in a block of shell, in README's table of commands and in the examples of --help, and
    of scripts and targets that a text names."""
    found = [(page.name, line) for page in PAGES for language, block in blocks(page, *SHELL)
             for line, _ in shell_lines(block, language)]
    rows = re.findall(r"^\| (`finola .*?`) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    found += [("README.md", line) for row in rows for line in re.findall("`(.*?)`", row)]
    found += [(page.name, line) for page in PAGES
              for line in re.findall(r"`((?:python|bash|make) [^`]+)`", page.read_text(encoding="utf-8"))]
    found += [("--help", line) for parser in parsers(build_parser()) for line, _ in shell_lines(parser.epilog or "")
              if line.startswith("finola ")]
    return list(dict.fromkeys(found))


def parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and those of its sub-commands."""
    subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(deeper for sub in subs for inner in sub.choices.values() for deeper in parsers(inner))]


@pytest.mark.parametrize(("where", "line"), [row for row in shown() if row[1].startswith("finola ")])
def test_a_command_parses_and_its_recipe_is_there(where, line):
    words, overrides = split_overrides(shlex.split(re.split(" && | > ", line)[0])[1:])
    args = build_parser().parse_args(words)
    assert "overrides" in args or not overrides
    if getattr(args, "recipe", None) not in (None, "RECIPE"):
        load_recipe(args.recipe, overrides)
    if args.command == "reproduce" and args.table not in (None, "TABLE"):
        find_table(args.table)


@pytest.mark.parametrize(("where", "line"), [row for row in shown() if not row[1].startswith("finola ")])
def test_another_line_names_what_is_there(where, line):
    """Scripts with their options, targets, extras, modules."""
    words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", line), comments=True)
    if words[0] == "make":
        assert re.search(f"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert {*re.findall(r"[\w-]+", words[2].partition("[")[2])} <= extras.keys()
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2])
    elif words[0] in ("python", "bash"):
        script = (ROOT / words[1]).read_text(encoding="utf-8")
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in script] == []
    else:
        assert [begin for begin in NOT_CHECKED if line.startswith(f"{begin} ")], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page):
    assert {language for language, _ in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    """All blocks of a page one after the other, in a folder with a photograph and the weights of a tiny detector. Those
    that want a Hub are run with the commands of their page."""
    code = [text for _, text in blocks(page, "python") if "hf-hub:" not in text]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for name in re.findall(r"`(finola(?:\.\w+)+)`", text):
        pkgutil.resolve_name(name)


def test_no_page_names_files_that_a_clone_alone_has():
    """Weights by path: an installed package has them elsewhere."""
    by_path = re.compile(r"finola/pretrained/(?!LICENSE)")
    assert [page.name for page in PAGES if by_path.search(page.read_text(encoding="utf-8"))] == []


def test_a_recipe_that_is_not_there_would_be_noticed():
    with pytest.raises(RecipeError):
        load_recipe("imagenette/no_such_row")
