"""The edits of a Python file: collected first, then made in one pass that leaves everything else as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import libcst as cst

from paceline.migrate.places import MARK, comment_lines


@dataclass
class Edits:
    """What is to change, by the nodes of the file.

    Attributes:
        module: the file.
        expressions: what takes the place of an expression.
        arguments: arguments that a call is given in addition.
        imports: the statements that take the place of an import statement.
        comments: reasons that become a comment above a statement.
        modules: modules that the file is to import besides.
    """

    module: cst.Module
    expressions: dict[cst.CSTNode, cst.BaseExpression] = field(default_factory=dict)
    arguments: dict[cst.CSTNode, list[tuple[str, str]]] = field(default_factory=dict)
    imports: dict[cst.CSTNode, list[cst.BaseSmallStatement]] = field(default_factory=dict)
    comments: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)

    def comment(self, statement: cst.CSTNode | None, reason: str) -> None:
        """Adds a comment above a statement, unless it is there already."""
        if statement is None:
            return
        is_first = bool(self.module.body) and statement is self.module.body[0]  # what is above it is the module's
        header = self.module.header if is_first else ()
        lines = cast("Sequence[cst.EmptyLine]", (*header, *getattr(statement, "leading_lines", ())))
        if any(line.comment is not None and MARK in line.comment.value for line in lines):
            return  # by an earlier run
        reasons = self.comments.setdefault(statement, [])
        if reason not in reasons:
            reasons.append(reason)

    def made(self) -> str:
        """Returns the file's new text."""
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

    def on_leave(  # type: ignore[override]  # LibCST's type depends on the node's
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
        """Returns the statements of a line, with those of its imports that are to change replaced."""
        imports = self._edits.imports
        if not any(each in imports for each in before):
            return list(after)
        body = [new for old, same in zip(before, after, strict=True) for new in imports.get(old, [same])]
        return [each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for each in body]

    def _line(
        self, original: cst.SimpleStatementLine, line: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.CSTNode]:
        body = self._body(original.body, line.body)
        if len(original.body) > 1 or len(body) == 1:
            return line.with_changes(body=body)
        first, *others = body
        later = [cst.SimpleStatementLine([each]) for each in others[:-1]]
        last = cst.SimpleStatementLine([others[-1]], trailing_whitespace=line.trailing_whitespace)
        start = line.with_changes(body=[first], trailing_whitespace=cst.TrailingWhitespace())
        return cst.FlattenSentinel([start, *later, last])


def expression(text: str) -> cst.BaseExpression:
    """Returns the expression that `text` is."""
    return cst.parse_expression(text)


def import_statement(module: str, local: str | None = None) -> cst.Import:
    """Returns `import module` or `import module as local`."""
    text = f"import {module}" if local in (None, module) else f"import {module} as {local}"
    line = cst.ensure_type(cst.parse_statement(text), cst.SimpleStatementLine)
    return cst.ensure_type(line.body[0], cst.Import)


def _with_arguments(call: cst.Call, arguments: Sequence[tuple[str, str]]) -> cst.Call:
    added = [
        cst.Arg(
            expression(value),
            cst.Name(keyword),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        for keyword, value in arguments
    ]
    existing = list(call.args)
    if existing and isinstance(existing[-1].comma, cst.MaybeSentinel):
        existing[-1] = existing[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    elif existing:  # a trailing comma, which stays one, with the layout that follows it
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
        (at, each)
        for at, line in enumerate(module.body)
        if isinstance(line, cst.SimpleStatementLine)
        for each in line.body
        if isinstance(each, cst.Import | cst.ImportFrom)
    ]


def _bound(module: cst.Module) -> set[str]:
    """Returns the modules that the file imports at its top under their own names."""
    return {
        cst.Module([]).code_for_node(alias.name)
        for _, each in _top_level_imports(module)
        if isinstance(each, cst.Import)
        for alias in each.names
        if alias.asname is None
    }


def _with_import(module: cst.Module, name: str) -> cst.Module:
    """Returns the file with `import name` after its first import of torch, or of anything, or after its docstring."""
    imports = _top_level_imports(module)
    roots = [(at, cst.Module([]).code_for_node(each)) for at, each in imports]
    at = next((at for at, text in roots if "torch" in text), next((at for at, _ in roots), -1))
    futures = [at for at, text in roots if "__future__" in text]
    at = max([at, *futures])
    line = cst.SimpleStatementLine([import_statement(name)])
    if at < 0 and module.get_docstring() is not None:
        at = 0
    return module.with_changes(body=[*module.body[: at + 1], line, *module.body[at + 1 :]])
