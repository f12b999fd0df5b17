"""Converts objects to msgpack's types and back.

Numbers, short bytes, ASCII strings, lists, and dicts with ASCII strings for keys are encoded as they are. Everything
else becomes a map with one integer key, the tag of its `Kind`, which no other map can be mistaken for.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import torch

MAX_DEPTH = 128

_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_SMALL_BYTES = 4096  # larger ones are sent beside the body
_PLAIN = frozenset({NoneType, bool, float})
_CONTAINERS = frozenset({list, dict})
_READ = frozenset({NoneType, bool, int, float, str, bytes, list, dict})


class MalformedPayload(ValueError):
    """The bytes are not an encoding that `encode` can make."""


class Refused(Exception):
    """A value cannot be sent; `path` leads to it, innermost step first."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type that is encoded under a tag: `pack` takes a value apart, and `unpack` puts it together again.

    What `pack` returns consists of values that are encoded as they are and of what the packer's methods return.
    """

    type: type | None  # None if it cannot be named without importing its module
    pack: Callable[[Any, Packer], object]
    unpack: Callable[[Any, Unpacker], object]


def stands_for_itself(value: object) -> bool:
    """Returns whether `value` has msgpack's types alone; it checks level by level, much faster than `pack`."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        kinds = set(map(type, level)) - _PLAIN
        if not kinds <= _READ:
            return False
        of_kind: dict[type, list[Any]] = {kind: [each for each in level if type(each) is kind] for kind in kinds}
        lists, dicts = of_kind.get(list, []), of_kind.get(dict, [])
        keys = list(chain.from_iterable(dicts))
        integers = of_kind.get(int, [0])
        if (
            not set(map(type, keys)) <= {str}
            or not all(map(str.isascii, chain(keys, of_kind.get(str, []))))
            or min(integers) < _SMALLEST_INT
            or max(integers) > _LARGEST_INT
            or max(map(len, of_kind.get(bytes, [b""]))) >= _SMALL_BYTES
        ):
            return False
        if not lists and not dicts:
            return True
        level = list(chain(chain.from_iterable(lists), chain.from_iterable(map(dict.values, dicts))))
    return False


class Packer:
    """Takes objects apart into msgpack's types; large pieces of memory go to `buffers`."""

    def __init__(self, kinds: Mapping[int, Kind], tag_of: Callable[[type], int | None]) -> None:
        self._kinds = kinds
        self._tag_of = tag_of
        self.buffers: list[torch.Tensor] = []
        self._depth = 0

    def pack(self, value: Any) -> object:
        """Returns the encoded form of `value`: itself if msgpack can hold it."""
        if _is_leaf(value):
            return value
        if self._depth == MAX_DEPTH:
            raise Refused(f"nested more than {MAX_DEPTH} deep, or holds itself; send it flat, or what it is made from")
        self._depth += 1
        kind = type(value)
        if kind is list:
            packed: object = self.pack_all(value)
        elif kind is dict and _is_map(value):
            values = value.values()
            packed_values = self.pack_all(values, value)
            packed = value if packed_values is values else dict(zip(value, packed_values, strict=True))
        else:
            tag = self._tag_of(kind)
            if tag is None:
                raise Refused(_advice_for(value))
            packed = {tag: self._kinds[tag].pack(value, self)}
        self._depth -= 1
        return packed

    def pack_all(self, values: Collection[Any], keys: Iterable[object] | None = None) -> Collection[Any]:
        """Returns the encoded form of each of `values`: `values` itself if msgpack can hold them all.

        Messages name the values by their `keys`, or by their positions.
        """
        if _are_leaves_of_one_kind(values):
            return values
        packed: list[object] | None = None
        at = 0
        try:
            for at, value in enumerate(values):
                if not _is_leaf(value):
                    stands_for_it = self.pack(value)
                    if stands_for_it is not value:
                        packed = list(values) if packed is None else packed
                        packed[at] = stands_for_it
        except Refused as refused:
            refused.path.append(f"[{at if keys is None else list(keys)[at]!r}]")
            raise
        return values if packed is None else packed

    def pack_items(self, items: dict[Any, Any]) -> list[object]:
        """Returns the list of keys followed by the list of values."""
        keys = list(items)
        return [self.pack_elements(keys), self.pack_all(list(items.values()), keys)]

    def pack_elements(self, elements: Iterable[Any]) -> Collection[Any]:
        """Returns the encoded form of keys or of the elements of a set, which have no position to be named by."""
        listed = list(elements)
        try:
            return self.pack_all(listed)
        except Refused as refused:
            refused.path[-1] = ", in a key or an element of a set,"
            raise

    def buffer(self, memory: torch.Tensor) -> int:
        """Adds `memory` (one-dimensional, uint8) to the buffers sent beside the body, and returns its number."""
        self.buffers.append(memory)
        return len(self.buffers) - 1


class Unpacker:
    """Puts objects together again that a `Packer` took apart."""

    def __init__(self, kinds: Mapping[int, Kind], buffers: Sequence[torch.Tensor]) -> None:
        self._kinds = kinds
        self._buffers = buffers

    def unpack(self, node: object) -> object:
        """Returns the object that `node` encodes."""
        if type(node) is list:
            return self.unpack_all(node)
        if type(node) is dict:
            if set(map(type, node)) <= {str}:
                if _has_containers(node.values()):
                    for key, value in node.items():
                        if type(value) in _CONTAINERS:
                            node[key] = self.unpack(value)
                return node
            ((tag, packed),) = node.items()
            return self._kinds[tag].unpack(packed, self)
        if type(node) not in _READ:
            raise MalformedPayload(f"{type(node).__name__} stands for nothing")
        return node

    def unpack_all(self, nodes: object) -> list[Any]:
        """Returns the objects that `nodes` encode, in the same order."""
        if type(nodes) is not list:
            raise MalformedPayload(f"{type(nodes).__name__} in the place of a list")
        if _has_containers(nodes):
            for at, node in enumerate(nodes):
                if type(node) in _CONTAINERS:
                    nodes[at] = self.unpack(node)
        return nodes

    def unpack_items(self, packed: object) -> list[tuple[Any, Any]]:
        """Returns the pairs of keys and values that `Packer.pack_items` took apart."""
        keys, values = self.unpack_all(packed)
        return list(zip(keys, values, strict=True))

    def buffer(self, number: object) -> torch.Tensor:
        """Returns the buffer with this number that was sent beside the body."""
        if type(number) is not int or not 0 <= number < len(self._buffers):
            raise MalformedPayload(f"there is no buffer {number!r}")
        return self._buffers[number]


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(_SMALLEST_INT <= value <= _LARGEST_INT)
    if kind is str:
        return bool(value.isascii())
    return kind in _PLAIN or (kind is bytes and len(value) < _SMALL_BYTES)


def _are_leaves_of_one_kind(values: Collection[Any]) -> bool:
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    if kinds == {int}:
        return bool(min(values) >= _SMALLEST_INT and max(values) <= _LARGEST_INT)
    return kinds == {str} and all(map(str.isascii, values))


def _is_map(value: dict[Any, Any]) -> bool:
    return set(map(type, value)) <= {str} and all(map(str.isascii, value))


def _has_containers(nodes: Collection[object]) -> bool:
    kinds = set(map(type, nodes))
    if not kinds <= _READ:
        raise MalformedPayload(f"{sorted(kind.__name__ for kind in kinds - _READ)} stand for nothing")
    return not kinds.isdisjoint(_CONTAINERS)


def _advice_for(value: object) -> str:
    """Returns text that says what `value` is, and what can be sent in its place."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return (
        f"a {name}, which does not travel between ranks; {_instead_of(value)}, or pass allow_pickle=True on every rank "
        "if you trust them all (a pickle can run any code where it is read)"
    )


def _instead_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return "send a plain tensor (tensor.detach().as_subclass(torch.Tensor))"
    if dataclasses.is_dataclass(value):
        return "send dataclasses.asdict(it)"
    if isinstance(value, enum.Enum):
        return "send its .value"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "send its ._asdict()"
    for plain in (dict, list, tuple, str, bytes, int, float):
        if isinstance(value, plain):
            return f"send {plain.__name__}(it)"
    return "send a dict, list or tuple of what it holds"
