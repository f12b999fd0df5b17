"""Engines based on a library distinguish ranks that are dead, are unresponsive, or run another version."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hosts.talking import await_word, say
from world import Ranks

import paceline as dist

# Each rank has its own PID namespace, so its process id is not valid in the namespaces of the other ranks.
_ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)  # os.unshare was added in Python 3.12


def in_a_namespace_of_its_own(directory: str) -> None:
    """Runs `leave_or_die` in a process of a new PID namespace, and signals its exit."""
    assert _libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    assert _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
    assert _libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
    for _ in range(3 * int(os.environ["RANK"]) + 1):
        if (passing := os.fork()) == 0:
            os._exit(0)
        os.waitpid(passing, 0)
    if (worker := os.fork()) == 0:
        try:
            leave_or_die(directory)
        finally:
            os._exit(0)
    os.waitpid(worker, 0)
    say(directory, f"{os.environ['RANK']} has ended")
    os._exit(0)


def leave_or_die(directory: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    pairs = [dist.new_group([0, other]) for other in (1, 1, 2)]
    dist.barrier()
    rank = dist.get_rank()
    if rank == 1:
        await_word(directory, "silent")
        dist.destroy_process_group()
    elif rank == 2:
        await_word(directory, "left")
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        for word, after, timeout_s in (("silent", (), 1), ("left", ["1 has ended"], 60), ("died", ["2 has ended"], 60)):
            await_word(directory, *after)
            with pytest.raises(dist.PacelineError) as caught:
                pair = pairs[("silent", "left", "died").index(word)]
                dist.all_reduce(torch.ones(2), group=pair, timeout=timedelta(seconds=timeout_s))
            Path(directory, f"{word}.text").write_text(f"{type(caught.value).__name__} {caught.value}")
            say(directory, word)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns rank 0's reports about a silent rank that leaves later and a killed rank, each in its own namespace."""
    if subprocess.run(_ALONE, capture_output=True).returncode:
        pytest.skip("PID namespaces are not permitted here")
    directory = tmp_path_factory.mktemp("words")
    Ranks(3)(in_a_namespace_of_its_own, str(directory))
    return {file.stem: file.read_text() for file in directory.glob("*.text")}


def test_a_live_rank_of_another_namespace_is_not_dead(verdicts):
    said = verdicts["silent"]
    assert said.startswith("CollectiveTimeoutError") and "rank 1 (" in said and "did not reach the call" in said


def test_a_rank_that_left_in_another_namespace_left(verdicts):
    assert verdicts["left"].startswith("PeerLostError rank 1 (") and ") left the group" in verdicts["left"]


def test_a_rank_killed_in_another_namespace_died(verdicts):
    assert verdicts["died"].startswith("PeerLostError rank 2 (") and ") died, detected by" in verdicts["died"]


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
            assert "cannot continue: rank 2 (" in text and "died or left while the group was being formed" in text
            assert waited_s < 30


def run_another_version(backend: str) -> str:
    from paceline.comm.engine import formation

    if os.environ["RANK"] == "1":
        formation.__version__ = "9.8.7"
    with pytest.raises(dist.RendezvousError) as caught:
        dist.init_process_group(backend, timeout=timedelta(seconds=30))
    return str(caught.value)


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_ranks_of_another_version_are_refused_by_all(ranks, backend):
    for text in ranks(3)(run_another_version, backend):
        assert "9.8.7 on rank 1 (" in text and f"{dist.__version__} on rank 0 (" in text and "rank 2 (" in text
