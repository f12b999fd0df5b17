"""Verdicts on failures are reported soon, and still name the right rank."""

from __future__ import annotations

import os
import selectors
from dataclasses import replace

import pytest

from paceline.operate.diagnosis.failure_snapshot import with_endings
from paceline.operate.diagnosis.job_snapshot import (
    ExitReason,
    ProcessActivity,
    ProcessState,
    RankExitStatus,
    RankState,
    StackLocation,
)
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.failures import ExceptionNotice
from paceline.operate.launch.workers.forker import Forker
from paceline.operate.launch.workers.job_control import Keyboard
from paceline.operate.launch.workers.worker import MemoryCgroup, MemoryWatch, WorkerProcess
from paceline.operate.launch.workers.worker_group import WorkerGroup

KILLED = -9


class Kills:
    """A generation of two workers that runs out of memory: `kernel_kills` kills them, and `end` reports an exit."""

    def __init__(self, directory) -> None:
        self.directory = directory
        self.kernel_kills(0)
        self.told: list[int] = []
        selector = selectors.DefaultSelector()
        alarm = ExceptionNotice(str(directory))
        self.generation = WorkerGroup(
            *(1, 2, 1.0, Keyboard(), selector, alarm, Forker({}, [], None, selector, print, None)),
            on_start=lambda _: None,
            on_exception=lambda _: None,
            on_failure=lambda failure: self.told.append(failure.rank),
        )
        self.generation._memory.close()
        self.generation._memory = MemoryWatch(MemoryCgroup(directory), os.devnull)
        self.generation.signal = lambda number: None  # there are no processes
        self.workers = [
            WorkerProcess(rank, rank, 2**30 + rank, str(directory / f"error-{rank}"), -1, exit_code=None)
            for rank in (0, 1)
        ]
        self.generation.workers += self.workers

    def kernel_kills(self, count) -> None:
        (self.directory / "memory.events").write_text(f"oom_kill {count}\n")

    def end(self, rank, peak_bytes, code=KILLED) -> None:
        worker = self.workers[rank]
        worker.exit_code, worker.peak_bytes = code, peak_bytes
        self.generation._ended(worker, code, b"")

    def close(self) -> None:
        for worker in self.workers:
            worker.exit_code = KILLED
        self.generation.workers.clear()
        self.generation.close()


@pytest.fixture
def kills(tmp_path):
    job = Kills(tmp_path)
    yield job
    job.close()


def test_of_two_killed_for_memory_the_larger_is_blamed(kills):
    kills.kernel_kills(2)
    kills.end(0, 200 << 20)
    assert kills.told == [] and not kills.generation.is_over, "the end of the larger one takes longer"
    kills.end(1, 800 << 20)
    assert kills.told == [1]
    assert kills.generation.is_over


def test_one_that_is_killed_for_memory_alone_is_told_at_once(kills):
    kills.kernel_kills(1)
    kills.end(0, 200 << 20)
    assert kills.told == [0]


def test_a_process_that_is_none_of_the_workers_is_not_awaited(kills):
    kills.kernel_kills(2)
    kills.end(0, 200 << 20)
    deadline_s = kills.generation.deadline_s
    assert kills.told == [] and deadline_s is not None
    kills.generation.tick(deadline_s)
    assert kills.told == [0]


def test_a_death_that_memory_did_not_cause_is_told_at_once(kills):
    kills.end(0, 200 << 20)
    kills.kernel_kills(1)
    kills.end(1, 800 << 20)
    assert kills.told == [0]


def test_an_error_that_came_meanwhile_names_its_line():
    seen = RankState(0, pid=1, place=StackLocation(), process=ProcessActivity(ProcessState.SLEEPS))
    ending = RankExitStatus(ExitReason.CONSEQUENCE, 2.0, "PeerLostError: rank 1 died", "train.py:88")
    workers = [WatchedWorker(0, 1, None, ending), WatchedWorker(1, 2, None)]
    found = with_endings(MachineSnapshot(1.0, (seen, replace(seen, rank=1, pid=2))), workers)
    assert [rank.ending for rank in found.ranks] == [ending, None]
