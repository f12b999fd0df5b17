"""Modules and folders in the package do not import each other in circles."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "src"


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in (SOURCES / "paceline").rglob("*.py")}


CIRCLES_OF_TYPES = {
    "cli.doctor.script.library_call -> cli.doctor.script.interpreter",
    "cli.doctor.script.training_calls -> cli.doctor.script.interpreter",
}
"""Imports for type checkers only that close a circle: functions of a class that take an object of it."""


def statements(node: ast.AST, with_types: bool) -> Iterator[ast.AST]:
    """Yields all nodes, including those in functions. Omits nodes for type checkers only, unless `with_types`."""
    for child in ast.iter_child_nodes(node):
        if not with_types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from statements(child, with_types)


def imports_of(file: Path, with_types: bool = False) -> set[str]:
    """Returns the modules in the package that a file imports, at the top or later."""
    found = set()
    for node in statements(ast.parse(file.read_text()), with_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return (found & FILES.keys()) - {"paceline", name_of(file)}


@cache
def graph_of(with_types: bool) -> dict[str, set[str]]:
    """Returns the imports of each module except `paceline` itself, which imports modules on first use."""
    return {name: imports_of(file, with_types) for name, file in FILES.items() if name != "paceline"}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns the modules that a module imports, directly or through other modules."""
    found, new = set[str](), {start}
    while new:
        found |= new
        new = set().union(*(graph[name] for name in new)) - found
    return found


def test_modules_do_not_import_each_other_in_a_circle():
    """An import within a function counts: it only hides the circle."""
    graph = graph_of(with_types=False)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(
            f"these modules import each other: {' <- '.join(error.args[1])}; move what both need into the lower one, "
            "or the function that needs both into a module above them"
        ) from None


def test_imports_for_types_close_no_other_circle():
    graph = graph_of(with_types=True)
    found = {
        f"{name} -> {other}".replace("paceline.", "")
        for name, imported in graph.items()
        for other in imported - graph_of(with_types=False)[name]
        if name in reachable(graph, other)
    }
    assert found == CIRCLES_OF_TYPES, "move the type into a module below both, or into the one that imports it"


def folder_pair_of(name: str, other: str) -> tuple[str, str] | None:
    """Returns the sibling folders that contain two modules, or None if no two siblings do."""
    own, others = (
        module.split(".") if FILES[module].stem == "__init__" else module.split(".")[:-1] for module in (name, other)
    )
    depth = next((at for at, pair in enumerate(zip(own, others, strict=False)) if pair[0] != pair[1]), None)
    return None if depth is None else (".".join(own[: depth + 1]), ".".join(others[: depth + 1]))


def test_sibling_folders_do_not_import_each_other():
    graph = defaultdict[str, set[str]](set)
    for name, imported in graph_of(with_types=True).items():
        for folder, other in filter(None, (folder_pair_of(name, module) for module in imported)):
            graph[folder].add(other)
    found = {
        " <-> ".join(sorted((folder, other))).replace("paceline.", "")
        for folder in list(graph)
        for other in set(graph[folder])
        if folder in reachable(graph, other)
    }
    assert not found, "move what both folders need into the lower one, or next to both"
