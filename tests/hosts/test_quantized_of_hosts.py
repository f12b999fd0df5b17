"""Sums that are rounded between hosts: errors, bitwise equality on all ranks, and rejected arguments."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from one_world import OneWorld, name_of
from torch import nn

import paceline as dist
from hosts.talking import rank
from hosts.telling import told_by

KINDS = ("bf16", "int8", "int4")
HALF_STEP = {"bf16": 1 / 256, "int8": 1.01 / 254, "int4": 1.01 / 14}  # relative to the largest magnitude in a group
COUNTS = [0, 1, 5, 63, 64, 65, 1023, 70_001]


def contribution(count: int, of: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + of)
    return (2 * torch.rand(count, generator=generator) - 1).to(dtype)


def tolerance(kind: str, dtype: torch.dtype) -> float:
    """Returns the maximum error of a sum. All contributions are below 1, and each is rounded at most twice."""
    return 2 * dist.get_world_size() * (HALF_STEP[kind] + 2 * torch.finfo(dtype).eps)


def same_bits_everywhere(tensor: torch.Tensor) -> None:
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, tensor)
    for output in outputs:
        assert torch.equal(output.view(torch.uint8), tensor.view(torch.uint8))


def sum_with_small_errors(kind: str) -> None:
    n = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in COUNTS:
            exact = sum(contribution(count, of, dtype).double() for of in range(n))
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensor = contribution(count, rank(), dtype)
                dist.all_reduce(tensor, op, wire=kind)
                wanted = exact if op is dist.ReduceOp.SUM else exact / n
                assert count == 0 or (tensor.double() - wanted).abs().max() <= tolerance(kind, dtype), (dtype, count)
                same_bits_everywhere(tensor)


def scatter_and_gather_with_small_errors(kind: str) -> None:
    n = dist.get_world_size()
    for count in COUNTS:
        inputs = [contribution(count, 10 * rank() + to) for to in range(n)]
        before = [each.clone() for each in inputs]
        output = torch.empty(count)
        dist.reduce_scatter(output, inputs, wire=kind)
        exact = sum(contribution(count, 10 * of + rank()) for of in range(n))
        assert count == 0 or (output - exact).abs().max() <= tolerance(kind, torch.float32)
        assert all(map(torch.equal, inputs, before))
        whole = torch.empty(n * count)
        own = contribution(count, rank())
        dist.all_gather_into_tensor(whole, own, wire=kind)
        assert torch.equal(own, contribution(count, rank()))
        exact = torch.cat([contribution(count, of) for of in range(n)])
        assert count == 0 or (whole - exact).abs().max() <= HALF_STEP[kind]
        same_bits_everywhere(whole)


def sum_lists_views_and_later() -> None:
    n = dist.get_world_size()
    sizes = [3, 0, 100_001, 1, 63]
    tensors = [contribution(size, rank()) for size in sizes]
    square = contribution(900, rank()).view(30, 30)
    works = [
        dist.all_reduce(tensors, async_op=True, wire="int8"),
        dist.all_reduce(square.t(), async_op=True, wire=dist.Wire("bf16")),
    ]
    for work in works:
        work.wait()
    for size, tensor in zip([*sizes, 900], [*tensors, square], strict=True):
        exact = sum(contribution(size, of) for of in range(n))
        assert size == 0 or (tensor.view(-1) - exact).abs().max() <= tolerance("int8", torch.float32)
        same_bits_everywhere(tensor.contiguous())


def of_unequal_magnitudes() -> torch.Tensor:
    """Next to 100, int4 rounds 0.1 to zero until the residual has grown to half a step of 100 / 7.

    Each separately rounded part of the tensor contains a 100, regardless of the number of ranks.
    """
    tensor = torch.full((128,), 0.1)
    tensor[::16] = 100.0
    return tensor * (1 + rank())


def lose_nothing_over_many_calls_with_feedback() -> None:
    calls, weights = 500, sum(1 + of for of in range(dist.get_world_size()))
    exact = calls * weights * of_unequal_magnitudes() / (1 + rank())
    wire = dist.Wire("int4")
    call_tensor = of_unequal_magnitudes()
    persistent = dist.all_reduce_init(call_tensor, wire="int4")
    totals = torch.zeros(3, 128, dtype=torch.float64)
    for _ in range(calls):
        for at, kind in enumerate(("int4", wire)):
            tensor = of_unequal_magnitudes()
            dist.all_reduce(tensor, wire=kind)
            totals[at] += tensor
        call_tensor.copy_(of_unequal_magnitudes())
        persistent()
        totals[2] += call_tensor
    one_call = 2 * 100 * weights * HALF_STEP["int4"] * 1.2
    assert exact.min() > 2 * one_call
    assert (totals[1] - exact).abs().max() <= one_call
    assert torch.equal(totals[1], totals[2])
    assert not totals[0].view(8, 16)[:, 1:].any()  # without feedback, small values are always rounded to zero
    assert wire.residual is not None and wire.residual.shape == (128,)
    wire.reset()
    assert wire.residual is None


def refuse_what_cannot_be_rounded() -> None:
    for tensor, op, named in [
        (torch.ones(4, dtype=torch.int64), dist.ReduceOp.SUM, "torch.int64 with SUM"),
        (torch.ones(4, dtype=torch.bool), dist.ReduceOp.SUM, "torch.bool with SUM"),
        (torch.ones(4, dtype=torch.float64), dist.ReduceOp.AVG, "torch.float64 with AVG"),
        (torch.ones(4, dtype=torch.complex64), dist.ReduceOp.SUM, "torch.complex64 with SUM"),
        (torch.ones(4), dist.ReduceOp.MAX, "torch.float32 with MAX"),
    ]:
        with pytest.raises(TypeError, match=f"all_reduce: wire='int8' was given for {named}; only sums"):
            dist.all_reduce(tensor, op, wire="int8")
    with pytest.raises(ValueError, match="wire is 'int3'; it must be one of bf16, int8, int4"):
        dist.all_reduce(torch.ones(4), wire="int3")
    with pytest.raises(TypeError, match="layout torch.sparse_coo"):
        dist.all_reduce(torch.ones(4).to_sparse(), wire="int8")
    dist.barrier()


def round_by_the_group_only_long_sums() -> None:
    group = dist.new_group(wire="int4")
    n = dist.get_world_size()
    assert group.wire == "int4" and dist.GroupMember.WORLD.wire is None
    for count in (64, 100_000):
        exact = sum(contribution(count, of).double() for of in range(n))
        for later in (False, True):
            tensor = contribution(count, rank())
            work = dist.all_reduce(tensor, group=group, async_op=later)
            if later:
                work.wait()
            error = (tensor - exact).abs().max()
            assert (error > 0.01) == (count > 1024) and error <= tolerance("int4", torch.float32)
    for tensor, op in (
        (torch.arange(5000), dist.ReduceOp.SUM),
        (torch.arange(5000).double(), dist.ReduceOp.SUM),
        (torch.arange(5000).float(), dist.ReduceOp.MAX),
    ):
        reduced = tensor.clone()
        dist.all_reduce(reduced, op, group=group)
        assert torch.equal(reduced, tensor * n if op is dist.ReduceOp.SUM else tensor)
    own = contribution(5000, rank())
    outputs = [torch.empty(5000) for _ in range(n)]
    dist.all_gather(outputs, own, group=group)
    assert torch.equal(outputs[rank()], own)  # exact, unless the call requests otherwise


def descend(wire: str | None, steps: int = 60) -> torch.Tensor:
    """The gradients do not depend on the weights, so their sum shows the accumulated rounding error."""
    model = nn.Linear(128, 1, bias=False)
    nn.init.zeros_(model.weight)
    replica = dist.DistributedDataParallel(model, wire=wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        replica(of_unequal_magnitudes().view(1, -1)).sum().backward()
        optimizer.step()
    return model.weight.detach()


def train_as_without_rounding() -> None:
    exact, rounded = descend(None), descend("int4")
    same_bits_everywhere(rounded)
    # After 60 steps, weights with small gradients differ from the exact ones by the rounding error of one or two steps.
    assert (exact - rounded).abs().max() <= 3 * 100 * dist.get_world_size() * HALF_STEP["int4"]
    assert not torch.equal(exact, rounded)
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="wire='int8' was given with deterministic=True"):
        dist.DistributedDataParallel(model, deterministic=True, logical_shards=8, wire="int8")
    with pytest.raises(TypeError, match="the parameter 'weight' is of torch.float64 on cpu"):
        dist.DistributedDataParallel(nn.Linear(4, 4).double(), wire="int8")
    with pytest.raises(ValueError, match="register_comm_hook was called on a module with wire='int8'"):
        dist.DistributedDataParallel(model, wire="int8").register_comm_hook(None, lambda state, bucket: bucket.buffer())


PROGRAMS = [
    *(partial(sum_with_small_errors, kind) for kind in KINDS),
    *(partial(scatter_and_gather_with_small_errors, kind) for kind in KINDS),
    sum_lists_views_and_later,
    lose_nothing_over_many_calls_with_feedback,
    refuse_what_cannot_be_rounded,
    round_by_the_group_only_long_sums,
    train_as_without_rounding,
]
QUANTIZED = OneWorld(*PROGRAMS)


@pytest.mark.parametrize("program", list(map(name_of, PROGRAMS)))
@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (2, 1, 1)], ids=str)
def test_between_hosts(hosts, program, layout):
    QUANTIZED.require(layout, program)


def differ_in_what_is_on_the_wire() -> list[tuple[str, str, float]]:
    dist.init_process_group()
    told = []
    for usual, odd in (({"wire": "int8"}, {"wire": "int4"}), ({}, {"wire": "bf16"})):
        group = dist.new_group()
        mine = odd if rank() == 1 else usual

        def call(group: dist.ProcessGroup = group, mine: dict[str, str] = mine) -> None:
            dist.all_reduce(torch.ones(500), group=group, **mine)
            dist.barrier(group)  # this raises the error on ranks that had already completed their part

        told.append(told_by(call))
        dist.destroy_process_group(group)
    dist.barrier()
    return told


def test_ranks_that_differ_in_wire_are_named(hosts):
    for (first, first_message, _), (second, second_message, _) in hosts(2, 1)(differ_in_what_is_on_the_wire):
        assert first == second == "CollectiveMismatchError", (first_message, second_message)
        assert "rank 0 (h0, pid " in first_message and "with wire='int8'" in first_message
        assert "rank 1 (h1, pid " in first_message and "with wire='int4'" in first_message
        assert "with wire='bf16'" in second_message and second_message.count(" called ") == 2


def round_nothing_on_one_host() -> None:
    dist.init_process_group()
    exact = contribution(10_000, rank())
    dist.all_reduce(exact)
    for wire in ("int4", dist.Wire("int8")):
        tensor = contribution(10_000, rank())
        dist.all_reduce(tensor, wire=wire)
        assert torch.equal(tensor, exact)
    with pytest.raises(dist.CollectiveMismatchError, match="with wire='int8'"):
        dist.all_reduce(torch.ones(4), wire="int8" if rank() == 0 else None)
    dist.barrier()  # the group remains usable


def test_one_host_rounds_nothing_but_compares_wires(ranks):
    ranks(2)(round_nothing_on_one_host)


def ask_other_engines_for_a_wire() -> None:
    with pytest.raises(ValueError, match="wire='int8' needs the engine 'paceline'"):
        dist.init_process_group("gloo", wire="int8")
    with pytest.raises(ValueError, match="wire is 'int2'; it must be one of bf16, int8, int4"):
        dist.init_process_group(wire="int2")
    dist.init_process_group("gloo")
    with pytest.raises(ValueError, match=r"rank \d: wire='bf16' needs CPU tensors and the engine 'paceline'"):
        dist.all_reduce(torch.ones(4), wire="bf16")
    dist.barrier()


def test_other_engines_say_that_they_do_not_round(ranks):
    ranks(2)(ask_other_engines_for_a_wire)
