"""Computes the possible contents of a disk after a power loss: all synced data, and any subset of the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from checkpoint_disks import Operation

Survives = Callable[[int], bool]  # given the index of an operation that was not synced, returns True if it survives


@dataclass
class Node:
    """A file with its `data`, or a directory with its visible names and its durable names."""

    data: bytearray | None = None
    seen: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


def after_power_loss(operations: Sequence[Operation], top: str, survives: Survives, chance: random.Random) -> Node:
    """Returns the contents of the directory `top` if the power is lost after these operations.

    Data that was made durable by syncing its file or directory is present. For each of the other operations, `survives`
    decides whether it survives, independently of the order of the operations. A write may also survive in part.
    """
    replay = _Replay(operations, top, survives, chance)
    for number, operation in enumerate(operations):
        if operation.kind == "write":
            replay.write(number, operation)
        elif operation.directory in replay.directories and operation.name:
            replay.change_names(number, operation)
    return replay.directories[top]


class _Replay:
    def __init__(self, operations: Sequence[Operation], top: str, survives: Survives, chance: random.Random) -> None:
        self.directories = {top: Node()}  # keyed by current path
        self._files: dict[int, Node] = {}
        self._ends: dict[int, int] = {}
        self._survives, self._chance = survives, chance
        self._synced_files = {each.file: at for at, each in enumerate(operations) if each.kind == "sync"}
        self._synced_names = {each.directory: at for at, each in enumerate(operations) if each.kind == "sync_directory"}

    def write(self, number: int, operation: Operation) -> None:
        at = self._ends.get(operation.file, 0)
        self._ends[operation.file] = at + len(operation.data)
        is_durable = number < self._synced_files.get(operation.file, -1)
        if not is_durable and not self._survives(number):
            return
        kept = operation.data
        if not is_durable and self._chance.random() < 0.3:
            kept = kept[: self._chance.randrange(len(kept) + 1)]
        data = self._files[operation.file].data
        assert data is not None
        data.extend(bytes(max(at + len(kept) - len(data), 0)))
        data[at : at + len(kept)] = kept

    def change_names(self, number: int, operation: Operation) -> None:
        path = operation.directory
        directory = self.directories[path]
        stays = number < self._synced_names.get(path, -1) or self._survives(number)
        if operation.kind == "rename":
            node = directory.seen[operation.name]
            self._move(f"{path}/{operation.name}", f"{path}/{operation.new_name}")
            _rename(directory.seen, operation, node)
            if stays:
                _rename(directory.durable, operation, node)
        elif operation.kind == "remove":
            directory.seen.pop(operation.name)
            if stays:
                directory.durable.pop(operation.name, None)
        else:
            node = self._make(operation, f"{path}/{operation.name}")
            directory.seen[operation.name] = node
            if stays:
                directory.durable[operation.name] = node

    def _make(self, operation: Operation, path: str) -> Node:
        if operation.kind == "make":
            return self.directories.setdefault(path, Node())
        return self._files.setdefault(operation.file, Node(bytearray()))

    def _move(self, old: str, new: str) -> None:
        for path in [each for each in self.directories if f"{each}/".startswith(f"{old}/")]:
            self.directories[new + path[len(old) :]] = self.directories.pop(path)


def _rename(names: dict[str, Node], operation: Operation, node: Node) -> None:
    names.pop(operation.name, None)
    names[operation.new_name] = node


class NodePlace:
    """A read-only storage location with the surviving files."""

    renames = True

    def __init__(self, top: Node) -> None:
        self._top = top

    def _find(self, name: str) -> Node | None:
        node: Node | None = self._top
        for step in filter(None, name.split("/")):
            node = node.durable.get(step) if node is not None else None
        return node

    def describe(self, name: str = "") -> str:
        return f"after the loss/{name}"

    def names(self, directory: str = "") -> list[str]:
        node = self._find(directory)
        return list(node.durable) if node is not None else []

    def size(self, name: str) -> int | None:
        node = self._find(name)
        return None if node is None or node.data is None else len(node.data)

    def open(self, name: str) -> _File:
        node = self._find(name)
        if node is None or node.data is None:
            raise FileNotFoundError(name)
        return _File(bytes(node.data))

    def share(self, directory: str) -> _File:
        return _File(b"")

    def write_to(self, directory) -> None:
        """Writes all files into an existing real directory."""
        _materialize(self._top, directory)


def _materialize(node: Node, path) -> None:
    for name, inner in node.durable.items():
        if inner.data is None:
            (path / name).mkdir()
            _materialize(inner, path / name)
        else:
            (path / name).write_bytes(inner.data)


class _File:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def read_into(self, at: int, buffer: memoryview) -> int:
        part = self._data[at : at + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass
