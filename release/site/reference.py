"""Generates the pages of the API reference: one for each group of public names, and one for each public module.

The names and their groups are read from the sources, without importing them. They are those of `_PUBLIC` in
`src/paceline/__init__.py`, where a comment starts each group. The page of a public module describes the module that it
is an alias of.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from public_names import MODULES, handed_on, source_of

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "paceline"
FOLDER = "reference"
_EXAMPLES = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
_PAGE_OPTIONS = "    options:\n      heading_level: 2\n"


class Group(NamedTuple):
    """A group of public names, each with the module that defines it."""

    title: str
    names: list[tuple[str, str]]

    @property
    def slug(self) -> str:
        """Returns the file name of the group's page, without the suffix."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


def fenced(docstring: str) -> str:
    """Returns the docstring with fences around its examples, which Markdown would otherwise format as text."""
    return _EXAMPLES.sub(lambda found: f"```pycon\n{found[0]}\n```", docstring)


def groups() -> list[Group]:
    """Returns the groups of public names in the order of the sources."""
    text = (PACKAGE / "__init__.py").read_text()
    table = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC"
    )
    assert isinstance(table.value, ast.Dict)
    lines = text.split("\n")
    found: list[Group] = []
    for key, value in zip(table.value.keys, table.value.values, strict=True):
        assert isinstance(key, ast.Constant)
        comment = re.fullmatch(r"\s*# (.+)", lines[key.lineno - 2])
        if comment:
            found.append(Group(comment[1], []))
        found[-1].names.extend((str(key.value), name) for name in ast.literal_eval(value))
    return found


def pages() -> dict[str, str]:
    """Returns the text of each page by its path."""
    found = {f"{FOLDER}/index.md": _index()}
    for group in groups():
        ours = [
            f"::: {module}.{name}\n{_PAGE_OPTIONS}" for module, name in group.names if module.startswith("paceline.")
        ]
        torchs = [f"- `{name}`, of `{module}`\n" for module, name in group.names if not module.startswith("paceline.")]
        found[f"{FOLDER}/{group.slug}.md"] = f"# {_capital(group.title)}\n\n" + "\n".join(ours) + "".join(torchs)
    for module, does in MODULES.items():
        handed = handed_on(module)
        described = "\n".join(f"::: {origin}.{name}\n{_PAGE_OPTIONS}" for origin, name in handed)
        whole = f"::: {source_of(module)}\n    options:\n      show_root_heading: false\n"
        found[f"{FOLDER}/{module}.md"] = f"# {module}\n\n{_capital(does)}.\n\n{described or whole}"
    return found


def _index() -> str:
    rows = []
    for group in groups():
        names = ", ".join(
            f"[`{name}`]({group.slug}.md{f'#{module}.{name}' if module.startswith('paceline.') else ''})"
            for module, name in group.names
        )
        rows.append(f"## {_capital(group.title)}\n\n{names}\n")
    modules = "".join(f"| [{module}]({module}.md) | {does} |\n" for module, does in MODULES.items())
    return (
        "# Reference\n\nAll public names, from their docstrings. Those of the first groups are names of `paceline`:\n"
        "`import paceline as dist`.\n\n" + "\n".join(rows) + f"\n## Modules\n\n| | |\n| --- | --- |\n{modules}"
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
