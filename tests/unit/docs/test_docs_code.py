"""The code in the README and docs compiles, its names exist, and its command lines are valid.

tests/ranks/test_docs.py runs the English programs. The tests in this file check that each Chinese page has the same
programs.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_blocks import (
    LESSONS,
    PAGES,
    ROOT,
    Block,
    after_a_diff,
    blocks,
    call_of_paceline,
    calls_in_prose,
    commands,
    meaning,
    names_in_prose,
    prose,
    python_of,
)

import paceline
from paceline.cli.main import COMMANDS, parser

sys.path.append(str(ROOT / "release" / "site"))

import public_names

NAMED = [str(page.relative_to(ROOT)) for page in PAGES]
CHINESE = [name for name in NAMED if name.startswith("docs/zh/")]
NEEDS_MORE = ("paceline.integrations.lightning", "paceline.integrations.ray")
"""Modules that cannot be imported without another library, which need not be here."""

USERS_NAMES = ("patch",)
"""Endings of users' files that look like names: `paceline.patch`."""

OTHERS_DIST = ("torch-distributed.md", "paddlepaddle-mindspore.md", "migrating.md")
"""Pages in which `dist` is also the module of another library."""


def english(name: str) -> Path:
    return ROOT / name.replace("docs/zh/", "docs/")


def listed(wrong: list[str]) -> str:
    return "\n".join(["", *wrong])


def syntax_error(text: str, block: Block) -> str | None:
    """Returns a message if the code of a block has a syntax error, otherwise None."""
    try:
        compile(text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        return f"{block}: line {error.lineno} of the block does not compile: {error.msg}"
    return None


def test_python_in_the_pages_compiles():
    pieces = [(piece, block) for page in PAGES for block in blocks(page, "python", "py") for piece in python_of(block)]
    wrong = [error for piece, block in pieces if (error := syntax_error(piece, block))]
    assert not wrong, listed(wrong)


def test_a_diff_in_a_page_leads_to_code():
    wrong = []
    for block in [block for page in PAGES for block in blocks(page, "diff")]:
        text = after_a_diff(block)
        first = next((line for line in text.split("\n") if line and not line.startswith("#")), "")
        if not first.startswith("paceline ") and (error := syntax_error(text, block)):
            wrong.append(error)
    assert not wrong, listed(wrong)


def is_there(module: str, name: str) -> bool:
    """Returns True if `module.name`, where the name may contain dots, is a module or an attribute of one."""
    if module in NEEDS_MORE:
        return _defines(module, name)
    found: object = import_module(module)
    path = module
    for part in name.split("."):
        path = f"{path}.{part}"
        if path in NEEDS_MORE:
            rest = f"{module}.{name}".removeprefix(path).removeprefix(".")
            return not rest or _defines(path, rest)
        if hasattr(found, part):
            found = getattr(found, part)
        elif _is_module(found) and _is_a_module(path):
            found = import_module(path)
        else:
            return _is_set_later(found, part)
    return True


def _defines(module: str, name: str) -> bool:
    """Returns True if the source of a module, or of the module that it aliases, defines a class or function `name`."""
    return public_names.find(public_names.source_of(module), name) is not None


def _is_a_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent in the name is a module, not a package
        return False


def _is_module(value: object) -> bool:
    return type(value).__name__ == "module"


def _is_set_later(found: object, name: str) -> bool:
    """Returns True if instances of a class may have an attribute that the class itself lacks."""
    return (
        isinstance(found, type) and f"self.{name}" in Path(import_module(found.__module__).__file__ or "").read_text()
    )


def uses(tree: ast.AST, module_of: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each name from Paceline's modules that the code uses; `module_of` maps names that are already bound."""
    names = dict(module_of)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                names[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            for each in node.names:
                yield node.module or "", each.name
                names[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = names.get(node.value.id, "")
            if module.split(".")[0] == "paceline" and _is_a_module(module):
                yield module, node.attr


def test_names_of_ours_in_programs_exist():
    known = {"paceline": "paceline", "dist": "paceline", "hvd": "paceline.horovod"}
    missing = []
    for block in [block for page in PAGES for block in blocks(page, "python", "py")]:
        for piece in python_of(block):
            missing += [
                f"{block}: there is no {module}.{used}"
                for module, used in uses(ast.parse(piece), known)
                if not (_is_a_module(module) and is_there(module, used))
            ]
    assert not missing, listed(missing)


def test_names_of_ours_in_prose_exist():
    missing = [
        f"{name}:{line}: there is no {module}.{used}"
        for name in NAMED
        for module in (["paceline"] if name.endswith(OTHERS_DIST) else ["paceline", "dist"])
        for line, used in names_in_prose(ROOT / name, module)
        if used not in USERS_NAMES and not is_there("paceline", used)
    ]
    assert not missing, listed(missing)


@cache
def whole_parser() -> argparse.ArgumentParser:
    return parser({})


@cache
def flags_of(command: str) -> frozenset[str]:
    [commands_of_it] = [action for action in whole_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return frozenset(commands_of_it.choices[command]._option_string_actions)


def test_command_lines_of_the_pages_are_understood(capsys):
    wrong = []
    for block, words in [command for page in PAGES for command in commands(page)]:
        call = call_of_paceline(words)
        if call is None:
            continue
        try:
            whole_parser().parse_args(["cpu" if word == "gpu" else word for word in call])  # there may be no GPU
        except SystemExit as end:
            if end.code:
                wrong.append(f"{block}: paceline {' '.join(call)}: {capsys.readouterr().err.splitlines()[:1]}")
        capsys.readouterr()
    assert not wrong, listed(wrong)


def test_commands_in_prose_have_flags_that_exist():
    wrong = []
    for name, line, words in [(page, *call) for page in NAMED for call in calls_in_prose(ROOT / page)]:
        if words[0].startswith("-") or words[0].isupper():
            continue
        if words[0] not in COMMANDS:
            wrong.append(f"{name}:{line}: paceline {words[0]}")
            continue
        for word in words[1:]:
            if word.endswith((".py", ".sh")):
                break  # later words belong to the script
            flag = word.split("=")[0].replace("_", "-") if word.startswith("--") else ""
            if flag and flag != "--" and flag not in flags_of(words[0]):
                wrong.append(f"{name}:{line}: paceline {words[0]} {word}")
    assert not wrong, listed(wrong)


def test_tasks_of_make_in_the_pages_exist():
    tasks = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    calls = [call for page in PAGES for call in commands(page)]
    asked = [(block, words[1]) for block, words in calls if words[0] == "make" and words[1:]]
    wrong = [f"{block}: make has no task {task}" for block, task in asked if task not in tasks]
    assert not wrong, listed(wrong)


def test_a_chinese_page_has_the_english_programs():
    wrong = [f"{name}: there is no English page {english(name)}" for name in CHINESE if not english(name).exists()]
    for name in [name for name in CHINESE if english(name).exists()]:
        known = [meaning(block) for block in blocks(english(name), "python")]
        wrong += [
            f"{block} is not a program of {english(name)}"
            for block in blocks(ROOT / name, "python")
            if meaning(block) not in known
        ]
    assert not wrong, listed(wrong)


def test_a_lesson_is_a_whole_program():
    lessons = [name for name in NAMED if len(Path(name).parts) > 2 and Path(name).parts[1] in LESSONS]
    programs = [block for name in lessons for block in blocks(ROOT / name, "python")]
    wrong = [
        f"{block} has to begin with its imports"
        for block in programs
        if not block.text.startswith(("import ", "from "))
    ]
    assert programs and not wrong, listed(wrong)


def test_lists_read_alike_for_the_site_and_the_repository():
    """MkDocs requires an empty line before a list, and four spaces before further paragraphs of an item."""
    wrong = []
    for name in NAMED:
        before = ""
        for number, line in enumerate(prose(ROOT / name).split("\n"), 1):
            item = re.match(r"([-*]|\d+\.) ", line)
            if item and before.strip() and not re.match(r"\s|([-*]|\d+\.) ", before):
                wrong.append(f"{name}:{number}: an empty line is missing before the list")
            if re.match(r" {1,3}\S", line) and not before.strip():
                wrong.append(f"{name}:{number}: a paragraph of a list's item is indented by four spaces")
            before = line
    assert not wrong, listed(wrong)


def test_code_is_found():
    """The other tests would pass if no code were found."""
    assert sum(len(blocks(page, "python")) for page in PAGES) > 50
    calls = [call for page in PAGES for _, words in commands(page) if (call := call_of_paceline(words))]
    assert len(calls) > 40 and ["doctor"] in calls
    assert sum(1 for page in PAGES for _ in calls_in_prose(page)) > 40


def test_what_is_wrong_is_found():
    known = {"dist": "paceline"}
    assert ("paceline", "all_redcue") in set(uses(ast.parse("dist.all_redcue(x)"), known))
    assert not is_there("paceline", "all_redcue") and not is_there("paceline", "ReduceOp.SUMM")
    assert is_there("paceline", "ReduceOp.SUM") and is_there("paceline", "parallel.hooks.int8_hook")
    assert is_there("paceline", "integrations.ray.TorchTrainer")
    assert not is_there("paceline.integrations.ray", "TorchTrainr")
    assert paceline.__version__
    with pytest.raises(SystemExit):
        whole_parser().parse_args(["run", "--nproc-per-nodes", "2", "train.py"])
