"""Measures the links of a job: between two ranks of a host, between two hosts, and all-reduces on one host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

import paceline
from paceline.plan.calibration import HostCall, Links
from paceline.plan.measuring.summing import reduction_s_per_byte
from paceline.schedule.network import Link

_BUDGET_S = 2.0  # for each of the two kinds of links
_SHORT_MESSAGES = 100
_LONGEST_NBYTES = 64 << 20
_LONG_S = 0.2  # a message of a rate's measurement takes at least so long, unless it is one of the longest
_HOST_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_HOST_CALLS_S = 0.2

UNMEASURED_WITHIN = Link(latency_s=2e-6, bytes_per_s=1e10)
"""Shared memory as the engine takes it to be before it has measured it."""


def hosts_of(names: Sequence[str]) -> list[list[int]]:
    """Returns the ranks of each host, by the names of the hosts that the ranks are on."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def measure_links(hosts: Sequence[Sequence[int]]) -> Links:
    """Returns the links as rank 0 sees them; every rank of the default group calls this.

    Args:
        hosts: the ranks of each host.
    """
    here = hosts[0]
    calls = _host_calls(here) if len(here) > 1 else ()
    within = measure_link(0, here[1]) if len(here) > 1 else None
    between = measure_link(0, hosts[1][0]) if len(hosts) > 1 else None
    return Links(within or UNMEASURED_WITHIN, between, None, reduction_s_per_byte(), calls)


def measure_link(first: int, second: int) -> Link | None:
    """Returns the link between two ranks on `first`, and None elsewhere; others return at once.

    The latency is half the median round trip of a byte, and the rate that of long messages, of which the answer is a
    byte.
    """
    rank = paceline.get_rank()
    if rank == first:
        return _ask(second)
    if rank == second:
        _answer(first)
    return None


def _ask(peer: int) -> Link:
    def round_trip(nbytes: int) -> float:
        message, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        paceline.send(torch.tensor([nbytes]), peer)
        began = time.perf_counter()
        paceline.send(message, peer)
        paceline.recv(answer, peer)
        return time.perf_counter() - began

    deadline = time.monotonic() + _BUDGET_S
    short = _repeated(lambda: round_trip(1), _SHORT_MESSAGES, deadline)
    nbytes, took_s = 64 << 10, round_trip(64 << 10)
    while took_s < _LONG_S and nbytes < _LONGEST_NBYTES:
        nbytes *= 4
        took_s = round_trip(nbytes)
    long = _repeated(lambda: round_trip(nbytes), 5, time.monotonic() + _BUDGET_S)
    paceline.send(torch.tensor([0]), peer)
    latency_s = median(short) / 2
    # A long message is offered before it is sent, so two round trips are not spent on its bytes.
    return Link(latency_s=latency_s, bytes_per_s=nbytes / max(1e-9, median(long) - 4 * latency_s))


def _answer(peer: int) -> None:
    count = torch.empty(1, dtype=torch.int64)
    while True:
        paceline.recv(count, peer)
        if not int(count):
            return
        paceline.recv(torch.empty(int(count), dtype=torch.uint8), peer)
        paceline.send(torch.zeros(1, dtype=torch.uint8), peer)


def _repeated(measure: Callable[[], float], most: int, deadline: float) -> list[float]:
    """Returns what up to `most` measurements give, fewer at the deadline but at least three."""
    found: list[float] = []
    while len(found) < most and (len(found) < 3 or time.monotonic() < deadline):
        found.append(measure())
    return found


def _host_calls(here: Sequence[int]) -> tuple[HostCall, ...]:
    """Returns the times of all-reduces among the ranks of one host; ranks of others only make the group."""
    group = paceline.new_group(list(here))
    if paceline.get_rank() not in here:
        return ()
    calls = []
    for nbytes in _HOST_SIZES:
        tensor = torch.zeros(nbytes // 4)
        paceline.all_reduce(tensor, group=group)
        began = time.perf_counter()
        paceline.all_reduce(tensor, group=group)
        one = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        paceline.all_reduce(one, paceline.ReduceOp.MAX, group=group)  # all ranks must repeat the call equally often
        turns = []
        for _ in range(max(3, min(200, int(_HOST_CALLS_S / float(one))))):
            began = time.perf_counter()
            paceline.all_reduce(tensor, group=group)
            turns.append(time.perf_counter() - began)
        calls.append(HostCall(len(here), nbytes, median(turns)))
    return tuple(calls)
