"""Calls inside functions that are compiled by torch.compile."""

from __future__ import annotations

import torch

import paceline


def calls(x: torch.Tensor) -> list[torch.Tensor]:
    """Runs each kind of call between computations that can be compiled."""
    rank, size = paceline.get_rank(), paceline.get_world_size()
    summed = x * 2
    paceline.all_reduce(summed)
    work = paceline.all_reduce(summed, async_op=True)
    work.wait()
    gathered = torch.empty(size * x.numel())
    paceline.all_gather_into_tensor(gathered, x + 1)
    mine = x + 10 * rank
    paceline.broadcast(mine, 1)
    paceline.all_reduce_coalesced([mine, gathered])
    passed = torch.empty_like(x)
    if rank == 0:
        paceline.send(x + 5, 1)
    else:
        paceline.recv(passed, 0)
        passed = passed * 2
    objects: list[object] = [None] * size
    paceline.all_gather_object(objects, rank)
    paceline.barrier()
    return [summed + 1, gathered, mine, torch.tensor(objects), passed * rank if rank else x]


def compiled_calls() -> None:
    paceline.init_process_group()
    x = torch.ones(3) * (1 + paceline.get_rank())
    expected = calls(x)
    for seen, wanted in zip(torch.compile(calls, backend="eager")(x), expected, strict=True):
        torch.testing.assert_close(seen, wanted, equal_nan=True)


def test_calls_inside_compiled_functions_break_the_graph(ranks):
    ranks(2)(compiled_calls)
