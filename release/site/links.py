"""Converts the links of pages to links of the site. A page is identified by its path in the repository.

The pages are written to be viewed in the repository: their links are relative to the file, including links to source
files and between the two languages. The English site is at the top, and the Chinese one below `zh/`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CHINESE = "docs/zh/"
ABOUT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages at the top of the repository that are also on the English site."""

HOMES = {"README.md": "docs/index.md", "README.zh.md": "docs/zh/index.md"}
FILES = "files/"
"""The folder of the site for other files that pages link to."""

_FENCE = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


class Place(NamedTuple):
    """A page of one of the two sites, identified by its path in the pages of that site."""

    language: str
    path: str


def place_of(target: str) -> Place | None:
    """Returns the place of a repository page on the site, or None if the file is not a page."""
    target = HOMES.get(target, target)
    if target in ABOUT:
        return Place("en", target)
    if not target.startswith("docs/") or not target.endswith(".md"):
        return None
    if target.startswith(CHINESE):
        return Place("zh", target.removeprefix(CHINESE))
    return Place("en", target.removeprefix("docs/"))


def address(place: Place) -> str:
    """Returns the address of a page, relative to the top of the site."""
    stem = place.path.removesuffix(".md")
    folder = posixpath.dirname(stem) if posixpath.basename(stem) == "index" else stem
    return posixpath.join("zh" if place.language == "zh" else "", folder, "").lstrip("/")


def between(start: Place, target: str) -> str:
    """Returns the link from a page to an address that is relative to the top of the site."""
    found = posixpath.relpath(f"/{target}", f"/{address(start)}")
    return f"{found}/" if target.endswith("/") or not target else found


def repository_path(place: Place) -> str:
    """Returns the page's path in the repository."""
    if place.language == "en" and place.path in ABOUT:
        return place.path
    path = f"{CHINESE if place.language == 'zh' else 'docs/'}{place.path}"
    homes = {there: here for here, there in HOMES.items()}
    return path if (ROOT / path).exists() else homes.get(path, path)


def rewritten(markdown: str, place: Place, needs_file: Callable[[str], None]) -> str:
    """Returns the text of a page with the links of the site.

    Args:
        markdown: The text of the page in the repository.
        place: The page.
        needs_file: A function that is called with the path of each other file that the site must include.
    """
    origin = repository_path(place)

    def link(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        path, hash_mark, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        new = _target(place, there, needs_file)
        inner = _LINK.sub(link, words)
        return f"{mark}[{inner}]({new}{hash_mark}{anchor})" if new is not None else inner

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[end:])])


def _target(place: Place, there: str, needs_file: Callable[[str], None]) -> str | None:
    """Returns the new link target, or None if the site does not contain it."""
    page = place_of(there)
    here = posixpath.dirname(place.path)
    if page is not None:
        return (
            posixpath.relpath(page.path, here or ".")
            if page.language == place.language
            else between(place, address(page))
        )
    if there.startswith("docs/pictures/"):
        return posixpath.relpath(there.removeprefix("docs/"), here or ".")
    if not (ROOT / there).is_file():
        return None
    needs_file(there)
    return (
        posixpath.relpath(f"{FILES}{there}", here or ".")
        if place.language == "en"
        else between(place, f"{FILES}{there}")
    )
