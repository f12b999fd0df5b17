"""The pictures in docs match the scripts that draw them, and the code that they show exists."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.comm.schedule.algorithms import ALGORITHMS
from paceline.comm.schedule.steps import Buffer, Operation

sys.path.append(str(Path(__file__).parents[3] / "docs" / "pictures"))  # contains a module that several scripts share

from playing import play

sys.path.pop()  # bench has modules with the same names
ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "pictures"

REPLICAS = runpy.run_path(str(PICTURES / "data_parallel.py"))["PICTURES"]
ARCHITECTURE = runpy.run_path(str(PICTURES / "architecture.py"))
DRAWN = {
    **{name: draw().svg() for name, draw in REPLICAS.items()},
    **{name: draw() for name, draw in ARCHITECTURE["PICTURES"].items()},
    **{
        name: draw()
        for script in ("elastic.py", "collectives.py", "all_reduce.py")
        for name, draw in runpy.run_path(str(PICTURES / script))["PICTURES"].items()
    },
}
COMPONENTS = ARCHITECTURE["COMPONENTS"]
LAYERS = ("interop", "operate", "train", "comm")
HOPS = [(route.title, number, hop) for route in ARCHITECTURE["ROUTES"] for number, hop in enumerate(route.hops, 1)]


def test_the_pictures_are_what_their_scripts_draw():
    assert [name for name, svg in DRAWN.items() if not ElementTree.fromstring(svg).tag.endswith("svg")] == []
    wrong = [name for name, svg in DRAWN.items() if (PICTURES / name).read_text() != svg]
    assert not wrong, f"run the scripts in docs/pictures that draw {', '.join(wrong)} again"


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
    """Returns True if `text` defines the function or `Class::method`, inside or outside the class."""
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


def test_the_architecture_shows_every_folder_of_every_layer():
    package = ROOT / "src" / "paceline"
    folders = [door.parent for layer in LAYERS for door in package.glob(f"{layer}/*/__init__.py")]
    shown = [folder for component in COMPONENTS for folder in component.folders]
    assert sorted([*(str(folder.relative_to(ROOT)) for folder in folders), "src/paceline/cli", "native"]) == sorted(
        shown
    )
    assert list(dict.fromkeys(component.layer for component in COMPONENTS)) == ["cli", *LAYERS, "core"]


def test_routes_in_the_architecture_run_downwards():
    for route in ARCHITECTURE["ROUTES"]:
        rows = [ARCHITECTURE["component_of"](hop) for hop in route.hops]
        assert rows == sorted(rows), f"{route.title}: {rows}"


@pytest.mark.parametrize("operation", [each for each in Operation if each != Operation.BARRIER])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "star"])
def test_a_played_schedule_does_what_its_operation_says(algorithm, operation):
    if operation not in ALGORITHMS[algorithm]:
        pytest.skip(f"{algorithm} has no {operation}")
    n, root = 5, 2
    final = play(algorithm, operation, n, root).states[-1]
    for rank in range(n):
        held = [final[cell] for cell in sorted(final) if cell[:2] == (rank, Buffer.OUTPUT)]
        assert [(sorted(data.ranks), data.part) for data in held] == meant(operation, rank, n, root, len(held))


def meant(operation: Operation, rank: int, n: int, root: int, blocks: int) -> list[tuple[list[int], int]]:
    """Returns a rank's final data: for each block, its part of the tensor and the ranks whose tensors it sums."""
    everybody = list(range(n))
    if operation in (Operation.REDUCE, Operation.GATHER) and rank != root:
        return []
    return {
        Operation.ALL_REDUCE: [(everybody, part) for part in range(blocks)],
        Operation.REDUCE: [(everybody, part) for part in range(blocks)],
        Operation.BROADCAST: [([root], part) for part in range(blocks)],
        Operation.ALL_GATHER: [([each], 0) for each in everybody],
        Operation.GATHER: [([each], 0) for each in everybody],
        Operation.SCATTER: [([root], rank)],
        Operation.REDUCE_SCATTER: [(everybody, rank)],
        Operation.ALL_TO_ALL: [([each], rank) for each in everybody],
    }[operation]


def test_a_ring_and_a_tree_take_the_rounds_that_the_page_says():
    assert len(play("ring", Operation.ALL_REDUCE, 4).rounds) == 2 * 3
    assert len(play("tree", Operation.ALL_REDUCE, 8).rounds) == 3 + 3
