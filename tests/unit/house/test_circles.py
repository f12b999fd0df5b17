"""Modules of the package do not import each other in circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "src"


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in (SOURCES / "paceline").rglob("*.py")}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes, including those in functions, except nodes that only a type checker evaluates."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from statements(child)


def imports_of(file: Path) -> set[str]:
    """Returns the modules of the package that a file imports, at its beginning or later."""
    found = set()
    for node in statements(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return found & FILES.keys()


def test_modules_do_not_import_each_other_in_a_circle():
    """An import within a function counts: it only hides the circle. `paceline` itself imports on first use."""
    graph = {name: imports_of(file) - {"paceline", name} for name, file in FILES.items() if name != "paceline"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(
            f"these modules import each other: {' <- '.join(error.args[1])}; move what both need into the lower one, "
            "or the function that needs both into a module above them"
        ) from None
