"""Check-in protocol, which ensures that each rank arrives exactly once and that all expect the same world size.

Every rank claims its number in the store and waits for the *verdict*, which is "complete" or the reason why the ranks
cannot continue. The first rank that finds the claims complete or contradictory sets the verdict, so all ranks receive
the same outcome at the same time.

Before a rank claims its number, it registers a last will with the store, and it withdraws the will when its group has
formed. If the rank dies in between, the store replaces the verdict with the will, even if the verdict is "complete".

After a failed check-in, rank 0 keeps its store open for a few seconds so that late ranks can read the reason.
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

_TIMEOUT = "timeout: "  # the beginning of the verdict if ranks are absent; a description of them follows
_READERS = "readers"  # the key that counts the ranks that have read the verdict
_READERS_S, _READERS_POLL_S = 5.0, 0.01
_LATE_RANKS_S, _LATE_RANKS_POLL_S = 5.0, 0.05


def settle(store: Store, verdict: str) -> None:
    """Sets the verdict unless one is already set."""
    store.compare_set(KEY, b"", verdict)


def reason_against(store: Store) -> str | None:
    """Returns the reason why the ranks cannot continue, or None if there is none so far."""
    if not store.check([KEY]):
        return None
    verdict = store.get(KEY).decode()
    return None if verdict == COMPLETE else verdict


def leave_will(store: Store, end: str) -> None:
    """Makes the store set the verdict if this process exits unexpectedly. `end` describes this process and its exit."""
    store.set_last_will(KEY, f"{end}; {ADVICE}")


def take_back_will(store: Store) -> None:
    """Withdraws the will; after that, this process's exit no longer sets the verdict."""
    store.set_last_will(KEY, None)


class Claim:
    """The rank and the world size with which a process was started."""

    def __init__(self, rank: int, world_size: int, host: str, pid: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.pid = pid

    @classmethod
    def mine(cls, rank: int, world_size: int) -> Claim:
        """Returns this process's claim."""
        return cls(rank, world_size, socket.gethostname(), os.getpid())

    def encode(self) -> bytes:
        """Encodes the claim as one line for the store."""
        return f"{self.rank} {self.world_size} {self.pid} {self.host}\n".encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def decode_claims(lines: bytes) -> list[Claim]:
    """Decodes the claims, in the order in which they were submitted."""
    claims = []
    for line in lines.decode().splitlines():
        rank, world_size, pid, host = line.split(" ", 3)
        claims.append(Claim(int(rank), int(world_size), host, int(pid)))
    return claims


def verdict_on(claims: list[Claim]) -> str | None:
    """Returns "complete", a description of the contradiction, or None if ranks are missing."""
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
                f"rank {claim.rank} was claimed twice: by {by_rank[claim.rank]} and by {claim}; give each process its "
                f"own rank from 0 to {claim.world_size - 1}"
            )
        by_rank[claim.rank] = claim
    return COMPLETE if len(by_rank) == first.world_size else None


def describe_absence(claims: list[Claim], world_size: int, waited_s: float) -> str:
    """Describes the ranks that have arrived and the ranks that are missing."""
    arrived = sorted({claim.rank for claim in claims})
    missing = [rank for rank in range(world_size) if rank not in set(arrived)]
    return (
        f"waited {waited_s:.0f} s for {world_size} ranks; {and_more(arrived, 20) or 'none'} arrived, "
        f"{and_more(missing, 20) or 'none'} did not. "
        "Look at the output of the missing ranks, and check that they were started with the same address"
    )


def claim_rank(store: Store, claim: Claim, timeout_s: float) -> None:
    """Claims a rank and waits for the verdict.

    After the claim, this process's death sets the verdict. If the claim succeeds, the caller must call
    `take_back_will` once the group has formed.

    Raises:
        RendezvousError: the claims contradict each other, or a rank died; every rank gets the same message.
        RendezvousTimeoutError: some ranks did not arrive; the message lists them.
    """
    who = f"rank {claim.rank} ({claim.host}, pid {claim.pid})"
    leave_will(store, f"{who} died during the rendezvous")
    try:
        _claim_and_wait(store, claim, timeout_s)
    except BaseException as error:
        with contextlib.suppress(StoreError):
            if not isinstance(error, PacelineError):
                settle(store, f"{who} gave up during the rendezvous: {type(error).__name__}: {error}")
            take_back_will(store)
        raise


def _claim_and_wait(store: Store, claim: Claim, timeout_s: float) -> None:
    store.append("claims", claim.encode())
    try:
        verdict, mine = _await_verdict(store, claim, timeout_s)
    except StoreServerLostError as error:
        raise RendezvousError(
            f"rank {claim.rank}: the process that serves the ranks' store (rank 0, or the launcher) died during the "
            f"rendezvous; {ADVICE}. ({error})"
        ) from error
    if verdict == COMPLETE and mine in (None, COMPLETE):
        return
    if verdict == COMPLETE:  # this claim was submitted after the verdict, so this rank is superfluous
        raise RendezvousError(f"rank {claim.rank}: {mine}")
    if verdict_on(decode_claims(store.get("claims"))) == COMPLETE:
        return  # a rank has left after all ranks arrived; if it is still needed, forming the group fails
    _await_readers(store)
    if verdict.startswith(_TIMEOUT):
        raise RendezvousTimeoutError(f"rank {claim.rank}: {verdict.removeprefix(_TIMEOUT)}")
    raise RendezvousError(f"rank {claim.rank}: {verdict}")


def _await_verdict(store: Store, claim: Claim, timeout_s: float) -> tuple[str, str | None]:
    """Returns the final verdict, and this rank's own verdict on the claims that existed when this rank arrived."""
    mine = verdict_on(decode_claims(store.get("claims")))
    if mine is not None:
        settle(store, mine)
    try:
        store.wait([KEY], timedelta(seconds=timeout_s))
    except StoreTimeoutError:
        absence = describe_absence(decode_claims(store.get("claims")), claim.world_size, timeout_s)
        return store.compare_set(KEY, b"", _TIMEOUT + absence).decode(), mine
    return store.get(KEY).decode(), mine


def _await_readers(store: Store) -> None:
    """Waits until the other ranks have read the verdict, because the store may shut down with this process.

    If claims are contradictory, the wait includes ranks that have not arrived yet, since all ranks were started
    together. After a timeout it excludes them, since they may never arrive.
    """
    deadline = time.monotonic() + _READERS_S
    with contextlib.suppress(StoreConnectionError):  # the process that served the store has exited after the same wait
        store.add(_READERS, 1)
        for_all = verdict_on(decode_claims(store.get("claims"))) not in (None, COMPLETE)
        while not _have_read_verdict(store, for_all) and time.monotonic() < deadline:
            time.sleep(_READERS_POLL_S)


def _have_read_verdict(store: Store, all_ranks: bool) -> bool:
    """Returns True if all live ranks that have arrived (or all ranks, if `all_ranks` is True) have read the verdict."""
    claims = decode_claims(store.get("claims"))
    expected = max(min(claim.world_size for claim in claims) if all_ranks else 0, len(claims))
    died = verdict_on(claims) in (None, COMPLETE) and not store.get(KEY).decode().startswith(_TIMEOUT)
    return store.add(_READERS, 0) >= expected - died


class _DelayedClose(threading.Thread):
    """Thread that closes a store (`opened`) after a delay; `check_in` is the view of the store used for the check-in.

    It is not a daemon thread, so the interpreter waits for it at exit.
    """

    def __init__(self, opened: Store, check_in: Store) -> None:
        super().__init__(name="paceline-late-ranks")
        self._opened = opened
        self._check_in = check_in
        self._closing = threading.Event()
        _delayed_closes.append(self)

    def run(self) -> None:
        deadline = time.monotonic() + _LATE_RANKS_S
        with contextlib.suppress(StoreError):
            while not _have_read_verdict(self._check_in, all_ranks=True) and time.monotonic() < deadline:
                if self._closing.wait(_LATE_RANKS_POLL_S):
                    break
        self._opened.close()
        _delayed_closes.remove(self)

    def close_now(self) -> None:
        self._closing.set()
        self.join()


_delayed_closes: list[_DelayedClose] = []


def close_store_later(opened: Store, check_in: Store) -> None:
    """Closes `opened` in the background once all ranks have read the verdict in `check_in`, or after 5 s."""
    _DelayedClose(opened, check_in).start()


def close_stores_now() -> None:
    """Immediately closes the stores kept open for late ranks; called when another rendezvous begins."""
    for thread in list(_delayed_closes):
        thread.close_now()
