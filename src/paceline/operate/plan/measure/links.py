"""Link measurement: links between ranks of one host, links between all pairs of hosts, and all-reduces on one host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

import paceline
from paceline.comm.record.memory import handed_memory
from paceline.comm.schedule.network import NetworkLink, Pair, round_robin_rounds
from paceline.operate.diagnosis.recording_reader import NoRecordingError, read_live
from paceline.operate.plan.calibration import HostCall, Links, PairLink
from paceline.operate.plan.measure.step_watch import reduction_s_per_byte

MOST_HOSTS = 32
"""The maximum number of hosts for measuring all pairs. With more hosts, only the first two are measured."""

_BUDGET_S = 2.0  # time limit for the short messages on a link; the same limit applies to its long messages
_ALL_ROUNDS_S = 30.0  # time limit for all measurements between hosts
_SHORT_MESSAGES = 100
_LONGEST_NBYTES = 64 << 20
_LONG_S = 0.2  # minimum duration of the messages that measure a rate, unless they have the maximum size
_HOST_SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_HOST_CALLS_S = 0.2

UNMEASURED_WITHIN = NetworkLink(latency_s=2e-6, bytes_per_s=1e10)
"""The engine's assumption about shared memory before any measurement."""


def hosts_of(names: Sequence[str]) -> list[list[int]]:
    """Groups ranks by host, given each rank's host name."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    return list(hosts.values())


def measure_links(hosts: Sequence[Sequence[int]]) -> Links:
    """Measures the links on rank 0's host and between hosts. Every rank of the default group must call it.

    Args:
        hosts: the ranks of each host.
    """
    here = hosts[0]
    calls = _host_calls(here) if len(here) > 1 else ()
    within = measure_link(0, here[1]) if len(here) > 1 else None
    pairs = measure_pairs(hosts if len(hosts) <= MOST_HOSTS else hosts[:2])
    return Links(within or UNMEASURED_WITHIN, usual_link(pairs), None, reduction_s_per_byte(), calls, pairs)


def measure_pairs(hosts: Sequence[Sequence[int]]) -> tuple[PairLink, ...]:
    """Measures the links between the first ranks of all pairs of hosts. Every rank of the job must call it.

    Each round measures as many disjoint pairs as possible at the same time, so the rates reflect the capacity of shared
    links.
    """
    rounds = round_robin_rounds(len(hosts))
    budget_s = min(_BUDGET_S, _ALL_ROUNDS_S / max(1, len(rounds)))
    own: dict[Pair, NetworkLink] = {}
    for pairs in rounds:
        for one, other in pairs:
            link = measure_link(hosts[one][0], hosts[other][0], budget_s)
            if link is not None:
                own[one, other] = link
    losses = _losses()
    measured = [
        (*pair, link.latency_s, link.bytes_per_s, losses.get(hosts[pair[1]][0], 0.0)) for pair, link in own.items()
    ]
    by_rank: list[list[tuple[int, int, float, float, float]]] = [[] for _ in range(paceline.get_world_size())]
    paceline.all_gather_object(by_rank, measured)
    gathered = sorted(numbers for of_rank in by_rank for numbers in of_rank)
    return tuple(PairLink(first, second, NetworkLink(*numbers)) for first, second, *numbers in gathered)


def usual_link(pairs: Sequence[PairLink]) -> NetworkLink | None:
    """Returns a link with the median latency and the median rate, or None if no link was measured."""
    if not pairs:
        return None
    links = [pair.link for pair in pairs]
    return NetworkLink(median(link.latency_s for link in links), median(link.bytes_per_s for link in links))


def _losses() -> Mapping[int, float]:
    """Returns the fraction of retransmitted segments for each rank on another host, from this process's recording."""
    with contextlib.suppress(OSError, NoRecordingError), handed_memory() as fd:
        if fd is not None:
            return {link.peer: link.retransmits / link.segments for link in read_live(fd).links if link.segments}
    return {}


def measure_link(first: int, second: int, budget_s: float = _BUDGET_S) -> NetworkLink | None:
    """Measures the link between two ranks and returns it on rank `first`; returns None on all other ranks.

    The latency is half the median round-trip time of a one-byte message. The rate is that of long messages, each
    acknowledged by a byte.

    Args:
        first, second: the two ranks.
        budget_s: the time limit for short messages, and separately for long ones, in seconds. Each measurement is
            repeated at least three times regardless.
    """
    rank = paceline.get_rank()
    if rank == first:
        return _ask(second, budget_s)
    if rank == second:
        _answer(first)
    return None


def _ask(peer: int, budget_s: float) -> NetworkLink:
    def round_trip(nbytes: int) -> float:
        message, answer = (
            torch.zeros(nbytes, dtype=torch.uint8, device="cpu"),
            torch.empty(1, dtype=torch.uint8, device="cpu"),
        )
        paceline.send(torch.tensor([nbytes], device="cpu"), peer)
        began = time.perf_counter()
        paceline.send(message, peer)
        paceline.recv(answer, peer)
        return time.perf_counter() - began

    deadline = time.monotonic() + budget_s
    short = _repeated(lambda: round_trip(1), _SHORT_MESSAGES, deadline)
    nbytes, took_s = 64 << 10, round_trip(64 << 10)
    while took_s < _LONG_S and nbytes < _LONGEST_NBYTES:
        nbytes *= 4
        took_s = round_trip(nbytes)
    long = _repeated(lambda: round_trip(nbytes), 5, time.monotonic() + budget_s)
    paceline.send(torch.tensor([0], device="cpu"), peer)
    latency_s = median(short) / 2
    # The sender announces a long message before sending it. Two round trips are therefore overhead.
    return NetworkLink(latency_s=latency_s, bytes_per_s=nbytes / max(1e-9, median(long) - 4 * latency_s))


def _answer(peer: int) -> None:
    count = torch.empty(1, dtype=torch.int64, device="cpu")
    while True:
        paceline.recv(count, peer)
        if not int(count):
            return
        paceline.recv(torch.empty(int(count), dtype=torch.uint8, device="cpu"), peer)
        paceline.send(torch.zeros(1, dtype=torch.uint8, device="cpu"), peer)


def _repeated(measure: Callable[[], float], most: int, deadline: float) -> list[float]:
    """Returns the results of up to `most` measurements; stops at the deadline, but always takes at least three."""
    found: list[float] = []
    while len(found) < most and (len(found) < 3 or time.monotonic() < deadline):
        found.append(measure())
    return found


def _host_calls(here: Sequence[int]) -> tuple[HostCall, ...]:
    """Measures all-reduces among the ranks of one host; ranks on other hosts only participate in creating the group."""
    group = paceline.new_group(list(here))
    if paceline.get_rank() not in here:
        return ()
    calls = []
    for nbytes in _HOST_SIZES:
        tensor = torch.zeros(nbytes // 4, device="cpu")
        paceline.all_reduce(tensor, group=group)
        began = time.perf_counter()
        paceline.all_reduce(tensor, group=group)
        one = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device="cpu")
        paceline.all_reduce(one, paceline.ReduceOp.MAX, group=group)  # all ranks must make the same number of calls
        turns = []
        for _ in range(max(3, min(200, int(_HOST_CALLS_S / float(one))))):
            began = time.perf_counter()
            paceline.all_reduce(tensor, group=group)
            turns.append(time.perf_counter() - began)
        calls.append(HostCall(len(here), nbytes, median(turns)))
    return tuple(calls)
