"""Extracts the code that readers might copy from the README and docs, with its location."""

from __future__ import annotations

import ast
import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
LESSONS = ("learn", "how-to", "coming-from")
"""The folders in which each block of Python is a whole program."""

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^[\w-]*[$#] ")
_SEPARATORS = frozenset(("|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "2>&1"))
_PLACEHOLDERS = re.compile(r"^[\[<(].*|.*\.\.\.$|^FLAGS$")
_IN_PROSE = re.compile(r"`([^`\n]+)`")


class Block(NamedTuple):
    """A fenced block, or a block that is indented by four spaces, in which case the language is empty."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """Returns the fenced blocks of a page in these languages, or in any language if none is given."""
    text = page.read_text()
    found = [
        Block(page, text.count("\n", 0, fence.start()) + 2, fence[2], _without_indent(fence[3], len(fence[1])))
        for fence in _FENCE.finditer(text)
    ]
    return [block for block in found if not languages or block.language in languages]


def _without_indent(text: str, width: int) -> str:
    return "".join(line[width:] if line[:width].isspace() else line for line in text.splitlines(keepends=True))


def prose(page: Path) -> str:
    """Returns the page with its fenced blocks replaced by empty lines."""
    return _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), page.read_text())


def indented(page: Path) -> Iterator[Block]:
    """Yields a page's code blocks that are marked only by indentation."""
    run: list[str] = []
    lines = [*prose(page).split("\n"), ""]
    for at, line in enumerate(lines):
        if line.startswith("    ") and (run or not lines[at - 1].strip()):
            run.append(line[4:])
        elif run:
            yield Block(page, at - len(run) + 1, "", "\n".join(run) + "\n")
            run = []


def python_of(block: Block) -> list[str]:
    """Returns the Python code of a block: the block itself, or the examples of an interpreter session."""
    if ">>>" in block.text:
        return [example.source for example in doctest.DocTestParser().get_examples(block.text)]
    return [block.text]


def after_a_diff(block: Block) -> str:
    """Returns the text after applying a diff."""
    return "".join(line[1:] for line in block.text.splitlines(keepends=True) if line[:1] != "-")


def meaning(block: Block) -> list[str]:
    """Returns the syntax trees of a Python block without comments or string contents, for comparisons."""
    dumps = []
    for piece in python_of(block):
        tree = ast.parse(piece)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        dumps.append(ast.dump(tree))
    return dumps


def commands(page: Path) -> list[tuple[Block, list[str]]]:
    """Returns the words of each simple command in a page's blocks, omitting output if there are prompts."""
    found = []
    for block in [*blocks(page, "sh", "bash", "console", ""), *indented(page)]:
        lines = block.text.replace("\\\n", " ").split("\n")
        if any(_PROMPT.match(line) for line in lines):
            lines = [_PROMPT.sub("", line) for line in lines if _PROMPT.match(line)]
        for line in lines:
            if "paceline" in line or line.startswith("make "):
                found += [(block, words) for words in _simple_commands(line)]
    return found


def _simple_commands(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    try:
        split = shlex.split(line, comments=True)
    except ValueError:
        return  # prose with an apostrophe, or output
    for word in [*split, ";"]:
        if word in _SEPARATORS:
            if words:
                yield words
            words = []
        else:
            words.append(word)


def call_of_paceline(words: list[str]) -> list[str] | None:
    """Returns the arguments of `paceline`, skipping variables and other launchers; None if it is not called."""
    words = [*words]
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    if words[:2] == ["docker", "build"]:
        return None
    for at, word in enumerate(words):
        if word == "paceline" and (at == 0 or words[0] in ("srun", "mpirun", "python", "docker", "ssh")):
            rest = words[at + 1 :]
            return None if any(_PLACEHOLDERS.match(each) for each in rest) else rest
    return None


def calls_in_prose(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Returns the words after `paceline` in a page's backticks, with line numbers."""
    for at, line in enumerate(prose(page).split("\n")):
        for quoted in _IN_PROSE.findall(line):
            if quoted.startswith("paceline ") and "..." not in quoted:
                yield at + 1, quoted.split()[1:]


def names_in_prose(page: Path, module: str) -> Iterator[tuple[int, str]]:
    """Returns the names `module.name` in a page's backticks, with line numbers."""
    for at, line in enumerate(prose(page).split("\n")):
        for quoted in _IN_PROSE.findall(line):
            for name in re.findall(rf"(?<![\w./-]){module}\.(\w+(?:\.[a-zA-Z]\w*)*)(?![\w/])", quoted):
                yield at + 1, name
