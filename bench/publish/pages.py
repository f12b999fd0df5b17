"""Generates the blocks between markers in the pages of the documentation from results.

    <!-- figures: all_reduce -->
    ... what `blocks.py` generates from bench/results/all_reduce.json ...
    <!-- end of figures -->

A block without a definition in `blocks.py` shows all tables of the result with the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from publish.blocks import BLOCKS
from publish.results import Result, read_all
from publish.tables import markdown, source

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(?<=<!-- figures: )([\w.-]+)( -->\n)(.*?)(?=<!-- end of figures -->)", re.DOTALL)


def pages() -> list[Path]:
    """Returns the pages that contain blocks."""
    found = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if _BLOCK.search(page.read_text())]


def filled(text: str, results: Mapping[str, Result], page: Path) -> str:
    """Returns the text of a page with all its blocks regenerated. Links are relative to a page in docs/."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}{block(match[1], results).replace('](../', f']({up}')}\n"

    return _BLOCK.sub(fill, text)


def block(name: str, results: Mapping[str, Result]) -> str:
    """Returns the text between the markers of a block."""
    if name in BLOCKS:
        return BLOCKS[name](results)
    if name not in results:
        raise KeyError(f"a page has figures of {name}, and there is no bench/results/{name}.json")
    return _everything(results[name])


def _everything(result: Result) -> str:
    """Returns all tables of a result with all their columns."""
    parts = []
    for each in result.tables:
        heads = list(dict.fromkeys(name for row in each.rows for name in row))
        parts.append(markdown(heads, [[row.get(head) for head in heads] for row in each.rows]))
    return "\n\n".join([*parts, source(result)])


def draw_all() -> list[Path]:
    """Regenerates all blocks and pictures; returns the files that changed."""
    from publish.plots import PICTURES

    results = read_all()
    drawn = {page: filled(page.read_text(), results, page) for page in pages()}
    drawn |= {ROOT / "docs" / "pictures" / name: draw(results) for name, draw in PICTURES.items()}
    changed = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        path.write_text(drawn[path])
    return [path.relative_to(ROOT) for path in changed]
