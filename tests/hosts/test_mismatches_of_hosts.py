"""Errors that ranks on several hosts raise when one of them runs a different call."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

import paceline as dist
from hosts.talking import rank
from hosts.telling import SOON_S, told_by, wait_for, world

_UNEQUAL = [150_000, 150_001, 150_001, 150_001]
Call = Callable[[dist.ProcessGroup, bool], object]
MISMATCHES: dict[str, tuple[Call, Call]] = {
    "broadcast": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.broadcast(torch.ones(4), 0, group=group, async_op=later),
    ),
    "400001 elements": (
        lambda group, later: dist.all_reduce(torch.ones(400_000), group=group, async_op=later),
        lambda group, later: dist.all_reduce(torch.ones(400_001), group=group, async_op=later),
    ),
    "float64": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.all_reduce(torch.ones(4).double(), group=group, async_op=later),
    ),
    "MAX": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group=group, async_op=later),
    ),
    "root 1": (
        lambda group, later: dist.broadcast(torch.ones(4), 0, group=group, async_op=later),
        lambda group, later: dist.broadcast(torch.ones(4), 1, group=group, async_op=later),
    ),
    "all_to_all(float32, 600003 elements)": (
        lambda group, later: dist.all_reduce(torch.ones(4), group=group, async_op=later),
        lambda group, later: dist.all_to_all_single(
            torch.empty(600_003), torch.ones(600_003), _UNEQUAL, _UNEQUAL, group=group, async_op=later
        ),
    ),
}


def make_calls_that_do_not_match() -> list[tuple[str, str, float]]:
    dist.init_process_group(timeout=timedelta(seconds=60))
    told = []
    for usual, odd in MISMATCHES.values():
        for later in (False, True):
            group = dist.new_group()
            dist.barrier(group)

            mine = odd if rank() == 2 else usual

            def call(group: dist.ProcessGroup, make: Call = mine, later: bool = later) -> None:
                work = make(group, later)
                if later:
                    wait_for(work)
                # A rank that completed its part before the mismatch was detected raises the error in its next call.
                time.sleep(0.1)
                dist.barrier(group)

            told.append(told_by(lambda group=group, call=call: call(group)))
            assert told_by(lambda group=group: dist.barrier(group))[0] == "CollectiveMismatchError"  # still broken
            dist.destroy_process_group(group)
    dist.barrier()  # other groups are not broken
    dist.destroy_process_group()
    return told


def test_calls_that_do_not_fit_are_named_on_every_rank(hosts):
    named = [what for what in MISMATCHES for _ in range(2)]
    for number, told in enumerate(hosts(2, 2)(make_calls_that_do_not_match)):
        for (error, message, took_s), what in zip(told, named, strict=True):
            assert error == "CollectiveMismatchError", message
            assert message.startswith(f"rank {number} (h{number // 2}, pid ")
            assert "rank 2 (h1, pid " in message and what in message, message
            assert message.count(" called ") == 2, message
            assert "All ranks of a group must make the same calls in the same order" in message
            assert took_s < SOON_S


def broadcast_from_two_roots() -> str:
    dist.init_process_group()
    dist.barrier()
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        dist.broadcast(torch.ones(4), rank())  # each root completes the call once its tensor is sent
        dist.all_gather([torch.empty(3) for _ in range(2)], torch.ones(3))
    return str(caught.value)


def test_two_roots_of_a_broadcast_are_both_named(hosts):
    for message in hosts(2, 1)(broadcast_from_two_roots):
        assert "rank 0 (h0, pid " in message and "broadcast(float32, 4 elements, root 0) as call" in message, message
        assert "rank 1 (h1, pid " in message and "broadcast(float32, 4 elements, root 1) as call" in message, message
        assert "all_gather" not in message, message


def split_wrongly() -> str:
    dist.init_process_group()
    rows = [2, 2, 2]
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        # Rank 2 expects three rows from rank 1, but rank 1 sends two.
        wanted = [2, 3, 2] if rank() == 2 else rows
        dist.all_to_all_single(torch.empty(sum(wanted)), torch.ones(6), wanted, rows)
        time.sleep(0.1)
        dist.barrier()
    return str(caught.value)


def test_splits_that_do_not_fit_name_both_ends(hosts):
    for number, message in enumerate(hosts(3, 1)(split_wrongly)):
        assert message.startswith(f"rank {number} (h{number}")
        assert "rank 1 (h1, pid " in message and "sends 8 bytes to rank 2 (h2, pid " in message
        assert "expects 12" in message


def send_what_is_not_expected() -> str:
    dist.init_process_group()
    message = ""
    if rank() == 0:
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            world().send(torch.ones(100_000), 1, async_op=False)
        message = str(caught.value)
    else:
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            world().recv(torch.empty(100_000, dtype=torch.int32), 0, async_op=False)
        message = str(caught.value)
    dist.barrier()  # the group remains usable
    return message


def test_a_message_that_does_not_fit_is_told_to_both_ends(hosts):
    for message in hosts(2, 1)(send_what_is_not_expected):
        assert "rank 0 (h0, pid " in message and "400000 bytes of float32" in message
        assert "rank 1 (h1, pid " in message and "400000 bytes of int32" in message


def take_different_algorithms(of_group: bool) -> str:
    name = ["ring", "tree"][rank()]
    if not of_group:
        with pytest.raises(dist.RendezvousError) as refused:
            dist.init_process_group(algorithm=name)
        return str(refused.value)
    dist.init_process_group()
    with pytest.raises(dist.CollectiveMismatchError) as caught:
        group = dist.new_group(algorithm=name)
        dist.all_reduce(torch.ones(3), group=group)
        dist.barrier(group)
    return str(caught.value)


@pytest.mark.parametrize("of_group", [False, True], ids=["of all groups", "of one group"])
def test_algorithms_that_differ_are_named(hosts, of_group):
    for message in hosts(2, 1)(take_different_algorithms, of_group):
        assert "ring" in message and "tree" in message, message
        assert "rank 0 (h0" in message or "rank 1 (h1" in message
