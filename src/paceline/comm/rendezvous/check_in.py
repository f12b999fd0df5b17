"""Lets ranks agree that all are there, that each rank is there once, and that all expect the same world size.

Every rank claims its number in the store. The first to see that the claims are complete, or that they contradict each
other, sets the verdict, for which all wait; if a rank dies, the store sets it (`verdict.py`). So all ranks learn the
same outcome at the same time.

The verdict on a meeting: "complete", or why the ranks cannot go on. Every rank waits for it and learns the same.

A rank leaves a last will with the store before it claims its number, and takes it back when its group has formed. If
the rank dies in between, the store itself replaces the verdict with the will, even the verdict "complete".

Keeps rank 0's store open for a while after a failed meeting, so that ranks that come late hear why.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta

from paceline.comm.store.remote_store import StoreServerLostError
from paceline.comm.store.store import Store
from paceline.errors import (
    PacelineError,
    RendezvousError,
    RendezvousTimeoutError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    and_more,
)

COMPLETE = "complete"
KEY = "verdict"
ADVICE = "look at its output and, if it was killed, at the memory it used (dmesg)"

_TIMEOUT = "timeout: "


def settle(store: Store, verdict: str) -> None:
    """Sets the verdict, unless there already is one."""
    store.compare_set(KEY, b"", verdict)


def settle_timeout(store: Store, absence: str) -> str:
    """Sets the verdict to a time-out, unless there already is one; returns the verdict that counts."""
    return store.compare_set(KEY, b"", _TIMEOUT + absence).decode()


def timeout_in(verdict: str) -> str | None:
    """Returns who was absent, if the verdict is a time-out; otherwise None."""
    return verdict.removeprefix(_TIMEOUT) if verdict.startswith(_TIMEOUT) else None


def reason_against(store: Store) -> str | None:
    """Returns why the ranks cannot go on; None if nothing prevents it, or there is no verdict yet."""
    if not store.check([KEY]):
        return None
    verdict = store.get(KEY).decode()
    return None if verdict == COMPLETE else verdict


def leave_will(store: Store, end: str) -> None:
    """Makes the end of this process the verdict from now on; `end` says which process it is, and at what point."""
    store.set_last_will(KEY, f"{end}; {ADVICE}")


def take_back_will(store: Store) -> None:
    """Makes the end of this process no longer affect the meeting."""
    store.set_last_will(KEY, None)


_HEARD = "heard"
_HEARING_S, _HEARING_POLL_S = 5.0, 0.01


class Claim:
    """The rank and world size that one process was given."""

    def __init__(self, rank: int, world_size: int, host: str, pid: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.pid = pid

    @classmethod
    def mine(cls, rank: int, world_size: int) -> Claim:
        """Returns the claim of this process."""
        return cls(rank, world_size, socket.gethostname(), os.getpid())

    def encode(self) -> bytes:
        """Returns the claim as one line for the store."""
        return f"{self.rank} {self.world_size} {self.pid} {self.host}\n".encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def decode_claims(lines: bytes) -> list[Claim]:
    """Returns the claims in the order in which they were made."""
    claims = []
    for line in lines.decode().splitlines():
        rank, world_size, pid, host = line.split(" ", 3)
        claims.append(Claim(int(rank), int(world_size), host, int(pid)))
    return claims


def verdict_on(claims: list[Claim]) -> str | None:
    """Returns the verdict on the claims so far: None while ranks are missing, "complete", or what is wrong."""
    first = claims[0]
    by_rank: dict[int, Claim] = {}
    for claim in claims:
        if claim.world_size != first.world_size:
            return (
                f"the ranks were given different world sizes: rank {first.rank} ({first}) has {first.world_size}, "
                f"rank {claim.rank} ({claim}) has {claim.world_size}; start every rank with the same world size"
            )
        if claim.rank in by_rank:
            return (
                f"rank {claim.rank} was claimed twice: by {by_rank[claim.rank]} and by {claim}; "
                f"give each process a rank of its own from 0 to {claim.world_size - 1}"
            )
        by_rank[claim.rank] = claim
    return COMPLETE if len(by_rank) == first.world_size else None


def describe_absence(claims: list[Claim], world_size: int, waited_s: float) -> str:
    """Describes which ranks came and which did not."""
    arrived = sorted({claim.rank for claim in claims})
    missing = [rank for rank in range(world_size) if rank not in set(arrived)]
    return (
        f"waited {waited_s:.0f} s for {world_size} ranks; {_list(arrived)} arrived, {_list(missing)} did not. "
        "Look at the output of the missing ranks, and check that they were started with the same address"
    )


def _list(ranks: list[int], most: int = 20) -> str:
    return and_more(ranks, most) or "none"


def claim_rank(store: Store, claim: Claim, timeout_s: float) -> None:
    """Claims a rank and waits for the verdict.

    From here on the death of this process sets the verdict. After a success the caller must end that with
    `take_back_will`, once the group has formed.

    Raises:
        RendezvousError: the claims contradict each other, or a rank died; every rank gets the same message.
        RendezvousTimeoutError: some ranks did not come; the message names them.
    """
    who = f"rank {claim.rank} ({claim.host}, pid {claim.pid})"
    leave_will(store, f"{who} died while the ranks met")
    try:
        _claim_and_wait(store, claim, timeout_s)
    except BaseException as error:
        with contextlib.suppress(StoreError):
            if not isinstance(error, PacelineError):
                settle(store, f"{who} gave up while the ranks met: {type(error).__name__}: {error}")
            take_back_will(store)
        raise


def _claim_and_wait(store: Store, claim: Claim, timeout_s: float) -> None:
    store.append("claims", claim.encode())
    try:
        verdict, mine = _await_verdict(store, claim, timeout_s)
    except StoreServerLostError as error:
        raise RendezvousError(
            f"rank {claim.rank}: the process that serves the ranks' store (rank 0, or the launcher) died while the "
            f"ranks met; {ADVICE}. ({error})"
        ) from error
    if verdict == COMPLETE and mine in (None, COMPLETE):
        return
    if verdict == COMPLETE:  # this claim came after the verdict "complete", so there is one rank too many
        raise RendezvousError(f"rank {claim.rank}: {mine}")
    if verdict_on(decode_claims(store.get("claims"))) == COMPLETE:
        return  # all had come and one has left since; if that matters, the ranks learn it while the group forms
    _await_readers(store)
    absence = timeout_in(verdict)
    if absence is not None:
        raise RendezvousTimeoutError(f"rank {claim.rank}: {absence}")
    raise RendezvousError(f"rank {claim.rank}: {verdict}")


def _await_verdict(store: Store, claim: Claim, timeout_s: float) -> tuple[str, str | None]:
    """Returns the verdict that counts, and this rank's own verdict on the claims when it arrived."""
    mine = verdict_on(decode_claims(store.get("claims")))
    if mine is not None:
        settle(store, mine)
    try:
        store.wait([KEY], timedelta(seconds=timeout_s))
    except StoreTimeoutError:
        absence = describe_absence(decode_claims(store.get("claims")), claim.world_size, timeout_s)
        return settle_timeout(store, absence), mine
    return store.get(KEY).decode(), mine


def _await_readers(store: Store) -> None:
    """Waits until the other ranks have heard the verdict that ended the meeting.

    The store may end with this process. If claims contradict each other, all ranks were started together, so this waits
    for those that have not come yet too; after a time-out it does not, since nobody knows when they will come.
    """
    deadline = time.monotonic() + _HEARING_S
    with contextlib.suppress(
        StoreConnectionError
    ):  # the store ended with another process, which had waited here as well
        store.add(_HEARD, 1)
        for_all = verdict_on(decode_claims(store.get("claims"))) not in (None, COMPLETE)
        while not have_read_verdict(store, for_all) and time.monotonic() < deadline:
            time.sleep(_HEARING_POLL_S)


def have_read_verdict(store: Store, all_ranks: bool) -> bool:
    """Returns whether all living ranks that came, or all ranks with `all_ranks`, have heard the meeting's verdict."""
    claims = decode_claims(store.get("claims"))
    expected = max(min(claim.world_size for claim in claims) if all_ranks else 0, len(claims))
    died = verdict_on(claims) in (None, COMPLETE) and timeout_in(store.get(KEY).decode()) is None
    return store.add(_HEARD, 0) >= expected - died


_STAYS_S = 5.0
_POLL_S = 0.05

_delayed_closes: list[_DelayedClose] = []


class _DelayedClose(threading.Thread):
    """Closes a store late. It is no daemon thread: the interpreter must wait for it, as late ranks need the store."""

    def __init__(self, opened: Store, meeting: Store) -> None:
        super().__init__(name="paceline-late-ranks")
        self._opened = opened
        self._meeting = meeting
        self._over = threading.Event()
        _delayed_closes.append(self)

    def run(self) -> None:
        deadline = time.monotonic() + _STAYS_S
        with contextlib.suppress(StoreError):
            while not have_read_verdict(self._meeting, all_ranks=True) and time.monotonic() < deadline:
                if self._over.wait(_POLL_S):
                    break
        self._opened.close()
        _delayed_closes.remove(self)

    def end(self) -> None:
        self._over.set()
        self.join()


def close_store_later(opened: Store, meeting: Store) -> None:
    """Closes `opened` in the background, when all ranks have heard how `meeting` ended in it, or after 5 s."""
    _DelayedClose(opened, meeting).start()


def close_stores_now() -> None:
    """Closes the stores that are still open, since another meeting begins."""
    for each in list(_delayed_closes):
        each.end()
