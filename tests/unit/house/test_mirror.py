"""Tests that can be found by the name of the module that they test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "paceline"
STAND_IN = PACKAGE / "interop" / "horovod" / "stand_in"
UNIT = ROOT / "tests" / "unit"

SHARE_WITH_A_TEST = 0.9


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


@cache
def modules() -> dict[Path, ast.Module]:
    """Returns the modules that define functions, by path in the package; others only re-export or list constants."""
    files = (file for file in sorted(PACKAGE.rglob("*.py")) if not file.stem.startswith("__"))
    trees = {file: ast.parse(file.read_text()) for file in files if STAND_IN not in file.parents}
    return {
        file.relative_to(PACKAGE): tree for file, tree in trees.items() if any(is_function(n) for n in ast.walk(tree))
    }


@cache
def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def mentions(test: Path, module: Path, tree: ast.Module) -> bool:
    """Returns True if a test imports the module, or mentions one of its public classes or functions."""
    text = test.read_text()
    if f"paceline.{'.'.join(module.with_suffix('').parts)}" in text:
        return True
    defined = (node.name for node in tree.body if is_function(node) or isinstance(node, ast.ClassDef))
    return any(re.search(rf"\b{name}\b", text) for name in defined if not name.startswith("_"))


def named_after(module: Path) -> list[Path]:
    """Returns the tests that have the module's name.

    For `train/zero/gradient_reducer.py`, they are `test_gradient_reducer.py` and `test_gradient_reducer_*.py` in
    `tests/unit/train/zero`. In the other folders of `tests`, which do not mirror the source, the name may begin with
    the module's folder: `tests/ranks/test_zero_gradient_reducer.py`. If several modules have the same name, a test
    without the folder in its name must mention this module.
    """
    name = re.compile(rf"test_(?P<folder>{module.parent.name}_)?{module.stem}(_\w+)?")
    is_shared = Counter(other.stem for other in modules())[module.stem] > 1
    return [
        test
        for test in files_of_tests()
        if (match := name.fullmatch(test.stem))
        and (
            test.parent == UNIT / module.parent
            if UNIT in test.parents
            else match["folder"] or not is_shared or mentions(test, module, modules()[module])
        )
    ]


def test_the_test_of_a_module_is_found_by_its_name():
    without = [str(module) for module in modules() if not named_after(module)]
    share = 1 - len(without) / len(modules())
    assert share >= SHARE_WITH_A_TEST, "\n".join(
        [
            f"a test has the name of {share:.0%} of the modules, and not of {SHARE_WITH_A_TEST:.0%} or more: name a "
            "test after the module that it tests, and put it in the module's folder of tests/unit, or in tests/ranks "
            "or another folder if it needs processes. These modules have none:",
            *without,
        ]
    )


def test_a_unit_test_stands_in_the_folder_of_what_it_tests():
    """Only folders that mirror a layer are checked. The others test the documentation, the core or the repository."""
    layers = {module.parts[0] for module in modules() if len(module.parts) > 1}
    wrong = [
        f"tests/unit/{folder}: there is no folder src/paceline/{folder}"
        for folder in sorted({test.parent.relative_to(UNIT) for test in files_of_tests() if UNIT in test.parents})
        if folder.parts and folder.parts[0] in layers and not (PACKAGE / folder).is_dir()
    ]
    assert not wrong, "\n".join(["", *wrong])
