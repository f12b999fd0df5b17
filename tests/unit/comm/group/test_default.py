"""Rules for the default group; rendezvous is tested in test_check_in.py and test_rendezvous.py."""

from __future__ import annotations

import pytest

import paceline as dist


def test_an_unknown_backend_and_a_missing_group_are_named():
    with pytest.raises(ValueError, match="backend 'telepathy' is not known; the backends are paceline"):
        dist.init_process_group("telepathy")
    with pytest.raises(ValueError, match="mpi takes tensors on cpu, not on cuda; to choose one engine per device type"):
        dist.init_process_group("cuda:mpi")
    with pytest.raises(ValueError, match="specifies two engines for cpu"):
        dist.init_process_group("cpu:paceline,paceline")
    with pytest.raises(ValueError, match="call paceline.init_process_group"):
        dist.get_rank()
    assert not dist.is_initialized()
    assert dist.is_available()


@pytest.mark.parametrize("backend", ["nccl", "cpu:paceline,cuda:nccl", "gloo", "mpi"])
def test_an_elastic_job_runs_on_paceline_only(backend):
    with pytest.raises(ValueError, match=rf"'{backend}' with elastic=True; .* on 'paceline', which .* in host memory"):
        dist.init_process_group(backend, elastic=True)
    assert not dist.is_initialized()
    dist.init_process_group("paceline", elastic=True)
    dist.destroy_process_group()


def test_one_process_is_a_group_of_one_again_and_again():
    import torch

    for _ in range(2):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.sum() == 1000
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "paceline")
        with pytest.raises(ValueError, match="exists already"):
            dist.init_process_group()
        dist.destroy_process_group()


def test_explain_takes_names_and_lists_them_for_an_unknown_one():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.explain("all_reduce", 1024).startswith("all_reduce of 1,024 bytes on 1 ranks, 1 host")
        with pytest.raises(
            ValueError, match=r"explain: unknown operation 'all_reduc'; the operations are all_reduce, br"
        ):
            dist.explain("all_reduc", 1024)
    finally:
        dist.destroy_process_group()


def test_what_is_no_group_of_paceline_s_is_refused():
    import torch

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    calls = [lambda wrong: dist.all_reduce(torch.ones(1), group=wrong), dist.get_world_size, dist.destroy_process_group]
    for call in [*calls, lambda wrong: dist.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=wrong)]:
        with pytest.raises(
            TypeError, match=r"rank 0: the process group is a builtins\.str; .* created by paceline\.new_group"
        ):
            call("world")
    dist.destroy_process_group()
