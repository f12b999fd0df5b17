"""Calls, barriers, objects, checkpoints and recordings follow the order of CUDA streams, on one rank."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from launching import wait_until
from one_world import Program, name_of, require, run_in_turn
from world import Ranks

import paceline as dist
from paceline.comm.record.layout import EventKind
from paceline.comm.record.recorder import DIRECTORY_VARIABLE, directory_of_files
from paceline.operate.diagnosis.recording import CallStatus
from paceline.operate.diagnosis.recording_reader import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU"),
    pytest.mark.timeout(300),
]
_CYCLES = 300_000_000  # about 200 ms


def each_stream_that_waits_is_behind_the_call() -> None:
    streams = (torch.cuda.current_stream(), torch.cuda.Stream())
    for is_first in (True, False):  # the host waits while CUDA loads a kernel for its first launch
        tensor, seen = torch.ones(1 << 16, device="cuda"), []
        torch.cuda._sleep(_CYCLES)
        tensor.mul_(2)
        work = dist.all_reduce(tensor, async_op=True)
        for stream in streams:
            with torch.cuda.stream(stream):
                work.wait()
                seen.append(tensor + 1)
        assert is_first or not work.is_completed(), "the host has not waited"
        torch.cuda.synchronize()
        assert all(bool((values == 3).all()) for values in seen) and work.is_completed()


def a_future_is_complete_when_its_call_is_on_the_stream() -> None:
    tensor = torch.ones(1 << 16, device="cuda")
    torch.cuda._sleep(_CYCLES)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    tripled = future.then(lambda done: done.value()[0] * 3)
    assert future.done() and tripled.done() and not torch.cuda.current_stream().query()
    assert bool((tripled.wait() == 3).all())


def a_barrier_waits_for_the_gpu() -> None:
    passed = torch.cuda.Event()
    torch.cuda._sleep(_CYCLES)
    passed.record()
    dist.barrier(device_ids=[torch.cuda.current_device()])
    assert passed.query()


def objects_may_have_tensors_of_a_gpu() -> None:
    received: list[object] = [None]
    dist.all_gather_object(received, [torch.ones(2, device="cuda")])
    assert received[0][0].device == torch.device("cuda", torch.cuda.current_device())  # type: ignore[index]


def a_checkpoint_has_what_a_side_stream_wrote_before_it() -> None:
    module, side = torch.nn.Linear(256, 256, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    directory = tempfile.mkdtemp()
    for _ in range(2):  # the first save pins the memory for copies
        with torch.cuda.stream(side), torch.no_grad():
            module.weight.fill_(1)
            torch.cuda._sleep(_CYCLES)
            module.weight.add_(1)
            handle = dist.save({"model": module}, directory, asynchronous=True)
            module.weight.mul_(100)
            handle.wait()
            dist.load({"model": module}, directory)
            assert bool((module.weight == 2).all())


def generators_come_back() -> None:
    state = dist.RandomState()
    saved = state.state_dict()
    drawn = torch.rand(4, device="cuda")
    state.load_state_dict(saved)
    assert torch.equal(drawn, torch.rand(4, device="cuda"))


def recordings_have_the_times_of_the_gpu() -> None:
    module = dist.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), checks=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.cuda._sleep(_CYCLES)
        module(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    (path,) = Path(directory_of_files()).glob("*.record")

    def phases() -> list[str | None]:
        ended = [event for event in read(path).events if event.kind is EventKind.DEVICE and event.end_ns is not None]
        return [event.name for event in ended[-3:]]

    wait_until(lambda: phases() == ["forward", "backward", "optimizer"])
    recording = read(path)
    calls = [call for call in recording.calls if recording.groups[call.group].device == "cuda"]
    assert calls and all(call.state is CallStatus.DONE for call in calls)
    assert max(call.started_ns - call.arrived_ns for call in calls) > 10_000_000, "a call that the GPU reached late"
    assert all(call.arrived_ns <= call.started_ns <= call.ended_ns for call in calls)


PROGRAMS: tuple[Program, ...] = (
    each_stream_that_waits_is_behind_the_call,
    a_future_is_complete_when_its_call_is_on_the_stream,
    a_barrier_waits_for_the_gpu,
    objects_may_have_tensors_of_a_gpu,
    a_checkpoint_has_what_a_side_stream_wrote_before_it,
    generators_come_back,
    recordings_have_the_times_of_the_gpu,
)


def _on_a_rank(directory: str) -> dict[str, str]:
    os.environ[DIRECTORY_VARIABLE] = directory
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=0)
    reports = run_in_turn({name_of(program): program for program in PROGRAMS})
    dist.destroy_process_group()
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("recordings")
    directory.chmod(0o700)
    return Ranks(1)(_on_a_rank, str(directory), timeout_s=200)[0]


@pytest.mark.parametrize("name", [name_of(program) for program in PROGRAMS])
def test_streams_on_gpus(reports, name):
    require(reports, name)
