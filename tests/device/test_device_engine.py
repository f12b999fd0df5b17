"""The engine for accelerators over a process group on the fake device, whose streams lag behind the host."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import fake_collectives
import fake_device
import nccl_checks
import pytest
import torch
from launching import wait_until
from one_world import Program, merged, name_of, require, run_in_turn
from world import Ranks

import paceline as dist
from paceline.comm.engine.adapters.device_streams import AcceleratorEvent

pytestmark = pytest.mark.timeout(400)

DEVICE = "fake:0"


def ones(count: int = 3, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value, device=DEVICE)


def calls_keep_the_order_of_streams_and_wait_for_none():
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size + 1) / 2
    dist.all_reduce(ones())
    for seed in range(1, 9):
        with torch.fake.delays(seed, 2000), torch.fake.counted() as counts:
            value = ones(1000, float(rank))
            value += 1
            dist.all_reduce(value)
            value *= 2
            pieces = [ones(7, float(rank)), ones(5, 2.0)]
            work = dist.all_reduce_coalesced(pieces, async_op=True)
            outputs = [ones(1000, 0.0) for _ in range(size)]
            dist.all_gather(outputs, value * (rank + 1))
            side = torch.fake.Stream(DEVICE)
            work.wait()
            with torch.fake.stream(side):
                work.wait()
                copies = [piece * 1 for piece in pieces]
            del work
        assert counts["synchronizations"] == 0
        torch.fake.synchronize(DEVICE)
        assert bool((value == 2 * total).all())
        assert [float(output[-1]) for output in outputs] == [2 * total * (r + 1) for r in range(size)]
        assert [copy.tolist() for copy in copies] == [[sum(range(size))] * 7, [2.0 * size] * 5]


def messages_are_put_on_the_stream_without_the_host():
    rank, size = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % size
    dist.isend(ones(), other).wait()
    dist.recv(ones(), other)
    with torch.fake.delays(3, 2000), torch.fake.counted() as counts:
        works = []
        received = [ones(100, 0.0) for _ in range(4)]
        for tag, tensor in enumerate(received):  # every rank sends first
            works.append(dist.isend(ones(100, 10.0 * rank + tag), other, tag=tag))
            works.append(dist.irecv(tensor, other, tag=tag))
        assert all(work.is_enqueued() for work in works)
        for work in works:
            work.wait()
    assert counts["synchronizations"] == 0
    assert [tensor[0].item() for tensor in received] == [10.0 * other + tag for tag in range(4)]


def threads_that_poll_a_device_have_made_it_current():
    """On CUDA, each of these threads would otherwise create a context on the first GPU."""
    second = torch.device("fake", 1)
    polls: dict[str, bool] = {}
    done = AcceleratorEvent.done

    def noted(event: AcceleratorEvent) -> bool:
        name = threading.current_thread().name
        polls[name] = polls.get(name, True) and torch.fake.current_device() == event._device.index
        return done(event)

    value = torch.ones(3, device=second)
    dist.all_reduce(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorEvent, "done", noted)
        gate = threading.Event()
        torch.fake.launch(lambda: gate.wait(60), torch.fake.current_stream(second))
        dist.all_reduce(value)
        wait_until(lambda: {"paceline-call-watch", "paceline-device-times"} <= polls.keys())
        gate.set()
        torch.fake.synchronize(second)
    polls.pop("MainThread", None)
    assert all(polls.values()), polls


def groups_are_ended_on_their_device():
    """After a thread has released a communicator, NCCL creates a context on the thread's current device."""
    seen: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("shutdown", "abort"):
            end = getattr(fake_collectives.FakeDeviceGroup, name)

            def noted(group: object, name: str = name, end: Callable[..., None] = end) -> None:
                seen[name] = torch.fake.current_device()
                end(group)

            patch.setattr(fake_collectives.FakeDeviceGroup, name, noted)
        for name in ("shutdown", "abort"):
            group = dist.new_group()
            dist.all_reduce(torch.ones(3, device="fake:1"), group=group)
            torch.fake.synchronize("fake:1")
            if name == "abort":
                dist.barrier()
                group.abort()
            dist.destroy_process_group(group)
            dist.barrier()
    assert seen == {"shutdown": 1, "abort": 1}


def the_end_of_a_group_waits_for_the_device():
    group = dist.new_group()
    dist.all_reduce(ones(), group=group)
    torch.fake.launch(lambda: time.sleep(1.0), torch.fake.current_stream(DEVICE))
    value = ones()
    dist.all_reduce(value, group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.destroy_process_group(group)
    assert value.tolist() == [dist.get_world_size()] * 3


def a_late_rank_is_named_and_the_device_goes_on():
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(ones(), group=group)
    if dist.get_rank() == 0:
        started = time.monotonic()
        dist.all_reduce(ones(), group=group)  # this call returns immediately
        torch.fake.synchronize(DEVICE)  # this returns once the call has been aborted
        assert time.monotonic() - started > 0.9
        with pytest.raises(dist.CollectiveTimeoutError, match=r"rank 1 .*did not reach the call"):
            dist.all_reduce(ones(), group=group)
    dist.barrier()
    value = ones()
    dist.all_reduce(value)
    assert value.tolist() == [dist.get_world_size()] * 3


def different_calls_are_found_while_they_run():
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(ones(), group=group)
    if dist.get_rank() == 0:
        dist.broadcast(ones(), 0, group)
    else:
        dist.all_reduce(ones(), group=group)
    deadline = time.monotonic() + 30
    while group.failure() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(dist.CollectiveMismatchError, match="do not match"):
        dist.all_reduce(ones(), group=group)
    dist.barrier()


def _on_the_device(check: nccl_checks.Check) -> Program:
    def run() -> None:
        with torch.device(DEVICE):
            check(dist.get_rank(), dist.get_world_size())

    run.__name__ = check.__name__
    return run


PROGRAMS: tuple[Program, ...] = (
    *(_on_the_device(check) for check in nccl_checks.MOVING if check is not nccl_checks.use_groups),
    calls_keep_the_order_of_streams_and_wait_for_none,
    messages_are_put_on_the_stream_without_the_host,
    threads_that_poll_a_device_have_made_it_current,
    groups_are_ended_on_their_device,
    the_end_of_a_group_waits_for_the_device,
    a_late_rank_is_named_and_the_device_goes_on,
    different_calls_are_found_while_they_run,
)


def on_the_device() -> dict[str, str]:
    fake_collectives.register()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:paceline,fake:fccl", timeout=timedelta(seconds=30))
    reports = run_in_turn({name_of(program): program for program in PROGRAMS})
    if not any(reports.values()):
        dist.destroy_process_group()
    return reports


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    fake_device.build()
    return merged(Ranks(2)(on_the_device, timeout_s=120))


@pytest.mark.parametrize("name", [name_of(program) for program in PROGRAMS])
def test_an_engine_over_a_process_group(reports, name):
    require(reports, name)
