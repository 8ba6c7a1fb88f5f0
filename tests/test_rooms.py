"""Which room of the package may import which (CONTRIBUTING.md), and what importing one costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import finola

PACKAGE = Path(finola.__file__).parent

# from the ground up: a room may import those above it in this list
FLOORS = (
    ("kernels",),
    ("autoregression",),
    ("pde",),
    ("models",),
    ("timm_models", "registry", "hub"),
    ("weights",),
    ("factory",),
    ("data",),  # stands beside models: see APART
    ("evaluation",),
    ("inference",),
    ("codec", "analysis"),
    ("training",),
    ("detection",),
    ("cli",),
)
ANYBODYS = ("errors", "files", "provenance", "drawing")  # every room may import these, and these import no room
APART = {("data", room) for room in ("kernels", "autoregression", "pde", "models", "registry", "weights", "factory")}
HEIGHT = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module; a package's __init__ has the name of the package."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, inside functions too; not those for type checkers alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_checkers = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in
                    ast.unparse(node.test) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in for_checkers:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("finola"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "finola":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if inner in MODULES else node.module


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "finola"


IMPORTS = {name: set(imported(path)) for name, path in MODULES.items()}


def test_every_room_has_its_floor():
    rooms = {room(module) for module in MODULES} - {"finola"}
    assert rooms == set(HEIGHT) | set(ANYBODYS)
    assert len([path for path in PACKAGE.glob("*.py")]) <= 12


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module):
    here = room(module)
    for other in IMPORTS[module]:
        there = room(other)
        if there in ANYBODYS or there == here:
            continue
        assert there != "finola", f"{module} imports the package's face"
        assert here in HEIGHT, f"{module}, which is anybody's, imports {other}"
        assert HEIGHT[there] < HEIGHT[here] and (here, there) not in APART, f"{module} imports {other}"


def test_only_the_command_line_knows_detection():
    assert {room(module) for module, names in IMPORTS.items() for name in names if room(name) == "detection"} <= {
        "detection", "cli"}


def test_no_circle():
    """No module leads back to itself, whatever the order in which they are imported."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module):], module])
        if module not in done:
            for other in IMPORTS[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_no_module_imports_timm_or_the_hubs_library_before_they_are_needed():
    """All but the one that registers the encoders there."""
    names = [name for name in MODULES if name not in ("finola.timm_models", "finola.cli.__main__")]
    code = f"import sys, importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n    " \
           "assert not {'timm', 'huggingface_hub'} & {module.split('.')[0] for module in sys.modules}, name"
    subprocess.run([sys.executable, "-c", code], check=True)
