"""Engines that rest on a library: which ranks have died, which only do not answer, and which run another version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
from world import free_port

import paceline as dist

# Each rank has a number in its own PID namespace that nobody has in the others.
_ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]
_PROGRAM = """
import os, sys
from datetime import timedelta
import torch
import paceline as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
pairs = [dist.new_group([0, other]) for other in (1, 1, 2)]
dist.barrier()
print("met", flush=True)
for line in sys.stdin:
    if line.strip() == "leave":
        break
    pair, timeout_s = line.split()
    try:
        dist.all_reduce(torch.ones(2), group=pairs[int(pair)], timeout=timedelta(seconds=float(timeout_s)))
    except dist.PacelineError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str]:
    """What rank 0 says of one that is silent, then leaves, and of one that is killed, each in its own namespace."""
    if subprocess.run([*_ALONE, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces are not permitted here")
    environment = {
        **os.environ,
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("127.0.0.1")),
        "PACELINE_SECRET": "ab" * 16,
        "OMP_NUM_THREADS": "1",
    }
    with ExitStack() as stack:
        ranks = []
        for rank in range(3):
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
            assert _answer(process) == "met"
        first, leaving, dying = ranks
        silent = _answer(first, "0 1")
        assert leaving.communicate("leave\n", timeout=60) == ("", None)
        left = _answer(first, "1 60")
        dying.kill()
        dying.wait()
        return {"silent": silent, "left": left, "died": _answer(first, "2 60")}


def _answer(rank: subprocess.Popen[str], order: str | None = None) -> str:
    assert rank.stdin is not None and rank.stdout is not None
    if order is not None:
        rank.stdin.write(f"{order}\n")
        rank.stdin.flush()
    return rank.stdout.readline().strip()


def test_a_live_rank_of_another_namespace_is_not_dead(verdicts):
    said = verdicts["silent"]
    assert said.startswith("CollectiveTimeoutError") and "rank 1 (" in said and "did not come" in said


def test_a_rank_that_left_in_another_namespace_left(verdicts):
    assert verdicts["left"].startswith("PeerLostError rank 1 (") and ") left the group" in verdicts["left"]


def test_a_rank_killed_in_another_namespace_died(verdicts):
    assert verdicts["died"].startswith("PeerLostError rank 2 (") and ") died, seen by" in verdicts["died"]


def a_group_without_a_member() -> tuple[str, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    started = time.monotonic()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RendezvousError) as caught:
        dist.new_group([0, 1, 2], timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    return str(caught.value), time.monotonic() - started


def test_a_member_that_died_ends_the_forming_of_a_later_group(ranks):
    with ranks(3).start(a_group_without_a_member) as world:
        for answer in world.join(60, expect_dead=[2])[:2]:
            text, waited_s = answer
            assert "cannot go on: rank 2 (" in text and "died or left while the group formed" in text
            assert waited_s < 30


def run_another_version(backend: str) -> str:
    from paceline.engine import introduction

    if os.environ["RANK"] == "1":
        introduction.__version__ = "9.8.7"
    with pytest.raises(dist.RendezvousError) as caught:
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
    return str(caught.value)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_ranks_of_another_version_are_refused_by_all(ranks, backend):
    for text in ranks(3)(run_another_version, backend):
        assert "9.8.7 on rank 1 (" in text and f"{dist.__version__} on rank 0 (" in text and "rank 2 (" in text
