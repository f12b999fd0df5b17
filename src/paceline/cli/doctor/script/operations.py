"""Operators on abstract values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from contextlib import suppress

from paceline.cli.doctor.script.value import (
    AbstractValue,
    Fact,
    SimulatedRank,
    either,
    inherited_facts,
    known,
    shortened,
)

_OPERATORS: dict[type[ast.AST], Callable[..., object]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Is: operator.eq, ast.IsNot: operator.ne,
}  # fmt: skip


def arithmetic(op: ast.operator, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Returns the result of a binary operator."""
    if left.alternatives or right.alternatives:
        return either(arithmetic(op, a, b) for a in left.each() for b in right.each())
    facts = inherited_facts([left, right])
    sizes = {Fact.WORLD_SIZE, Fact.LOCAL_SIZE}
    if isinstance(op, ast.Mult) and (sizes & left.facts or sizes & right.facts):
        facts |= {Fact.TIMES_WORLD_SIZE}
    elif isinstance(op, (ast.Mult, ast.Add, ast.Sub)):
        facts |= (left.facts | right.facts) & {Fact.TIMES_WORLD_SIZE}
    if left.is_known and right.is_known and type(op) in _OPERATORS:
        with suppress(Exception):
            return known(_OPERATORS[type(op)](left.constant, right.constant), facts)
    text = shortened(f"({left.text} {type(op).__name__} {right.text})")
    return AbstractValue(text, facts=facts | {Fact.OPAQUE}, arguments=(left, right))


def unary(op: ast.unaryop, operand: AbstractValue) -> AbstractValue:
    """Returns the result of a unary operator."""
    if operand.alternatives:
        return either(unary(op, each) for each in operand.alternatives)
    if isinstance(op, ast.Not) and (truth := operand.truth()) is not None:
        return known(not truth, operand.facts)
    if operand.is_known and type(op) in _OPERATORS:
        with suppress(Exception):
            return known(_OPERATORS[type(op)](operand.constant), operand.inherited())
    text = shortened(f"{type(op).__name__}({operand.text})")
    return AbstractValue(text, facts=operand.inherited() | {Fact.OPAQUE}, arguments=(operand,))


def compare(op: ast.cmpop, left: AbstractValue, right: AbstractValue, identity: SimulatedRank) -> AbstractValue:
    """Returns the result of a comparison. The launcher's environment variables count as set."""
    if left.alternatives or right.alternatives:
        return either(compare(op, a, b, identity) for a in left.each() for b in right.each())
    facts = inherited_facts([left, right])
    if isinstance(op, (ast.Is, ast.IsNot)) and right.is_known and right.constant is None:
        is_none = left.is_none()
        if is_none is not None:
            return known(is_none is isinstance(op, ast.Is), left.facts & {Fact.RANK})
    collection = right.constant if right.is_known else _constants(right.items)
    if isinstance(op, (ast.In, ast.NotIn)) and left.is_known and "environ" in right.text.split("."):
        if identity.number_named(str(left.constant)) is not None:
            return known(isinstance(op, ast.In))
    elif left.is_known and collection is not None and type(op) in _OPERATORS:
        with suppress(Exception):
            return known(bool(_OPERATORS[type(op)](left.constant, collection)), facts)
    text = shortened(f"({left.text} {type(op).__name__} {right.text})")
    return AbstractValue(text, facts=facts | {Fact.OPAQUE}, arguments=(left, right))


def item(owner: AbstractValue, index: AbstractValue, identity: SimulatedRank) -> AbstractValue:
    """Returns an item of a list, a dict or the environment."""
    if index.is_known:
        if (stored := owner.attributes.get(f"[{index.text}]")) is not None:
            return stored
        number = index.constant
        if owner.items is not None and isinstance(number, int) and -len(owner.items) <= number < len(owner.items):
            return _selected(owner.items[number], index)
        if isinstance(number, str):
            variable = identity.number_named(number)
            if variable is not None and owner.last_name in ("environ", "environb"):
                variable.constant, variable.text = str(variable.constant), repr(str(variable.constant))
            return variable if variable is not None and not owner.facts else unknown_item(owner, index.text)
    if owner.items:
        return _selected(either(owner.items), index)
    facts = inherited_facts([owner, index])
    return AbstractValue(shortened(f"{owner.text}[{index.text}]"), facts=facts, arguments=(owner, index))


def _selected(value: AbstractValue, index: AbstractValue) -> AbstractValue:
    """Returns an item of a collection; it depends on the rank if the index does."""
    facts = index.inherited() - value.facts
    if not facts:
        return value
    if value.is_known:
        return known(value.constant, value.facts | facts)
    text = shortened(f"{value.text}[{index.text}]")
    return AbstractValue(text, facts=value.inherited() | facts, arguments=(value,))


def text_of_parts(parts: list[AbstractValue]) -> AbstractValue:
    """Returns a formatted string."""
    facts = inherited_facts(parts)
    if all(part.is_known for part in parts):
        return known("".join(str(part.constant) for part in parts), facts)
    return AbstractValue(shortened("f" + "|".join(part.text for part in parts)), facts=facts, arguments=tuple(parts))


def unknown_item(value: AbstractValue, index: str) -> AbstractValue:
    """Returns an item of a collection whose items are not known."""
    facts = value.inherited() | (value.facts & {Fact.OPAQUE})
    return AbstractValue(shortened(f"{value.text}[{index}]"), facts=facts, arguments=(value,))


def part(value: AbstractValue, number: int, length: int) -> AbstractValue:
    """Returns the part of a value that tuple unpacking assigns to one target."""
    if value.items is not None and len(value.items) == length:
        return value.items[number]
    return unknown_item(value, str(number))


def _constants(items: list[AbstractValue] | None) -> list[object] | None:
    return [item.constant for item in items] if items is not None and all(item.is_known for item in items) else None
