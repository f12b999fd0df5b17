"""Tensors on the fake device are staged in host memory: results, order, and failures of calls.

The chunks are so small that a few thousand elements fill many chunks.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import fake_device
import pytest
import staged_programs
import torch
import torch.distributed as torch_dist
from one_world import merged, name_of, require, run_in_turn
from sampling import FACTOR
from staged_programs import ON_ANY_DEVICE, trained
from torch_programs import torch_group
from world import Ranks

import paceline as dist
from paceline.comm.engine.adapters.group_recorder import GroupRecorder
from paceline.comm.engine.channel import DTYPE_CODES, CallFailure, CollectiveCall, DevicePieces, OutcomeCode, ReduceOp
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.staged import channel
from paceline.comm.record.layout import EventKind
from paceline.comm.schedule.steps import Operation
from paceline.operate.diagnosis import recording_reader

HERE = staged_programs.HERE = "fake:0"
DELAYED_CALLS = 20 * FACTOR


def calls_keep_the_order_of_streams():
    """One stream computes the input late, another uses the result, and the memory is freed in the meantime."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first, other = torch.fake.Stream(HERE), torch.fake.Stream(HERE)
    for number in range(DELAYED_CALLS):
        with torch.fake.delays(seed=7 * number + rank, most_us=400):
            with torch.fake.stream(first):
                tensor = torch.full((2000 if number % 2 else 10,), float(rank), device=HERE)
                tensor += number
                work = dist.all_reduce(tensor, async_op=True)
            junk = torch.full_like(tensor, -1.0)
            with torch.fake.stream(other):
                work.wait()
                doubled = tensor * 2
                tensor.record_stream(other)
            del tensor, work
            torch.fake.current_stream().wait_stream(other)
            junk += 1
        wanted = 2 * (number * size + size * (size - 1) / 2)
        assert bool((doubled == wanted).all()), (number, doubled[0].item(), wanted)


def the_host_does_not_wait_in_an_asynchronous_call():
    tensor = torch.ones(3000, device=HERE)
    dist.all_reduce(tensor)
    torch.fake.synchronize()
    with torch.fake.delays(seed=1, most_us=50_000), torch.fake.counted() as counts:
        for _ in range(20):
            tensor.add_(0)
        works = [dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True) for _ in range(5)]
        busy = not torch.fake.current_stream().query()
    assert busy and counts["synchronizations"] == 0
    for work in works:
        work.wait()
    assert bool((tensor == dist.get_world_size()).all())


def a_recording_shows_chunks_that_overlap():
    tensor = torch.ones(4 * channel.SLOT_BYTES // 4, device=HERE)
    for _ in range(3):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
    torch.fake.synchronize()
    (file,) = (path for path in Path(os.environ["PACELINE_RECORD_DIR"]).rglob("*") if path.is_file())
    recorded = recording_reader.read(file)
    chunks = [event for event in recorded.events if event.kind is EventKind.CHUNK][-12:]
    assert [chunk.first for chunk in chunks] == [*range(4)] * 3
    assert {(chunk.name, chunk.second) for chunk in chunks} == {("all_reduce", channel.SLOT_BYTES)}
    pairs = [(early, late) for early, late in pairwise(chunks) if late.first]
    assert all(early.end_ns is not None and early.start_ns < late.start_ns < early.end_ns for early, late in pairs)
    assert [call for call in recorded.calls if call.count == tensor.numel()][-1].operation == "all_reduce"


def messages_arrive_in_order_and_from_anywhere():
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    with torch.fake.delays(seed=rank, most_us=1000):
        sends = [
            dist.isend(torch.full((50_000,), 10.0 * rank + number, device=HERE), after, tag=tag)
            for number, tag in enumerate((0, 1, 1))
        ]
        received = [(tag, torch.empty(50_000, device=HERE)) for tag in (1, 0, 1)]
        for tag, tensor in received:
            work = dist.irecv(tensor, None if tag else before, tag=tag)
            work.wait()
            assert work.source_rank() == before
        for work in sends:
            work.wait()
        wanted = [10.0 * before + number for number in (1, 0, 2)]
        assert [bool((each == value).all()) for (_, each), value in zip(received, wanted, strict=True)] == [True] * 3
        if rank == 0:
            dist.send(torch.arange(5.0, device=HERE), 1)
        elif rank == 1:
            tensor = torch.empty(5, device=HERE)
            dist.recv(tensor, 0)
            assert tensor.tolist() == [0, 1, 2, 3, 4]


def a_device_that_is_late_is_named():
    rank = dist.get_rank()
    group = dist.new_group()
    tensor = torch.ones(3, device=HERE)
    dist.all_reduce(tensor, group=group)
    done = Path(tempfile.gettempdir()) / f"staged-late-{os.environ['MASTER_PORT']}"
    if rank == 0:  # the device is blocked until the host has timed out
        torch.fake.launch(partial(_await, done.exists))
    with pytest.raises(dist.CollectiveTimeoutError) as caught:
        dist.all_reduce(tensor, group=group, timeout=timedelta(seconds=0.3))
    if rank == 0:
        assert "was waiting for this rank's part" in str(caught.value)
        done.touch()
        torch.fake.synchronize()
    dist.barrier()
    done.unlink(missing_ok=True)
    dist.destroy_process_group(group)


class SecondChunkFails:
    """Stands in for the channel of a single rank's CPU tensors; the call for the second chunk fails."""

    def __init__(self) -> None:
        self._chunks = 0

    def run(self, call: CollectiveCall) -> CallFailure | None:
        if call.operation == Operation.ALL_GATHER:  # the exchange of sizes
            (source, nbytes), (target, _) = call.inputs[0], call.outputs[0]
            ctypes.memmove(target, source, nbytes)
            return None
        self._chunks += 1
        return CallFailure(OutcomeCode.TIMED_OUT, missing=[0]) if self._chunks == 2 else None

    def failure(self) -> int:
        return OutcomeCode.OK

    def abort(self) -> None:
        pass


def what_a_failed_call_copies_does_not_overwrite_later_values():
    recorder = GroupRecorder([RankIdentity(0, "here", os.getpid())], 0)
    staged = channel.StagedChannel(SecondChunkFails(), torch.device(HERE), recorder, 0, 1)
    tensor = torch.ones(3000, device=HERE)
    gate = threading.Event()
    torch.fake.launch(lambda: gate.wait(60), staged._to_device._stream)
    pieces = [DevicePieces([tensor])]
    call = CollectiveCall(Operation.ALL_REDUCE, DTYPE_CODES[tensor.dtype], ReduceOp.SUM, -1, 3000, 10**11, [], pieces)
    work = staged.submit(call)
    assert work.wait(10**11) and work.outcome().code == OutcomeCode.TIMED_OUT and work.done()
    tensor.zero_()
    gate.set()
    staged._to_device.synchronize()
    assert not tensor.any().item()
    _await(lambda: work.layout is None)
    staged.close()


def _await(condition: Callable[[], bool]) -> None:
    import time

    while not condition():
        time.sleep(0.01)


def data_parallel_training_has_the_bits_of_the_cpu():
    for overlap in (False, True):
        here = trained("cpu", overlap)
        with torch.fake.delays(seed=5, most_us=200):
            assert all(map(torch.equal, trained(HERE, overlap), here))


def two_devices_of_a_rank_have_groups_of_their_own():
    size = dist.get_world_size()
    works = [dist.all_reduce(torch.ones(3, device=f"fake:{index % 2}"), async_op=True) for index in range(4)]
    for work in works:
        work.wait()
        assert work.result()[0].tolist() == [size] * 3


def gloo_takes_tensors_of_the_device_too():
    size = dist.get_world_size()
    group = dist.new_group(backend="gloo")
    tensor = torch.ones(3 * channel.SLOT_BYTES, device=HERE)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == size).all())
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group=group)
    elif dist.get_rank() == 1:
        dist.recv(torch.empty_like(tensor), 0, group=group)
    dist.barrier(group)
    dist.destroy_process_group(group)


PROGRAMS = (
    *ON_ANY_DEVICE,
    calls_keep_the_order_of_streams,
    the_host_does_not_wait_in_an_asynchronous_call,
    a_recording_shows_chunks_that_overlap,
    messages_arrive_in_order_and_from_anywhere,
    a_device_that_is_late_is_named,
    what_a_failed_call_copies_does_not_overwrite_later_values,
    data_parallel_training_has_the_bits_of_the_cpu,
    two_devices_of_a_rank_have_groups_of_their_own,
    gloo_takes_tensors_of_the_device_too,
)
NAMES = [name_of(program) for program in PROGRAMS]


pytestmark = pytest.mark.timeout(400)  # the first one may have to build the device


def _on_ranks() -> dict[str, str]:
    fake_device.load()
    torch.set_num_threads(1)
    channel.SLOT_BYTES = 4096
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PACELINE_RECORD_DIR"] = folder
        dist.init_process_group()
        reports = run_in_turn({name_of(program): program for program in PROGRAMS})
        dist.destroy_process_group()
    return reports


@pytest.fixture(scope="module")
def reports() -> object:
    fake_device.build()
    return merged(Ranks(2)(_on_ranks, timeout_s=300))


@pytest.mark.parametrize("name", NAMES)
def test_staged(reports, name):
    require(reports, name)


def _delayed_calls() -> None:
    global DELAYED_CALLS
    DELAYED_CALLS = 1000
    fake_device.load()
    channel.SLOT_BYTES = 4096
    dist.init_process_group()
    calls_keep_the_order_of_streams()
    dist.destroy_process_group()


@pytest.mark.soak
def test_a_thousand_calls_keep_the_order_of_streams(ranks):
    fake_device.build()
    ranks(3)(_delayed_calls, timeout_s=600)


def _with_torch(folder: str) -> str:
    fake_device.load()
    with torch_group("paceline", folder):
        rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
        tensor = torch.full((3,), rank + 1.0, device=HERE)
        torch_dist.all_reduce(tensor)
        assert tensor.tolist() == [size * (size + 1) / 2] * 3
        work = torch_dist.all_reduce(tensor, async_op=True)
        work.wait()
        gathered = [torch.empty(3, device=HERE) for _ in range(size)]
        torch_dist.all_gather(gathered, torch.full((3,), float(rank), device=HERE))
        assert [each[0].item() for each in gathered] == [*range(size)]
        whole = torch.arange(2.0 * size, device=HERE)
        part = torch.empty(2, device=HERE)
        torch_dist.reduce_scatter_tensor(part, whole)
        assert part.tolist() == [size * 2 * rank, size * (2 * rank + 1)]
        if rank == 0:
            torch_dist.send(part, 1)
        elif rank == 1:
            torch_dist.recv(part, 0)
            assert part.tolist() == [0, size]
        with pytest.raises(RuntimeError, match="has no backend for the device meta"):
            torch_dist.group.WORLD._get_backend(torch.device("meta"))
    return "done"


def test_torch_distributed_takes_tensors_of_the_device(ranks, tmp_path):
    fake_device.build()
    assert ranks(2)(_with_torch, str(tmp_path)) == ["done"] * 2


def _fail_on_the_device() -> str:
    fake_device.load()
    dist.init_process_group()
    tensor = torch.ones(3, device=HERE)
    dist.all_reduce(tensor)
    dist.barrier()
    if dist.get_rank() == 0:

        def fail(*_: object) -> None:
            raise RuntimeError("the device is lost")

        channel.copy_to_device = fail
    with pytest.raises(dist.CollectiveError) as caught:
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    return str(caught.value)


def test_an_error_of_the_device_ends_the_calls_of_all_ranks(ranks):
    fake_device.build()
    failed, other = ranks(2)(_fail_on_the_device, timeout_s=100)
    assert "the device is lost" in failed
    assert "aborted the group" in other
