"""Kills jobs at random times in random ways; nothing that they started may remain."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import wait_until
from stubborn import Started


def _ordeal(number: int, directory: Path) -> str | None:
    """Runs a job and kills it at a random time in a random way; returns a description of what remains.

    Every fourth job is killed only after its workers have started, because killing a launcher before it has
    started anything tests little.
    """
    chance = random.Random(number)
    words = chance.choice(["", "ignore"])
    flags = (f"--max-restarts={chance.choice([0, 0, 5])}", f"--start-method={chance.choice(['spawn', 'forkserver'])}")
    job = Started(directory, "--shutdown-timeout=0.2", *flags, words=words)
    try:
        if number % 4 == 0:
            wait_until(lambda: job.is_up, 60)
        time.sleep(chance.uniform(0.0, 0.1 if number % 4 == 0 else 0.6))
        for _ in range(chance.choice([1, 1, 2, 3])):
            mine = [job.process.pid, *job.left()]
            victim = chance.choice([job.process.pid, chance.choice(mine)])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            time.sleep(chance.uniform(0.0, 0.05))
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.process.pid, chance.choice([signal.SIGKILL, signal.SIGTERM]))
        try:
            job.process.wait(60)
        except subprocess.TimeoutExpired:
            return f"ordeal {number}: the launcher runs on"
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not job.left())
        told = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[-100:] for pid in job.left()]
        return f"ordeal {number}: left are {told}" if told else None
    finally:
        job.close()


def _expect_nothing_left(numbers: range, directory: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        assert not [left for left in threads.map(lambda number: _ordeal(number, directory), numbers) if left]


@pytest.mark.timeout(180)
def test_random_kills_leave_nothing(tmp_path):
    _expect_nothing_left(range(24), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_hundreds_of_random_kills_leave_nothing(tmp_path):
    _expect_nothing_left(range(24, 500), tmp_path)
