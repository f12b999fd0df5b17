"""The Chinese pages follow the English ones: same headings, code, tables and figures, so that a change is noticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest
from os.path import relpath
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block, blocks, indented, prose

CHINESE = ROOT / "docs" / "zh"
PAGES = [ROOT / "README.zh.md", *sorted(CHINESE.rglob("*.md"))]
NAMED = [str(page.relative_to(ROOT)) for page in PAGES]
OWN_TABLES = {"docs/zh/glossary.md": "it explains its terms in Chinese, and explains some that English readers know"}
_CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”‘’]")
_COMMENT = re.compile(r"(^|(?<=\s))(#|//) .*")
_ITEM = re.compile(r"([-*]|\d+\.) ")


def english_of(page: Path) -> Path:
    """The page that a Chinese page translates."""
    if page == ROOT / "README.zh.md":
        return ROOT / "README.md"
    return ROOT / "docs" / page.relative_to(CHINESE)


def advice(name: str, what: str) -> str:
    original = english_of(ROOT / name).relative_to(ROOT)
    return (
        f"{name} does not follow {original}: {what}. If {original} has changed, change {name} likewise, in the terms "
        "of docs/zh/glossary.md; comments in code are translated, and all else in it stays"
    )


def headings(page: Path) -> list[str]:
    """The marks of a page's headings: `##` for one of the second level."""
    return re.findall(r"^(#+) ", prose(page), re.MULTILINE)


def markers(page: Path) -> list[str]:
    """The names of a page's blocks of figures, of which the README has a Chinese form."""
    return [name.removesuffix(".zh") for name in re.findall(r"<!-- figures: ([\w.-]+) -->", page.read_text())]


def rows(page: Path) -> int:
    """The number of lines in a page's tables, apart from blocks of figures."""
    text = re.sub(r"<!-- figures: .*?<!-- end of figures -->", "", prose(page), flags=re.DOTALL)
    return len(re.findall(r"^ *\|", text, re.MULTILINE))


def code(page: Path) -> list[Block]:
    """All code of a page, fenced and indented, in the order of the page. The rest of a list's item is no code."""
    lines = prose(page).split("\n")
    found = blocks(page)
    for block in indented(page):
        before = [line for line in lines[: block.line - 1] if line and not line.startswith(" ")]
        if not (before and _ITEM.match(before[-1])):
            found.append(block)
    return sorted(found, key=lambda block: block.line)


def statements(block: Block) -> Iterator[str]:
    """The lines of a block without their comments, where there is anything else."""
    for line in block.text.split("\n"):
        stripped = _COMMENT.sub("", line).rstrip()
        if stripped:
            yield stripped


def agree(chinese: str | None, english: str | None) -> bool:
    """Whether two lines are the same but for words that are translated."""
    if chinese is None or english is None:
        return False
    start = _CHINESE.split(chinese, maxsplit=1)[0]
    return chinese == english if start == chinese else english.startswith(start.rstrip())


def first_difference(chinese: Block, english: Block) -> str | None:
    for mine, theirs in zip_longest(statements(chinese), statements(english)):
        if not agree(mine, theirs):
            return f"{chinese} has {mine!r}, and {english} has {theirs!r}"
    return None


@pytest.mark.parametrize("name", NAMED)
def test_a_chinese_page_links_to_its_original(name):
    page = ROOT / name
    original = english_of(page)
    assert original.exists(), (
        f"{name} translates {original.relative_to(ROOT)}, which is not there: remove or rename {name}"
    )
    link = f"[English]({relpath(original, page.parent)})"
    top = page.read_text().split("\n## ")[0]
    assert link in top, f"{name} must have the link {link} above its first section"


@pytest.mark.parametrize("name", NAMED)
def test_a_chinese_page_has_the_same_headings(name):
    mine, theirs = headings(ROOT / name), headings(english_of(ROOT / name))
    assert mine == theirs, advice(name, f"it has the headings {' '.join(mine)}, and not {' '.join(theirs)}")


@pytest.mark.parametrize("name", NAMED)
def test_a_chinese_page_has_the_same_figures(name):
    mine, theirs = markers(ROOT / name), markers(english_of(ROOT / name))
    assert mine == theirs, advice(name, f"it has the blocks of figures {mine}, and not {theirs}")


@pytest.mark.parametrize("name", [name for name in NAMED if name not in OWN_TABLES])
def test_a_chinese_page_has_tables_of_the_same_length(name):
    mine, theirs = rows(ROOT / name), rows(english_of(ROOT / name))
    assert mine == theirs, advice(name, f"its tables have {mine} lines, and not {theirs}")


@pytest.mark.parametrize("name", NAMED)
def test_a_chinese_page_has_the_same_code(name):
    mine, theirs = code(ROOT / name), code(english_of(ROOT / name))
    different = [found for pair in zip(mine, theirs, strict=False) if (found := first_difference(*pair))]
    assert not different, advice(name, different[0])
    assert len(mine) == len(theirs), advice(name, f"it has {len(mine)} blocks of code, and not {len(theirs)}")


def test_the_chinese_terms_are_those_of_the_glossary():
    """The English glossary names the Chinese terms; the Chinese one has each of them at the beginning of a row."""
    terms = [row.split("|")[2] for row in re.findall(r"^\|.+", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)]
    asked = {term.strip() for cell in terms for term in cell.split("、")} - {"Chinese", "---"}
    chinese = (CHINESE / "glossary.md").read_text()
    assert sorted(term for term in asked if not re.search(rf"^\|[^|]*{term}", chinese, re.MULTILINE)) == []


def test_changed_code_is_noticed():
    def block(text: str) -> Block:
        return Block(ROOT / "README.md", 1, "sh", text)

    english = block("run --now 2   # at once\nlatest   the newest\n\nend\n")
    assert first_difference(block("run --now 2   # 立即\nlatest   最新的\nend\n"), english) is None
    assert first_difference(block("run --now 3   # 立即\nlatest   最新的\nend\n"), english)
    assert first_difference(block("run --now 2   # 立即\noldest   最新的\nend\n"), english)
    assert first_difference(block("run --now 2   # 立即\nlatest   最新的\n"), english)
