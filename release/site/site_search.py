"""Ranks pages in the search results, and lists the Chinese terms that the search index must not split.

Material's search splits Chinese text into words with jieba's dictionary, which lacks technical terms: the index
contains 全 and 归约 for 全归约, and the browser does not split queries, so the query 全归约 matches neither.
"""

from __future__ import annotations

import re

from links import ROOT

BOOSTS = {"learn/": 3.0, "how-to/": 3.0, "coming-from/": 2.0, "reference/": 0.5, "decisions/": 0.1, "CHANGELOG.md": 0.1}
"""The score factors by prefix of the page's path; all other pages have a factor of 1."""

ROW = re.compile(r"^\| ([^|]+) \|", re.MULTILINE)
HAN = re.compile(r"[\u4e00-\u9fff]{2,}")
TITLE = re.compile(r"[\u4e00-\u9fff]{2,4}")


def boost(path: str) -> float:
    """Returns the factor by which the score of the page at `path`, relative to its site's folder, is multiplied."""
    return next((factor for start, factor in BOOSTS.items() if path.startswith(start)), 1.0)


def terms() -> list[str]:
    """Returns the Chinese terms in the first column of the glossary, and page titles that consist of one short term."""
    chinese = ROOT / "docs" / "zh"
    cells = ROW.findall((chinese / "glossary.md").read_text())
    titles = [page.read_text().split("\n", 1)[0].removeprefix("# ") for page in chinese.rglob("*.md")]
    words = {term for cell in cells for term in HAN.findall(re.sub(r"（[^）]*）", " ", cell))}
    return sorted((words | {title for title in titles if TITLE.fullmatch(title)}) - {"中文"})
