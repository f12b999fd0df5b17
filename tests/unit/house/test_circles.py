"""Modules and folders in the package do not import each other in circles."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "src"


def name_of(file: Path) -> str:
    parts = file.relative_to(SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in (SOURCES / "paceline").rglob("*.py")}


def imports_of(file: Path) -> set[str]:
    """Returns the package's modules that a file imports, including within functions and for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else node.module for name in names}
    return (found & FILES.keys()) - {"paceline", name_of(file)}


@cache
def import_graph() -> dict[str, set[str]]:
    """Returns the imports of each module except `paceline` itself, which imports modules on first use."""
    return {name: imports_of(file) for name, file in FILES.items() if name != "paceline"}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns the modules that a module imports, directly or through other modules."""
    found, new = set[str](), {start}
    while new:
        found |= new
        new = set().union(*(graph[name] for name in new)) - found
    return found


def test_modules_do_not_import_each_other_in_a_circle():
    """An import within a function or for annotations counts as well, because it only hides the circle."""
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        raise AssertionError(
            f"these modules import each other: {' <- '.join(error.args[1])}; move what both need into the lower one, "
            "or the function that needs both into a module above them, or pass the function only the data that it reads"
        ) from None


def folder_pair_of(name: str, other: str) -> tuple[str, str] | None:
    """Returns the sibling folders that contain two modules, or None if no two siblings do."""
    own, others = (
        module.split(".") if FILES[module].stem == "__init__" else module.split(".")[:-1] for module in (name, other)
    )
    depth = next((at for at, pair in enumerate(zip(own, others, strict=False)) if pair[0] != pair[1]), None)
    return None if depth is None else (".".join(own[: depth + 1]), ".".join(others[: depth + 1]))


def test_sibling_folders_do_not_import_each_other():
    graph = defaultdict[str, set[str]](set)
    for name, imported in import_graph().items():
        for folder, other in filter(None, (folder_pair_of(name, module) for module in imported)):
            graph[folder].add(other)
    found = {
        " <-> ".join(sorted((folder, other))).replace("paceline.", "")
        for folder in list(graph)
        for other in set(graph[folder])
        if folder in reachable(graph, other)
    }
    assert not found, "move what both folders need into the lower one, or next to both"
