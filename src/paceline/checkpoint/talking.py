"""How the ranks that save or load a checkpoint tell each other what they have, and what went wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from paceline.durations import to_seconds
from paceline.engine.failures import Code, Member
from paceline.errors import CheckpointError, StoreError, StoreTimeoutError
from paceline.group.default import default_world, find_world, given_or_default
from paceline.group.process_group import ProcessGroup
from paceline.store.base import Store

_SAID, _GONE = b"+", b"-"
_LOOK_S = 0.5  # between looks whether a rank that is waited for has died
_PARTING_S = 10.0  # for ranks that live, as far as is known, to hear what rank 0 says last


class Talk(Protocol):
    """The ranks that take part, and two ways to talk, which every rank uses in the same order."""

    rank: int
    size: int
    me: str

    def collect(self, mine: bytes) -> list[bytes]:
        """Returns what every rank has, on rank 0; an empty list on the others."""
        ...

    def announce(self, text: bytes) -> bytes:
        """Returns what rank 0 has."""
        ...


class Alone:
    """A process without a group."""

    rank, size, me = 0, 1, "this process"

    def collect(self, mine: bytes) -> list[bytes]:
        """Returns `mine`."""
        return [mine]

    def exchange(self, mine: bytes) -> list[bytes]:
        """Returns `mine`."""
        return [mine]

    def announce(self, text: bytes) -> bytes:
        """Returns `text`."""
        return text


class GroupTalk:
    """Talks by collectives of `group`, as the thread does that trains."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size, self.me = group.rank(), group.size(), f"rank {group.me.rank}"

    def exchange(self, mine: bytes) -> list[bytes]:
        """Returns what every rank has, on every rank."""
        return self.group.all_gather_bytes(mine)

    def collect(self, mine: bytes) -> list[bytes]:
        """Returns what every rank has, on rank 0."""
        everyone = self.group.all_gather_bytes(mine)
        return everyone if self.rank == 0 else []

    def announce(self, text: bytes) -> bytes:
        """Returns what rank 0 has."""
        return self.group.all_gather_bytes(text if self.rank == 0 else b"")[0]


def talk_of(group: ProcessGroup | None) -> GroupTalk | Alone:
    """Returns how this process talks to the others of `group`, or of the default group if there is one."""
    if group is None and find_world() is None:
        return Alone()
    return GroupTalk(given_or_default(group))


class StoreTalk:
    """Talks by keys of the job's store, from a thread beside the one that trains, whose collectives go on.

    A rank that dies leaves a last will in the store, so that nobody waits for it.

    Args:
        group: the ranks.
        store: the store.
        token: the same on all ranks, and different for each use.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, group: ProcessGroup, store: Store, token: str, timeout_s: float) -> None:
        self.rank, self.size, self.me = group.rank(), group.size(), f"rank {group.me.rank}"
        self._group, self._store, self._timeout_s = group, store, timeout_s
        self._members: Sequence[Member] = group.members
        self._parts = [f"checkpoint/{token}/{rank}" for rank in range(self.size)]
        self._verdict = f"checkpoint/{token}/verdict"
        with contextlib.suppress(StoreError):  # some stores keep none
            store.set_last_will(self._parts[self.rank], _GONE)
            if self.rank == 0:
                store.set_last_will(self._verdict, _GONE)

    def collect(self, mine: bytes) -> list[bytes]:
        """Returns what every rank has, on rank 0.

        Raises:
            CheckpointError: a rank has died, or did not answer in time.
        """
        self._say(self._parts[self.rank], mine)
        if self.rank > 0:
            return []
        everyone = [self._hear(key, rank) for rank, key in enumerate(self._parts)]
        for key in self._parts:
            self._forget(key)
        return everyone

    def announce(self, text: bytes) -> bytes:
        """Returns what rank 0 has; raises what `collect` raises. Rank 0 waits until the others have heard it."""
        if self.rank > 0:
            said = self._hear(self._verdict, 0)
            with contextlib.suppress(StoreError):
                self._store.set(self._heard_by(self.rank), b"")
            return said
        self._say(self._verdict, text)
        self._await_hearers()
        return text

    def _heard_by(self, rank: int) -> str:
        return f"{self._verdict}/{rank}"

    def _await_hearers(self) -> None:
        """Waits while the others live and may not have heard yet: the store may end with this process."""
        keys = [self._heard_by(rank) for rank in range(1, self.size)]
        deadline = time.monotonic() + min(self._timeout_s, _PARTING_S)
        with contextlib.suppress(CheckpointError, StoreError):
            while keys and not self._are_set(keys):
                for rank in range(1, self.size):
                    self._require_alive(rank, deadline)
            for key in [self._verdict, *keys]:
                self._forget(key)

    def _are_set(self, keys: list[str]) -> bool:
        """Waits for the keys for a moment."""
        try:
            self._store.wait(keys, _LOOK_S)
        except StoreTimeoutError:
            return False
        return True

    def _say(self, key: str, text: bytes) -> None:
        with self._needing_store():
            self._store.set(key, _SAID + text)
        with contextlib.suppress(StoreError):
            self._store.set_last_will(key, None)

    def _hear(self, key: str, rank: int) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while True:
            with self._needing_store(), contextlib.suppress(StoreTimeoutError):
                self._store.wait([key], _LOOK_S)
                said = self._store.get(key)
                break
            self._require_alive(rank, deadline)
        if said == _GONE:
            raise self._lost(rank)
        return said[len(_SAID) :]

    def _require_alive(self, rank: int, deadline: float) -> None:
        member = self._members[rank]
        if member.process is not None and member.process.has_ended():
            raise self._lost(rank)
        if self._group.is_closed or self._group.failure() != Code.OK:
            raise CheckpointError(
                f"{self.me}: the process group has broken while a checkpoint was being written, so that it stays "
                "unfinished; earlier ones are untouched"
            )
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{self.me}: {member} has not written its part of a checkpoint within {self._timeout_s:.0f} s; the "
                "disk may be slow or out of reach there. Earlier checkpoints are untouched; give init_process_group a "
                "longer timeout if the disk is that slow"
            )

    def _lost(self, rank: int) -> CheckpointError:
        return CheckpointError(
            f"{self.me}: {self._members[rank]} died while a checkpoint was being written, so that it stays unfinished; "
            "earlier ones are untouched"
        )

    @contextlib.contextmanager
    def _needing_store(self) -> Iterator[None]:
        try:
            yield
        except StoreTimeoutError:
            raise
        except StoreError as error:
            raise CheckpointError(
                f"{self.me}: the ranks could not talk to each other while a checkpoint was being written, so that it "
                f"stays unfinished; earlier ones are untouched. {error}"
            ) from error

    def _forget(self, key: str) -> None:
        with contextlib.suppress(StoreError):  # a store of torch's keeps its keys
            self._store.delete_key(key)


def talk_beside(talk: GroupTalk, token: str) -> StoreTalk:
    """Returns how a thread of each rank talks beside the training, once; every rank calls this before it starts."""
    return StoreTalk(talk.group, default_world().store, token, to_seconds(talk.group.timeout))
