"""Worker program of `paceline plan --measure`: measures the links, then runs the script on each rank separately.

    python -m paceline.operate.plan.measure_worker SETTINGS SCRIPT ARGS...

SETTINGS is a `MeasureSettings` as JSON. The program measures all-reduces on one host, the links between the ranks on
this host, and the links between all pairs of hosts. The process exits after the last measured step and skips the
script's final actions, such as saving a model. Ranks that run at the same time each form a world of size 1, so they
synchronize through files.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NoReturn

import msgspec
import torch

import paceline
from paceline.comm.record.recorder import handed_memory
from paceline.comm.rendezvous.environment import STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE
from paceline.comm.schedule.network import NetworkLink, Pair, round_robin_rounds
from paceline.operate.diagnosis.recording_reader import NoRecordingError, read_live
from paceline.operate.plan.calibration import HostCall, Links, PairLink, encode
from paceline.operate.plan.step_watch import (
    LEFT_OUT,
    StepWatch,
    TooFewStepsError,
    calibration_of,
    reduction_s_per_byte,
    world_of_one,
)

MOST_HOSTS = 32
"""The maximum number of hosts for measuring all pairs. With more hosts, only the first two are measured."""

_BUDGET_S = 2.0  # time limit for the short messages on a link, and separately for the long messages
_ALL_ROUNDS_S = 30.0  # time limit for all measurements between hosts
_SHORT_MESSAGES = 100
_LONGEST_NBYTES = 64 << 20
_LONG_S = 0.2  # messages for rate measurements are enlarged until they take this long or reach the maximum size
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
    """Measures the links on rank 0's host and between hosts. Every rank in the default group must call it.

    Args:
        hosts: the ranks of each host.
    """
    here = hosts[0]
    calls = _host_calls(here) if len(here) > 1 else ()
    within = measure_link(0, here[1]) if len(here) > 1 else None
    pairs = measure_pairs(hosts if len(hosts) <= MOST_HOSTS else hosts[:2])
    return Links(within or UNMEASURED_WITHIN, usual_link(pairs), None, reduction_s_per_byte(), calls, pairs)


def measure_pairs(hosts: Sequence[Sequence[int]]) -> tuple[PairLink, ...]:
    """Measures the links between the first ranks of all pairs of hosts. Every rank in the job must call it.

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

    The latency is half the median round-trip time of a one-byte message. The rate is measured with long messages, each
    acknowledged by one byte.

    Args:
        first, second: the two ranks.
        budget_s: the time limit in seconds, which applies separately to short and to long messages. Each measurement is
            repeated at least three times, even if this exceeds the limit.
    """
    rank = paceline.get_rank()
    if rank == first:
        return _request(second, budget_s)
    if rank == second:
        _answer(first)
    return None


def _request(peer: int, budget_s: float) -> NetworkLink:
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
    """Returns the results of up to `most` measurements; stops at the deadline, but not before the third measurement."""
    found: list[float] = []
    while len(found) < most and (len(found) < 3 or time.monotonic() < deadline):
        found.append(measure())
    return found


def _host_calls(here: Sequence[int]) -> tuple[HostCall, ...]:
    """Measures all-reduces among the ranks on one host; ranks on other hosts only participate in creating the group."""
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


_PAUSE_S = 0.01
_LATEST_S = 300.0  # timeout for the other ranks on this machine to finish their first step
_MOST_EXTRA_STEPS = 10  # limit on a rank's steps while it waits for slower ranks, as a multiple of the measured steps


class FileBarrier:
    """Signals between the ranks on a machine, implemented as files in a shared directory.

    Args:
        directory: an existing directory that these ranks share.
        rank: this rank's number on the machine.
        ranks: the number of ranks on the machine.
    """

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self.ranks = ranks

    def signal(self, word: str) -> None:
        """Sends a signal to the other ranks."""
        (self._directory / f"{word}.{self._rank}").touch()

    def all_signaled(self, word: str) -> bool:
        """Returns True if all ranks have sent the signal."""
        return all((self._directory / f"{word}.{rank}").exists() for rank in range(self.ranks))

    def signal_and_wait(self, word: str, timeout_s: float) -> bool:
        """Sends a signal and waits until all ranks have sent it; returns False on timeout."""
        self.signal(word)
        deadline = time.monotonic() + timeout_s
        while not self.all_signaled(word):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)
        return True


@dataclass(frozen=True)
class MeasureSettings:
    """The settings that the command passes to its workers.

    Attributes:
        output: the file that rank 0 writes.
        directory: an empty directory on this machine, shared by the ranks that run at the same time.
        steps: the number of measured steps.
        together: whether all ranks on the first machine run the script, each in a separate world; if false, only rank 0
            does.
        links: the known link properties, or None to measure them.
    """

    output: str
    directory: str
    steps: int
    together: bool
    links: Links | None = None


def main(words: Sequence[str]) -> None:
    """Runs the measurement with the given command-line arguments."""
    settings = msgspec.json.decode(words[0], type=MeasureSettings)
    script, arguments = words[1], list(words[2:])
    links, hosts = _links(settings)
    rank, here = int(os.environ.get("RANK", "0")), hosts[0]
    if rank not in here or (rank != 0 and not settings.together):
        return
    together = len(here) if settings.together else 1
    for name in (STORE, TORCH_STORE, TORCH_STORE_REQUESTS, USES_TORCH_STORE):
        os.environ.pop(name, None)
    os.environ.update(world_of_one(len(here)))
    barrier = FileBarrier(Path(settings.directory), here.index(rank), together)
    measurement = _Measurement(settings, links, [script, *arguments], barrier, is_first=rank == 0)
    watch = StepWatch(measurement.after_step)
    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # new in Python 3.11; if True, sys.path[0] is not this folder
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        watch.close()
    measurement.finish(watch)


def _links(settings: MeasureSettings) -> tuple[Links, list[list[int]]]:
    """Returns the link properties and the ranks of each host."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return settings.links or Links(UNMEASURED_WITHIN, None, None, reduction_s_per_byte()), [[0]]
    paceline.init_process_group()
    try:
        names: list[object] = [None] * paceline.get_world_size()
        paceline.all_gather_object(names, socket.gethostname())
        hosts = hosts_of([str(name) for name in names])
        return settings.links or measure_links(hosts), hosts
    finally:
        paceline.destroy_process_group()


class _Measurement:
    """Stops the script once all ranks that run at the same time have measured enough steps."""

    def __init__(
        self, settings: MeasureSettings, links: Links, command: Sequence[str], barrier: FileBarrier, *, is_first: bool
    ) -> None:
        self._settings = settings
        self._links = links
        self._command = command
        self._barrier = barrier
        self._is_first = is_first
        self._written = False

    def after_step(self, watch: StepWatch) -> None:
        """Writes the calibration after the last measured step; exits if all ranks are done or this one is far ahead."""
        done, needed = len(watch.steps), LEFT_OUT + self._settings.steps
        if done == 1 and not self._barrier.signal_and_wait("begun", _LATEST_S):
            print("paceline plan: not all ranks on this machine are training yet; this one continues", file=sys.stderr)
        if done == needed:
            self._write(watch)
            self._barrier.signal("measured")
        if done >= needed and (self._barrier.all_signaled("measured") or done >= needed * _MOST_EXTRA_STEPS):
            _exit_now()

    def finish(self, watch: StepWatch) -> None:
        """Writes the calibration if the script ended before `after_step` could write it.

        Raises:
            SystemExit: the script ran too few steps.
        """
        if not self._written:
            try:
                self._write(watch)
            except TooFewStepsError as error:
                raise SystemExit(f"paceline plan: {' '.join(self._command)}: {error}") from None
        self._barrier.signal("measured")

    def _write(self, watch: StepWatch) -> None:
        self._written = True
        calibration = calibration_of(watch, self._links, self._command, self._barrier.ranks)
        if self._is_first:
            whole = Path(f"{self._settings.output}.part")
            whole.write_bytes(encode(calibration))
            whole.replace(self._settings.output)


def _exit_now() -> NoReturn:
    """Exits without running the rest of the script, which could overwrite a better model."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
