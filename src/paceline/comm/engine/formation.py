"""Formation of a group: each rank waits until all ranks have set their keys in the store or one rank has failed.

A rank that gives up publishes its reason before it leaves. If a rank dies, the store's server (if there is one)
publishes the rank's last will (`Store.set_last_will`); open connections can also reveal the death to other ranks.

When the default group forms, every rank publishes its host, its process and its version of Paceline. The version must
be the same on all ranks. The version is read first, because "version" is the only field whose meaning is the same in
all versions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline import __version__
from paceline.comm.engine.failures import ProcessIdentity, RankIdentity
from paceline.comm.rendezvous import check_in
from paceline.comm.security.untrusted_peers import decode_untrusted
from paceline.comm.store.store import Store
from paceline.errors import RendezvousError, StoreConnectionError, StoreError, StoreTimeoutError, and_more
from paceline.linux import is_out_of_descriptors, out_of_descriptors_error

_FIRST_WITH_VERSION = "0.1.0"
_MOST_NAMED = 4


def host_id() -> str:
    """Returns a string that is equal in two processes if and only if they share abstract Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def describe_rank(**more: str | int | None) -> str:
    """Returns a JSON description of this rank, with additional fields for an engine."""
    me = ProcessIdentity.mine()
    process = {"host": socket.gethostname(), "pid": me.pid, "namespace": me.namespace, "started": me.started}
    return msgspec.json.encode({"version": __version__, **process, **more}).decode()


def read_ranks(
    answers: Sequence[bytes], rank: int
) -> tuple[tuple[RankIdentity, ...], list[dict[str, str | int | None]]]:
    """Parses the ranks' descriptions, in rank order; returns the members, and all fields in each description.

    Raises:
        RendezvousError: the ranks run different versions; the message lists them.
    """
    entries = [_parsed(answer) for answer in answers]
    _require_same_version(entries, rank)
    members = tuple(
        RankIdentity(
            r, entry["host"], entry["pid"], ProcessIdentity(entry["namespace"], entry["pid"], entry["started"])
        )
        for r, entry in enumerate(entries)
    )
    return members, entries


def _parsed(answer: bytes) -> dict[str, Any]:
    """Returns the fields of a description, or {} if it is malformed."""
    try:
        fields = decode_untrusted(msgspec.json.decode, answer)
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {}


def _require_same_version(entries: Sequence[Mapping[str, Any]], rank: int) -> None:
    ranks_of: dict[str, list[int]] = {}
    for r, entry in enumerate(entries):
        ranks_of.setdefault(str(entry.get("version", f"a version before {_FIRST_WITH_VERSION}")), []).append(r)
    if len(ranks_of) > 1:
        versions = "; ".join(
            f"{version} on {and_more([_name(entries[r], r) for r in ranks], _MOST_NAMED)}"
            for version, ranks in ranks_of.items()
        )
        me = RankIdentity(rank, socket.gethostname(), os.getpid())
        raise RendezvousError(
            f"{me}: the ranks run different versions of Paceline: {versions}. Install the same version for all ranks"
        )


def _name(entry: Mapping[str, Any], rank: int) -> str:
    known = {"host", "pid"} <= {*entry}
    return str(RankIdentity(rank, str(entry["host"]), int(entry["pid"]))) if known else f"rank {rank}"


_INIT = "engine"
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.1, 0.8
_PARTING_S = 2.0  # the time that other ranks have to read the reason, if a rank has died
_LONGEST_PARTING_S = 15.0  # the time that other ranks have to read the reason, if no rank is known to have died
_PROGRESS_DELAY_S = 0.5  # the time within which a lost rank is reported
_STORE_RANK = 0  # the rank that serves the store, unless the launcher serves it


class Formation:
    """A context manager for the formation of one group; publishes an error raised in its body to the other ranks.

    Args:
        what: a name or number that is the same on all members and unique to the group; None for the default group,
            whose store may shut down with this rank.
    """

    def __init__(self, store: Store, rank: int, world_size: int, what: int | str | None = None) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self._me = RankIdentity(rank, socket.gethostname(), os.getpid())
        self._topic = _INIT if what is None else f"group/{what}"
        self._open = False
        self._has_reason = False
        self._gone: Callable[[], RankIdentity | None] = _no_rank
        self._bequest: tuple[str, str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the context has been entered but not yet exited."""
        return self._open

    def watch(self, gone: Callable[[], RankIdentity | None]) -> None:
        """Registers a function for `look` to call, which returns a rank that has died or left, or None if none has."""
        before = self._gone
        self._gone = lambda: before() or gone()

    def publish_on_exit(self, key: str, value: str) -> None:
        """Makes the store's server set `key` to `value` when this rank exits, even long after the formation."""
        self._bequest = key, value

    def absent(self, keys: Sequence[str], deadline: float) -> list[str]:
        """Waits for `keys` until `deadline` (seconds on the monotonic clock); returns the keys that are still missing.

        Raises:
            RendezvousError: a rank gave up or died.
        """
        look_s = _FIRST_LOOK_S
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(StoreTimeoutError):
                self.store.wait(keys, timedelta(seconds=min(look_s, remaining_s)))
                return []
            self.look()
            if remaining_s <= look_s:
                return [key for key in keys if not self.store.check([key])]
            look_s = min(2 * look_s, _LONGEST_LOOK_S)

    def look(self, patience_s: float = 0.0) -> None:
        """Checks whether a rank has given up or died: once by default, or repeatedly for `patience_s` seconds.

        Raises:
            RendezvousError: a rank gave up or died; the message contains the reason.
        """
        deadline = time.monotonic() + patience_s
        while True:
            for topic in {self._topic, _INIT}:
                if self.store.check([f"{topic}/gave_up"]):
                    self._has_reason = True
                    raise RendezvousError(f"{self._me} cannot continue: {self.store.get(f'{topic}/gave_up').decode()}")
            if reason := check_in.reason_against(self.store):
                self._has_reason = True
                raise RendezvousError(f"{self._me} cannot continue: {reason}")
            if time.monotonic() >= deadline:
                break
            time.sleep(_FIRST_LOOK_S)
        if lost := self._gone():
            raise self._without(lost)

    def await_progress(self) -> None:
        """Calls `look` repeatedly until any report about a lost rank must have arrived."""
        self.look(_PROGRESS_DELAY_S)

    def __enter__(self) -> Formation:
        self._open = True
        if self._topic == _INIT:
            try:
                check_in.leave_will(self.store, f"{self._me} died while the group was being formed")
            except StoreConnectionError as error:
                raise self._without_store(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if is_out_of_descriptors(error):
                shortage = out_of_descriptors_error(str(self._me), "the connections of the group")
                self._leave(shortage)
                raise shortage from error
            self._leave(error)
        finally:
            self._open = False
            self._gone = _no_rank

    def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, StoreConnectionError):
            # The rank that served the store may have left because another rank died; in this case, report the dead
            # rank.
            lost = self._gone()
            raise (self._without(lost) if lost else self._without_store(error)) from error
        if self._topic == _INIT:
            with contextlib.suppress(StoreConnectionError):
                check_in.take_back_will(self.store)
        if error is not None:
            with contextlib.suppress(StoreError):
                self._publish_and_part(error)
        elif self._bequest is not None:
            with contextlib.suppress(StoreConnectionError):
                self.store.set_last_will(*self._bequest)

    def _without(self, lost: RankIdentity) -> RendezvousError:
        return RendezvousError(
            f"{self._me} cannot continue: {lost} died or left while the group was being formed; {check_in.ADVICE}"
        )

    def _without_store(self, error: StoreConnectionError) -> RendezvousError:
        return RendezvousError(
            f"{self._me} cannot continue: the process that serves the ranks' store (rank 0, or the launcher) ended "
            f"while the group was being formed; look at its output. ({error})"
        )

    def announce(self, error: BaseException) -> None:
        """Publishes that this rank is giving up because of `error`, unless another rank has already given up."""
        if self._has_reason:
            return
        reason = str(error).removeprefix(f"{self._me}: ")
        with contextlib.suppress(StoreError):
            self.store.set(f"{self._topic}/gave_up", f"{self._me} gave up: {type(error).__name__}: {reason}")

    def _publish_and_part(self, error: BaseException) -> None:
        self.announce(error)
        self.store.set(f"{self._topic}/received/{self.rank}", b"")
        if self._topic == _INIT and self.rank == _STORE_RANK:
            self._part()

    def _part(self) -> None:
        """On the rank that serves the store, waits until all other live ranks have read the reason."""
        keys = [f"{self._topic}/received/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + _LONGEST_PARTING_S
        while time.monotonic() < deadline:
            with contextlib.suppress(StoreTimeoutError):
                self.store.wait(keys, timedelta(seconds=_PARTING_S))
                return
            if self._gone() or check_in.reason_against(self.store):
                return


def _no_rank() -> None:
    return None
