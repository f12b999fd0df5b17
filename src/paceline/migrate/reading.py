"""Reads a Python file: what it imports, and where it uses what it imports, by the full names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import libcst as cst
from libcst.metadata import ImportAssignment, MetadataWrapper, ParentNodeProvider, PositionProvider, ScopeProvider

from paceline.migrate.names import concerns_us


@dataclass(frozen=True)
class Imported:
    """One name of an import statement: the full name of what is imported, and the name that the file gives it."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    name: str
    local: str
    line: int


@dataclass(frozen=True)
class Use:
    """A dotted expression that leads to something imported, and how the file writes it.

    `root` is the full name of what its first word was imported as; None if the word comes from `import a.b`.
    """

    node: cst.Name | cst.Attribute
    name: str
    written: str
    root: str | None
    line: int


@dataclass
class Reading:
    """What a file contains. `calls` has the call of each use that is called, by the use's node."""

    module: cst.Module
    imports: list[Imported] = field(default_factory=list)
    stars: list[tuple[int, str]] = field(default_factory=list)  # line and module of `from module import *`
    uses: list[Use] = field(default_factory=list)
    calls: dict[cst.CSTNode, cst.Call] = field(default_factory=dict)
    resolve_parents: Callable[[], Mapping[cst.CSTNode, cst.CSTNode]] = dict

    @cached_property
    def parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        """The parent of each node. They are looked for on first use: it takes a third of the time of all the rest."""
        return self.resolve_parents()

    def concerning(self) -> Iterator[Imported | Use]:
        """Yields what concerns the migration."""
        yield from (each for each in self.imports if concerns_us(each.name))
        yield from (each for each in self.uses if concerns_us(each.name))

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns the innermost statement around `node` that can have a comment above it."""
        at: cst.CSTNode | None = node
        while at is not None and not hasattr(at, "leading_lines"):
            at = self.parents.get(at)
        return at


def read(text: str) -> Reading:
    """Returns what the file contains.

    Raises:
        libcst.ParserSyntaxError: the text is not valid Python.
    """
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)

    def parents() -> Mapping[cst.CSTNode, cst.CSTNode]:
        return cast("Mapping[cst.CSTNode, cst.CSTNode]", wrapper.resolve(ParentNodeProvider))

    collector = _Collector(Reading(wrapper.module, resolve_parents=parents))
    wrapper.visit(collector)
    return collector.found


def dotted(node: cst.CSTNode | None) -> str | None:
    """Returns an expression such as `a.b.c` as text; None if it is another one."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join((node.value, *reversed(parts)))


def bindings(statement: cst.Import | cst.ImportFrom) -> Iterator[tuple[cst.ImportAlias, str, str]]:
    """Yields each name of an import statement: its alias, the full name, and the name in the file."""
    if isinstance(statement.names, cst.ImportStar):
        return
    prefix = ""
    if isinstance(statement, cst.ImportFrom):
        if statement.relative or statement.module is None:
            return
        prefix = f"{dotted(statement.module)}."
    for alias in statement.names:
        name = dotted(alias.name) or ""
        local = dotted(alias.asname.name) if alias.asname is not None else None
        yield alias, prefix + name, local or name


class _Collector(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (ScopeProvider, PositionProvider)

    def __init__(self, found: Reading) -> None:
        super().__init__()
        self.found = found
        self._no_uses: set[cst.CSTNode] = set()  # names of parameters, keywords, attributes and the like

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        return self._imported(node)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        if isinstance(node.names, cst.ImportStar) and not node.relative:
            self.found.stars.append((self._line(node), dotted(node.module) or ""))
        return self._imported(node)

    def _imported(self, node: cst.Import | cst.ImportFrom) -> bool:
        for alias, name, local in bindings(node):
            self.found.imports.append(Imported(node, alias, name, local, self._line(alias)))
        return False

    def visit_Arg(self, node: cst.Arg) -> None:  # noqa: N802
        self._hide(node.keyword)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        self._hide(node.name)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self._hide(node.name)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self._hide(node.name)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802
        self._hide(node.target)

    def visit_NameItem(self, node: cst.NameItem) -> None:  # noqa: N802
        self._hide(node.name)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self.found.calls[node.func] = node

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        self._hide(node.attr)
        written = dotted(node)
        if written is None:
            return True  # the attribute of a call and the like, in which there may be uses
        self._used(node, written)
        return False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        if node not in self._no_uses:
            self._used(node, node.value)

    def _hide(self, node: cst.CSTNode | None) -> None:
        if isinstance(node, cst.Name):
            self._no_uses.add(node)

    def _used(self, node: cst.Name | cst.Attribute, written: str) -> None:
        first, dot, rest = written.partition(".")
        scope = self.get_metadata(ScopeProvider, node, None)
        if scope is None:
            return
        assigned = [each for each in scope[first] if isinstance(each, ImportAssignment)]
        bound = [pair for each in assigned for pair in _named(cast("cst.Import | cst.ImportFrom", each.node), first)]
        if bound:
            root = min((name for name, is_whole in bound if is_whole), default=None)
            self.found.uses.append(Use(node, (root or first) + dot + rest, written, root, self._line(node)))


def _named(statement: cst.Import | cst.ImportFrom, first: str) -> Iterator[tuple[str, bool]]:
    """Yields what a statement gives the name `first`, and whether that is the whole: `import a.b` gives `a` too."""
    for _, name, local in bindings(statement):
        if local.partition(".")[0] == first:
            yield name, local == first
