"""What a launcher holds for workers: files of checkpoints in memfds, of at most two generations of each root.

Several ranks write at the same time, so memory that was granted to one is counted as taken before it is. Where it is
short, the copies of other roots go, first those of the root for which the longest ago one was begun: a script may use
ever new directories.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.checkpoint.copies.messages import Begin, Commit, Entry, Finish, GiveManifest, Read
from paceline.checkpoint.copies.room import available_nbytes
from paceline.checkpoint.format.refusals import size
from paceline.system_calls import memfd_create

_NAME = "paceline-copy"
_SPARE = 1.1  # of the memory that a copy takes, so much must be available


class RefusedError(Exception):
    """The vault does not do what it was asked for; the message is for the worker."""


@dataclass
class _Generation:
    begin: Begin
    due: int = 0  # the bytes that ranks have announced, and not written yet
    files: dict[str, int] = field(default_factory=dict)  # the descriptors of those that are complete
    commit: Commit | None = None
    manifest: bytes = b""

    def entry(self) -> Entry:
        held = {name: os.fstat(descriptor).st_size for name, descriptor in self.files.items()}
        begin, commit = self.begin, self.commit
        if commit is None:
            return Entry(begin.token, begin.sequence, begin.step, held)
        return Entry(begin.token, begin.sequence, begin.step, held, commit.files, commit.vaults)

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class Vault:
    """The memory; threads may use it at the same time.

    Args:
        available: returns how many bytes of memory may still be taken.
    """

    def __init__(self, available: Callable[[], int] = available_nbytes) -> None:
        self._available = available
        self._roots: dict[str, dict[str, _Generation]] = {}
        self._changing = threading.Lock()

    def begin(self, begin: Begin) -> None:
        """Makes room for a checkpoint: of its root only the one to keep is left, and of others what there is room for.

        Raises:
            RefusedError: there is too little memory.
        """
        with self._changing:
            known = self._roots.pop(begin.root, {})
            self._roots[begin.root] = known  # the one that was used last comes last
            for token in [each for each in known if each not in (begin.token, begin.keep)]:
                known.pop(token).close()
            self._make_room(begin)
            known.setdefault(begin.token, _Generation(begin)).due += begin.nbytes

    def _make_room(self, begin: Begin) -> None:
        while True:
            due = sum(each.due for known in self._roots.values() for each in known.values())
            available = self._available()
            if available >= (begin.nbytes + due) * _SPARE:
                return
            oldest = next(iter(self._roots))
            if oldest == begin.root:
                others = f", of which {size(due)} are for other copies that are being written" if due else ""
                raise RefusedError(
                    f"a copy of {size(begin.nbytes)} is too large for the {size(available)} of memory that are "
                    f"left{others}; take fewer hosts for peer_copies, or none"
                )
            for generation in self._roots.pop(oldest).values():
                generation.close()

    def wrote(self, root: str, token: str, nbytes: int) -> None:
        """Notes that a part of what was announced has been written: it is no longer among the memory that is left."""
        with self._changing:
            generation = self._roots.get(root, {}).get(token)
            if generation is not None:
                generation.due = max(0, generation.due - nbytes)

    def finish(self, finish: Finish, descriptor: int) -> None:
        """Takes over a memfd with a complete file.

        Raises:
            RefusedError: the checkpoint is not one that was begun, or was given up since.
        """
        with self._changing:
            generation = self._roots.get(finish.root, {}).get(finish.token)
            if generation is None or generation.commit is not None:
                os.close(descriptor)
                raise RefusedError(f"the checkpoint of {finish.file} was given up here, since another one was begun")
            with contextlib.suppress(KeyError):
                os.close(generation.files.pop(finish.file))
            generation.files[finish.file] = descriptor

    def commit(self, commit: Commit, manifest: bytes) -> None:
        """Notes that all ranks have written a checkpoint, and its manifest.

        Raises:
            RefusedError: it was given up.
        """
        with self._changing:
            generation = self._generation(commit.root, commit.token)
            generation.commit, generation.manifest, generation.due = commit, manifest, 0

    def look(self, root: str) -> list[Entry]:
        """Returns what there is of a root."""
        with self._changing:
            return [each.entry() for each in self._roots.get(root, {}).values()]

    def manifest(self, wanted: GiveManifest) -> bytes:
        """Returns a checkpoint's manifest.

        Raises:
            RefusedError: it is not there.
        """
        with self._changing:
            return self._generation(wanted.root, wanted.token).manifest

    def read(self, wanted: Read) -> bytes:
        """Returns bytes of a file, fewer than asked for only at its end.

        Raises:
            RefusedError: the file is not there.
        """
        with self._changing:
            files = self._generation(wanted.root, wanted.token).files
            if wanted.file not in files:
                raise RefusedError(f"{wanted.file} is not here")
            return os.pread(files[wanted.file], wanted.count, wanted.at)

    def close(self) -> None:
        """Gives all memory back; idempotent."""
        with self._changing:
            for known in self._roots.values():
                for generation in known.values():
                    generation.close()
            self._roots.clear()

    def _generation(self, root: str, token: str) -> _Generation:
        generation = self._roots.get(root, {}).get(token)
        if generation is None:
            raise RefusedError("the checkpoint was given up here, since another one was begun")
        return generation


def new_file() -> int:
    """Returns the descriptor of an empty file in memory.

    Raises:
        OSError: there are no descriptors left.
    """
    return memfd_create(_NAME)
