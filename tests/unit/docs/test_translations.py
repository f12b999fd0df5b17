"""The Chinese pages have the same sections and code as the English pages; outdated translations are detected."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from itertools import zip_longest
from os.path import relpath
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_blocks import ROOT, Block, blocks, indented, prose

CHINESE = ROOT / "docs" / "zh"
PAGES = [ROOT / "README.zh.md", *sorted(CHINESE.rglob("*.md"))]
NAMED = [str(page.relative_to(ROOT)) for page in PAGES]
OWN_TABLES = {"docs/zh/glossary.md": "it explains its terms in Chinese, and explains some that English readers know"}
_CHINESE = re.compile(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”‘’]")
_COMMENT = re.compile(r"(^|(?<=\s))(#|//) .*")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_FIGURES = re.compile(r"<!-- figures: .*?<!-- end of figures -->", re.DOTALL)
_LONG = 300
_SHORTEST = 0.2
"""Of a long English part, what its translation has at least in characters. Those of the pages have 0.28 or more."""


class Part(NamedTuple):
    """A heading, paragraph, list item, table row, picture or block of code."""

    line: int
    kind: str
    text: str


def english_of(page: Path) -> Path:
    """Returns the page that a Chinese page translates."""
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
    """Returns the marks of a page's headings, such as `##` for a second-level heading."""
    return re.findall(r"^(#+) ", prose(page), re.MULTILINE)


def markers(page: Path) -> list[str]:
    """Returns the names of the blocks of figures on a page; those in the README have Chinese variants."""
    return [name.removesuffix(".zh") for name in re.findall(r"<!-- figures: ([\w.-]+) -->", page.read_text())]


def rows(page: Path) -> int:
    """Returns the number of lines in a page's tables, excluding blocks of figures."""
    return len(re.findall(r"^ *\|", _FIGURES.sub("", prose(page)), re.MULTILINE))


def parts(page: Path) -> list[Part]:
    """Returns the parts of a page in order, without blocks of figures or the link to the original page."""
    lines = prose(page).split("\n")
    for block in blocks(page):
        lines[block.line - 2] = "```"
    text = _FIGURES.sub(lambda figures: "\n" * figures[0].count("\n"), "\n".join(lines))
    found: list[Part] = []
    goes_on = False
    for at, line in enumerate(text.split("\n")):
        kind = kind_of(line)
        if kind == "paragraph" and goes_on:
            found[-1] = found[-1]._replace(text=f"{found[-1].text} {line.strip()}")
        elif kind and not line.startswith("[English]("):
            indented = kind == "paragraph" and line.startswith("    ")
            found.append(Part(at + 1, "indented" if indented else kind, line))
        goes_on = kind in ("paragraph", "item")
    return found


def kind_of(line: str) -> str:
    """Returns the kind of part to which a line belongs, unless it continues the previous part; "" for an empty line."""
    line = line.strip()
    for kind, mark in {"heading": "#", "row": "|", "picture": "![", "code": "```"}.items():
        if line.startswith(mark):
            return kind
    return ("item" if _ITEM.match(line) else "paragraph") if line else ""


def lacks(chinese: Part | None, english: Part | None) -> str | None:
    """Returns the deficiencies in a translated part that can be detected without knowing the languages."""
    if chinese is None or english is None or chinese.kind != english.kind:
        return f"{described(chinese)} is where {described(english)} should be"
    if chinese.kind == "indented":
        return None  # another test compares its code
    if code_in(chinese) != code_in(english):
        different = ", ".join(f"`{each}`" for each in sorted(code_in(chinese) ^ code_in(english)))
        return f"{described(chinese)} and {described(english)} differ in {different}"
    if chinese.text.count("](") != english.text.count("]("):
        return f"{described(chinese)} has another number of links than {described(english)}"
    if len(english.text) > _LONG and len(chinese.text) < _SHORTEST * len(english.text):
        return f"{described(chinese)} is too short for a translation of {described(english)}"
    return None


def code_in(part: Part) -> set[str]:
    return {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", part.text)}


def described(part: Part | None) -> str:
    return f"the {part.kind} in line {part.line} ({part.text.strip()[:40]})" if part else "the end"


def code(page: Path) -> list[Block]:
    """Returns all code on a page, fenced and indented, in order. Further text in a list item is not code."""
    lines = prose(page).split("\n")
    found = blocks(page)
    for block in indented(page):
        before = [line for line in lines[: block.line - 1] if line and not line.startswith(" ")]
        if not (before and _ITEM.match(before[-1])):
            found.append(block)
    return sorted(found, key=lambda block: block.line)


def statements(block: Block) -> Iterator[str]:
    """Returns the lines of a block without comments, or with them if there are no other lines."""
    for line in block.text.split("\n"):
        stripped = _COMMENT.sub("", line).rstrip()
        if stripped:
            yield stripped


def agree(chinese: str | None, english: str | None) -> bool:
    """Returns True if two lines are equal except for translated words."""
    if chinese is None or english is None:
        return False
    start = _CHINESE.split(chinese, maxsplit=1)[0]
    return chinese == english if start == chinese else english.startswith(start.rstrip())


def first_difference(chinese: Block, english: Block) -> str | None:
    for mine, theirs in zip_longest(statements(chinese), statements(english)):
        if not agree(mine, theirs):
            return f"{chinese} has {mine!r}, and {english} has {theirs!r}"
    return None


def listed(wrong: list[str]) -> str:
    return "\n".join(["", *wrong])


def test_a_chinese_page_links_to_its_original():
    wrong = []
    for page in PAGES:
        name, original = page.relative_to(ROOT), english_of(page)
        link = f"[English]({relpath(original, page.parent)})"
        if not original.exists():
            wrong.append(
                f"{name} translates {original.relative_to(ROOT)}, which has not reached this call: remove or "
                f"rename {name}"
            )
        elif link not in page.read_text().split("\n## ")[0]:
            wrong.append(f"{name} must have the link {link} above its first section")
    assert not wrong, listed(wrong)


def compared(of: Callable[[Path], object], message: str, *, but: Collection[str] = ()) -> list[str]:
    """Returns a message for each Chinese page if the values of `of` for this page and for the original differ."""
    pairs = [(name, of(ROOT / name), of(english_of(ROOT / name))) for name in NAMED if name not in but]
    return [advice(name, message.format(mine=mine, theirs=theirs)) for name, mine, theirs in pairs if mine != theirs]


def test_a_chinese_page_has_the_same_headings():
    wrong = compared(lambda page: " ".join(headings(page)), "it has the headings {mine}, and not {theirs}")
    assert not wrong, listed(wrong)


def test_a_chinese_page_has_the_same_figures():
    wrong = compared(markers, "it has the blocks of figures {mine}, and not {theirs}")
    assert not wrong, listed(wrong)


def test_a_chinese_page_has_tables_of_the_same_length():
    wrong = compared(rows, "its tables have {mine} lines, and not {theirs}", but=OWN_TABLES)
    assert not wrong, listed(wrong)


def test_a_chinese_page_has_the_same_parts():
    wrong = []
    for name in NAMED:
        mine, theirs = parts(ROOT / name), parts(english_of(ROOT / name))
        if name in OWN_TABLES:
            mine, theirs = ([part for part in each if part.kind != "row"] for each in (mine, theirs))
        different = next((found for pair in zip_longest(mine, theirs) if (found := lacks(*pair))), None)
        wrong += [advice(name, different)] if different else []
    assert not wrong, listed(wrong)


def test_a_chinese_page_has_the_same_code():
    wrong = []
    for name in NAMED:
        mine, theirs = code(ROOT / name), code(english_of(ROOT / name))
        different = [found for pair in zip(mine, theirs, strict=False) if (found := first_difference(*pair))]
        if different:
            wrong.append(advice(name, different[0]))
        elif len(mine) != len(theirs):
            wrong.append(advice(name, f"it has {len(mine)} blocks of code, and not {len(theirs)}"))
    assert not wrong, listed(wrong)


def test_the_chinese_terms_are_those_of_the_glossary():
    """Each Chinese term in the English glossary is the first entry of a row in the Chinese glossary."""
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


ENGLISH = """# Ranks

One paragraph, which uses `run` and [a link](a.md), and
goes on.

![picture](a.svg)

1. An item
   of two lines.
2. Another one.

```sh
run
```
"""
TRANSLATED = """# 编号

[English](page.md)

一个段落，使用 `run` 和[链接](a.md)。

![图](a.svg)

1. 两行的一项。
2. 另一项。

```sh
run
```
"""


@pytest.mark.parametrize(
    ("lost", "noticed"),
    [
        ("", None),
        ("一个段落，使用 `run` 和[链接](a.md)。", "is where the paragraph in line 3"),
        ("2. 另一项。", "is where the item in line 10"),
        (" `run` ", "differ in `run`"),
        ("[链接](a.md)", "another number of links"),
        ("![图](a.svg)", "is where the picture in line 6"),
        ("```sh\nrun\n```\n", "the end is where the code in line 12"),
    ],
)
def test_what_a_translation_has_lost_is_noticed(tmp_path, lost, noticed):
    chinese, english = tmp_path / "zh.md", tmp_path / "page.md"
    english.write_text(ENGLISH)
    chinese.write_text(TRANSLATED.replace(lost, "") if lost else TRANSLATED)
    found = [lacks(*pair) for pair in zip_longest(parts(chinese), parts(english))]
    first = next((each for each in found if each), None)
    assert first is None if noticed is None else noticed in first


def test_half_a_paragraph_is_noticed():
    english = Part(3, "paragraph", "A sentence of some forty characters. " * 10)
    assert lacks(Part(5, "paragraph", "约有十五个汉字的一个完整句子。" * 10), english) is None
    assert "too short" in str(lacks(Part(5, "paragraph", "约有十五个汉字的一个完整句子。" * 4), english))
