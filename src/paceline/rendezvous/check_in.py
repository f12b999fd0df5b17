"""How ranks agree that they are complete, each rank is there once, and all mean the same world size.

Every rank claims its number in the store; the first to see that the claims are complete, or that they contradict each
other, writes the verdict, which all wait for. So every rank learns the same, at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta

from paceline.errors import RendezvousError, RendezvousTimeoutError, StoreConnectionError, StoreTimeoutError
from paceline.store.base import Store

_VERDICT = "verdict"
_COMPLETE = "complete"
_HEARD = "heard"
_LINGER_S, _LINGER_POLL_S = 5.0, 0.01


class Claim:
    """One process's word on who it is."""

    def __init__(self, rank: int, world_size: int, host: str, pid: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = host
        self.pid = pid

    @classmethod
    def mine(cls, rank: int, world_size: int) -> Claim:
        """The claim of this process."""
        return cls(rank, world_size, socket.gethostname(), os.getpid())

    def encode(self) -> bytes:
        """One line for the store."""
        return f"{self.rank} {self.world_size} {self.pid} {self.host}\n".encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def decode_claims(lines: bytes) -> list[Claim]:
    """The claims in the order in which they were made."""
    claims = []
    for line in lines.decode().splitlines():
        rank, world_size, pid, host = line.split(" ", 3)
        claims.append(Claim(int(rank), int(world_size), host, int(pid)))
    return claims


def judge(claims: list[Claim]) -> str | None:
    """The verdict on the claims so far: None while ranks are missing, "complete", or what is wrong."""
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
    return _COMPLETE if len(by_rank) == first.world_size else None


def describe_absence(claims: list[Claim], world_size: int, waited_s: float) -> str:
    """Who came and who did not."""
    arrived = sorted({claim.rank for claim in claims})
    missing = [rank for rank in range(world_size) if rank not in set(arrived)]
    return (
        f"waited {waited_s:.0f} s for {world_size} ranks; {_list(arrived)} arrived, {_list(missing)} did not. "
        "Look at the output of the missing ranks, and check that they were started with the same address"
    )


def _list(ranks: list[int], most: int = 20) -> str:
    if not ranks:
        return "none"
    return ", ".join(map(str, ranks[:most])) + (f" and {len(ranks) - most} more" if len(ranks) > most else "")


def agree(store: Store, claim: Claim, timeout_s: float) -> None:
    """Claims a rank and waits for the verdict.

    Raises:
        RendezvousError: the claims contradict each other; every rank gets the same message.
        RendezvousTimeoutError: some ranks did not come; names them.
    """
    store.append("claims", claim.encode())
    verdict = judge(decode_claims(store.get("claims")))
    if verdict is not None:
        store.compare_set(_VERDICT, b"", verdict)
    try:
        store.wait([_VERDICT], timedelta(seconds=timeout_s))
    except StoreTimeoutError:
        absence = describe_absence(decode_claims(store.get("claims")), claim.world_size, timeout_s)
        told = store.compare_set(_VERDICT, b"", "timeout: " + absence).decode()
    else:
        told = store.get(_VERDICT).decode()
    if told == _COMPLETE and verdict in (None, _COMPLETE):
        return
    came_too_late = told == _COMPLETE
    if not came_too_late:
        _linger(store, all_alive=not told.startswith("timeout: "))
    if told.startswith("timeout: "):
        raise RendezvousTimeoutError(f"rank {claim.rank}: " + told.removeprefix("timeout: "))
    # A claim that came after the verdict "complete" is one too many.
    raise RendezvousError(f"rank {claim.rank}: {told if told != _COMPLETE else verdict}")


def _linger(store: Store, all_alive: bool) -> None:
    """Waits until those that claimed a rank have heard the verdict, and with `all_alive` those that are about to.

    The store may end with this process, and one that comes a moment later would wait there for nothing.
    """
    deadline = time.monotonic() + _LINGER_S
    with contextlib.suppress(StoreConnectionError):  # it ended with another process, which had lingered
        heard = store.add(_HEARD, 1)
        while time.monotonic() < deadline:
            claims = decode_claims(store.get("claims"))
            expected = min(claim.world_size for claim in claims) if all_alive else 0
            if heard >= max(expected, len(claims)):
                return
            time.sleep(_LINGER_POLL_S)
            heard = store.add(_HEARD, 0)
