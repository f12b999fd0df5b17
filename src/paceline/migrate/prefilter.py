"""A quick look at a Python file, to find out whether it has to be read in full.

LibCST takes a third of a second for a file of a thousand lines, and Python's own parser some milliseconds. Most files
of a program import torch and have nothing to migrate.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from paceline.migrate.calls import reported
from paceline.migrate.names import TELLING_WORDS, concerns_us, group_user

_IMPORTS_US = re.compile(r"^[ \t]*(?:import|from)[ \t]+(?:torch\.distributed|horovod)\b", re.MULTILINE)


def may_concern(text: str) -> bool:
    """Returns whether anything in a file may concern the migration, or the way by which the program comes over.

    Names are followed without regard to scopes, so that the result is also true for some files in which nothing does,
    and for those that this Python cannot parse.
    """
    if not any(all(word in text for word in words) for words in TELLING_WORDS):
        return False
    if _IMPORTS_US.search(text):
        return True
    tree = _parsed(text)
    if tree is None:
        return True
    names: set[str] = set()
    meanings: dict[str, set[str]] = {}  # what the first word of a dotted name may stand for
    chains: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name, local in _bindings(node):
                names.add(name)
                first = local.partition(".")[0]
                meanings.setdefault(first, set()).add(name if local == first else first)
        elif isinstance(node, (ast.Name, ast.Attribute)) and (chain := _chain(node)) is not None:
            chains.add(chain)
    names |= {root + rest for first, rest in chains for root in meanings.get(first, ())}
    return any(concerns_us(each) or reported(each) is not None or group_user(each) is not None for each in names)


def imports_of(text: str) -> Iterator[str]:
    """Yields the full names of all that a file imports; nothing if it cannot be parsed."""
    tree = _parsed(text)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (name for name, local in _bindings(node) if local != "*")


def _parsed(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in the program
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _bindings(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yields the full name of each thing that is imported, and its name in the file, as `reading.bindings` does."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.name, alias.asname or alias.name
    elif not statement.level and statement.module is not None:
        for alias in statement.names:
            yield f"{statement.module}.{alias.name}", alias.asname or alias.name


def _chain(node: ast.expr) -> tuple[str, str] | None:
    """Returns the first word of a dotted name and the rest, with its dot; None for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return node.id, "".join(f".{part}" for part in reversed(parts))
