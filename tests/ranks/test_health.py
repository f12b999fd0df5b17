"""Warnings about non-finite gradients, and about replicas that differ."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable

import pytest
import torch
from one_world import OneWorld
from torch import nn
from training import batches, mlp

import paceline as dist

OPTIONS: dict[str, dict[str, object]] = {
    "at the end": {},
    "overlapping": {"bucket_cap_mb": 3e-4, "overlap": True},
    "deterministic": {"deterministic": True, "logical_shards": 2},
}


def warned(steps: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps()
    return [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]


class Middle(nn.Module):
    """Multiplies the gradients that pass through it by `factor`; gradients of later layers are unchanged."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.factor)
        return x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Middle(), nn.Linear(8, 8))


# - Gradients


def train(wrapped: nn.Module, middle: Middle, *, spoil: bool) -> None:
    """Runs two steps, and corrupts this rank's gradients in the second; both steps are checked completely."""
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        middle.factor = math.nan if spoil and step == 1 else 1.0
        wrapped(batches(4, 8, step=step)[dist.get_rank()]).sum().backward()
        optimizer.step()


def names_only_the_rank_where_nan_arose(how: str) -> None:
    module = model()
    wrapped = dist.DistributedDataParallel(module, **OPTIONS[how])
    told = warned(lambda: train(wrapped, module[2], spoil=dist.get_rank() == 1))
    if dist.get_rank() == 1:
        (text,) = told
        assert "rank 1: in step 2 this rank's own gradients have NaN or infinity: those of 4 of 6 parameters" in text
        assert "first reached '1.bias' (8 NaN and 0 infinite of 8 numbers), and it spread to '0.weight' (64 NaN" in text
        assert "an optimizer has applied their average" in text
    else:
        assert told == []


def is_silent_while_a_scaler_looks_for_its_scale() -> None:
    for fused in (False, True):
        module = model()
        wrapped = dist.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=3e38)

        def step(module=module, wrapped=wrapped, optimizer=optimizer, scaler=scaler) -> None:
            optimizer.zero_grad()
            scaler.scale(wrapped(batches(4, 8)[0]).sum()).backward()
            odd = any(not each.grad.isfinite().all() for each in module.parameters())
            scaler.step(optimizer)
            scaler.update()
            assert odd

        assert warned(step) == []


def tells_what_something_wrote_to_a_parameter() -> None:
    module = model()
    wrapped = dist.DistributedDataParallel(module)
    with torch.no_grad():
        module[1].weight[2] = math.inf
    told = warned(lambda: wrapped(batches(4, 8)[0]).sum().backward())
    (text,) = told
    assert f"rank {dist.get_rank()}: 1 of 6 parameters had NaN or infinity before the backward of step 1" in text
    assert "first '1.weight' (0 NaN and 8 infinite of 64 numbers)" in text


def names_the_rank_of_a_shard() -> None:
    module = model()
    shards = dist.LogicalShards(module, 4)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = dist.ShardLoader(list(torch.randn(24, 8).sign()), batch_size=2, shards=shards)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return module(x).sum()

    def epoch() -> None:
        for step, each in enumerate(loader):
            optimizer.zero_grad()
            module[2].factor = math.nan if dist.get_rank() == 1 and step == 1 else 1.0
            shards.backward(loss_of, each)
            optimizer.step()

    told = warned(epoch)
    assert [("rank 1: in step 2" in text, "'1.bias'" in text) for text in told] == [(True, True)] * dist.get_rank()


def names_the_rank_with_zero(stage: int) -> None:
    module = model()
    optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=stage, lr=0.1)

    def steps() -> None:
        for step in range(2):
            optimizer.zero_grad()
            module[2].factor = math.nan if dist.get_rank() == 1 and step == 1 else 1.0
            module(batches(4, 8)[0]).sum().backward()
            optimizer.step()

    told = warned(steps)
    assert [("rank 1: in step 2" in text, "'1.bias'" in text) for text in told] == [(True, True)] * dist.get_rank()


def names_the_rank_of_a_sparse_gradient() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(16, 8, sparse=True), Middle(), nn.Linear(8, 8))
    wrapped = dist.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)

    def steps() -> None:
        for step in range(4):
            optimizer.zero_grad()
            module[1].factor = math.nan if dist.get_rank() == 1 and step == 1 else 1.0
            wrapped(torch.tensor([1, 3 + dist.get_rank()])).sum().backward()
            optimizer.step()

    told = warned(steps)
    assert len(told) == dist.get_rank()
    for text in told:
        assert "rank 1: in step 2 this rank's own gradients have NaN or infinity: those of 1 of 3 parameters" in text
        assert "first reached '0.weight' (16 NaN and 0 infinite of 16 numbers)" in text


GRADIENTS = OneWorld(
    *(functools.partial(names_only_the_rank_where_nan_arose, how) for how in OPTIONS),
    is_silent_while_a_scaler_looks_for_its_scale,
    tells_what_something_wrote_to_a_parameter,
    names_the_rank_of_a_shard,
    names_the_rank_of_a_sparse_gradient,
    *(functools.partial(names_the_rank_with_zero, stage) for stage in (2, 3)),
)


@pytest.mark.parametrize("case", GRADIENTS.programs)
def test_odd_gradients_are_laid_at_the_right_door(case):
    GRADIENTS.require(2, case)


# - Replicas


def make_steps(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer, count: int, after: Callable[[int], object] = lambda step: None
) -> None:
    for step in range(1, count + 1):
        optimizer.zero_grad()
        wrapped(batches(4, 8, step=step)[dist.get_rank()]).sum().backward()
        optimizer.step()
        after(step)


def names_the_rank_that_differs_once() -> None:
    module = mlp()
    wrapped = dist.DistributedDataParallel(module, checks=3)
    last = dist.get_world_size() - 1

    @torch.no_grad()
    def spoil(step: int) -> None:
        if step == 4 and dist.get_rank() == last:
            module[2].bias[5] += 1

    told = warned(lambda: make_steps(wrapped, torch.optim.SGD(wrapped.parameters(), 0.0), 12, spoil))
    assert len(told) == (dist.get_rank() == 0)
    for text in told:
        assert "the replicas of Sequential differ since step 6" in text
        assert "in 1 of 6 parameters, first in '2.bias' (at step 3 all were equal)" in text
        assert (
            "rank 2 differs from ranks 0 and 1" if last == 2 else "ranks 0 and 1 differ, and there is no majority"
        ) in text


def names_a_setting_of_the_optimizer() -> None:
    wrapped = dist.DistributedDataParallel(mlp(), checks=2)
    optimizer = torch.optim.Adam(wrapped.parameters(), 0.1 if dist.get_rank() else 0.2)
    told = warned(lambda: make_steps(wrapped, optimizer, 2))
    assert len(told) == (dist.get_rank() == 0)
    for text in told:
        assert "(this was the first comparison)" in text
        assert "values of the optimizer, first in 'lr' of Adam" in text


def leaves_alone_what_may_differ() -> None:
    """Comparisons in every step cause no warnings, and do not block a rank that runs a forward pass alone."""
    odd = dist.get_rank() == 1
    torch.manual_seed(dist.get_rank())
    frozen = mlp()
    dist.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(frozen, ["0.weight"])
    if odd:
        frozen[0].weight.data += 1

    def train_each() -> None:
        for module in (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()), frozen):
            for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"broadcast_buffers": False}):
                wrapped = dist.DistributedDataParallel(module, checks=1, **options)
                optimizer = torch.optim.SGD([each for each in wrapped.parameters() if each.requires_grad], 0.1, 0.9)
                for step in range(4):
                    optimizer.zero_grad()
                    with wrapped.no_sync() if step == 2 else contextlib.nullcontext():
                        wrapped(batches(4, 8, step=step)[dist.get_rank()]).sum().backward()
                    if step != 2:
                        optimizer.step()
                    wrapped.eval()
                    if odd and step != 1:  # a later backward without averaging would be matched with this forward
                        wrapped(torch.ones(2, 8))  # this builds a graph, although no backward pass follows
                    wrapped.train()

    assert warned(train_each) == []


def compares_nothing_while_ranks_run_out_of_inputs() -> None:
    wrapped = dist.DistributedDataParallel(mlp(), checks=1)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)

    def uneven_then_even() -> None:
        with wrapped.join():
            make_steps(wrapped, optimizer, 2 + dist.get_rank())
        make_steps(wrapped, optimizer, 2)

    assert warned(uneven_then_even) == []


def compares_nothing_if_a_hook_may_average_in_part() -> None:
    def alone(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped = dist.DistributedDataParallel(mlp())
    wrapped.register_comm_hook(None, alone)
    assert warned(lambda: make_steps(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), 12)) == []
    told = []
    wrapped = dist.DistributedDataParallel(mlp(), checks=2)
    wrapped.register_comm_hook(None, alone)
    told = warned(lambda: make_steps(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), 4))
    assert len(told) == (dist.get_rank() == 0)


def compares_buffers_of_shards_as_well() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    shards = dist.LogicalShards(module, 4, checks=2)
    loader = dist.ShardLoader(list(torch.ones(48, 8)), batch_size=2, shards=shards)

    def epoch() -> None:
        for step, each in enumerate(loader):
            shards.backward(lambda x: module(x).sum(), each)
            if step == 2 and dist.get_rank() == 1:
                module[1].running_var += 1

    told = warned(epoch)
    assert len(told) == (dist.get_rank() == 0)
    assert all("buffers, first in '1.running_mean'" in text or "'1.running_var'" in text for text in told)


def compares_what_zero_leaves_whole(stage: int) -> None:
    os.environ["PACELINE_CHECKS"] = "2"
    try:
        module = mlp()
        optimizer = dist.ZeroRedundancyOptimizer(module, torch.optim.SGD, stage=stage, lr=0.0)
    finally:
        del os.environ["PACELINE_CHECKS"]

    @torch.no_grad()
    def spoil(step: int) -> None:
        if step == 3 and dist.get_rank() == 1 and stage < 3:  # below stage 3, the parameter is available here
            module[0].bias[2] += 1

    told = warned(lambda: make_steps(module, optimizer, 6, spoil))
    assert len(told) == (dist.get_rank() == 0 and stage < 3)
    for text in told:
        assert "the replicas of Sequential differ since step 4" in text
        assert "in 1 of 6 parameters, first in '0.bias' (at step 2 all were equal)" in text


def raises_on_every_rank_when_asked() -> None:
    module = mlp()
    wrapped = dist.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, 0.9)
    make_steps(wrapped, optimizer, 2)
    torch.manual_seed(0)
    assert dist.check_replicas(wrapped, optimizer) == []
    if dist.get_rank() == 1:
        optimizer.state[module[0].bias]["momentum_buffer"][0] += 1
        torch.rand(1)
    with pytest.raises(dist.ReplicasDifferError, match="first in 'momentum_buffer' of SGD for '0.bias'") as raised:
        dist.check_replicas(module, [optimizer])
    assert raised.value.ranks == ((1,) if dist.get_world_size() > 2 else (0, 1))
    assert [each.part for each in dist.check_replicas(module, random_state=True, raises=False)] == ["random states"]


def looks_at_types_shapes_and_signs() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    alike: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda each: each.view(2, 2),
        lambda each: each.view(torch.int32),
        torch._neg_view,
    )
    for change in alike:
        module = nn.Module()
        module.register_buffer("values", change(values.clone()) if dist.get_rank() == 1 else values.clone())
        with pytest.raises(dist.ReplicasDifferError, match="1 of 1 buffers, first in 'values'"):
            dist.check_replicas(module)
    module = nn.Module()
    module.register_buffer("values", torch._neg_view(-values) if dist.get_rank() == 1 else values)
    assert dist.check_replicas(module) == []


REPLICAS = OneWorld(
    looks_at_types_shapes_and_signs,
    names_the_rank_that_differs_once,
    names_a_setting_of_the_optimizer,
    leaves_alone_what_may_differ,
    compares_nothing_while_ranks_run_out_of_inputs,
    compares_nothing_if_a_hook_may_average_in_part,
    compares_buffers_of_shards_as_well,
    *(functools.partial(compares_what_zero_leaves_whole, stage) for stage in (1, 2, 3)),
    raises_on_every_rank_when_asked,
)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", REPLICAS.programs)
def test_replicas_are_compared_where_they_must_be_equal(case, size):
    REPLICAS.require(size, case)


def compare_over_gloo() -> list[str]:
    dist.init_process_group("gloo")
    wrapped = dist.DistributedDataParallel(mlp(), checks=2)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1 + dist.get_rank())
    return warned(lambda: make_steps(wrapped, optimizer, 3))


def test_other_engines_compare_replicas_too(ranks):
    first, second = ranks(2)(compare_over_gloo)
    assert len(first) == 1
    assert "ranks 0 and 1 differ" in first[0]
    assert second == []
