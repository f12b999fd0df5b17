"""Errors about mistakes in data-parallel training state what was observed, the rank, and the solution."""

from __future__ import annotations

import datetime
import re
import warnings

import pytest
import torch
from torch import nn
from training import batches, mlp

import paceline as dist


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))


def told_by(steps) -> str:
    """Returns the error or the warnings that the steps cause."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            steps()
        except dist.CollectiveError as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(each.message) for each in warned)


def wrap_models_that_differ(at: int) -> str:
    dist.init_process_group()
    odd = dist.get_rank() == 1
    modules = [
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4 + odd), nn.Linear(4 + odd, 2))),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=not odd)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(not odd)),
    ]
    return told_by(lambda: dist.DistributedDataParallel(modules[at]))


@pytest.mark.parametrize(
    ("at", "first"), [(0, r"'1\.0\.weight' of shape \[4, 4\]"), (1, r"'1\.weight'"), (2, r"'1\.weight'.*=True; rank 1")]
)
def test_models_that_differ_name_their_first_such_parameter(ranks, at, first):
    for told in ranks(2)(wrap_models_that_differ, at):
        assert re.search(rf"the models differ: rank 0: parameter {first}", told)
        assert "Build the same model on every rank" in told


def wrap_expanded_tensors() -> None:
    dist.init_process_group()
    parameter, buffer = nn.Linear(3, 1), nn.Linear(3, 1)
    parameter.weight = nn.Parameter(torch.ones(1).expand(1, 3))
    buffer.register_buffer("mask", torch.ones(1).expand(3))
    for module, name in ((parameter, "weight"), (buffer, "mask")):
        with pytest.raises(RuntimeError, match=rf"elements of '{name}' share a memory .*clone\(\)"):
            dist.DistributedDataParallel(module)
    dist.DistributedDataParallel(buffer, broadcast_buffers=False, init_sync=False)
    dist.barrier()


def test_expanded_tensors_are_refused_on_all_ranks(ranks):
    ranks(2)(wrap_expanded_tensors)


def change_parameters_after_wrapping() -> None:
    dist.init_process_group()
    module = mlp()
    wrapped = dist.DistributedDataParallel(module)
    module[2].weight = nn.Parameter(torch.ones(8, 8))
    module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(
        RuntimeError, match=r"rank 0: the module changed.*\(new: extra, 2\.weight\).*wrap it afterwards"
    ):
        wrapped(torch.ones(1, 8))


def test_a_parameter_that_changes_after_wrapping_is_named(ranks):
    ranks(1)(change_parameters_after_wrapping)


def skips_a_backward(build) -> str:
    dist.init_process_group(timeout=datetime.timedelta(seconds=2))
    rank = dist.get_rank()
    model = dist.DistributedDataParallel(build())

    def train() -> None:
        for step in range(4):
            loss = model(batches(4, 8, step=step)[rank]).sum()
            if not (rank == 1 and step == 2):
                loss.backward()

    return told_by(train)


def test_a_missing_backward_is_reported_where_buffers_are_copied(ranks):
    skipped, others = ranks(2)(skips_a_backward, normalized)[::-1]
    assert skipped.startswith("CollectiveMismatchError") and others.startswith("CollectiveMismatchError")
    assert (
        "before the 4th forward pass of Sequential. The preceding forward pass had no backward pass on this rank"
        in skipped
    )
    assert "call backward() on its result" in skipped
    assert "averages the gradients of Sequential for the 3rd time, after 3 forward passes of this rank" in others
    assert "with the loss times 0, or train within model.join()" in others


def test_a_missing_backward_is_reported_where_the_others_wait(ranks):
    told = ranks(2)(skips_a_backward, mlp)[0]
    assert re.match("(CollectiveTimeoutError|PeerLostError): ", told)
    assert "for the 4th time, after 4 forward passes" in told
    assert "a backward pass that one rank skips" in told


def forward_twice() -> None:
    dist.init_process_group()
    rank = dist.get_rank()
    for options in ({}, {"bucket_cap_mb": 0.0003, "overlap": True}, {"find_unused_parameters": True}):
        module = mlp()
        model = dist.DistributedDataParallel(module, **options)
        model(batches(4, 8)[rank])  # on every rank, without using the output
        model(torch.full((1, 8), float(rank))).sum().backward()
        alone = mlp()
        for r in range(2):
            (alone(torch.full((1, 8), float(r))).sum() / 2).backward()
        for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


def test_a_forward_without_backward_on_every_rank_is_harmless(ranks):
    ranks(2)(forward_twice)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(8, 8), nn.ModuleDict({"unused": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x)


def leave_parameters_unused() -> None:
    dist.init_process_group()
    told = r"rank \d: .*2 of 4 parameters \(branch\.unused\.weight, branch\.unused\.bias\).*find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=told):
        dist.DistributedDataParallel(Branches())(torch.ones(1, 8)).sum().backward()


def test_unused_parameters_are_named_by_their_dotted_path(ranks):
    ranks(2)(leave_parameters_unused)


def same_batches(kind: str) -> str:
    dist.init_process_group()
    rank = dist.get_rank()
    model = dist.DistributedDataParallel(mlp().double() if kind == "double" else mlp())
    constant = torch.ones(4, 8)

    def train() -> None:
        for step in range(5):
            every = batches(4, 8, step=step)
            x = every[{"same": 0, "double": 0, "own": rank}.get(kind, 0 if rank != 1 else 1)]
            if kind == "now and then":
                x = every[rank if step == 1 else 0]
            x = constant if kind == "constant" else x
            model(x.double() if kind == "double" else x).sum().backward()

    return told_by(train)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("same", "ranks 0, 1 and 2 read the same batches: their first 3 batches were equal"),
        ("double", "ranks 0, 1 and 2 read the same batches"),
        ("two of three", "ranks 0 and 2 read the same batches"),
        ("own", None),
        ("now and then", None),
        ("constant", None),
    ],
)
def test_ranks_that_read_the_same_batches_are_told_once(ranks, kind, told):
    first, *others = ranks(3)(same_batches, kind)
    first = re.sub(r"rank 0: the 3 ranks on .* cores, so.*ranks here(; )?", "", first)
    assert others == ["", ""]
    assert first.count("read the same batches") == (told is not None)
    if told is not None:
        assert told in first and "sampler=paceline.DistributedSampler(dataset)" in first


def too_many_threads() -> str:
    dist.init_process_group()
    torch.set_num_threads(1000)
    told = [told_by(lambda: dist.DistributedDataParallel(nn.Linear(2, 2))) for _ in range(2)]
    assert told[1] == ""  # the warning appears once per process
    return told[0]


def test_more_threads_than_cores_are_reported_once_for_a_host(ranks):
    first, second = ranks(2)(too_many_threads)
    assert second == ""
    assert re.search(r"rank 0: the 2 ranks on .* compute with 2000 threads on \d+ cores", first)
    assert re.search(r"Give each (\d+): set OMP_NUM_THREADS=\1, or call torch\.set_num_threads\(\1\)", first)
