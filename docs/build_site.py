"""Build the documentation site into a folder: python docs/build_site.py [site]

README, CONTRIBUTING, CHANGELOG and docs/ are its pages. They keep the places that they have in the repository, so that
links are the same here and there. What they link to besides comes along: images as they are, code and other text as
pages. Dead links and anchors, and images, scripts and styles of other hosts, end the build: then there is no site.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")] + sorted(ROOT.glob("docs/*.md"))
LINK = re.compile(r"(?<=\]\()[^)#\s]+")  # the address in [text](address#anchor)
STYLE_LINK = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")  # to another host
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash"}
AS_THEY_ARE = (".png", ".gif", ".jpg", ".ipynb")


def build(out: Path) -> None:
    """The site in `out`, in place of what is there.

    Raises:
        SystemExit: a dead link, or a page that needs another host.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for page in PAGES:
            copy_page(page, work / "pages")
        shutil.copy(ROOT / "docs" / "zensical.toml", work)
        shutil.copy(ROOT / "docs" / "site.css", work / "pages" / "docs")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(work / "zensical.toml")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}  # where mkdocstrings finds the package
        if subprocess.run(command, env=environment).returncode:
            sys.exit("docs/build_site.py: zensical has found faults, see above")
        if faults := list(find_faults(work / "site")):
            sys.exit("\n".join(faults))
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(work / "site", out)


def copy_page(page: Path, pages: Path) -> None:
    """A page and what it links to."""

    def copied(address: re.Match[str]) -> str:
        if urlsplit(address[0]).scheme:
            return address[0]
        target = (page.parent / address[0]).resolve()
        if not target.exists():
            sys.exit(f"{page.relative_to(ROOT)}: links to {address[0]}, which is not there")
        return address[0] if target in PAGES else address[0].rstrip("/") + copy_target(target, pages)

    place = pages / page.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(LINK.sub(copied, page.read_text(encoding="utf-8")), encoding="utf-8")


def copy_target(target: Path, pages: Path) -> str:
    """What is no page itself; returns what its page's name has more than its own."""
    place = pages / target.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix in AS_THEY_ARE:
        shutil.copy(target, place)
        return ""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        files = [file for file in sorted(target.iterdir()) if file.is_file()]
        body = "\n".join(f"- [{file.name}]({target.name}/{file.name}{copy_target(file, pages)})" for file in files)
    else:
        body = f"~~~~~~{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text(encoding='utf-8')}\n~~~~~~"
    page = place.with_name(place.name + ".md")
    page.write_text(f"---\nhide: [toc]\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n{body}\n", encoding="utf-8")
    return ".md"


class Addresses(HTMLParser):
    """What a page of the site refers to, and what it can be referred to by."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.parts: list[str] = []  # what a browser fetches to show the page
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attrs if value}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag != "a":
            self.parts += [given[key] for key in ("src", "href", "srcset", "data") if key in given]


def find_faults(site: Path) -> Iterator[str]:
    """Lines about dead links and anchors, and about what other hosts would have to serve."""
    pages = {page: Addresses(page) for page in site.rglob("*.html")}
    for page, found in pages.items():
        name = page.relative_to(site)
        for address in found.links + found.parts:
            parts = urlsplit(address)
            base = site if parts.path.startswith("/") else page.parent
            target = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                if address in found.parts:
                    yield f"{name}: fetches {address}"
            elif not target.exists():
                yield f"{name}: links to {address}, which is not there"
            elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: links to {address}, an anchor that is not there"
    for style in site.rglob("*.css"):
        for address in STYLE_LINK.findall(style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)}: fetches {address}"


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site"))
