"""From objects to what msgpack has, and back.

Numbers, short bytes, ASCII strings, lists, and dicts with ASCII strings for keys stand for themselves. Everything else
is a map with one integer key, the tag of its `Kind`, so that no other map can be taken for one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from paceline.group.advice import advice_for

MAX_DEPTH = 128

_SMALLEST_INT, _LARGEST_INT = -(1 << 63), (1 << 64) - 1
_SMALL_BYTES = 4096  # from here on they go beside the body
_PLAIN = frozenset({NoneType, bool, float})
_CONTAINERS = frozenset({list, dict})
_READ = frozenset({NoneType, bool, int, float, str, bytes, list, dict})


class MalformedPayload(ValueError):
    """The bytes are not what `encode` makes."""


class Refused(Exception):
    """A value cannot be sent; `path` leads to it, from the inside out."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[str] = []


@dataclass(frozen=True)
class Kind:
    """A type that travels under a tag: `pack` takes a value apart, `unpack` puts it together.

    What `pack` returns is made of what stands for itself and of what the packer's methods return.
    """

    type: type | None  # None where it cannot be named without importing it
    pack: Callable[[Any, Packer], object]
    unpack: Callable[[Any, Unpacker], object]


class Packer:
    """Takes objects apart into what msgpack has; large memory goes to `buffers`."""

    def __init__(self, kinds: Mapping[int, Kind], tag_of: Callable[[type], int | None]) -> None:
        self._kinds = kinds
        self._tag_of = tag_of
        self.buffers: list[torch.Tensor] = []
        self._depth = 0

    def pack(self, value: Any) -> object:
        """What stands for `value`."""
        kind = type(value)
        if kind in _PLAIN or (kind is str and value.isascii()):
            return value
        if kind is int and _SMALLEST_INT <= value <= _LARGEST_INT:
            return value
        if kind is bytes and len(value) < _SMALL_BYTES:
            return value
        if self._depth == MAX_DEPTH:
            raise Refused(f"nested more than {MAX_DEPTH} deep, or holds itself; send it flat, or what it is made from")
        self._depth += 1
        if kind is list:
            packed: object = self.pack_all(value)
        elif kind is dict and _is_map(value):
            packed = dict(zip(value, self.pack_all(value.values(), list(value)), strict=True))
        else:
            tag = self._tag_of(kind)
            if tag is None:
                raise Refused(advice_for(value))
            packed = {tag: self._kinds[tag].pack(value, self)}
        self._depth -= 1
        return packed

    def pack_all(self, values: Collection[object], keys: Sequence[object] | None = None) -> list[object]:
        """What stands for each of `values`; their places are called by `keys`, or else by numbers."""
        if _need_no_packing(values):
            return list(values)
        packed: list[object] = []
        try:
            for value in values:
                packed.append(self.pack(value))
        except Refused as refused:
            refused.path.append(f"[{len(packed) if keys is None else keys[len(packed)]!r}]")
            raise
        return packed

    def pack_items(self, items: dict[Any, Any]) -> list[object]:
        """Keys and values, one list after the other."""
        keys = list(items)
        return [self.pack_elements(keys), self.pack_all(items.values(), keys)]

    def pack_elements(self, elements: Iterable[object]) -> list[object]:
        """What stands for keys, or for the elements of a set: they have no place by which they could be called."""
        listed = list(elements)
        if _need_no_packing(listed):
            return listed
        packed: list[object] = []
        try:
            for element in listed:
                packed.append(self.pack(element))
        except Refused as refused:
            refused.path.append(f", in the key or element of type {type(listed[len(packed)]).__name__},")
            raise
        return packed

    def buffer(self, memory: torch.Tensor) -> int:
        """Has `memory` (one-dimensional, uint8) sent beside the body; its number."""
        self.buffers.append(memory)
        return len(self.buffers) - 1


class Unpacker:
    """Puts together what `Packer` took apart."""

    def __init__(self, kinds: Mapping[int, Kind], buffers: Sequence[torch.Tensor]) -> None:
        self._kinds = kinds
        self._buffers = buffers

    def unpack(self, node: object) -> object:
        """The object that `node` stands for."""
        if type(node) is list:
            return self.unpack_all(node)
        if type(node) is dict:
            if set(map(type, node)) <= {str}:
                return dict(zip(node, self.unpack_all(list(node.values())), strict=True))
            ((tag, packed),) = node.items()
            return self._kinds[tag].unpack(packed, self)
        if type(node) not in _READ:
            raise MalformedPayload(f"{type(node).__name__} stands for nothing")
        return node

    def unpack_all(self, nodes: object) -> list[Any]:
        """The objects that `nodes` stand for."""
        if type(nodes) is not list:
            raise MalformedPayload(f"{type(nodes).__name__} in the place of a list")
        kinds = set(map(type, nodes))
        if not kinds <= _READ:
            raise MalformedPayload(f"{kinds - _READ} stand for nothing")
        if kinds.isdisjoint(_CONTAINERS):
            return nodes
        return [self.unpack(node) if type(node) in _CONTAINERS else node for node in nodes]

    def unpack_items(self, packed: object) -> list[tuple[Any, Any]]:
        """The pairs that `Packer.pack_items` took apart."""
        keys, values = self.unpack_all(packed)
        return list(zip(keys, values, strict=True))

    def buffer(self, number: object) -> torch.Tensor:
        """The memory that was sent beside the body under `number`."""
        if type(number) is not int or not 0 <= number < len(self._buffers):
            raise MalformedPayload(f"there is no buffer {number!r}")
        return self._buffers[number]


def _is_map(value: dict[Any, Any]) -> bool:
    return set(map(type, value)) <= {str} and all(map(str.isascii, value))


def _need_no_packing(values: Collection[Any]) -> bool:
    kinds = set(map(type, values))
    if kinds <= _PLAIN:
        return True
    if kinds == {int}:
        return bool(min(values) >= _SMALLEST_INT and max(values) <= _LARGEST_INT)
    return kinds == {str} and all(map(str.isascii, values))
