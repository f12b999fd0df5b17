"""The peers of a process group on devices: their rendezvous, progress, and liveness."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import wait_until

import paceline as dist
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.torch_backend import peers
from paceline.comm.engine.torch_backend.peers import (
    AbsentError,
    DevicePeer,
    PeerWatch,
    RankProgress,
    SharedGpuError,
    exchange_peers,
)

MEMBERS = (RankIdentity(0, "alpha", 11), RankIdentity(1, "beta", 12))
HERE = DevicePeer.here("GPU-1", "cuda:0")


def meet(store: dist.Store, index: int, wait_s: float, mine: DevicePeer = HERE) -> tuple[DevicePeer, ...]:
    return exchange_peers(store, MEMBERS, index, mine, time.monotonic() + wait_s, lambda: False)


def test_the_first_rank_that_is_missing_is_told():
    with pytest.raises(AbsentError) as caught:
        meet(dist.HashStore(), 0, 0.05)
    assert caught.value.missing == (1,)


def test_two_ranks_with_one_gpu_are_named_with_the_fix(monkeypatch):
    store = dist.HashStore()
    with pytest.raises(AbsentError):
        meet(store, 1, 0)
    wanted = r"rank 0 \(alpha, pid 11\) and rank 1 \(beta, pid 12\) both use one GPU .*set_device\(LOCAL_RANK\)"
    with pytest.raises(SharedGpuError, match=wanted):
        meet(store, 0, 1)
    monkeypatch.setenv("PACELINE_NCCL_SHARED_GPU", "1")
    assert meet(store, 0, 1) == (HERE, HERE)


def test_devices_without_an_identity_may_be_shared():
    store = dist.HashStore()
    device = DevicePeer.here("", "fake:0")
    with pytest.raises(AbsentError):
        meet(store, 1, 0, device)
    assert meet(store, 0, 1, device) == (device, device)


def nobody(index: int) -> bool:
    return False


@pytest.mark.parametrize("refusal", [None, errno.ENOSYS, errno.EPERM])
def test_peers_are_watched_without_descriptors_too(monkeypatch, refusal):
    def refuse(pid: int) -> int:
        raise OSError(refusal, "refused")

    if refusal is not None:
        monkeypatch.setattr(peers, "pidfd_open", refuse)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        presences = [DevicePeer("here", pid, "", "") for pid in (os.getpid(), peer.pid)]
        watched = PeerWatch(presences, 0, nobody)
        assert watched.gone() == []
        peer.kill()
        wait_until(lambda: watched.gone() == [1])
        watched.close()
    assert PeerWatch(presences, 0, nobody).gone() == [1], "it had ended before"


def test_several_threads_may_watch_peers_at_once():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as peer:
        watched = PeerWatch([DevicePeer("here", pid, "", "") for pid in (os.getpid(), peer.pid)], 0, nobody)
        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(lambda: [watched.gone() for _ in range(2000)]) for _ in range(4)]
            answers[0].result()
            threads.submit(watched.close).result()
        peer.kill()
    assert not any(any(answer.result()) for answer in answers)


def test_the_store_is_asked_about_ranks_of_other_machines(monkeypatch):
    asked: list[int] = []

    def has_exited(index: int) -> bool:
        asked.append(index)
        return index == 100

    presences = [DevicePeer("here", os.getpid(), "", ""), *(DevicePeer("there", n, "", "") for n in range(1, 101))]
    clock = _replaced_clock(monkeypatch)
    watched = PeerWatch(presences, 0, has_exited)
    assert watched.gone() == [] and asked == []
    clock(6)
    assert watched.gone() == [] and asked == list(range(1, 65))
    assert watched.gone() == [] and len(asked) == 64
    clock(6)
    assert watched.gone() == [100]


def _replaced_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(peers.time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_ranks_find_their_first_call_that_differs(monkeypatch):
    clock = _replaced_clock(monkeypatch)
    store = dist.HashStore()
    ranks = [RankProgress(store, index, 3, kept=4) for index in range(3)]
    for number in range(1, 7):
        for index, rank in enumerate(ranks):
            rank.arrive((number, 0, 0, 0, 7 if (number, index) == (5, 1) else 3, 8))
    assert ranks[0].difference(at_once=True) == {}, "the other ranks have published nothing"
    ranks[1].publish(at_once=True)
    wanted = {0: (5, 0, 0, 0, 3, 8), 1: (5, 0, 0, 0, 7, 8)}
    ranks[0].publish(at_once=True)
    clock(1)
    assert not ranks[0].is_compared
    assert ranks[0].difference() == wanted and ranks[0].difference() == {} and ranks[0].is_compared
    assert ranks[2].difference(at_once=True) == {}, "it makes the same calls as rank 0"
    ranks[2].publish(at_once=True)
    clock(1)
    assert ranks[1].difference() == {1: wanted[1], 2: wanted[0]}
    assert ranks[1].latest() == [(6, 0, 0, 0, *latest) for latest in [(3, 8)] * 3]


def test_ranks_wait_for_each_others_calls_for_some_seconds_only(monkeypatch):
    clock = _replaced_clock(monkeypatch)
    store = dist.HashStore()
    early, late = (RankProgress(store, index, 2) for index in range(2))
    early.arrive((1, 0, 0, 0, -1, 8))
    early.publish(at_once=True)
    for _ in range(2):
        clock(1)
        assert early.difference() == {} and not early.is_compared
    late.arrive((1, 1, 0, 0, -1, 8))
    late.publish(at_once=True)
    clock(1)
    assert early.difference() == {0: (1, 0, 0, 0, -1, 8), 1: (1, 1, 0, 0, -1, 8)} and early.is_compared
    early.arrive((2, 0, 0, 0, -1, 8))
    early.publish(at_once=True)
    for _ in range(10):
        clock(1)
        early.difference()
    assert early.is_compared, "a rank that makes no calls is not asked forever"
