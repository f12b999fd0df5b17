"""Disks that record the operations on them, or kill the process at a chosen operation."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.train.checkpoint.format.local_storage import Disk


@dataclass(frozen=True)
class Operation:
    """An operation on a disk: its `kind`, the file or directory, and the names or bytes involved."""

    kind: str
    file: int = -1  # the number of the file, for "write" and "sync"
    directory: str = ""  # the path of the directory, for operations that change or sync its entries
    name: str = ""
    new_name: str = ""
    data: bytes = b""


class TracingDisk(Disk):
    """Performs operations and records them."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._files: dict[int, int] = {}
        self._made = 0

    def note(self, kind: str, path: Path, **facts: object) -> None:
        self.operations.append(Operation(kind, directory=str(path.parent), name=path.name, **facts))

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.note("make", path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._made += 1
        self._files[descriptor] = self._made
        self.note("create", path, file=self._made)
        return descriptor

    def write(self, descriptor: int, views: Sequence[memoryview]) -> int:
        count = super().write(descriptor, views)
        self.operations.append(Operation("write", self._files[descriptor], data=b"".join(views)[:count]))
        return count

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.operations.append(Operation("sync", self._files[descriptor]))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.operations.append(Operation("sync_directory", directory=str(path)))

    def rename(self, old: Path, new: Path) -> None:
        assert old.parent == new.parent
        super().rename(old, new)
        self.note("rename", old, new_name=new.name)

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self.note("remove", path)

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self.note("remove", path)


class KillingDisk(Disk):
    """Kills the process with SIGKILL before its n-th operation; half of a write is performed first."""

    def __init__(self, number: int) -> None:
        self._left = number

    def _count(self) -> bool:
        self._left -= 1
        return self._left == 0

    def _maybe_die(self) -> None:
        if self._count():
            os.kill(os.getpid(), signal.SIGKILL)

    def make_directory(self, path: Path) -> None:
        self._maybe_die()
        super().make_directory(path)

    def create(self, path: Path) -> int:
        self._maybe_die()
        return super().create(path)

    def write(self, descriptor: int, views: Sequence[memoryview]) -> int:
        self._maybe_die()
        if self._count():
            whole = b"".join(views)
            super().write(descriptor, [memoryview(whole[: len(whole) // 2])])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(descriptor, views)

    def sync(self, descriptor: int) -> None:
        self._maybe_die()
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        self._maybe_die()
        super().sync_directory(path)

    def rename(self, old: Path, new: Path) -> None:
        self._maybe_die()
        super().rename(old, new)

    def remove_file(self, path: Path) -> None:
        self._maybe_die()
        super().remove_file(path)

    def remove_directory(self, path: Path) -> None:
        self._maybe_die()
        super().remove_directory(path)
