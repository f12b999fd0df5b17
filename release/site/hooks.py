"""Hooks that MkDocs calls during a build: they add pages, and convert links, the navigation and the language switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import reference
from links import ABOUT, FILES, ROOT, Place, address, between, repository_path, rewritten
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_search import boost
from table_heads import without_empty_heads

NAMES = {"en": "English", "zh": "中文"}
SWITCH = "switch:"
IN_CHINESE = {
    "Learn": "学习",
    "How to": "操作指南",
    "Coming from": "从其他库迁移",
    "Guide": "手册",
    "Train": "训练",
    "Communicate": "通信",
    "Run and observe": "运行与观测",
    "More": "更多",
    "Reference": "API 参考",
    "About": "关于",
    "Decisions": "设计决定",
}
"""The titles of the sections; pages define their own titles."""


def language_of(config: MkDocsConfig) -> str:
    """Returns the language of the site that is being built."""
    return str(config.theme["language"])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the navigation sections whose pages are discovered instead of listed."""
    assert config.nav is not None
    listed = set(_listed(config.nav))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("zh/")}
    decisions = sorted(page for page in pages if page.startswith("decisions/"))
    found = {
        "Decisions": decisions,
        "More": sorted(pages - listed - set(decisions)),
        "Reference": list(reference.pages()),
    }
    config.nav = [entry for entry in (_filled(entry, found) for entry in config.nav) if entry is not None]
    if language_of(config) == "zh":
        config.nav = [_in_chinese(entry) for entry in config.nav]
    return config


def _listed(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        if isinstance(entry, str):
            found.append(entry)
        else:
            found += [page for inner in entry.values() for page in _listed(inner)]
    return found


def _filled(entry: Any, found: dict[str, list[str]]) -> Any:
    """Returns the entry with the discovered pages, or None for an empty section."""
    if isinstance(entry, str):
        return entry
    [(title, inner)] = entry.items()
    inner = [each for each in (_filled(each, found) for each in [*inner, *found.get(title, [])]) if each is not None]
    return {title: inner} if inner else None


def _in_chinese(entry: Any) -> Any:
    """Returns the entry for the Chinese site. A page that exists only in English is linked to the English site."""
    if isinstance(entry, str):
        if _exists(Place("zh", entry)):
            return entry
        return {f"{_title(entry)} (English)": f"../{address(Place('en', entry))}"}
    [(title, inner)] = entry.items()
    if title == "Reference":
        return {IN_CHINESE[title]: "../reference/"}
    return {IN_CHINESE[title]: [_in_chinese(each) for each in inner]}


def _exists(place: Place) -> bool:
    return (ROOT / repository_path(place)).exists()


def _title(page: str) -> str:
    text = (ROOT / repository_path(Place("en", page))).read_text()
    return text.removeprefix("# ").split("\n", 1)[0].replace("`", "")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds pages from outside the site's folder, and the pictures for the Chinese site."""
    if language_of(config) == "zh":
        for picture in sorted((ROOT / "docs" / "pictures").iterdir()):
            if picture.suffix in {".svg", ".webp", ".png"}:
                files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
        if files.get_file_from_path("index.md") is None:
            files.append(File.generated(config, "index.md", content=(ROOT / "README.zh.md").read_text()))
        return files
    for name in ABOUT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for path, text in reference.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Converts links of the repository to links of the site, and ranks the page in the search."""
    place = Place(language_of(config), page.file.src_uri)
    page.meta["search"] = {"boost": boost(place.path)}
    if place.path.startswith(f"{reference.FOLDER}/"):
        return markdown

    def needs_file(path: str) -> None:
        if place.language == "en":
            keep(path, files, config)
        else:
            _kept_by_the_other.add(path)

    return rewritten(markdown, place, needs_file)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes empty table headers."""
    return without_empty_heads(html)


_kept_by_the_other: set[str] = set()


def keep(path: str, files: Files, config: MkDocsConfig) -> None:
    """Includes a file of the repository that a page links to."""
    if files.get_file_from_path(f"{FILES}{path}") is None:
        files.append(File.generated(config, f"{FILES}{path}", abs_src_path=str(ROOT / path)))


def on_post_build(config: MkDocsConfig) -> None:
    """Copies files that only the Chinese pages link to into the English site, which was built before."""
    for path in sorted(_kept_by_the_other):
        target = Path(config.site_dir).parent / FILES / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    _kept_by_the_other.clear()


def on_page_context(context: Any, page: Page, config: MkDocsConfig, nav: Any) -> Any:
    """Adds the language switch to each page. Its links have a scheme, because MkDocs does not change such links."""
    config.extra["alternate"] = [{"name": NAMES[each], "link": f"{SWITCH}{each}", "lang": each} for each in NAMES]
    return context


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Links the switch to the same page of the other site, or else to its start page."""
    here = Place(language_of(config), page.file.src_uri)
    for language in NAMES:
        link = between(here, address(counterpart(here, language)))
        output = output.replace(f'href="{SWITCH}{language}"', f'href="{link}"')
    return output


def counterpart(place: Place, language: str) -> Place:
    """Returns the same page in a language, or the start page of that language's site."""
    if language == place.language:
        return place
    there = Place(language, place.path)
    return there if _exists(there) else Place(language, "index.md")
