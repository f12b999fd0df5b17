"""Schedules that use plain messages: every algorithm and operation, on threads that represent ranks."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from schedule_wires import COUNT, HOSTS, Link, Links, Wire, pieces
from values import expected, make

from paceline.comm.engine.adapters.schedule_executor import PythonExecutor
from paceline.comm.engine.channel import DTYPE_CODES, NO_REDUCTION, CollectiveCall, ReduceOp
from paceline.comm.schedule.algorithms import ALGORITHMS, algorithms_offering
from paceline.comm.schedule.steps import Operation


def _run(algorithm: str, operation: Operation, op: ReduceOp, size: int, root: int) -> list[list[torch.Tensor]]:
    """Returns the final contents of every rank's output tensors."""
    links: Links = defaultdict(Link)
    for pair in ((a, b) for a in range(size) for b in range(size)):
        links[pair]

    def rank_main(rank: int) -> list[torch.Tensor]:
        in_place = operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
        at_root = root in (-1, rank)
        many_in = operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL, Operation.SCATTER)
        many_out = operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.GATHER)
        inputs = [make(torch.float32, COUNT, 10 * rank + each) for each in range(size if many_in else 1)]
        outputs = [torch.zeros(COUNT) for _ in range(size if many_out else 1)]
        if in_place:
            outputs, inputs = inputs, []
        if operation is Operation.SCATTER and not at_root:
            inputs = []
        if operation is Operation.GATHER and not at_root:
            outputs = []
        call = CollectiveCall(
            operation,
            DTYPE_CODES[torch.float32],
            op,
            root,
            0 if operation is Operation.ALL_TO_ALL else COUNT,
            10**10,
            [pieces(each) for each in inputs],
            [pieces(each) for each in outputs],
        )
        PythonExecutor(Wire(links, rank), rank, HOSTS[size], algorithm).run(call, time.monotonic_ns() + 10**10)
        return outputs

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(rank_main, range(size)))


def _wanted(operation: Operation, op: ReduceOp, size: int, root: int, rank: int) -> list[torch.Tensor]:
    def tensor(of: int, part: int = 0) -> torch.Tensor:
        return make(torch.float32, COUNT, 10 * of + part)

    def reduced(part: int) -> torch.Tensor:
        return expected(ReduceOp(op), [tensor(of, part) for of in range(size)])

    match operation:
        case Operation.ALL_REDUCE:
            return [reduced(0)]
        case Operation.REDUCE:
            return [reduced(0) if rank == root else tensor(rank)]
        case Operation.BROADCAST:
            return [tensor(root)]
        case Operation.ALL_GATHER:
            return [tensor(of) for of in range(size)]
        case Operation.GATHER:
            return [tensor(of) for of in range(size)] if rank == root else []
        case Operation.SCATTER:
            return [tensor(root, rank)]
        case Operation.REDUCE_SCATTER:
            return [reduced(rank)]
        case _:
            return [tensor(of, rank) for of in range(size)]


_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)

_ROOTED = (Operation.REDUCE, Operation.BROADCAST, Operation.GATHER, Operation.SCATTER)

_OPERATIONS = [operation for operation in Operation if operation is not Operation.BARRIER]


@pytest.mark.parametrize("size", list(HOSTS))
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_schedule_runs_in_the_order_of_its_steps(algorithm, size):
    for operation in _OPERATIONS:
        if algorithm not in algorithms_offering(operation):
            continue
        for op in (ReduceOp.SUM, ReduceOp.AVG) if operation in _REDUCING else (NO_REDUCTION,):
            root = size - 1 if operation in _ROOTED else -1
            for rank, outputs in enumerate(_run(algorithm, operation, op, size, root)):
                wanted = _wanted(operation, op, size, root, rank)
                torch.testing.assert_close(outputs, wanted, msg=lambda text, at=(operation, op, rank): f"{at}: {text}")
