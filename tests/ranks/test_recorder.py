"""Tests the calls that each rank records, and the recordings of killed ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from forked_launcher import run
from own_recording import mine
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.comm.record.layout import EventKind
from paceline.operate.diagnosis.recording import CallStatus
from paceline.operate.diagnosis.recording_reader import read_directory


def calls_of_each_kind(backend: str) -> None:
    paceline.init_process_group(backend)
    rank = paceline.get_rank()
    x = torch.ones(1000)
    paceline.all_reduce(x)
    work = paceline.all_reduce(x, op=paceline.ReduceOp.MAX, async_op=True)
    work.wait()
    paceline.broadcast(x, 1)
    group = paceline.new_group([0, 1], group_desc="mine")
    paceline.barrier(group)
    init, *calls = mine().calls
    assert (init.group, init.operation, init.sequence) == (1, "new_group", 0)
    made = [call for call in calls if call.operation != "barrier" or call.group > 2]
    assert [(call.group, call.operation, call.dtype, call.count, call.root, call.is_async) for call in made[:3]] == [
        (2, "all_reduce", "float32", 1000, None, False),
        (2, "all_reduce", "float32", 1000, None, True),
        (2, "broadcast", "float32", 1000, 1, False),
    ]
    assert [call.reduction for call in made[:3]] == ["sum", "max", None]
    sequences = [call.sequence for call in made[:3]]
    assert sequences == list(range(sequences[0], sequences[0] + 3))
    assert all(call.state is CallStatus.DONE and call.outcome == "ok" for call in made)
    assert all(call.arrived_ns <= call.started_ns <= call.ended_ns for call in made)
    line = calls_of_each_kind.__code__.co_firstlineno
    assert init.line == f"test_recorder.py:{line + 1}"
    lines = [f"test_recorder.py:{line + below}" for below in (4, 5, 7)]
    assert [call.line for call in made[:3]] == lines, "the line that made the call, not the one that waited for it"
    formed = made[3]
    assert (formed.operation, formed.sequence, formed.line) == ("new_group", 0, f"test_recorder.py:{line + 8}")
    groups = mine().groups
    assert (groups[4].name, groups[4].ranks, groups[4].rank) == ("mine", (0, 1), rank)
    assert groups[formed.group].identity == groups[4].identity
    assert groups[2].name == "default" and groups[2].engine == f"{backend} on cpu"
    paceline.destroy_process_group()
    assert all(group.closed_ns is not None for group in mine().groups.values())


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_calls_of_all_kinds_are_recorded(ranks, backend):
    ranks(2)(calls_of_each_kind, backend)


def late_rank_is_seen() -> None:
    paceline.init_process_group()
    x = torch.ones(1000)
    paceline.barrier()
    if paceline.get_rank() == 1:
        paceline.recv(x, 0, tag=7)  # once this arrives, rank 0 waits in the all-reduce
    else:
        paceline.send(x, 1, tag=7)
    paceline.all_reduce(torch.ones(1 << 20))
    *_, reduced = mine().calls
    assert reduced.operation == "all_reduce" and reduced.shm_nbytes == 4 << 20
    assert reduced.last_arrived in (0, 1)
    assert reduced.arrived_ns <= reduced.complete_ns <= reduced.ended_ns
    (message,) = [call for call in mine().calls if call.operation in ("send", "recv")]
    assert message.tag == 7 and message.root == 1 - paceline.get_rank() and message.state is CallStatus.DONE


def test_messages_and_arrivals_are_recorded(ranks):
    ranks(2)(late_rank_is_seen)


def messages_of_gloo() -> None:
    paceline.init_process_group("gloo")
    x, rank = torch.ones(1000), paceline.get_rank()
    if rank == 1:
        paceline.recv(x, tag=7)  # from any rank
    else:
        paceline.send(x, 1, tag=7)
    paceline.all_reduce(x)
    *_, message, reduced = mine().calls
    assert (message.operation, message.tag) == (("send", "recv")[rank], 7)
    assert (message.count, message.state, message.shm_nbytes) == (1000, CallStatus.DONE, (4000, 0)[rank])
    assert (message.root, message.last_arrived) == ((1, None), (None, 0))[rank]
    assert (reduced.operation, reduced.shm_nbytes, reduced.tcp_nbytes) == ("all_reduce", 4000, 0)


def test_messages_and_bytes_over_gloo_are_recorded(ranks):
    ranks(2)(messages_of_gloo)


def schedules_are_named() -> None:
    paceline.init_process_group(algorithm="ring")
    paceline.all_reduce(torch.ones(1 << 16))
    call = mine().calls[-1]
    assert call.algorithm == "ring" and call.shm_nbytes > 0 and call.tcp_nbytes == 0


def test_the_algorithm_and_its_bytes_are_recorded(ranks):
    ranks(2)(schedules_are_named)


def training_with_workers() -> None:
    paceline.init_process_group()
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    module = paceline.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    paceline.barrier()
    for _ in DataLoader(data, batch_size=8, num_workers=2):
        pass  # the loader's processes are forks of this one
    for x, y in paceline.StatefulLoader(data, batch_size=8):
        optimizer.zero_grad()
        with module.no_sync():
            (module(x) - y).square().mean().backward()
        (module(x) - y).square().mean().backward()
        optimizer.step()
    recording = mine()
    kinds = [event.kind for event in recording.events]
    assert kinds.count(EventKind.STEP) == 2, "the forward without averaging belongs to the step of the next one"
    assert kinds.count(EventKind.FORWARD) == 4 and kinds.count(EventKind.BACKWARD) >= 2
    assert kinds.count(EventKind.OPTIMIZER) == 2 and kinds.count(EventKind.DATA_WAIT) == 3
    buckets = [event for event in recording.events if event.kind is EventKind.BUCKET]
    assert [(bucket.first, bucket.second) for bucket in buckets] == [(0, 20), (0, 20)]
    assert all(bucket.start_ns <= bucket.sent_ns <= bucket.end_ns for bucket in buckets)
    assert recording.step == 2 and buckets[1].step == 2


def test_a_step_of_training_is_recorded_by_its_parts(ranks):
    ranks(2)(training_with_workers)


KILLED = """
import os, signal, torch, paceline
paceline.init_process_group()
for _ in range(5):
    paceline.all_reduce(torch.ones(10))
if paceline.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
paceline.all_reduce(torch.ones(10))
"""


# The suite uses forks, because a new interpreter records in the same way but is slow to import torch.
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.soak), "forkserver"])
def test_the_last_calls_of_a_killed_rank_can_be_read(tmp_path, script, method):
    environment = {**os.environ, "PACELINE_RUNS_DIR": str(tmp_path)}
    done = run("--nproc-per-node=2", f"--start-method={method}", script(KILLED), env=environment)
    assert done.returncode == 128 + signal.SIGKILL or done.returncode == 1
    waited, killed = read_directory(tmp_path)
    assert (waited.rank, killed.rank) == (0, 1)
    assert (waited.is_ended, killed.is_ended) == (True, False)
    last = killed.calls[-1]
    assert last.operation == "all_reduce" and last.state is CallStatus.DONE
    missed = waited.calls[-1]
    assert missed.sequence == last.sequence + 1 and missed.outcome == "peer_lost" and missed.missing == (1,)
