"""The names of backends in a file: where "gloo" stands for torch's backend, "paceline" takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from paceline.migrate.names import Way
from paceline.migrate.reading import Reading, dotted

_GLOO, _OURS = "gloo", "paceline"
_ASKED_FOR = "get_default_backend_for_device"


class Mixture(ValueError):
    """A mixture of backends, which the plug-in cannot be part of in all releases of PyTorch."""


def replaced(node: cst.CSTNode, way: Way) -> dict[cst.CSTNode, cst.BaseExpression]:
    """Returns the strings in an expression that name gloo, with what takes their place.

    Raises:
        Mixture: a string names several backends, and torch.distributed will read it.
    """
    found: dict[cst.CSTNode, cst.BaseExpression] = {}
    for string in _strings(node):
        value = string.evaluated_value
        if not isinstance(value, str) or _GLOO not in value.lower():
            continue
        backends = [part.rpartition(":") for part in value.lower().split(",")]
        if not any(name == _GLOO for _, _, name in backends):
            continue
        if len({name for _, _, name in backends}) > 1 and way is Way.PLUGIN:
            raise Mixture(value)
        new = ",".join(device + colon + (_OURS if name == _GLOO else name) for device, colon, name in backends)
        found[string] = cst.SimpleString(f"{string.quote}{new}{string.quote}")
    return found


def names_in(node: cst.CSTNode) -> set[str]:
    """Returns the variables and attributes that a backend's expression takes its value from, by their last word."""
    if isinstance(node, cst.IfExp):
        return names_in(node.body) | names_in(node.orelse)
    name = dotted(node)
    return set() if name is None or ".Backend." in name else {name.rpartition(".")[2]}


@dataclass(frozen=True)
class Elsewhere:
    """The replacements outside of calls that make groups, and whether the file gives the variables their values."""

    found: dict[cst.CSTNode, cst.BaseExpression]
    shows_values: bool


def elsewhere(reading: Reading, names: set[str], way: Way, is_named: bool) -> Elsewhere:
    """Returns the replacements where the file gives these variables a value, or compares a backend with one.

    Comparisons stay as they are if gloo is neither among the values nor, as `is_named` says, in a call.

    Raises:
        Mixture: as for `replaced`.
    """
    finder = _Values(reading, names, way)
    reading.module.visit(finder)
    return Elsewhere(finder.found if finder.has_gloo or is_named else {}, finder.shows_values)


class _Values(cst.CSTVisitor):
    def __init__(self, reading: Reading, names: set[str], way: Way) -> None:
        super().__init__()
        self._names, self._way = names, way
        self._asks = {use.node for use in reading.uses if use.name.endswith(".get_backend")}
        self.found: dict[cst.CSTNode, cst.BaseExpression] = {}
        self.has_gloo = self.shows_values = False

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        if any(self._is_one(target.target) for target in node.targets):
            self._take(node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802
        if self._is_one(node.target) and node.value is not None:
            self._take(node.value)

    def visit_Param(self, node: cst.Param) -> None:  # noqa: N802
        if self._is_one(node.name) and node.default is not None:
            self._take(node.default)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        if (dotted(node.func) or "").rpartition(".")[2] != "add_argument":
            return
        options = [arg.value.evaluated_value for arg in node.args if isinstance(arg.value, cst.SimpleString)]
        if any(str(option).lstrip("-").replace("-", "_") in self._names for option in options):
            for arg in node.args:
                if arg.keyword is not None and arg.keyword.value in ("default", "choices"):
                    self._take(arg.value)

    def visit_Comparison(self, node: cst.Comparison) -> None:  # noqa: N802
        sides = [node.left, *(each.comparator for each in node.comparisons)]
        if any(self._is_one(side) for side in sides) or any(self._is_asked(side) for side in sides):
            for side in sides:
                self.found |= replaced(side, self._way)

    def _is_one(self, node: cst.CSTNode) -> bool:
        name = dotted(node)
        return name is not None and name.rpartition(".")[2] in self._names

    def _is_asked(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Call) and node.func in self._asks

    def _take(self, value: cst.CSTNode) -> None:
        new = replaced(value, self._way)
        self.found |= new
        self.has_gloo = self.has_gloo or bool(new)
        is_asked_for = isinstance(value, cst.Call) and (dotted(value.func) or "").endswith(_ASKED_FOR)
        self.shows_values = self.shows_values or is_asked_for or any(True for _ in _strings(value))


def _strings(node: cst.CSTNode) -> Iterator[cst.SimpleString]:
    if isinstance(node, cst.SimpleString):
        yield node
        return
    for child in node.children:
        yield from _strings(child)
