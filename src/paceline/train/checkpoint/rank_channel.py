"""How the ranks that save or load a checkpoint tell each other what they have, and what went wrong.

What a rank's work came to, as the other ranks learn of it.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from paceline.comm.engine.failures import OutcomeCode, RankIdentity
from paceline.comm.group.default import default_world, find_world, given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.store.store import Store
from paceline.durations import to_seconds
from paceline.errors import CheckpointDamagedError, CheckpointError, StoreError, StoreTimeoutError

_SOMEBODY = "this process"
_WELL, _FAILED, _DAMAGED = b"+", b"-", b"!"


def encode_result(work: Callable[[], bytes], me: str) -> bytes:
    """Returns what `work` returns, or its error, so that other ranks can learn of either; `heard` takes it apart.

    An error that does not name a rank is made to name this one, `me`.
    """
    try:
        return _WELL + work()
    except CheckpointDamagedError as error:
        return _DAMAGED + _by(me, str(error))
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        return _FAILED + _by(me, str(error))
    except Exception as error:  # somebody's code, for which the other ranks must not wait
        return _FAILED + _by(me, f"{error!r}\n{traceback.format_exc()}")


def decode_result(answer: bytes) -> bytes:
    """Returns what a rank's work returned.

    Raises:
        CheckpointDamagedError, CheckpointError: it failed.
    """
    if answer[:1] == _WELL:
        return answer[1:]
    error = CheckpointDamagedError if answer[:1] == _DAMAGED else CheckpointError
    raise error(answer[1:].decode())


def fault_of(answer: bytes) -> str | None:
    """Returns what went wrong in a rank's work; None if nothing did."""
    return None if answer[:1] == _WELL else answer[1:].decode()


def _by(me: str, text: str) -> bytes:
    if text.startswith(_SOMEBODY):
        return (me + text[len(_SOMEBODY) :]).encode()
    return (text if me == _SOMEBODY or text.startswith("rank ") else f"{me}: {text}").encode()


_SAID, _GONE = b"+", b"-"
_LOOK_S = 0.5  # between looks whether a rank that is waited for has died
_PARTING_S = 10.0  # for ranks that live, as far as is known, to hear what rank 0 says last


class RankChannel(Protocol):
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


class SingleRank:
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


class GroupChannel:
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


def channel_of(group: ProcessGroup | None) -> GroupChannel | SingleRank:
    """Returns how this process talks to the others of `group`, or of the default group if there is one."""
    if group is None and find_world() is None:
        return SingleRank()
    return GroupChannel(given_or_default(group))


class StoreChannel:
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
        self._members: Sequence[RankIdentity] = group.members
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
                self._store.set(self._read_key_of(self.rank), b"")
            return said
        self._say(self._verdict, text)
        self._await_readers()
        return text

    def _read_key_of(self, rank: int) -> str:
        return f"{self._verdict}/{rank}"

    def _await_readers(self) -> None:
        """Waits while the others live and may not have heard yet: the store may end with this process."""
        keys = [self._read_key_of(rank) for rank in range(1, self.size)]
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
        if self._group.is_closed or self._group.failure() != OutcomeCode.OK:
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


def background_channel(talk: GroupChannel, token: str) -> StoreChannel:
    """Returns how a thread of each rank talks beside the training, once; every rank calls this before it starts."""
    return StoreChannel(talk.group, default_world().store, token, to_seconds(talk.group.timeout))
