"""Errors in torch.distributed programs when ranks die, disagree or are absent, and cleanup of destroyed groups."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from hosts.talking import await_word, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_programs import torch_group

import paceline


def lose_a_rank(directory: str, how: str) -> str:
    with torch_group("paceline", directory):
        rank = torch_dist.get_rank()
        group = torch_dist.new_group([2, 1])  # rank 1 is last in the group; messages use the job's rank numbers
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
        if how == "DDP":
            model = DistributedDataParallel(model, process_group=group) if rank else model
        elif how == "FSDP":
            mesh = torch_dist.init_device_mesh("cpu", (3,))
            model = fully_shard(model, mesh=mesh)
        torch_dist.barrier()
        if rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        in_group = how in ("synchronous", "DDP", "message") and rank == 2
        with pytest.raises(RuntimeError, match=r"rank 1 \(.*, pid \d+\) died") as caught:
            if in_group and how == "synchronous":
                torch_dist.all_reduce(torch.ones(70_000), group=group)
            elif in_group and how == "DDP":
                for _ in range(2):
                    model(torch.ones(2, 100)).sum().backward()
            elif in_group:
                torch_dist.recv(torch.ones(3), 1, group=group)
            elif how == "FSDP":
                for _ in range(2):
                    model(torch.ones(2, 100)).sum().backward()
            elif how == "work":
                torch_dist.all_reduce(torch.ones(70_000), async_op=True).wait()
            elif how == "future":
                torch_dist.all_reduce(torch.ones(70_000), async_op=True).get_future().wait()
            elif how == "functional":
                gathered = torch_dist._functional_collectives.all_reduce(torch.ones(70_000), "sum", [0, 1, 2])
                torch_dist._functional_collectives.wait_tensor(gathered)
            else:
                torch_dist.barrier()
        say(directory, f"told {rank}")  # otherwise, a rank might detect a departed rank before the dead one
        await_word(directory, "told 0", "told 2")
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("how", ["synchronous", "work", "future", "message", "functional", "DDP", "FSDP"])
def test_a_dead_rank_is_named(ranks, tmp_path, how):
    with ranks(3).start(lose_a_rank, str(tmp_path), how) as world:
        told = world.join(60, expect_dead={1})
    for rank in (0, 2):
        assert "PeerLostError" in told[rank], told[rank]


def make_calls_that_do_not_match(directory: str) -> None:
    with torch_group("paceline", directory):
        rank = torch_dist.get_rank()
        for wait in ("synchronously", "work", "future"):
            with pytest.raises(paceline.CollectiveMismatchError, match="4 elements.*5 elements"):
                work = torch_dist.all_reduce(torch.ones(4 + rank), async_op=wait != "synchronously")
                (work if wait == "work" else work.get_future()).wait()
            tensor = torch.ones(3)
            torch_dist.all_reduce(tensor)
            assert tensor[0] == 2
        work = torch_dist.all_reduce(torch.ones(4 + rank), async_op=True)
        with pytest.raises(paceline.CollectiveMismatchError):
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert isinstance(work.exception(), paceline.CollectiveMismatchError)


def test_calls_that_do_not_fit_fail_and_harm_nothing(ranks, tmp_path):
    ranks(2)(make_calls_that_do_not_match, str(tmp_path))


def stay_away(directory: str) -> None:
    with torch_group("paceline", directory):
        group = torch_dist.new_group([1, 0], timeout=timedelta(seconds=0.5))
        if torch_dist.get_rank() == 0:
            with pytest.raises(paceline.CollectiveTimeoutError, match=r"timed out after 0\.5 s.*rank 1 \(") as caught:
                torch_dist.all_reduce(torch.ones(3), group=group)
            assert caught.value.missing == (1,)
            assert re.search(" (Timed out|closed|timeout) ", str(caught.value))  # programs for gloo match these words
        torch_dist.barrier()
        # The timeout that a caller passes to `wait`.
        if torch_dist.get_rank() == 0:
            work = torch_dist.all_reduce(torch.ones(70_000), async_op=True)
            with pytest.raises(paceline.CollectiveTimeoutError, match="wait"):
                work.wait(timedelta(seconds=0.1))
            torch_dist.send(torch.ones(1), 1)
            work.wait()
        else:
            torch_dist.recv(torch.ones(1), 0)
            torch_dist.all_reduce(torch.ones(70_000))


def test_a_rank_that_stays_away_is_named(ranks, tmp_path):
    ranks(2)(stay_away, str(tmp_path))


def miss_a_backward_in_join(directory: str, dies: bool) -> str:
    with torch_group("paceline", directory):
        rank, group = torch_dist.get_rank(), torch_dist.new_group([1, 0])
        model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        torch_dist.barrier()
        group.set_timeout(timedelta(seconds=60 if dies else 1))
        error = paceline.PeerLostError if dies else paceline.CollectiveTimeoutError
        with pytest.raises(error) as caught, model.join(divide_by_initial_world_size=False):
            loss = model(torch.ones(2, 3)).sum() if rank == 0 else torch.zeros(())
            if rank == 1 and dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                await_word(directory, "told")
                raise paceline.CollectiveTimeoutError("this rank has stayed away")
            loss.backward()  # this waits for the calls that the forward pass started
        say(directory, "told")
        return str(caught.value)


@pytest.mark.parametrize("dies", [False, True])
def test_a_backward_in_join_fails_with_its_forward(ranks, tmp_path, dies):
    with ranks(2).start(miss_a_backward_in_join, str(tmp_path), dies) as world:
        told = world.join(60, expect_dead={1} if dies else set())[0]
    assert re.search(r"rank 1 \(.*, pid \d+\) died" if dies else r"timed out after 1\.0 s.*rank 1 \(", told), told


def box_a_work(directory: str) -> None:
    with torch_group("paceline", directory):
        tensor = torch.ones(70_000)
        boxed = torch_dist.all_reduce(tensor, async_op=True).boxed()
        gc.collect()
        boxed.wait()
        assert tensor[0] == 2


def test_torchs_side_of_a_work_outlives_the_other(ranks, tmp_path):
    ranks(2)(box_a_work, str(tmp_path), timeout_s=60)


def ask_for_what_cannot_be_done(directory: str) -> None:
    with torch_group("paceline", directory):
        group = torch_dist.group.WORLD
        with pytest.raises(TypeError, match=r"no engine for it: create a second group.*pass tensor.cpu"):
            torch_dist.all_reduce(torch.ones(3, device="meta"))
        with pytest.raises(RuntimeError, match="no backend for the device mps"):  # no Linux build supports mps
            group._get_backend(torch.device("mps"))
        with pytest.raises(ValueError, match="rank [01]: .* is not contiguous"):
            torch_dist.all_gather_into_tensor(torch.empty(4, 6).t(), torch.ones(12))
        with pytest.raises(ValueError, match="has no options"):
            torch_dist.new_group(pg_options=object())


def mix_too_early(directory: str) -> None:
    with torch_group("paceline", directory):
        mixed = torch_dist.new_group(backend="cpu:paceline,cuda:nccl")  # PyTorch creates only the first backend
        torch_dist.all_reduce(tensor := torch.ones(3), group=mixed)
        assert tensor.tolist() == [2, 2, 2]
        with pytest.raises(
            RuntimeError, match=r"cuda.*before release 2.14, PyTorch creates only one backend of a mixture"
        ):
            mixed._get_backend(torch.device("cuda"))
        mixed = torch_dist.new_group(backend="cpu:gloo,cuda:paceline")  # PyTorch keeps only the second backend
        torch_dist.all_reduce(tensor := torch.ones(3), group=mixed)
        assert tensor.tolist() == [2, 2, 2] and mixed._get_backend(torch.device("cpu")) is mixed


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="nccl is made, and asks for a GPU")
def test_a_mixture_that_pytorch_does_not_make_is_refused(ranks, tmp_path):
    ranks(2)(mix_too_early, str(tmp_path))


def test_what_cannot_be_done_is_refused(ranks, tmp_path):
    ranks(2)(ask_for_what_cannot_be_done, str(tmp_path))


def use_groups(directory: str) -> None:
    before: tuple[int, int] | None = None
    for turn in range(4):
        os.makedirs(f"{directory}/{turn}", exist_ok=True)
        with torch_group("paceline", f"{directory}/{turn}"):
            group = torch_dist.new_group([1, 0])
            mesh = torch_dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
            for each in (None, group, mesh.get_group("b")):
                work = torch_dist.all_reduce(torch.ones(70_000), group=each, async_op=True)
                work.get_future().wait()
                torch_dist.all_reduce(torch.ones(3), group=each)
            assert "PACELINE_SECRET" in os.environ  # set by the test, not left over from the initialization
        if torch.__version__ >= (2, 7):  # older versions do not notify the groups
            with pytest.raises(ValueError, match="was destroyed"):
                group.allreduce([torch.ones(3)])
        else:
            del group, mesh
        del work  # programs keep references to the group and the mesh
        gc.collect()
        now = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if turn == 1:  # the first turn starts threads that run until the process exits
            before = now
        assert before is None or now <= before, (turn, before, now)


def test_a_destroyed_group_leaves_no_threads_and_no_descriptors(ranks, tmp_path):
    ranks(2)(use_groups, str(tmp_path))


def form_without_a_secret(directory: str) -> None:
    del os.environ["PACELINE_SECRET"]
    with torch_group("paceline", directory):
        torch_dist.all_reduce(torch.ones(3))
        torch_dist.all_reduce(torch.ones(3), group=torch_dist.new_group([1, 0]))
        assert "PACELINE_SECRET" not in os.environ


def form_with_one_secret(directory: str) -> None:
    if os.environ["RANK"] == "1":
        del os.environ["PACELINE_SECRET"]
        with pytest.raises(paceline.AuthenticationError, match="no secret of the job, and rank 0 has one"):
            torch_group("paceline", directory, 5).__enter__()
    else:
        with pytest.raises(paceline.RendezvousError, match=r"rank 1 \(.* gave up: Auth.* no secret of the job"):
            torch_group("paceline", directory, 5).__enter__()


def test_ranks_without_a_secret_share_one_while_they_meet(ranks, tmp_path):
    ranks(2)(form_without_a_secret, str(tmp_path))


def test_a_secret_that_only_some_ranks_have_is_told(ranks, tmp_path):
    ranks(2)(form_with_one_secret, str(tmp_path))


def meet_late(directory: str) -> None:
    with torch_group("paceline", directory):
        if torch_dist.get_rank() == 1:
            time.sleep(1.5)
        group = torch_dist.new_group(timeout=timedelta(seconds=0.5))
        torch_dist.all_reduce(one := torch.ones(1), group=group)
        assert one.item() == 2.0
        if torch_dist.get_rank() == 0:
            with pytest.raises(paceline.CollectiveTimeoutError, match=r"timed out after 0\.5 s"):
                torch_dist.all_reduce(one, group=group)
        torch_dist.barrier()


def test_a_short_time_limit_is_for_calls_not_for_rendezvous(ranks, tmp_path):
    ranks(2)(meet_late, str(tmp_path))
