"""RankChannel: exchanges results and errors, encoded as bytes, between the ranks during a save or load.

The training thread uses the group's collectives (`GroupChannel`). A process without a group exchanges nothing
(`SingleRank`). A thread that writes in the background uses the job's store (`StoreChannel`), because only the training
thread may call the group's collectives.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from paceline.comm.engine.channel import OutcomeCode
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.group.default import default_world, find_world, given_or_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.store.store import Store
from paceline.durations import to_seconds
from paceline.errors import CheckpointDamagedError, CheckpointError, StoreError, StoreTimeoutError

_THIS_PROCESS = "this process"
_SUCCESS, _FAILURE, _DAMAGE = b"+", b"-", b"!"
_VALUE, _DIED = b"+", b"-"
_CHECK_S = 0.5  # interval between liveness checks on a rank whose key is still missing
_LAST_WAIT_S = 10.0  # maximum time that rank 0 waits for the other ranks to read its last key
T = TypeVar("T")


class SingleRank:
    """The channel of a process without a group."""

    rank, size, me = 0, 1, _THIS_PROCESS

    def gather(self, mine: bytes) -> list[bytes]:
        """Returns `[mine]`."""
        return [mine]

    all_gather = gather

    def broadcast(self, data: bytes) -> bytes:
        """Returns `data`."""
        return data


class GroupChannel:
    """A channel over the collectives of `group`, for the training thread."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size, self.me = group.rank(), group.size(), f"rank {group.me.rank}"

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Gathers the bytes of all ranks on every rank."""
        return self.group.all_gather_bytes(mine)

    def gather(self, mine: bytes) -> list[bytes]:
        """Gathers the bytes of all ranks on rank 0; returns an empty list on the other ranks."""
        from_all = self.all_gather(mine)
        return from_all if self.rank == 0 else []

    def broadcast(self, data: bytes) -> bytes:
        """Sends the bytes of rank 0 to all ranks, and returns them."""
        return self.all_gather(data if self.rank == 0 else b"")[0]


CollectiveChannel: TypeAlias = GroupChannel | SingleRank


def channel_of(group: ProcessGroup | None) -> CollectiveChannel:
    """Returns the training thread's channel for `group`, or for the default group (if any) if `group` is None."""
    if group is None and find_world() is None:
        return SingleRank()
    return GroupChannel(given_or_default(group))


def encode_result(work: Callable[[], bytes | None], me: str) -> bytes:
    """Calls `work` and encodes its result or its error for other ranks; `decode_result` is the inverse.

    Prepends `me`, the name of this rank, to an error message that does not begin with the name of a rank.
    """
    try:
        return _SUCCESS + (work() or b"")
    except CheckpointDamagedError as error:
        return _DAMAGE + _prefixed(me, str(error))
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        return _FAILURE + _prefixed(me, str(error))
    except Exception as error:  # the user's code may raise any error, and other ranks must receive it
        return _FAILURE + _prefixed(me, f"{error!r}\n{traceback.format_exc()}")


def decode_result(answer: bytes) -> bytes:
    """Returns the result of a rank's work, or raises the error with which it failed."""
    if is_success(answer):
        return answer[1:]
    error = CheckpointDamagedError if answer[:1] == _DAMAGE else CheckpointError
    raise error(answer[1:].decode())


def require_success(answers: list[bytes]) -> bytes:
    """Raises the first error in the encoded results; returns b"" if all ranks succeeded."""
    for answer in answers:
        decode_result(answer)
    return b""


def is_success(answer: bytes) -> bool:
    """Returns True if a rank's work succeeded."""
    return answer[:1] == _SUCCESS


def fault_of(answer: bytes) -> str | None:
    """Returns the error message from a rank's work, or None if the work succeeded."""
    return None if is_success(answer) else answer[1:].decode()


def _prefixed(me: str, text: str) -> bytes:
    if text.startswith(_THIS_PROCESS):
        text = me + text[len(_THIS_PROCESS) :]
    elif me != _THIS_PROCESS and not text.startswith("rank "):
        text = f"{me}: {text}"
    return text.encode(errors="backslashreplace")  # a path may have bytes that are not UTF-8


def results_of_all(work: Callable[[], bytes | None], channel: CollectiveChannel) -> list[bytes]:
    """Calls `work` and returns the results of all ranks, or raises a rank's error on all; every rank must call this."""
    return [decode_result(answer) for answer in channel.all_gather(encode_result(work, channel.me))]


def exchanged(work: Callable[[], T], kind: type[T], channel: CollectiveChannel) -> list[T]:
    """Does the same as `results_of_all` for results that JSON can represent."""
    answers = results_of_all(lambda: msgspec.json.encode(work()), channel)
    return [msgspec.json.decode(answer, type=kind) for answer in answers]


def result_of_first(work: Callable[[], bytes], channel: CollectiveChannel) -> bytes:
    """Calls `work` on rank 0 and returns its result or raises its error on every rank; every rank must call this."""
    return decode_result(channel.broadcast(encode_result(work, channel.me) if channel.rank == 0 else b""))


class StoreChannel:
    """A channel over keys in the job's store, for background threads. Each method may be called only once.

    Each rank registers a last will, which the store publishes if the rank dies. The other ranks then fail without
    waiting for the timeout.

    Args:
        token: a string that is the same on all ranks and different for each channel.
        timeout_s: the maximum time that a rank waits for any other rank, in seconds.
    """

    def __init__(self, group: ProcessGroup, store: Store, token: str, timeout_s: float) -> None:
        self.rank, self.size, self.me = group.rank(), group.size(), f"rank {group.me.rank}"
        self._group, self._store, self._timeout_s = group, store, timeout_s
        self._members: Sequence[RankIdentity] = group.members
        self._gathered = [f"checkpoint/{token}/{rank}" for rank in range(self.size)]
        self._broadcast = f"checkpoint/{token}/verdict"
        with contextlib.suppress(StoreError):  # some stores do not support last wills
            store.set_last_will(self._gathered[self.rank], _DIED)
            if self.rank == 0:
                store.set_last_will(self._broadcast, _DIED)

    def gather(self, mine: bytes) -> list[bytes]:
        """Gathers the bytes of all ranks on rank 0; returns an empty list on the other ranks."""
        self._set(self._gathered[self.rank], mine)
        if self.rank > 0:
            return []
        from_all = [self._get(key, rank) for rank, key in enumerate(self._gathered)]
        for key in self._gathered:
            self._delete(key)
        return from_all

    def broadcast(self, data: bytes) -> bytes:
        """Sends the bytes of rank 0 to all ranks, and returns them. Rank 0 waits until the others have read them."""
        if self.rank > 0:
            received = self._get(self._broadcast, 0)
            with contextlib.suppress(StoreError):
                self._store.set(self._read_key_of(self.rank), b"")
            return received
        self._set(self._broadcast, data)
        self._await_readers()
        return data

    def _read_key_of(self, rank: int) -> str:
        return f"{self._broadcast}/{rank}"

    def _await_readers(self) -> None:
        """Waits until all ranks have read the broadcast, because this process may serve the store."""
        readers = range(1, self.size)
        keys = [self._read_key_of(rank) for rank in readers]
        with contextlib.suppress(CheckpointError, StoreError):
            if keys:
                self._wait(keys, readers, min(self._timeout_s, _LAST_WAIT_S))
            for key in [self._broadcast, *keys]:
                self._delete(key)

    def _set(self, key: str, data: bytes) -> None:
        with self._needing_store():
            self._store.set(key, _VALUE + data)
        with contextlib.suppress(StoreError):
            self._store.set_last_will(key, None)

    def _get(self, key: str, rank: int) -> bytes:
        with self._needing_store():
            self._wait([key], [rank], self._timeout_s)
            value = self._store.get(key)
        if value == _DIED:
            raise self._incomplete(f"{self._members[rank]} died")
        return value[len(_VALUE) :]

    def _wait(self, keys: list[str], ranks: Iterable[int], timeout_s: float) -> None:
        """Waits until these ranks have set the keys; raises CheckpointError if a rank dies or the time elapses."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._store.wait(keys, _CHECK_S)
                return
            except StoreTimeoutError:
                for rank in ranks:
                    self._require_alive(rank, deadline)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(StoreError):  # some of torch's stores cannot delete keys
            self._store.delete_key(key)

    def _require_alive(self, rank: int, deadline: float) -> None:
        member = self._members[rank]
        if member.process is not None and member.process.has_ended():
            raise self._incomplete(f"{member} died")
        if self._group.is_closed or self._group.failure() != OutcomeCode.OK:
            raise self._incomplete("the process group failed")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{self.me}: {member} has not written its part of a checkpoint within {self._timeout_s:.0f} s; the "
                "disk may be slow or out of reach there. Earlier checkpoints are untouched; give init_process_group a "
                "longer timeout if the disk is that slow"
            )

    def _incomplete(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.me}: {what} while a checkpoint was being written, so this checkpoint is incomplete; earlier ones "
            "are untouched"
        )

    @contextlib.contextmanager
    def _needing_store(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise CheckpointError(f"{self._incomplete('the ranks could not communicate')}. {error}") from error


RankChannel: TypeAlias = CollectiveChannel | StoreChannel
"""A channel on which all ranks call `gather` and `broadcast` in the same order. Error messages call this rank `me`."""


def background_channels(channel: CollectiveChannel, *tokens: str) -> list[RankChannel]:
    """Returns a channel for each token, for a background thread; every rank must call this in its training thread."""
    if isinstance(channel, SingleRank):
        return [channel for _ in tokens]
    store, timeout_s = default_world().store, to_seconds(channel.group.timeout)
    return [StoreChannel(channel.group, store, token, timeout_s) for token in tokens]
