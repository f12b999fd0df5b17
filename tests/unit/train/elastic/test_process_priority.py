"""Replacements run at a lower priority until they receive the state or train."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from paceline.operate.launch.elastic.elastic_agent import ElasticAgent
from paceline.operate.launch.elastic.worker_pool import PoolWorker
from paceline.train.elastic import process_priority, protocol
from paceline.train.elastic.process_priority import NICENESS, LoweredPriorities
from paceline.train.elastic.protocol import TransferOffer, WaitNotice

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


@pytest.mark.parametrize("is_replacement", [True, False])
def test_a_replacement_yields_until_it_is_told_to_learn(is_replacement: bool) -> None:
    happened: list[object] = []
    agent = object.__new__(ElasticAgent)
    nothing = SimpleNamespace(write=lambda *_, **__: None, watch=lambda _: None, began=lambda _: None)
    agent._events = agent._cleanup = agent._exits = nothing
    agent._connection = SimpleNamespace(client=SimpleNamespace(send=lambda report: None))
    agent._priorities = SimpleNamespace(
        begin=lambda pid: happened.append(("yields", pid)), end=lambda pid: happened.append(("is back", pid))
    )
    channel = SimpleNamespace(send=lambda message: happened.append(type(protocol.decode_to_worker(message)).__name__))
    member = PoolWorker("0.1.1", 1, 1, channel, 0.0, is_replacement=is_replacement)
    member.worker = SimpleNamespace(pid=7)
    agent._members = SimpleNamespace(by_uid={"0.1.1": member}.get)
    agent._on_start(member)
    for message in (WaitNotice("a while"), TransferOffer(5, "0.0.0", 3, "x:1")):
        agent._tell("0.1.1", message)
    assert happened == [("yields", 7)] * is_replacement + ["WaitNotice", ("is back", 7), "TransferOffer"]
