"""Rules in CONTRIBUTING.md for the names of tests."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.rglob("test_*.py"))
LONGEST_NAME = 60
FIXTURES = ("ranks", "hosts")


def statements_of(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"))


def programs_of(test: ast.FunctionDef) -> Iterator[str]:
    """Yields the functions that run on ranks: the arguments of `ranks(n)`, `hosts(n)` or their `start`."""
    for call in ast.walk(test):
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Name):
            called = call.func.value if isinstance(call.func, ast.Attribute) else call.func
            if isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and called.func.id in FIXTURES:
                yield call.args[0].id


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {file.relative_to(ROOT): ast.parse(file.read_text()) for file in FILES}


def test_there_are_tests_to_check(trees):
    assert sum(len(list(statements_of(tree))) for tree in trees.values()) > 500


def test_names_of_tests_are_short_statements(trees):
    names = [(file, test.name) for file, tree in trees.items() for test in statements_of(tree)]
    assert [f"{file}: {name}" for file, name in names if len(name) > LONGEST_NAME] == []


def test_no_test_hides_another_of_its_name(trees):
    for file, tree in trees.items():
        assert [
            name for name, times in Counter(test.name for test in statements_of(tree)).items() if times > 1
        ] == [], file


def test_only_test_files_in_unit_share_a_name():
    """Unit tests are named after modules, whose names may recur in several folders. Other tests have unique names."""
    names = Counter(file.name for file in FILES if ROOT / "unit" not in file.parents)
    assert [name for name, times in names.items() if times > 1] == []


def test_programs_say_in_words_what_they_do(trees):
    """A traceback contains the name of the program that failed; `groups` or `leave` would be meaningless there."""
    for file, tree in trees.items():
        own = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
        programs = {name for test in statements_of(tree) for name in programs_of(test)} & own
        assert [name for name in programs if "_" not in name] == [], file
