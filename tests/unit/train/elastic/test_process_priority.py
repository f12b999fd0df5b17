"""Replacements run at a lower priority until they receive the state or start to train."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline.train.elastic import process_priority
from paceline.train.elastic.process_priority import NICENESS, LoweredPriorities

OWN = os.getpriority(os.PRIO_PROCESS, 0)

# Starts another process when requested, and reports its id.
PROGRAM = """
import subprocess, sys, threading
sys.stdin.readline()
threading.Thread(target=lambda: sys.stdin.readline(), daemon=True).start()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def niceness(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(each)) for each in os.listdir(f"/proc/{pid}/task")}


def child_of(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.mark.skipif(not process_priority._can_undo(OWN), reason="needs CAP_SYS_NICE")
def test_a_process_yields_with_all_that_it_starts_until_the_end(process: subprocess.Popen[str]) -> None:
    priorities = LoweredPriorities()
    priorities.begin(process.pid)
    child = child_of(process)
    assert niceness(process.pid) == niceness(child) == {min(OWN + NICENESS, 19)}
    priorities.end(process.pid)
    assert niceness(process.pid) == niceness(child) == {OWN}


def test_what_cannot_be_undone_is_not_done(process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_priority, "_can_undo", lambda _: False)
    priorities = LoweredPriorities()
    priorities.begin(process.pid)
    assert niceness(process.pid) == {OWN}


def test_processes_that_have_ended_are_no_matter(process: subprocess.Popen[str]) -> None:
    priorities = LoweredPriorities()
    priorities.begin(process.pid)
    process.kill()
    process.wait()
    priorities.end(process.pid)
    priorities.begin(process.pid)
    priorities.forget(process.pid)
    priorities.end(process.pid)
