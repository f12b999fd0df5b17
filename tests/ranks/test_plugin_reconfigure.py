"""Groups from `init_process_group("paceline", enable_reconfigure=True)`, which requires torch 2.15 or newer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.interop.torch_backend

HAS_RECONFIGURE = hasattr(torch_dist, "_reconfigure")
pytestmark = pytest.mark.skipif(not HAS_RECONFIGURE, reason=f"torch {torch.__version__} has no _reconfigure; 2.15 has")

LONG = timedelta(seconds=60)
SOON_S = 25.0
LATE = 3  # the rank that starts outside the group, in tests in which it replaces another one


class Job:
    """A rank in a reconfigurable program, and the store in which the ranks publish their handles."""

    def __init__(self, directory: str) -> None:
        self.name = int(os.environ["RANK"])
        self.store = torch_dist.FileStore(f"{directory}/store", -1)

    @property
    def group(self) -> torch_dist.ProcessGroup:
        return torch_dist.group.WORLD

    def handles(self, stage: str, names: list[int]) -> list[str]:
        """Publishes this rank's handle; waits for the handles of `names` and returns them."""
        self.store.set(f"{stage}/{self.name}", torch_dist._get_reconfigure_handle())
        return [self.store.get(f"{stage}/{name}").decode() for name in names]

    def form(self, uuid: int, names: list[int]) -> None:
        work = torch_dist._reconfigure(uuid, self.handles(str(uuid), names), timeout=LONG)
        assert work.wait() and work.is_completed()
        assert (torch_dist.get_rank(), torch_dist.get_world_size()) == (names.index(self.name), len(names))

    def meet(self, stage: str, names: list[int]) -> None:
        self.store.set(f"met/{stage}/{self.name}", "")
        self.store.wait([f"met/{stage}/{name}" for name in names])

    def sum(self) -> float:
        """Returns the sum of the ranks' names; calls of every kind must work."""
        size, rank = torch_dist.get_world_size(), torch_dist.get_rank()
        tensor = torch.full((40_000,), float(self.name))
        torch_dist.all_reduce(tensor)
        works = [torch_dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        assert all(work.wait() for work in works)
        gathered = [None] * size
        torch_dist.all_gather_object(gathered, rank)
        assert gathered == list(range(size))
        root = torch.tensor([rank])
        torch_dist.broadcast(root, group_src=size - 1)
        assert root == size - 1
        if size > 1:
            received = torch.zeros(1)
            requests = torch_dist.batch_isend_irecv(
                [
                    torch_dist.P2POp(torch_dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
                    torch_dist.P2POp(torch_dist.irecv, received, (rank - 1) % size),
                ]
            )
            assert all(request.wait() for request in requests) and received == (rank - 1) % size
        assert torch_dist.get_process_group_ranks(None) == list(range(size))
        return float(tensor[0])


@contextmanager
def job(directory: str, size: int = 3) -> Iterator[Job]:
    paceline.interop.torch_backend.register()
    made = Job(directory)
    torch_dist.init_process_group(
        "paceline",
        store=torch_dist.PrefixStore("job", made.store),
        rank=made.name % size,  # a replacement has the same rank number as the one that it replaces
        world_size=size,
        timeout=LONG,
        enable_reconfigure=True,
    )
    assert torch_dist._supports_reconfigure() and torch_dist.get_backend() == "paceline"
    yield made
    torch_dist.destroy_process_group()


def change_members(directory: str) -> list[float]:
    with job(directory) as me:
        with pytest.raises(paceline.RendezvousError, match="no other ranks yet.*_get_reconfigure_handle"):
            torch_dist.all_reduce(torch.ones(3))
        sums = []
        me.form(10 + me.name, [me.name])  # each rank alone
        sums.append(me.sum())
        for uuid, names in ((20, [0, 1, 2]), (21, [2, 0, 1]), (22, [0, 2]), (23, [1, 2, 0])):
            if me.name in names:
                me.form(uuid, names)
                sums.append(me.sum())
            me.meet(str(uuid), [0, 1, 2])
        return sums


def test_ranks_come_go_and_change_their_order(ranks, tmp_path):
    told = ranks(3)(change_members, str(tmp_path))
    assert told == [[0, 3, 3, 2, 3], [1, 3, 3, 3], [2, 3, 3, 2, 3]]


def replace_the_dead(directory: str) -> tuple[float, float]:
    with job(directory) as me:
        model, loss = DistributedDataParallel, 0.0
        if me.name != LATE:
            me.form(1, [0, 1, 2])
            assert me.sum() == 3
            torch_dist.new_group()  # a call that the replacement has not run
            replica = model(nn.Linear(3, 1))
            replica(torch.ones(2, 3)).sum().backward()
            if me.name == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(paceline.PeerLostError, match=r"rank 1 \("):
                replica(torch.ones(2, 3)).sum().backward()
                me.sum()
            assert me.group.get_error().name == "REMOTE_ERROR"
        me.form(2, [0, LATE, 2])
        assert me.group.get_error().name == "SUCCESS"
        total = me.sum()
        ones = torch.ones(3)
        torch_dist.all_reduce(ones, group=torch_dist.new_group([2, 0, 1]))
        assert ones[0] == 3
        torch.manual_seed(me.name)
        replica = model(nn.Linear(3, 1))  # wrapping copies rank 0's parameters
        loss = replica(torch.full((2, 3), me.name + 1.0)).sum()
        loss.backward()
        return total, float(next(replica.parameters()).grad[0, 0])


def test_a_killed_rank_is_replaced_by_another_process(ranks, tmp_path):
    with ranks(4).start(replace_the_dead, str(tmp_path)) as world:
        told = world.join(90, expect_dead={1})
    expected = 2 * (1 + 3 + 4) / 3
    for rank in (0, 2, LATE):
        total, gradient = told[rank]
        assert total == 5 and gradient == pytest.approx(expected)


def go_on_after_an_abort(directory: str) -> None:
    with job(directory) as me:
        me.form(1, [0, 1, 2])
        if me.name == 1:
            threading.Timer(0.3, me.group.abort).start()
        with pytest.raises(paceline.GroupAbortedError):
            torch_dist.recv(torch.ones(3), (me.name + 1) % 3)
        if me.name != 1:
            assert me.group.get_error().name == "COMM_ERROR"
        me.form(2, [0, 1, 2])
        assert me.group.get_error().name == "SUCCESS" and me.sum() == 3


def test_an_aborted_group_can_be_reconfigured(ranks, tmp_path):
    ranks(3)(go_on_after_an_abort, str(tmp_path))


def go_on_after_a_time_out(directory: str) -> None:
    with job(directory) as me:
        me.form(1, [0, 1, 2])
        ran = threading.Event()
        me.group.register_abort_hook(0, ran.set)
        for uuid in (2, 3):  # the hooks run for each failure
            me.group.set_timeout(timedelta(seconds=1))
            if me.name != 0:
                work = torch_dist.all_reduce(torch.ones(4), async_op=True)
                assert ran.wait(SOON_S) and me.group.get_error().name == "TIMEOUT"
                with pytest.raises(RuntimeError, match="timed out"):
                    work.wait()
            me.group.set_timeout(LONG)
            me.form(uuid, [0, 1, 2])
            assert me.sum() == 3
            ran.clear()


def test_a_group_that_timed_out_can_be_reconfigured(ranks, tmp_path):
    ranks(3)(go_on_after_a_time_out, str(tmp_path))


def leave_those_that_wait(directory: str) -> None:
    with job(directory) as me:
        me.form(1, [0, 1, 2])
        if me.name == 2:
            with pytest.raises(paceline.CollectiveError, match="rank [01] .*left|interrupted on rank [01]"):
                torch_dist.recv(torch.ones(3), 0)
        else:
            time.sleep(0.3)
            waiting = threading.Thread(target=_fail_to_receive)
            waiting.start()
            time.sleep(0.3)
            me.form(2, [0, 1])
            waiting.join(SOON_S)
            assert not waiting.is_alive() and me.sum() == 1


def _fail_to_receive() -> None:
    with pytest.raises(RuntimeError):
        torch_dist.recv(torch.ones(3), 2)


def test_calls_of_the_former_group_end(ranks, tmp_path):
    ranks(3)(leave_those_that_wait, str(tmp_path))


def pass_what_cannot_be(directory: str) -> None:
    with job(directory, 2) as me:
        mine, *_ = handles = me.handles("all", [me.name, 1 - me.name])
        for wrong, told in (
            ([], "no handles"),
            ([mine, mine], r"handle of rank . \(.*\) twice"),
            ([mine, "gloo:0:1:2:tcp"], "not a handle of the backend 'paceline'"),
            (handles[1:], "not among the 1"),
        ):
            with pytest.raises(ValueError, match=told):
                torch_dist._reconfigure(1, wrong)
        with pytest.raises(ValueError, match="no hints; got quick"):
            torch_dist._reconfigure(1, handles, hints={"quick": "yes"})
        torch_dist._reconfigure(2, set(handles)).wait()  # with a set, the ranks keep their order
        assert torch_dist.get_rank() == me.name and me.sum() == 1
        with pytest.raises(RuntimeError, match="uuid 2 was already used"):
            torch_dist._reconfigure(2, set(handles))
        assert me.sum() == 1  # the group is unchanged
        with pytest.raises(RuntimeError, match="different handles for the uuid 3|waited|gave up"):
            torch_dist._reconfigure(3, handles, timeout=timedelta(seconds=2))
        me.meet("after", [0, 1])
        me.form(4, [0, 1])
        assert me.sum() == 1


def test_handles_that_do_not_fit_are_refused(ranks, tmp_path):
    ranks(2)(pass_what_cannot_be, str(tmp_path))


def count_on_the_dead(directory: str) -> None:
    with job(directory) as me:
        handles = me.handles("all", [0, 1, 2])
        me.meet("all", [0, 1, 2])
        if me.name == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(paceline.RendezvousError, match=r"rank 1 \(.*died|gave up"):
            torch_dist._reconfigure(1, handles, timeout=LONG)
        assert time.monotonic() - started < SOON_S
        with pytest.raises(paceline.RendezvousError, match="no other ranks"):
            torch_dist.barrier()
        torch_dist._reconfigure(2, [handles[2], handles[0]], timeout=LONG).wait()
        assert me.sum() == 2


def test_a_dead_rank_among_the_handles_is_named(ranks, tmp_path):
    with ranks(3).start(count_on_the_dead, str(tmp_path)) as world:
        world.join(60, expect_dead={1})


def mix_backends(directory: str) -> None:
    paceline.interop.torch_backend.register()
    with pytest.raises(ValueError, match="mixture of backends cannot be reconfigured"):
        torch_dist.init_process_group(
            "cpu:gloo,cuda:paceline",
            store=torch_dist.FileStore(f"{directory}/store", 1),
            rank=0,
            world_size=1,
            enable_reconfigure=True,
        )


def test_a_mixture_is_refused(ranks, tmp_path):
    ranks(1)(mix_backends, str(tmp_path))
