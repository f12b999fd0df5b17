"""Resolves the imports in a Python file and their uses to fully qualified names, and applies edits to the file.

Edits are collected first and then applied in a single pass that preserves all other text.
"""

from __future__ import annotations

import ast
import symtable
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar, cast

import libcst as cst
from libcst.metadata import (
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from paceline.interop.migrate.names import MARK, comment_lines, is_migrated

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class ImportedName:
    """A name in an import statement."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    name: str  # fully qualified
    local: str  # the name bound in the file
    line: int


@dataclass(frozen=True)
class NameUse:
    """A dotted expression that refers to an imported name."""

    node: cst.Name | cst.Attribute
    name: str  # fully qualified
    written: str  # the expression as written in the file
    root: str | None  # the first word's qualified name; None if it was bound by `import a.b`
    line: int


@dataclass
class PythonSource:
    """A parsed file with its imports and their uses."""

    module: cst.Module
    imports: list[ImportedName] = field(default_factory=list)
    stars: list[tuple[int, str]] = field(default_factory=list)  # line and module of each `from module import *`
    uses: list[NameUse] = field(default_factory=list)
    calls: dict[cst.CSTNode, cst.Call] = field(default_factory=dict)  # calls, keyed by the called expression
    resolve_parents: Callable[[], Mapping[cst.CSTNode, cst.CSTNode]] = dict

    @cached_property
    def parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        """The parent of each node. Computed on first use because it increases the parsing time by about 30%."""
        return self.resolve_parents()

    def concerning(self) -> Iterator[ImportedName | NameUse]:
        """Yields the imports and uses of names that the migration handles."""
        yield from (found for found in self.imports if is_migrated(found.name))
        yield from (use for use in self.uses if is_migrated(use.name))

    def statement_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Returns the innermost statement that contains `node` and can be preceded by a comment."""
        statement: cst.CSTNode | None = node
        while statement is not None and not hasattr(statement, "leading_lines"):
            statement = self.parents.get(statement)
        return statement


def read_source(text: str) -> PythonSource:
    """Parses the text of a Python file."""
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)

    def parents() -> Mapping[cst.CSTNode, cst.CSTNode]:
        return cast("Mapping[cst.CSTNode, cst.CSTNode]", wrapper.resolve(ParentNodeProvider))

    scopes = None if imports_are_unambiguous(text) else wrapper.resolve(ScopeProvider)
    collector = _Collector(PythonSource(wrapper.module, resolve_parents=parents), scopes)
    wrapper.visit(collector)
    return collector.found


def imports_are_unambiguous(text: str) -> bool:
    """Returns True if every imported name has a single meaning in a file.

    This is the case if no imported name is bound by another kind of statement, bound in several scopes, or used outside
    the function that imports it. LibCST's scope analysis, which takes half of the time, is then unnecessary.
    """
    module = _without_warnings(lambda: symtable.symtable(text, "", "exec"))
    if module is None:
        return False
    symbols = [(scope, symbol) for scope in _scopes_in(module) for symbol in scope.get_symbols()]
    importers = {symbol.get_name(): scope for scope, symbol in symbols if symbol.is_imported()}
    return all(
        not (symbol.is_assigned() or symbol.is_parameter())
        and (scope is importer or (symbol.is_global() if importer is module else symbol.is_free()))
        for scope, symbol in symbols
        if (importer := importers.get(symbol.get_name())) is not None
    )


def _scopes_in(scope: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield scope
    for child in scope.get_children():
        yield from _scopes_in(child)


def syntax_tree(text: str) -> ast.Module | None:
    """Parses a file with Python's own parser; returns None if this version of Python cannot parse it."""
    return _without_warnings(lambda: ast.parse(text))


def _without_warnings(parse: Callable[[], Parsed]) -> Parsed | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # e.g. invalid escape sequences in the program
            return parse()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def dotted(node: cst.CSTNode | None) -> str | None:
    """Returns a dotted expression such as `a.b.c` as text, or None for other expressions."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join((node.value, *reversed(parts)))


def bindings(statement: cst.Import | cst.ImportFrom) -> Iterator[tuple[cst.ImportAlias, str, str]]:
    """Yields the alias node, the qualified name and the local name for each name in an import statement."""
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
    """Collects the imports in a file, their uses, and all calls; `scopes` is None if `imports_are_unambiguous`."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, found: PythonSource, scopes: Mapping[cst.CSTNode, Scope | None] | None) -> None:
        super().__init__()
        self.found = found
        self._scopes = scopes
        self._names: list[tuple[cst.Name | cst.Attribute, str]] = []  # possible uses, each with its text
        self._no_uses: set[cst.CSTNode] = set()  # names that are parameters, keywords, attributes etc.

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
            self.found.imports.append(ImportedName(node, alias, name, local, self._line(alias)))
        return False

    def visit_Arg(self, node: cst.Arg) -> None:  # noqa: N802
        self._hide(node.keyword)

    def _hide_name(self, node: cst.Param | cst.FunctionDef | cst.ClassDef | cst.NameItem) -> None:
        self._hide(node.name)

    visit_Param = visit_FunctionDef = visit_ClassDef = visit_NameItem = _hide_name  # noqa: N815

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802
        self._hide(node.target)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self.found.calls[node.func] = node

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        self._hide(node.attr)
        written = dotted(node)
        if written is None:
            return True  # e.g. an attribute of a call's result, whose parts may contain uses
        self._names.append((node, written))
        return False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        if node not in self._no_uses:
            self._names.append((node, node.value))

    def _hide(self, node: cst.CSTNode | None) -> None:
        if isinstance(node, cst.Name):
            self._no_uses.add(node)

    def leave_Module(self, original_node: cst.Module) -> None:  # noqa: N802
        """Adds the uses of imported names. At the end of the module, all imports are known."""
        statements: dict[str, list[cst.Import | cst.ImportFrom]] = {}
        for imported in self.found.imports:
            of_name = statements.setdefault(imported.local.partition(".")[0], [])
            if imported.statement not in of_name:
                of_name.append(imported.statement)
        for node, written in self._names:
            first, dot, rest = written.partition(".")
            nodes = statements.get(first, []) if self._scopes is None else _imports_in(self._scopes.get(node), first)
            bound = [pair for statement in nodes for pair in _named(statement, first)]
            if bound:
                root = min((name for name, is_whole in bound if is_whole), default=None)
                self.found.uses.append(NameUse(node, (root or first) + dot + rest, written, root, self._line(node)))


def _imports_in(scope: Scope | None, first: str) -> list[cst.Import | cst.ImportFrom]:
    found = () if scope is None else scope[first]
    return [cast("cst.Import | cst.ImportFrom", item.node) for item in found if isinstance(item, ImportAssignment)]


def _named(statement: cst.Import | cst.ImportFrom, first: str) -> Iterator[tuple[str, bool]]:
    """Yields the qualified names bound to `first`; False marks a package bound by an import such as `import a.b`."""
    for _, name, local in bindings(statement):
        if local.partition(".")[0] == first:
            yield name, local == first


@dataclass
class Edits:
    """The edits to a file, keyed by node.

    `arguments` are the arguments to add to calls, `comments` the reasons to write above statements, and `modules` the
    modules to import.
    """

    module: cst.Module
    expressions: dict[cst.CSTNode, cst.BaseExpression] = field(default_factory=dict)
    arguments: dict[cst.CSTNode, list[tuple[str, str]]] = field(default_factory=dict)
    imports: dict[cst.CSTNode, list[cst.BaseSmallStatement]] = field(default_factory=dict)
    comments: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)

    def comment(self, statement: cst.CSTNode | None, reason: str) -> None:
        """Adds a comment above a statement unless an earlier run has already added it."""
        if statement is None:
            return
        # in LibCST, the lines above the first statement belong to the module
        is_first = bool(self.module.body) and statement is self.module.body[0]
        header = self.module.header if is_first else ()
        lines = cast("Sequence[cst.EmptyLine]", (*header, *getattr(statement, "leading_lines", ())))
        if any(line.comment is not None and MARK in line.comment.value for line in lines):
            return
        reasons = self.comments.setdefault(statement, [])
        if reason not in reasons:
            reasons.append(reason)

    def applied(self) -> str:
        """Returns the edited text."""
        if not (self.expressions or self.arguments or self.imports or self.comments or self.modules):
            return self.module.code
        edited = self.module.visit(_Editor(self))
        missing = sorted(self.modules - _bound(edited))
        for name in missing:
            edited = _with_import(edited, name)
        return edited.code


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: Edits) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(  # type: ignore[override]  # the type in LibCST depends on the node
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.CSTNode]:
        edits = self._edits
        if original_node in edits.expressions:
            return edits.expressions[original_node]
        node = cast("cst.CSTNode", super().on_leave(original_node, updated_node))
        if isinstance(node, cst.Call) and original_node in edits.arguments:
            node = _with_arguments(node, edits.arguments[original_node])
        if original_node in edits.comments:
            node = _with_comments(node, edits.comments[original_node])
        if isinstance(original_node, cst.SimpleStatementSuite) and isinstance(node, cst.SimpleStatementSuite):
            return node.with_changes(body=self._body(original_node.body, node.body))
        if isinstance(original_node, cst.SimpleStatementLine) and isinstance(node, cst.SimpleStatementLine):
            return self._line(original_node, node)
        return node

    def _body(
        self, before: Sequence[cst.BaseSmallStatement], after: Sequence[cst.BaseSmallStatement]
    ) -> list[cst.BaseSmallStatement]:
        """Returns the statements on a line with the imports replaced."""
        imports = self._edits.imports
        if not any(statement in imports for statement in before):
            return list(after)
        body = [new for old, same in zip(before, after, strict=True) for new in imports.get(old, [same])]
        return [statement.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for statement in body]

    def _line(
        self, original: cst.SimpleStatementLine, line: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.CSTNode]:
        body = self._body(original.body, line.body)
        if len(original.body) > 1 or len(body) == 1:
            return line.with_changes(body=body)
        first, *others = body
        later = [cst.SimpleStatementLine([statement]) for statement in others[:-1]]
        last = cst.SimpleStatementLine([others[-1]], trailing_whitespace=line.trailing_whitespace)
        start = line.with_changes(body=[first], trailing_whitespace=cst.TrailingWhitespace())
        return cst.FlattenSentinel([start, *later, last])


def import_statement(module: str, local: str | None = None) -> cst.Import:
    """Returns `import module` or `import module as local`."""
    text = f"import {module}" if local in (None, module) else f"import {module} as {local}"
    line = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)
    return cst.ensure_type(line.body[0], cst.Import)


def _with_arguments(call: cst.Call, arguments: Sequence[tuple[str, str]]) -> cst.Call:
    added = [
        cst.Arg(
            cst.parse_expression(value),
            cst.Name(keyword),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        for keyword, value in arguments
    ]
    existing = list(call.args)
    if existing and isinstance(existing[-1].comma, cst.MaybeSentinel):
        existing[-1] = existing[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    elif existing:  # moves a trailing comma and its whitespace to the end
        comma = existing[-1].comma
        between = existing[-2].comma if len(existing) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        existing[-1] = existing[-1].with_changes(comma=between)
        added[-1] = added[-1].with_changes(comma=comma)
    return call.with_changes(args=[*existing, *added])


def _with_comments(node: cst.CSTNode, reasons: Sequence[str]) -> cst.CSTNode:
    lines = [cst.EmptyLine(comment=cst.Comment(line)) for reason in reasons for line in comment_lines(reason)]
    return node.with_changes(leading_lines=[*getattr(node, "leading_lines", ()), *lines])


def _top_level_imports(module: cst.Module) -> list[tuple[int, cst.Import | cst.ImportFrom]]:
    return [
        (index, statement)
        for index, line in enumerate(module.body)
        if isinstance(line, cst.SimpleStatementLine)
        for statement in line.body
        if isinstance(statement, cst.Import | cst.ImportFrom)
    ]


def _bound(module: cst.Module) -> set[str]:
    """Returns the modules that the file imports at top level without an alias."""
    return {
        cst.Module([]).code_for_node(alias.name)
        for _, statement in _top_level_imports(module)
        if isinstance(statement, cst.Import)
        for alias in statement.names
        if alias.asname is None
    }


def _with_import(module: cst.Module, name: str) -> cst.Module:
    """Adds `import name` after the file's first import of torch, its first import, or its docstring."""
    imports = [(index, cst.Module([]).code_for_node(node)) for index, node in _top_level_imports(module)]
    first = imports[0][0] if imports else -1
    after = next((index for index, text in imports if "torch" in text), first)
    after = max([after, *(index for index, text in imports if "__future__" in text)])
    if after < 0 and module.get_docstring() is not None:
        after = 0
    line = cst.SimpleStatementLine([import_statement(name)])
    return module.with_changes(body=[*module.body[: after + 1], line, *module.body[after + 1 :]])
