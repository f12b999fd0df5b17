"""Finds broken links within the built site, including links between the two languages."""

from __future__ import annotations

import posixpath
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ELSEWHERE = frozenset(("https", "http", "mailto", "data"))


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records the link and the anchor of a tag."""
        for name, value in attrs:
            if value is None:
                continue
            if name in ("href", "src"):
                self.links.append(value)
            elif name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value)


@cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def broken_links(site: Path) -> list[str]:
    """Returns a line for each link whose file or anchor does not exist."""
    found = []
    for path in sorted(site.rglob("*.html")):
        if path.name == "404.html":
            continue  # served for any address, so its links are absolute
        for link in sorted(set(_read(path).links)):
            if reason := _fault(site, path, link):
                found.append(f"{path.relative_to(site)}: {link}: {reason}")
    return found


def _fault(site: Path, path: Path, link: str) -> str:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return "" if parts.scheme in ELSEWHERE else "this is no address"
    target = path
    if parts.path:
        if parts.path.startswith("/"):
            return "it begins at the top of a server, where the site need not be"
        target = Path(posixpath.normpath(path.parent / unquote(parts.path)))
        if target.is_dir():
            target = target / "index.html"
    if site not in target.parents or not target.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if anchor and target.suffix == ".html" and anchor not in _read(target).anchors | {"__top"}:
        return "there is no such anchor"
    return ""
