"""Schedules over plain messages: every algorithm and operation, on threads that represent ranks."""

from __future__ import annotations

import ctypes
import queue
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from values import expected, make

from paceline.comm.engine.adapters.schedule_executor import PythonExecutor
from paceline.comm.engine.adapters.serial_channel import CallTimeout
from paceline.comm.engine.channel import DTYPE_CODES, NO_REDUCTION, CollectiveCall, ReduceOp
from paceline.comm.schedule.algorithms import ALGORITHMS, algorithms_offering
from paceline.comm.schedule.steps import Operation

_COUNT = 5
_HOSTS = {2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 2], [1, 3]]}


class _Link:
    """A link between two ranks, which matches messages and receives in the order in which they are posted."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.posted: list[_Received] = []


class _Received:
    def __init__(self, link: _Link, address: int, nbytes: int) -> None:
        self.link, self.address, self.nbytes = link, address, nbytes
        link.posted.append(self)

    def wait(self, deadline_ns: int) -> None:
        while self in self.link.posted:
            try:
                data = self.link.messages.get(timeout=max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
            except queue.Empty:
                raise CallTimeout from None
            first = self.link.posted.pop(0)
            assert len(data) == first.nbytes
            ctypes.memmove(first.address, data, first.nbytes)


_Links = defaultdict[tuple[int, int], _Link]


class _Sent:
    def wait(self, deadline_ns: int) -> None:
        """Returns at once, because the message was buffered."""


class _Wire:
    """Links with unlimited buffers between threads."""

    def __init__(self, links: _Links, rank: int) -> None:
        self.links, self.rank = links, rank

    def send(self, peer: int, address: int, nbytes: int) -> _Sent:
        self.links[self.rank, peer].messages.put(ctypes.string_at(address, nbytes))
        return _Sent()

    def receive(self, peer: int, address: int, nbytes: int) -> _Received:
        return _Received(self.links[peer, self.rank], address, nbytes)


def _pieces(tensor: torch.Tensor) -> list[int]:
    """Splits a tensor into two pieces, like a list of tensors."""
    first = tensor[:2]
    rest = tensor[2:]
    return [first.data_ptr(), first.nbytes, rest.data_ptr(), rest.nbytes]


def _run(algorithm: str, operation: Operation, op: ReduceOp, size: int, root: int) -> list[list[torch.Tensor]]:
    """Returns the final contents of every rank's output tensors."""
    links: _Links = defaultdict(_Link)
    for pair in ((a, b) for a in range(size) for b in range(size)):
        links[pair]

    def rank_main(rank: int) -> list[torch.Tensor]:
        in_place = operation in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)
        at_root = root in (-1, rank)
        many_in = operation in (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL, Operation.SCATTER)
        many_out = operation in (Operation.ALL_GATHER, Operation.ALL_TO_ALL, Operation.GATHER)
        inputs = [make(torch.float32, _COUNT, 10 * rank + each) for each in range(size if many_in else 1)]
        outputs = [torch.zeros(_COUNT) for _ in range(size if many_out else 1)]
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
            0 if operation is Operation.ALL_TO_ALL else _COUNT,
            10**10,
            [_pieces(each) for each in inputs],
            [_pieces(each) for each in outputs],
        )
        PythonExecutor(_Wire(links, rank), rank, _HOSTS[size], algorithm).run(call, time.monotonic_ns() + 10**10)
        return outputs

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(rank_main, range(size)))


def _wanted(operation: Operation, op: ReduceOp, size: int, root: int, rank: int) -> list[torch.Tensor]:
    def tensor(of: int, part: int = 0) -> torch.Tensor:
        return make(torch.float32, _COUNT, 10 * of + part)

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


@pytest.mark.parametrize("size", list(_HOSTS))
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


def test_the_wait_for_an_absent_rank_ends_at_its_time_out():
    links: _Links = defaultdict(_Link)
    tensor = torch.ones(_COUNT)
    call = CollectiveCall(
        Operation.ALL_REDUCE, DTYPE_CODES[torch.float32], ReduceOp.SUM, -1, _COUNT, 0, [], [_pieces(tensor)]
    )
    with pytest.raises(CallTimeout):
        PythonExecutor(_Wire(links, 0), 0, _HOSTS[2]).run(call, time.monotonic_ns() + 50_000_000)
