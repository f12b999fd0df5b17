"""The pictures in docs are those that the code beside them draws, and the code that they show exists."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
REPLICAS = runpy.run_path(str(PICTURES / "data_parallel.py"))["PICTURES"]
ARCHITECTURE = runpy.run_path(str(PICTURES / "architecture.py"))
DRAWN = {
    **{name: draw().svg() for name, draw in REPLICAS.items()},
    **{name: draw() for name, draw in ARCHITECTURE["PICTURES"].items()},
    **{name: draw() for name, draw in runpy.run_path(str(PICTURES / "elastic.py"))["PICTURES"].items()},
}
LAYERS = ARCHITECTURE["LAYERS"]
HOPS = [(route.title, number, hop) for route in ARCHITECTURE["ROUTES"] for number, hop in enumerate(route.hops, 1)]


@pytest.mark.parametrize("name", list(DRAWN))
def test_a_picture_is_what_its_script_draws(name):
    assert ElementTree.fromstring(DRAWN[name]).tag.endswith("svg")
    assert (PICTURES / name).read_text() == DRAWN[name], f"run the script in docs/pictures that draws {name} again"


def _python_defines(text: str, function: str) -> bool:
    body = ast.parse(text).body
    for name in function.split("."):
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


def _native_defines(text: str, function: str) -> bool:
    """Whether `text` defines `Class::method`, in the class or outside of it, or the function."""
    owner, _, name = function.rpartition("::")
    outside = re.search(rf"^[\w:<>,*& \[\]]*\b{re.escape(function)}\([^;]*?\{{", text, re.MULTILINE)
    inside = re.search(rf"^class {owner}\b.*?^\s[^;\n]*\b{name}\(", text, re.MULTILINE | re.DOTALL) if owner else None
    return bool(outside or inside)


def test_the_architecture_shows_functions_that_exist():
    wrong = []
    for title, number, hop in HOPS:
        file = ROOT / hop.file
        defines = _python_defines if file.suffix == ".py" else _native_defines
        if not file.exists():
            wrong.append(f"{title}, hop {number}: there is no {hop.file}")
        elif not defines(file.read_text(), hop.function):
            wrong.append(f"{title}, hop {number}: {hop.file} does not define {hop.function}")
    assert not wrong, "\n".join(["docs/pictures/architecture.py is out of date:", *wrong])


def test_the_architecture_shows_every_folder_of_the_package():
    folders = {f"src/paceline/{path.parent.name}" for path in (ROOT / "src" / "paceline").glob("*/__init__.py")}
    shown = {folder for layer in LAYERS for folder in layer.folders}
    assert folders | {"native"} == shown


def test_routes_in_the_architecture_run_downwards():
    for route in ARCHITECTURE["ROUTES"]:
        rows = [ARCHITECTURE["layer_of"](hop) for hop in route.hops]
        assert rows == sorted(rows), f"{route.title}: {rows}"
