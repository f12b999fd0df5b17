"""Recordings of device work contain device times, and diagnoses distinguish a late device from a late program."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import fake_device
import torch
from launching import wait_until

import paceline as dist
from paceline import _core
from paceline.comm.engine.adapters.device_streams import AcceleratorEvent
from paceline.comm.engine.adapters.group_recorder import clock_of
from paceline.comm.group.default import own_world
from paceline.comm.record.layout import EventKind
from paceline.comm.record.recorder import DIRECTORY_VARIABLE, directory_of_files
from paceline.operate.diagnosis.diagnosis import diagnose
from paceline.operate.diagnosis.finding import Cause
from paceline.operate.diagnosis.job_snapshot import JobSnapshot
from paceline.operate.diagnosis.recording import CallRecord, CallStatus, ProcessRecording
from paceline.operate.diagnosis.recording_reader import rank_state_of, read
from paceline.train.training_events import phases_of

DEVICE = "fake:0"


def recordings() -> list[ProcessRecording]:
    """Returns the recordings of both running ranks, by rank."""
    found = [read(path) for path in Path(directory_of_files()).glob("*.record")]
    return sorted(found, key=lambda each: each.rank)


def latest_calls() -> list[CallRecord]:
    """Returns the latest device call of each rank that has run one."""
    made = [[call for call in each.calls if each.groups[call.group].device == "fake"] for each in recordings()]
    return [calls[-1] for calls in made if calls]


def are(*states: CallStatus) -> bool:
    return [call.state for call in latest_calls()] == [*states]


def a_device_that_is_late_is_told(rank: int) -> None:
    store = own_world().store
    stream, gate = torch.fake.current_stream(DEVICE), threading.Event()
    phases_of(torch.device(DEVICE)).mark("backward", 7)
    if rank == 1:
        torch.fake.launch(lambda: gate.wait(60), stream)
    work = dist.all_reduce(torch.ones(1000, device=DEVICE), async_op=True)
    if rank == 0:
        wait_until(lambda: are(CallStatus.RUNNING, CallStatus.PENDING))
        states = [rank_state_of(recording) for recording in recordings()]
        verdict = diagnose(JobSnapshot(time.monotonic() + 60, tuple(states)))
        assert verdict is not None
        assert (verdict.cause, verdict.blamed, verdict.is_fault) == (Cause.DEVICE_BUSY, (1,), False)
        assert "ranks 0-1 wait" in verdict.sentence or "ranks 0, 1 wait" in verdict.sentence, verdict.sentence
        assert "rank 1 has reached the call, but its device is still in the backward of step 7, for" in verdict.sentence
        store.set("seen", b"")
    else:
        store.wait(["seen"])
        released_ns = time.monotonic_ns()
        gate.set()
    phases_of(torch.device(DEVICE)).mark("", 7)
    work.wait()
    torch.fake.synchronize(DEVICE)
    wait_until(lambda: are(CallStatus.DONE, CallStatus.DONE))
    first, second = latest_calls()
    assert first.started_ns < second.started_ns < min(first.ended_ns, second.ended_ns)
    if rank == 1:
        assert abs(second.started_ns - released_ns) < 5e9 and second.started_ns - second.arrived_ns > 0
        wait_until(lambda: any(event.kind is EventKind.DEVICE and event.end_ns for event in recordings()[1].events))
        phase = next(event for event in recordings()[1].events if event.kind is EventKind.DEVICE)
        assert (phase.name, phase.first, phase.second) == ("backward", 0, 7) and phase.end_ns >= second.started_ns


def steps_are_recorded_and_nothing_waits_for_it(rank: int) -> None:
    torch.manual_seed(0)
    model = dist.DistributedDataParallel(torch.nn.Linear(4, 2).to(DEVICE), checks=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(3, 4, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    waits = []
    for is_paused in (False, True, False, True, False):  # the first steps connect and determine the bucket order
        _core.pause_recording(is_paused)
        with torch.fake.counted() as counts:
            step()
        waits.append(counts["synchronizations"])
        torch.fake.synchronize(DEVICE)
    _core.pause_recording(False)
    assert waits[4] == waits[3] == 0, waits

    def phases() -> list[str]:
        events = [event for event in recordings()[rank].events if event.kind is EventKind.DEVICE and event.end_ns]
        return [event.name for event in events if event.second == events[-1].second]

    wait_until(lambda: phases() == ["forward", "backward", "optimizer"])
    spans = [event for event in recordings()[rank].events if event.kind is EventKind.DEVICE][-3:]
    assert all(one.start_ns <= one.end_ns <= two.start_ns for one, two in itertools.pairwise(spans))


def times_are_those_of_the_host() -> None:
    """An event is assigned the host tick at which it was recorded, even if its time is read later."""
    before = _core.record_ticks()
    event = torch.fake.Event(enable_timing=True)
    with torch.fake.device(DEVICE):
        event.record()
        event.synchronize()
    after = _core.record_ticks()
    time.sleep(0.05)
    tick = clock_of(torch.device(DEVICE)).tick_of(AcceleratorEvent(torch.device(DEVICE), event))
    slack = (after - before) * 2 + 1_000_000
    assert before - slack <= tick <= after + slack


def both_ranks(directory: str) -> None:
    os.environ[DIRECTORY_VARIABLE] = directory  # not shared, because other processes' recordings would displace ours
    fake_device.load()
    torch.set_num_threads(1)
    dist.init_process_group("paceline")
    rank = dist.get_rank()
    times_are_those_of_the_host()
    a_device_that_is_late_is_told(rank)
    dist.barrier()
    steps_are_recorded_and_nothing_waits_for_it(rank)
    dist.barrier()
    dist.destroy_process_group()


def test_devices_have_their_times(ranks, tmp_path):
    fake_device.build()
    tmp_path.chmod(0o700)
    ranks(2)(both_ranks, str(tmp_path))
