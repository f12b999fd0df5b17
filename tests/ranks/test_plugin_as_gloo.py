"""`--compat torch`: the attributes of a group that replaces gloo equal gloo's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch_programs import torch_group

from paceline.errors import CollectiveTimeoutError, PeerLostError
from paceline.interop.torch_backend import patches
from paceline.interop.torch_backend.process_group import TorchProcessGroup

GLOO_HAS_ALL_LISTS = torch.__version__ >= (2, 8)  # older versions have neither all_to_all nor reduce_scatter of lists


def with_both(program: Callable[[], object], directory: str) -> None:
    """Runs on a rank. The program must return the same result with gloo and with Paceline in its place."""
    found = []
    for of in ("gloo", "paceline"):
        os.makedirs(f"{directory}/{of}", exist_ok=True)
        with torch_group("gloo", f"{directory}/{of}"):
            assert isinstance(torch_dist.group.WORLD, TorchProcessGroup) == (of == "paceline")
            found.append(program())
            torch_dist.barrier()
        patches.replace_gloo()
    theirs, ours = found
    assert ours == theirs, f"gloo: {theirs}\npaceline: {ours}"


def events() -> list[tuple[str, bool, list[list[int]]]]:
    """Returns each call's name in a profile, whether the call ended on a different thread, and the tensor shapes."""
    rank = torch_dist.get_rank()
    one, two = torch.ones(3), torch.ones(2, 3)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        torch_dist.all_reduce(one)
        torch_dist.all_reduce(one, async_op=True).wait()
        torch_dist.all_reduce_coalesced([one, two])
        torch_dist.broadcast(two, 0)
        torch_dist.reduce(one, 1)
        torch_dist.all_gather([torch.empty(3), torch.empty(3)], one)
        torch_dist.all_gather_coalesced([[torch.empty(3), torch.empty(2, 3)] for _ in range(2)], [one, two])
        torch_dist.all_gather_into_tensor(torch.empty(6), one)
        torch_dist.gather(one, [torch.empty(3), torch.empty(3)] if rank == 0 else None)
        if GLOO_HAS_ALL_LISTS:
            torch_dist.all_to_all([torch.empty(3), torch.empty(3)], [torch.ones(3), torch.ones(3)])
        torch_dist.all_to_all_single(torch.empty(2, 2), torch.ones(2, 2))
        torch_dist.all_to_all_single(torch.empty(4, 2), torch.ones(4, 2), [2, 2], [2, 2])
        torch_dist.all_to_all_single(torch.empty(2, 2, dtype=torch.complex64), torch.ones(2, 2, dtype=torch.complex64))
        torch_dist.barrier()
        if rank == 0:
            torch_dist.send(two, 1)
            torch_dist.send(two, 1)
        else:
            torch_dist.recv(two, 0)
            torch_dist.recv(two)
    torch_dist.barrier()
    calls = [event for event in profiled.events() if event.name.startswith(("gloo:", "paceline:"))]
    older = torch.__version__ < (2, 13)  # their profiles lack Python events that end on a different thread
    return sorted((event.name, older or event.is_async, event.input_shapes) for event in calls)


def show_names(directory: str) -> None:
    def program() -> object:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        group = torch_dist.group.WORLD
        return model._get_ddp_logging_data()["backend_name"], torch_dist.get_backend(), group.name(), events()

    with_both(program, directory)


def test_profiles_and_logging_data_name_what_they_name_with_gloo(ranks, tmp_path):
    ranks(2)(show_names, str(tmp_path))


def barrier_error(group: object, timeout_s: float, wait_all_ranks: bool = False) -> Exception:
    with pytest.raises((CollectiveTimeoutError, PeerLostError)) as raised:
        torch_dist.monitored_barrier(group, timedelta(seconds=timeout_s), wait_all_ranks)
    return raised.value


def miss_barriers(directory: str) -> None:
    """Runs on three ranks: ranks 1 and 2 skip one barrier, and rank 2 skips another."""
    patches.replace_gloo()
    rank = int(os.environ["RANK"])
    with torch_group("gloo", directory):
        first, all_of_them, last, at_once, reversed_pair = (
            torch_dist.new_group(ranks) for ranks in [None] * 4 + [[1, 2]]
        )
        torch_dist.monitored_barrier(first, timedelta(seconds=60))
        if rank == 0:
            for text, group, timeout_s, wait_all_ranks in [
                (
                    "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 300 ms\n Original exception: \n",
                    first,
                    0.3,
                    False,
                ),
                ("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 300 ms\n", all_of_them, 0.3, True),
                ("Rank 0 timed out in monitoredBarrier after 0 ms.\n", at_once, 0, False),
            ]:
                error = barrier_error(group, timeout_s, wait_all_ranks)
                assert str(error).startswith(text)
                assert "barrier() timed out" in str(error), "Paceline's own message follows"
                assert error.missing == (1, 2)
        if rank < 2:
            error = barrier_error(last, 2)
            theirs = [
                "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 2000 ms\n",
                "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                "rank 0. Please check rank 0 logs for faulty rank.\n",
            ]
            assert str(error).startswith(theirs[rank])
        if rank == 1:
            # The group's rank 1 is rank 2 of the job.
            assert str(barrier_error(reversed_pair, 0.3)).startswith("[Rank 0]: Rank 1 failed to pass")
        torch_dist.barrier()


def test_a_monitored_barrier_says_who_is_missing_in_gloos_words(ranks, tmp_path):
    ranks(3)(miss_barriers, str(tmp_path))


def wait_for_a_late_first_rank(directory: str) -> None:
    patches.replace_gloo()
    rank = int(os.environ["RANK"])
    with torch_group("gloo", directory):
        if rank == 0:
            time.sleep(0.5)
        torch_dist.monitored_barrier(timeout=timedelta(seconds=0.1 if rank else 60))


def test_the_time_limit_of_a_monitored_barrier_is_rank_0s(ranks, tmp_path):
    ranks(2)(wait_for_a_late_first_rank, str(tmp_path))


def exchange_uneven_tensors(directory: str) -> None:
    def program() -> object:
        rank, size = torch_dist.get_rank(), torch_dist.get_world_size()
        found = []
        for async_op in (False, True):
            inputs = [torch.arange(3.0 * r + 1) + rank for r in range(size)]
            output = torch.empty_like(inputs[rank])
            work = torch_dist.reduce_scatter(output, inputs, async_op=async_op)
            if work is not None:
                work.wait()
            found.append(output.tolist())
        return found

    if GLOO_HAS_ALL_LISTS:
        with_both(program, directory)
    os.makedirs(f"{directory}/gathered", exist_ok=True)
    with torch_group("paceline", f"{directory}/gathered"):
        rank = torch_dist.get_rank()
        for async_op in (False, True):
            outputs = [torch.empty(3 * r + 1) for r in range(2)]  # gloo requires equal sizes; torch's nccl does not
            work = torch_dist.all_gather(outputs, torch.arange(3.0 * rank + 1), async_op=async_op)
            if work is not None:
                work.wait()
            assert all(torch.equal(outputs[r], torch.arange(3.0 * r + 1)) for r in range(2))


def test_lists_of_tensors_of_different_sizes_are_legal(ranks, tmp_path):
    ranks(2)(exchange_uneven_tensors, str(tmp_path))
