"""The pages of the documentation, and what stands in their blocks."""

from __future__ import annotations

import re
from pathlib import Path

import finola

ROOT = Path(finola.__file__).parents[1]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")] + sorted(ROOT.glob("docs/*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = ("sh", "console")  # a console has commands behind "$ ", and below each what it prints

in_clone = (ROOT / "README.md").exists()  # an installed package has no pages


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of a page's blocks in these languages, by default all."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, text) for language, text in found if not languages or language in languages]


def shell_lines(text: str, language: str = "sh") -> list[tuple[str, list[str]]]:
    """(command, what is shown of its output) of each line of a block; continued lines are joined, notes left out."""
    found: list[tuple[str, list[str]]] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if language == "console" and not line.startswith("$ "):
            found[-1][1].append(line)
        elif line.strip():
            found.append((re.split(r"\s{3,}|\s#", line.strip().removeprefix("$ "))[0], []))
    return found
