"""Engines that rest on a library: which ranks have died, which only do not answer, and which run another version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch
from world import free_port

import paceline as dist

# The number that the rank has in a namespace of its own is nobody's in the others.
_ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
_PROGRAM = """
import sys
from datetime import timedelta
import torch
import paceline as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(2))
print("met", flush=True)
for line in sys.stdin:
    try:
        if line.strip() == "leave":
            break
        dist.all_reduce(torch.ones(2), timeout=timedelta(seconds=float(line)))
        print("done", flush=True)
    except dist.PacelineError as error:
        print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
"""
_permitted = subprocess.run([*_ALONE, "true"], capture_output=True).returncode == 0
needs_namespaces = pytest.mark.skipif(not _permitted, reason="PID namespaces are not permitted here")


@contextmanager
def in_namespaces(size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks that each run in a PID namespace of their own and make an all-reduce for each line that they read."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "PACELINE_SECRET": "ab" * 16,
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        ranks = []
        for rank in range(size):
            script = f'for _ in {"x " * (3 * rank + 1)}; do /bin/true; done; "$0" -c "$1"; exit'
            process = subprocess.Popen(
                [*_ALONE, script, sys.executable, _PROGRAM],
                env={**environment, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # and all in its namespace with it
            ranks.append(process)
        for process in ranks:
            assert hear(process) == "met"
        yield ranks


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@needs_namespaces
def test_a_live_rank_of_another_namespace_is_not_dead():
    with in_namespaces(2) as (first, _):
        tell(first, "1")
        answer = hear(first)
    assert answer.startswith("CollectiveTimeoutError") and "rank 1 (" in answer and "did not come" in answer, answer


@needs_namespaces
def test_a_rank_killed_in_another_namespace_died():
    with in_namespaces(3) as (first, second, third):
        third.kill()
        tell(first, "30")
        tell(second, "30")
        for survivor in (first, second):
            answer = hear(survivor)
            assert answer.startswith("PeerLostError rank 2 (") and ") died, seen by" in answer, answer


@needs_namespaces
def test_a_rank_that_left_another_namespace_left():
    with in_namespaces(2) as (first, second):
        tell(second, "leave")
        second.wait()
        tell(first, "30")
        answer = hear(first)
    assert answer.startswith("PeerLostError rank 1 (") and "left the group" in answer, answer


def a_group_without_a_member() -> tuple[str, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    started = time.monotonic()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RendezvousError) as caught:
        dist.new_group([0, 1, 2], timeout=timedelta(seconds=50))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    return str(caught.value), time.monotonic() - started


def test_a_member_that_died_ends_the_forming_of_a_later_group(ranks):
    with ranks(3).start(a_group_without_a_member) as world:
        for answer in world.join(60, expect_dead=[2])[:2]:
            text, waited_s = answer
            assert "cannot go on: rank 2 (" in text and "died or left while the group formed" in text
            assert waited_s < 30


def versions(backend: str) -> str:
    from paceline.engine import introduction

    if os.environ["RANK"] == "1":
        introduction.__version__ = "9.8.7"
    with pytest.raises(dist.RendezvousError) as caught:
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
    return str(caught.value)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_ranks_of_another_version_are_refused_by_all(ranks, backend):
    for text in ranks(3)(versions, backend):
        assert "9.8.7 on rank 1 (" in text and f"{dist.__version__} on rank 0 (" in text and "rank 2 (" in text
