"""Stream semantics of calls, barriers, objects and checkpoints on a device.

The engine is a mock. Its calls are kernels on a separate stream, which the test can block.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import fake_device
import pytest
import torch
from launching import wait_until
from one_world import Program, name_of, require, run_in_turn
from world import RankFailed, Ranks

import paceline as dist
from paceline.comm.engine.adapters.device_streams import AcceleratorStream
from paceline.comm.engine.api import BackendChoice
from paceline.comm.engine.channel import CallFailure, OutcomeCode
from paceline.comm.group.buffers import Buffers
from paceline.comm.group.collectives.object_codec import decode, encode
from paceline.comm.group.init import make_current
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.group.work import JoinedWork, Work
from paceline.interop.torch_backend.work import FinishedWork, RunningWork

DEVICE = "fake:1"
DEVICES = ("cpu", "fake:0", "fake:1")


@contextmanager
def held(stream: torch.Stream) -> Iterator[threading.Event]:
    """Blocks a stream until the event is set, or until the end of the context."""
    gate = threading.Event()
    torch.fake.launch(lambda: gate.wait(60), stream)
    try:
        yield gate
    finally:
        gate.set()


class Doubling:
    """A call of the mock engine: it doubles a tensor on a separate stream, after the work in the program's stream."""

    def __init__(self, tensor: torch.Tensor, is_enqueued: bool = True) -> None:
        self.stream = AcceleratorStream(tensor.device)
        self.failure: CallFailure | None = None
        self.gate = threading.Event()
        self._is_enqueued = is_enqueued
        self.stream.follow()
        torch.fake.launch(lambda: self.gate.wait(60), self.stream._stream)
        with self.stream.current():
            tensor.mul_(2)
        self._ended = self.stream.record()

    def done(self) -> bool:
        return self.failure is not None or self._ended.done()

    def wait(self, timeout_ns: int) -> bool:
        self._ended.order()
        return True

    def outcome(self) -> CallFailure | None:
        return self.failure

    def is_enqueued(self) -> bool:
        return self._is_enqueued


def each_stream_that_waits_is_behind_the_call():
    tensor = torch.ones(64, device=DEVICE)
    call = Doubling(tensor)
    work = Work(call, "all_reduce", [tensor])
    side = torch.fake.Stream(DEVICE)
    seen = []
    for stream in (torch.fake.current_stream(DEVICE), side):
        with torch.fake.stream(stream):
            assert work.wait()
            seen.append(tensor + 1)
        assert not work.is_completed() and not work.is_success(), (
            "the host has not waited, and the device has not ended"
        )
    call.gate.set()
    torch.fake.synchronize(DEVICE)
    assert [values.tolist() for values in seen] == [[3.0] * 64] * 2
    wait_until(work.is_completed)
    assert work.is_success()


def what_was_not_contiguous_is_copied_back_in_the_order_of_every_stream():
    tensor = torch.ones(8, 8, device=DEVICE)
    column = tensor[:, 1]
    dense = column.clone()
    call = Doubling(dense)
    work = Work(call, "all_reduce", [dense], lambda: column.copy_(dense), results=[column])
    first, second = torch.fake.Stream(DEVICE), torch.fake.Stream(DEVICE)
    seen = []
    for stream in (first, second):
        with torch.fake.stream(stream):
            work.wait()
            seen.append(column + 1)
    assert not work.is_completed()
    call.gate.set()
    torch.fake.synchronize(DEVICE)
    assert [values.tolist() for values in seen] == [[3.0] * 8] * 2
    assert tensor.sum().item() == 8 * 9
    assert work.is_completed()


def a_future_is_complete_when_its_call_is_on_the_stream():
    tensor = torch.ones(64, device=DEVICE)
    call = Doubling(tensor)
    work = Work(call, "all_reduce", [tensor])
    future = work.get_future()
    assert future.done() and work.get_future() is future
    tripled = future.then(lambda done: done.value()[0] * 1.5)
    assert tripled.done(), "the callback has run, and its kernel waits"
    unrelated = torch.ones(8, device=DEVICE) + 1
    assert unrelated.tolist() == [2.0] * 8, "the program's stream is not behind the call"
    call.gate.set()
    assert tripled.wait().tolist() == [3.0] * 64
    assert (future.wait()[0] + 1).tolist() == [3.0] * 64


def a_future_of_a_call_that_a_thread_makes_completes_later():
    tensor = torch.ones(64, device=DEVICE)
    call = Doubling(tensor, is_enqueued=False)
    future = Work(call, "all_reduce", [tensor]).get_future()
    current = []
    tripled = future.then(lambda done: (current.append(torch.fake.current_device()), done.value()[0] * 1.5)[1])
    assert not future.done()
    call.gate.set()
    assert tripled.wait().tolist() == [3.0] * 64
    assert current == [1], "the thread that completes futures is on the device of its calls"


def the_stream_of_a_call_is_behind_it_even_if_another_thread_drops_the_work():
    side = torch.fake.Stream(DEVICE)
    with torch.fake.stream(side):
        tensor = torch.ones(4, device=DEVICE)
        call = Doubling(tensor)
        works = [Work(call, "double", [tensor])]
        dropping = threading.Thread(target=works.clear)
        dropping.start()
        dropping.join()
        copied = tensor * 1  # this tensor represents any tensor that might reuse the memory
    assert not side.query()
    call.gate.set()
    torch.fake.synchronize(DEVICE)
    assert copied.tolist() == [2] * 4


def the_memory_of_a_copy_is_not_reused_before_the_call_has_read_it():
    buffers, side = Buffers(), torch.fake.Stream(DEVICE)
    buffers.read([torch.ones(4, 2, device=DEVICE).t()])
    call = Doubling(buffers.kept[0])
    wait_until(torch.fake.current_stream(DEVICE).query)
    work = Work(call, "all_gather", buffers.kept, buffers.finish)
    with torch.fake.stream(side):
        work.wait()
    del work
    assert not torch.fake.current_stream(DEVICE).query()
    call.gate.set()
    torch.fake.synchronize(DEVICE)


def a_finished_call_of_the_plugin_has_a_future():
    tensor = torch.ones(4, device=DEVICE)
    assert FinishedWork([tensor]).get_future().wait() == [tensor]
    running = RunningWork(Work(None, "double", [tensor, tensor.cpu()]), [tensor, tensor.cpu()])
    running.boxed()
    running.wait()
    assert running.get_future().wait()[0] is tensor


def a_failure_that_is_known_later_is_raised_by_later_waits():
    tensor = torch.ones(4, device=DEVICE)
    call = Doubling(tensor)
    work = Work(call, "all_reduce", [tensor], to_error=lambda outcome: ConnectionError("rank 1 died"))
    assert work.wait()
    call.failure = CallFailure(OutcomeCode.PEER_LOST)
    call.gate.set()
    with pytest.raises(ConnectionError):
        work.wait()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    failed = Work(call, "all_reduce", [tensor], to_error=lambda outcome: ConnectionError("rank 1 died"))
    with pytest.raises(ConnectionError):
        failed.get_future().wait()


def parts_on_two_devices_are_one_work():
    tensors = [torch.ones(4, device=f"fake:{index}") for index in range(2)]
    calls = [Doubling(tensor) for tensor in tensors]
    works = [Work(call, "all_reduce", [tensor]) for call, tensor in zip(calls, tensors, strict=True)]
    joined = JoinedWork(works, "all_reduce_coalesced", tensors)
    future = joined.get_future()
    joined.wait()
    sums = [tensor + 1 for tensor in tensors]
    calls[0].gate.set()
    assert sums[0].tolist() == [3.0] * 4
    assert not joined.is_completed()
    calls[1].gate.set()
    assert sums[1].tolist() == [3.0] * 4 and future.wait() == tensors
    wait_until(joined.is_completed)


def a_barrier_waits_for_the_device_of_its_group():
    stream = torch.fake.current_stream("fake:0")
    served = mock.patch.object(ProcessGroup, "device_types", frozenset({"cpu", "fake"}))
    with served:
        for device_ids, waits in (([0], True), (None, True), ([1], False)):
            with held(stream) as gate:
                threading.Timer(0.1, gate.set).start()
                dist.barrier(device_ids=device_ids)
                assert gate.is_set() == waits
        with held(stream) as gate:
            work = dist.barrier(async_op=True)
            assert work is not None and not work.is_completed()
            gate.set()
            work.wait()
            assert work.is_completed()
    with mock.patch.object(ProcessGroup, "device_types", frozenset({"cpu"})), held(stream) as gate:
        dist.barrier(device_ids=[0])
        assert not gate.is_set()
    with pytest.raises(TypeError, match=r"device_ids is 'fake:0'; it must be a list of indices"):
        dist.barrier(device_ids="fake:0")


def tensors_of_different_devices_are_gathered_on_each():
    for async_op in (False, True):
        inputs = [torch.full((2, 3), float(number), device=device) for number, device in enumerate(DEVICES)]
        outputs = [[torch.zeros(2, 3, device=device).t().contiguous().t() for _ in DEVICES] for device in DEVICES]
        work = dist.all_gather_multigpu(outputs, inputs, async_op=async_op)
        if work is not None:
            work.wait()
        assert [[tensor.unique().tolist() for tensor in tensors] for tensors in outputs] == [[[0.0], [1.0], [2.0]]] * 3


def a_device_of_a_group_has_an_index_and_exists():
    chosen = BackendChoice("some", {"cpu": "paceline", "fake": "some"})
    assert make_current(1, chosen) == torch.device("fake:1") and torch.fake.current_device() == 1
    assert make_current(torch.device("fake:0"), chosen) == torch.device("fake:0") and torch.fake.current_device() == 0
    assert make_current(None, chosen) is None and make_current(torch.device("cpu"), chosen) is None
    for device, message in (
        (2, "device_id is fake:2, and this process sees 2 of them.*LOCAL_RANK"),
        (torch.device("fake"), "device_id is fake, without an index"),
        (torch.device("cuda:0"), "has no engine for cuda|the accelerator of this torch here is fake"),
    ):
        with pytest.raises(ValueError, match=message):
            make_current(device, chosen)
    with pytest.raises(ValueError, match="the accelerator of this torch here is fake"):
        make_current(torch.device("cuda:0"), BackendChoice("nccl", {"cpu": "paceline", "cuda": "nccl"}))


def objects_with_tensors_of_a_device_arrive_on_that_of_the_receiver():
    torch.fake.set_device(1)
    values = {"loss": torch.ones(3, device="fake:1"), "other": [torch.nn.Parameter(torch.zeros(2, device="fake:0"))]}
    encoded = encode(values, "obj")
    for current, expected in ((1, "fake:1"), (0, "fake:0")):
        torch.fake.set_device(current)
        received = decode(bytes(encoded.body), [buffer.clone() for buffer in encoded.buffers])
        assert isinstance(received, dict)
        assert received["loss"].device == torch.device(expected) and received["loss"].tolist() == [1, 1, 1]
        (other,) = received["other"]
        assert other.device == torch.device("fake:0") and other.requires_grad and isinstance(other, torch.nn.Parameter)
    torch.fake.set_device(0)


def a_checkpoint_has_what_a_side_stream_wrote_before_it(path: str):
    module = torch.nn.Linear(6, 4, device="fake:0")
    side = torch.fake.Stream("fake:0")
    side.wait_stream(torch.fake.current_stream("fake:0"))
    for asynchronous in (True, False):
        directory = Path(path) / str(asynchronous)
        with torch.fake.stream(side), torch.no_grad():
            module.weight.fill_(1)
            module.bias.fill_(1)
            torch.fake.synchronize("fake:0")
            with held(side) as gate:
                module.weight.add_(1)
                module.bias.add_(1)
                if not asynchronous:
                    gate.set()
                handle = dist.save({"model": module}, directory, asynchronous=asynchronous)
                module.weight.mul_(100)  # the next step, which must not affect the checkpoint
                module.bias.mul_(100)
                assert handle is None or not (handle.done() or side.query()), "saving has waited for no device"
            if handle is not None:
                handle.wait()
            assert module.weight.sum().item() == 24 * 200
            dist.load({"model": module}, directory)
            assert module.weight.sum().item() == 24 * 2 and module.bias.tolist() == [2.0] * 4


def the_generators_of_all_devices_are_saved():
    state = dist.RandomState()
    torch.fake.set_device(1)
    saved = state.state_dict()
    drawn = [torch.rand(4, device=f"fake:{index}").tolist() for index in range(2)]
    state.load_state_dict(saved)
    assert [torch.rand(4, device=f"fake:{index}").tolist() for index in range(2)] == drawn
    torch.fake.set_device(0)  # as on a rank that uses the other device
    state.load_state_dict(saved)
    assert [torch.rand(4, device=f"fake:{index}").tolist() for index in (1, 0)] == drawn
    state.load_state_dict({**saved, "fake": saved["fake"][0]})  # in the form in which earlier releases saved it
    assert torch.rand(4, device="fake:0").tolist() == drawn[1]


PROGRAMS: list[Program] = [
    each_stream_that_waits_is_behind_the_call,
    what_was_not_contiguous_is_copied_back_in_the_order_of_every_stream,
    a_future_is_complete_when_its_call_is_on_the_stream,
    a_future_of_a_call_that_a_thread_makes_completes_later,
    the_stream_of_a_call_is_behind_it_even_if_another_thread_drops_the_work,
    the_memory_of_a_copy_is_not_reused_before_the_call_has_read_it,
    a_finished_call_of_the_plugin_has_a_future,
    a_failure_that_is_known_later_is_raised_by_later_waits,
    parts_on_two_devices_are_one_work,
    a_barrier_waits_for_the_device_of_its_group,
    tensors_of_different_devices_are_gathered_on_each,
    a_device_of_a_group_has_an_index_and_exists,
    objects_with_tensors_of_a_device_arrive_on_that_of_the_receiver,
    the_generators_of_all_devices_are_saved,
]


def run_programs(programs: dict[str, Program], path: str) -> dict[str, str]:
    fake_device.load()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    saving = functools.partial(a_checkpoint_has_what_a_side_stream_wrote_before_it, path)
    return run_in_turn({**programs, "saving": saving})


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, str]:
    path = str(tmp_path_factory.mktemp("checkpoints"))
    fake_device.build()
    programs = {name_of(program): program for program in PROGRAMS}
    try:
        (answer,) = Ranks(1)(run_programs, programs, path, timeout_s=110)
    except RankFailed as error:
        return dict.fromkeys([*programs, "saving"], str(error))
    return answer


@pytest.mark.parametrize("program", [*map(name_of, PROGRAMS), "saving"])
def test_streams(reports, program):
    require(reports, program)
