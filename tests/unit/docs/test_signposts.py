"""The files to which docs, docstrings and comments refer exist, and every package has a docstring."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "paceline"
FOLDERS = ("src", "native", "docs", "tests", "bench", "examples", "release")
SUFFIXES = "pyi?|cpp|hpp|inl|md|svg|toml"
FILE = re.compile(rf"(?<![\w./~:*-])[\w./-]*[\w-]\.(?:{SUFFIXES})(?![\w/(-])")

PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w(?![\w*{{(-])")
COMMENT_WITH_FILE = re.compile(rf"#.*(?:\.(?:{SUFFIXES})|(?:{'|'.join(FOLDERS)})/)")

# Users' files, which are not in this repository.
USERS_FILES = {
    "train.py": "the script of a user in examples of commands",
    "script.py": "likewise",
}


class Sign(NamedTuple):
    """A file that a text refers to, and the location of the reference."""

    file: Path
    line: int
    name: str
    folder: Path | None = None  # the package that this docstring belongs to

    def leads_nowhere(self) -> bool:
        name = PurePosixPath(self.name)
        if self.folder is not None and (self.folder / name).exists():
            return False
        if self.folder is not None and len(name.parts) == 1:
            return True
        return self.name not in USERS_FILES and str(name) not in SUFFIXES_OF_PATHS

    def __str__(self) -> str:
        where = f"in {self.folder.relative_to(ROOT)}/" if self.folder else "in the repository"
        return f"{self.file.relative_to(ROOT)}:{self.line}: there is no `{self.name}` {where}"


def _suffixes_of_paths() -> set[str]:
    """Returns each way to refer to a file or folder of the repository, such as `c.py`, `b/c.py` and `a/b/c.py`."""
    below = (path for folder in FOLDERS for path in [ROOT / folder, *(ROOT / folder).rglob("*")])
    parts = (path.relative_to(ROOT).parts for path in [*below, *ROOT.glob("*.*")])
    return {"/".join(part[start:]) for part in parts for start in range(len(part))}


SUFFIXES_OF_PATHS = _suffixes_of_paths()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PLATES = sorted(path for path in PACKAGE.glob("*/**/__init__.py"))


def _named_in(text: str) -> Iterator[tuple[int, str]]:
    """Yields the 0-based line and the name of each file and folder that `text` refers to, in backticks or by path."""
    for at, line in enumerate(text.split("\n")):
        quoted = [name for words in re.findall(r"`([^`]+)`", line) if " " not in words for name in FILE.findall(words)]
        paths = [name for name in FILE.findall(line) if "/" in name] + PATH.findall(line)
        yield from ((at, name) for name in sorted({*quoted, *paths}))


def _signs_of_page(page: Path) -> Iterator[Sign]:
    prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.DOTALL)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)  # another test checks links
    return (Sign(page, at + 1, name) for at, name in _named_in(prose))


def _signs_of_module(module: Path) -> Iterator[Sign]:
    text = module.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                plate = isinstance(node, ast.Module) and module.name == "__init__.py" and module.parent != PACKAGE
                folder = module.parent if plate else None
                line = node.body[0].lineno
                yield from (Sign(module, line + at, name, folder) for at, name in _named_in(docstring))
    if not COMMENT_WITH_FILE.search(text):
        return  # tokenizing is slow, and few comments name a file
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from (Sign(module, token.start[0], name) for _, name in _named_in(token.string))


def _signs_of_source(source: Path) -> Iterator[Sign]:
    for at, line in enumerate(source.read_text().split("\n")):
        comment = re.search(r"//.*", re.sub(r'"[^"]*"', '""', line))
        if comment:
            yield from (Sign(source, at + 1, name) for _, name in _named_in(comment[0]))


def _listed(wrong: list[str]) -> str:
    return "\n".join(["", *wrong])


def test_every_file_that_a_page_names_exists():
    wrong = [str(sign) for page in PAGES for sign in _signs_of_page(page) if sign.leads_nowhere()]
    assert not wrong, _listed(wrong)


def test_every_file_that_a_docstring_or_comment_names_exists():
    modules = sorted(
        path for folder in ("src", "bench", "examples", "release") for path in (ROOT / folder).rglob("*.py")
    )
    wrong = [str(sign) for module in modules for sign in _signs_of_module(module) if sign.leads_nowhere()]
    assert not wrong, _listed(wrong)


def test_every_file_that_a_native_comment_names_exists():
    sources = sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in {".cpp", ".hpp", ".inl"})
    wrong = [str(sign) for source in sources for sign in _signs_of_source(source) if sign.leads_nowhere()]
    assert not wrong, _listed(wrong)


def test_every_class_that_the_architecture_page_names_exists():
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "native").rglob("*.hpp")]
    classes = {name for source in sources for name in re.findall(r"^(?:class|struct) (\w+)", source.read_text(), re.M)}
    quoted = re.findall(r"`([A-Z][a-z]\w+)(?:(?:\.|::)\w+)?`", (ROOT / "docs" / "architecture.md").read_text())
    wrong = [f"docs/architecture.md: there is no class `{name}`" for name in quoted if name not in classes]
    assert len(quoted) > 10 and not wrong, _listed(wrong)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_of_a_page_leads_somewhere():
    wrong = []
    for page in PAGES:
        for at, line in enumerate(page.read_text().split("\n")):
            for link in re.findall(r"\]\(([^)\s]+)\)", line):
                path, _, anchor = link.partition("#")
                target = page if not path else page.parent / path
                if "://" in link:
                    continue
                if not target.exists() or (anchor and anchor not in _anchors(target)):
                    wrong.append(f"{page.relative_to(ROOT)}:{at + 1}: the link {link} leads nowhere")
    assert not wrong, _listed(wrong)


def test_every_folder_has_a_door_plate():
    wrong = []
    for plate in PLATES:
        docstring = ast.get_docstring(ast.parse(plate.read_text())) or ""
        sentences = re.findall(r"[.;:](?=\s|$)", docstring)
        missing = [words for words in ("May use", "Start reading at") if words not in " ".join(docstring.split())]
        if missing or len(sentences) < 2:
            wrong.append(
                f"{plate.relative_to(ROOT)} must say in at least two sentences what lives there, what it may use ('May "
                f"use ...') and where to begin ('Start reading at `FILE`'); missing: {missing or 'a second sentence'}"
            )
    assert PLATES and not wrong, _listed(wrong)
