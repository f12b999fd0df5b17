"""Structure of the code base: readable file sizes, unique names, and known words.

CONTRIBUTING.md describes the rules that these tests check.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from house_terms import GERUNDS, PERSONS_WORDS, TERMS

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src"
STAND_IN = SOURCES / "paceline" / "interop" / "horovod" / "stand_in" / "horovod"
"""Named as Horovod names its own files and classes."""

MOST_FILES = 400
LONGEST_FILE = 1200
RELATIVE = re.compile(r"(What|How|Which|Where|Who|Whose|When|Why)\b")
WORDS = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z][a-z\d]*|[a-z]+\d*")
PERSONS_NAMES = {"came": "a field of the public class ViewChange", "tell": "the method of Python's files"}
PARTICIPLE = re.compile(r"\w+ed|Gone|Ready|Running|Lost|Out|Up")

RELATIVE_DOCSTRINGS = """
"""
"""Files in which the docstring of the module or of a class still begins with a relative word."""


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the modules of `src` by path, except those that imitate Horovod's."""
    files = (file for file in sorted(SOURCES.rglob("*.py")) if STAND_IN not in file.parents)
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [(file, node) for file, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def listed(wrong: list[str]) -> str:
    return "\n".join(["", *wrong])


def test_a_class_name_has_one_meaning():
    files = defaultdict(list)
    for file, node in classes():
        files[node.name].append(file)
    wrong = [f"{name} is a class of {' and of '.join(where)}" for name, where in files.items() if len(where) > 1]
    assert not wrong, listed(wrong)


def test_a_docstring_begins_with_its_subject():
    """The first word is a noun or a third-person verb, never a question word as in `What the ranks agree on`."""
    allowed = set(RELATIVE_DOCSTRINGS.split())
    texts = [(file, "the module", ast.get_docstring(tree)) for file, tree in trees().items()]
    texts += [(file, node.name, ast.get_docstring(node)) for file, node in classes()]
    wrong = [
        f"{file}: the docstring of {name} begins with a relative word: {text.splitlines()[0]}"
        for file, name, text in texts
        if text and RELATIVE.match(text) and file not in allowed
    ]
    assert not wrong, listed(wrong)


def test_a_module_is_named_by_a_noun():
    wrong = [
        f"{file}: a module is named after its main class or function, not after an activity"
        for file in trees()
        if Path(file).stem.endswith("ing") and Path(file).stem not in GERUNDS
    ]
    assert not wrong, listed(wrong)


def names_in(tree: ast.Module) -> set[str]:
    """Returns the names that a module defines, assigns, passes or accesses."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                names.add(name)
            case ast.keyword(arg=str(name)):
                names.add(name)
    return names


def test_processes_do_not_act_like_persons():
    """Processes send, receive, report, request and raise; they do not tell, hear, know or come."""
    words = set(PERSONS_WORDS.split())
    wrong = [
        f"{file}: {name}"
        for file, tree in trees().items()
        for name in sorted(names_in(tree))
        if name not in PERSONS_NAMES and not words.isdisjoint(word.lower() for word in WORDS.findall(name))
    ]
    assert not wrong, listed(wrong)


def test_a_loop_variable_names_the_element():
    wrong = [
        f"{file}:{node.lineno}: the loop variable is named `each`"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "each" and isinstance(node.ctx, ast.Store)
    ]
    assert not wrong, listed(wrong)


def test_no_file_is_too_long_to_read():
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in trees()}
    wrong = [f"{file} has {lines} lines" for file, lines in lengths.items() if lines > LONGEST_FILE]
    assert not wrong, listed(wrong)


def test_files_are_few_enough_to_know():
    count = len(list(SOURCES.rglob("*.py")))
    assert count <= MOST_FILES, (
        f"src has {count} Python files, and not {MOST_FILES} or fewer: a file is a concept that a contributor would "
        "ask for by name; fold a short file with one importer into that importer"
    )


def own_terms() -> set[str]:
    """Returns the words of the terms that docs/glossary.md defines."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    return {word for row in rows for word in re.findall(r"\w+", row.lower())}


def is_known(name: str, known: set[str]) -> bool:
    """Returns True if the name, or its last word, is a known word or the plural of one."""
    endings = {"ies": "y", "es": "", "s": "", "": ""}
    words = [name, name.split("_")[-1]]
    return any(word.removesuffix(end) + one in known for word in words for end, one in endings.items())


def test_a_name_ends_in_a_term_of_the_field():
    """Messages and events may end in a participle after a noun: `WorkerStarted`."""
    known = own_terms().union(*(words.split() for words in TERMS.values()))
    folders = {str(Path(file).parent) for file in trees()} - {"src"}
    names = [(file, node.name, WORDS.findall(node.name)) for file, node in classes()]
    names += [(folder, f"the folder {Path(folder).name}", [Path(folder).name]) for folder in folders]
    wrong = [
        f"{file}: {name} ends in {words[-1]!r}, which neither tests/support/house_terms.py nor docs/glossary.md has"
        for file, name, words in names
        if not is_known(words[-1].lower(), known) and not (len(words) > 1 and PARTICIPLE.fullmatch(words[-1]))
    ]
    assert not wrong, listed(sorted(wrong))


def test_no_exception_is_kept_that_nothing_needs():
    modules = {Path(file).stem for file in trees()}
    wrong = [f"there is no module {name} any more" for name in GERUNDS if name not in modules]
    assert not wrong, listed(["tests/support/house_terms.py has exceptions that nothing needs:", *wrong])
