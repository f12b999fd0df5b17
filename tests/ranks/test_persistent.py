"""Persistent calls on one host: results and rejected arguments."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch
from launching import wait_until
from one_world import OneWorld, name_of
from own_recording import mine
from persistent_cases import Case, agree, drawn
from torch.profiler import ProfilerActivity, profile

import paceline as dist
from paceline.comm.group.collectives.persistent import EngineCall, RepeatedCall


def compare_all_forms(cases: list[Case], algorithm: str | None, backend: str) -> int:
    dist.init_process_group(backend, algorithm=algorithm)
    compared = agree(cases, dist.GroupMember.WORLD)
    dist.destroy_process_group()
    return compared


@pytest.mark.parametrize(
    ("size", "algorithm", "backend"),
    [(1, None, "paceline"), (2, None, "paceline"), (3, None, "paceline"), (3, "ring", "paceline"), (2, None, "gloo")],
)
def test_persistent_calls_do_what_plain_ones_do(ranks, size, algorithm, backend):
    assert min(ranks(size)(compare_all_forms, drawn(6), algorithm, backend)) > 100


def forms_fit_together() -> None:
    """A persistent call matches a plain call on the other rank, which prepares its calls in a different order."""
    rank = dist.get_rank()
    one, many = torch.zeros(1), torch.zeros(50_000)
    tensors = [one, many] if rank == 0 else [many, one]
    calls = {tensor.numel(): dist.all_reduce_init(tensor) for tensor in tensors}
    for number in range(1, 4):
        one.fill_(number)
        many.fill_(rank)
        if (number + rank) % 2:
            calls[1]()
        else:
            dist.all_reduce(one)
        calls[50_000].start()
        assert one.item() == 2 * number
        calls[50_000].wait()
        assert (many == 1).all()


def asks_without_waiting() -> None:
    tensor = torch.zeros(70_000)
    call = dist.all_reduce_init(tensor)
    for number in range(1, 4):
        tensor.fill_(number)
        call.start()
        wait_until(call.test)
        assert call.test()
        assert (tensor == 2 * number).all()
        if number == 2:
            call.wait()
    call.wait()
    with pytest.raises(ValueError, match=r"rank \d: all_reduce: .*has not been started"):
        call.test()


def misuse_is_refused() -> None:
    rank = dist.get_rank()
    call = dist.all_reduce_init(torch.ones(3))
    with pytest.raises(ValueError, match=rf"rank {rank}: all_reduce: .*has not been started.*call start\(\) first"):
        call.wait()
    assert repr(call) == "PersistentCall(all_reduce, not started)"
    call.start()
    assert repr(call) == "PersistentCall(all_reduce, started)"
    for again in (call.start, call):
        with pytest.raises(
            ValueError, match=rf"rank {rank}: all_reduce: .*was started and has not completed; call wait\(\)"
        ):
            again()
    call.wait()
    call()
    with pytest.raises(TypeError, match="BAND is not defined for torch.float32"):
        dist.all_reduce_init(torch.ones(3), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="reduce needs dst"):
        dist.reduce_init(torch.ones(3))
    with pytest.raises(ValueError, match="recv needs src"):
        dist.recv_init(torch.ones(3))


def moved_memory_is_noticed() -> None:
    for prepare in (dist.all_reduce_init, lambda tensor: dist.broadcast_init(tensor, 0)):
        for move in (
            lambda tensor: tensor.resize_(5000),
            lambda tensor: tensor.set_(torch.ones(3)),
            lambda tensor: tensor.untyped_storage().resize_(0),
            lambda tensor: setattr(tensor, "data", torch.ones(3)),
            lambda tensor: setattr(tensor, "data", tensor.data[:2]),  # the remaining changes keep the address
            lambda tensor: setattr(tensor, "data", tensor.data.as_strided((5,), (1,))),
            lambda tensor: setattr(tensor, "data", tensor.data.as_strided((3,), (2,))),
            lambda tensor: setattr(tensor, "data", tensor.data.view(3, 1)),
            lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
            lambda tensor: setattr(tensor, "data", torch._neg_view(tensor.data)),
        ):
            tensor = torch.ones(6)[:3]
            call = prepare(tensor)
            call()
            other = torch.empty(3)  # another tensor may reuse the memory of a freed one
            move(tensor)
            for start in (call, call.start):
                with pytest.raises(
                    ValueError, match="has been moved, or has .* than at .*_init.*Prepare the call again"
                ):
                    start()
            del other
    whole = torch.zeros(4)
    call = dist.all_gather_into_tensor_init(whole, torch.ones(2))
    whole.data = torch.zeros(4)
    with pytest.raises(ValueError, match="all_gather_into_tensor: a tensor of this persistent call has been moved"):
        call()


def mismatches_are_named() -> None:
    rank = dist.get_rank()
    call = dist.all_reduce_init(torch.ones(2 + rank))
    for make in (call, lambda: (call.start(), call.wait())):
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            make()
        for count in (2, 3):
            assert f"all_reduce(float32, {count} elements, SUM)" in str(caught.value)
    matching = dist.barrier_init()
    matching()


def dropped_in_flight() -> None:
    """A started call completes even if no reference to it is kept."""
    rank = dist.get_rank()
    kept = torch.full((70_000,), 1.0 + rank)
    call = dist.all_reduce_init(kept)
    call.start()
    del call
    gc.collect()
    assert (kept == 3).all()


def group_without_this_rank() -> None:
    rank = dist.get_rank()
    alone = dist.new_group([0])
    tensor = torch.full((2,), 5.0)
    call = dist.all_reduce_init(tensor, group=alone)
    call()
    call.start()
    wait_until(call.test)
    call.wait()
    assert tensor.tolist() == [5.0, 5.0]
    assert isinstance(call, EngineCall if rank == 0 else RepeatedCall)


def messages_are_passed() -> None:
    rank = dist.get_rank()
    tensor = torch.zeros(1000)
    call = dist.send_init(tensor, 1, tag=3) if rank == 0 else dist.recv_init(tensor, 0, tag=3)
    for number in range(4):
        tensor.fill_(number if rank == 0 else -1)
        if number % 2:
            call()
        else:
            call.start()
            call.wait()
        assert (tensor == number).all()
    dist.barrier()


def one_call_from_many_threads() -> None:
    """Threads may share a call if they take turns; a concurrent start is rejected without harm."""
    tensor = torch.ones(70_000)
    call = dist.all_reduce_init(tensor, dist.ReduceOp.MAX)
    refused: list[str] = []
    entered = threading.Barrier(4)
    made = 0
    lock = threading.Lock()

    def make() -> None:
        nonlocal made
        entered.wait(20)
        while True:
            with lock:
                if made == 40:
                    return
                made += 1
            while True:
                try:
                    call()
                    break
                except ValueError as error:
                    refused.append(str(error))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert all("another thread is making this call" in each for each in refused), refused
    dist.barrier()


def calls_are_recorded() -> None:
    before = len(mine().calls)
    call = dist.all_reduce_init(torch.ones(7), dist.ReduceOp.MAX)
    call()
    call.start()
    call.wait()
    made = mine().calls[before:]
    assert [(each.operation, each.dtype, each.count, each.reduction, each.is_async) for each in made] == [
        ("all_reduce", "float32", 7, "max", False),
        ("all_reduce", "float32", 7, "max", True),
    ]
    assert all(each.outcome == "ok" for each in made)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
        call.start()
        call.wait()
        dist.barrier()
    names = [event.name for event in profiled.events() if event.name.startswith("paceline:")]
    assert names.count("paceline:all_reduce") == 2, names


def compiled_function() -> None:
    tensor = torch.ones(3)
    call = dist.all_reduce_init(tensor)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        call()
        call.start()
        call.wait()
        return y + tensor

    assert torch.compile(step, backend="eager")(torch.ones(3)).tolist() == [6.0] * 3


TOGETHER = [
    forms_fit_together,
    asks_without_waiting,
    misuse_is_refused,
    moved_memory_is_noticed,
    mismatches_are_named,
    dropped_in_flight,
    group_without_this_rank,
    messages_are_passed,
    one_call_from_many_threads,
    calls_are_recorded,
    compiled_function,
]
WORLD = OneWorld(*TOGETHER)


@pytest.mark.parametrize("program", list(map(name_of, TOGETHER)))
def test_persistent_calls_behave(program):
    WORLD.require(2, program)


def ended_group_is_named() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    group = dist.new_group()
    calls = [dist.all_reduce_init(torch.ones(count), group=group) for count in (1, 70_000)]
    copied = dist.all_reduce_init(torch.ones(4, 2)[:, 0], group=group)
    for call in (*calls, copied):
        call()
    dist.destroy_process_group(group)
    for call in (*calls, copied):
        for make in (call, call.start):
            with pytest.raises(ValueError, match=rf"rank {rank}: this process group was destroyed"):
                make()
    with pytest.raises(ValueError, match="all_reduce_init prepared this call for the group that has ended"):
        calls[0]()
    other = dist.all_reduce_init(torch.ones(1))
    dist.destroy_process_group()
    dist.init_process_group()
    with pytest.raises(ValueError, match="prepare it again"):
        other()
    dist.barrier()


def test_calls_of_a_group_that_has_ended_say_so(ranks):
    ranks(2)(ended_group_is_named)


def made_in_a_forked_child() -> int:
    dist.init_process_group()
    call = dist.all_reduce_init(torch.ones(1))
    call()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        for make in (call, call.start, lambda: dist.barrier(call._group)):
            try:
                make()
            except ValueError as error:
                told += f"{error}\n"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told.count("this process was forked from a member of the group") == 3, told
    call()
    dist.barrier()
    return 0


def test_a_forked_child_cannot_make_its_parents_calls(ranks):
    ranks(2)(made_in_a_forked_child)


def aborted_and_late(form: str) -> None:
    dist.init_process_group(timeout=120)
    rank, group = dist.get_rank(), dist.GroupMember.WORLD
    assert group is not None
    late = dist.all_reduce_init(torch.ones(3), group=dist.new_group(), timeout=0.3)
    call = dist.all_reduce_init(torch.ones(70_000))
    call()
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"rank 1 .*all_reduce|all_reduce.*rank 1"):
            make(late, form)
        group.abort()
    with pytest.raises(dist.GroupAbortedError) as caught:
        make(call, form)
    assert caught.value.rank == 0
    with pytest.raises(dist.GroupAbortedError):
        make(call, form)


def make(call: dist.PersistentCall, form: str) -> None:
    if form == "called":
        call()
    else:
        call.start()
        call.wait()


@pytest.mark.parametrize("form", ["called", "started"])
def test_time_outs_and_aborts_reach_persistent_calls(ranks, form):
    ranks(2)(aborted_and_late, form)


def outlived_by_the_others() -> str:
    dist.init_process_group(timeout=60)
    call = dist.all_reduce_init(torch.ones(70_000))
    call()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    with pytest.raises(dist.PeerLostError) as caught:
        while True:
            call()
    with pytest.raises(dist.PeerLostError):
        call.start()
        call.wait()
    return str(caught.value)


def test_a_death_ends_a_persistent_call(ranks):
    with ranks(2).start(outlived_by_the_others) as world:
        told, _ = world.join(expect_dead={1})
    assert f"rank 1 ({os.uname().nodename}, pid {world.pids[1]}) died" in str(told)
