"""Runs collectives by schedule over bare sends and receives, for operations that an engine's library lacks.

Steps start in their order, which is stricter than a schedule requires (`schedule/steps.py`), and each waits only for
the earlier steps whose blocks it needs. Every block is one message, so both ends split the data alike whatever the
layout of their memory.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from paceline import _core
from paceline.engine.adapters.flat_buffer import FlatBuffer
from paceline.engine.algorithms import ALL_TO_ALL_NBYTES, UNMEASURED
from paceline.engine.channel import Call
from paceline.engine.codes import ITEM_SIZES, ReduceOp
from paceline.schedule.cost import choose
from paceline.schedule.registry import build, offers
from paceline.schedule.steps import Buffer, Kind, Operation, Schedule, Slice, Step

_CUT = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)


class Transfer(Protocol):
    """A message in progress."""

    def wait(self, deadline_ns: int) -> None:
        """Waits until the message is over, but no longer than `deadline_ns` of the monotonic clock.

        Raises:
            CallTimeout, LibraryError: as for `SerialChannel.perform`.
        """


class Wire(Protocol):
    """The messages that an engine must offer: they arrive in the order of their sends and proceed independently."""

    def send(self, peer: int, address: int, nbytes: int) -> Transfer:
        """Starts a send of `nbytes` bytes at `address` to a group rank."""
        ...

    def receive(self, peer: int, address: int, nbytes: int) -> Transfer:
        """Starts a receive of `nbytes` bytes to `address` from a group rank."""
        ...


class Spans(NamedTuple):
    """The address and the number of bytes of each block, for each of the three buffers."""

    blocks: tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]

    def of(self, blocks: Slice | None) -> list[tuple[int, int]]:
        """Returns the spans of a slice's blocks."""
        return [] if blocks is None else self.blocks[blocks.buffer][blocks.first : blocks.first + blocks.length]


class PythonExecutor:
    """Runs a group's calls by schedule over its `wire`.

    Args:
        wire: the engine's sends and receives.
        rank: the group rank of this process.
        hosts: the group ranks of each host.
        algorithm: the algorithm for every operation that it offers; by default the one expected to be the fastest.
    """

    def __init__(self, wire: Wire, rank: int, hosts: Sequence[Sequence[int]], algorithm: str | None = None) -> None:
        self._wire = wire
        self._rank = rank
        self._hosts = [list(ranks) for ranks in hosts]
        self._size = sum(map(len, hosts))
        self._forced = algorithm
        self._algorithm = functools.lru_cache(1024)(self._choose)
        self._schedule = functools.lru_cache(256)(self._build)

    def run(self, call: Call, deadline_ns: int) -> None:
        """Runs any call but a barrier to its end.

        Raises:
            CallTimeout, LibraryError: as for `SerialChannel.perform`.
        """
        operation = call.operation
        nbytes = call.count * ITEM_SIZES[call.dtype]
        longest = nbytes if operation in _CUT else nbytes * self._size if call.count else ALL_TO_ALL_NBYTES
        schedule = self._schedule(self._algorithm(operation, longest), operation, call.root)
        read_only = operation is Operation.REDUCE and call.root != self._rank
        inputs = [FlatBuffer([each]).copy_in() for each in (call.outputs if read_only else call.inputs)]
        outputs = [FlatBuffer([each]) for each in (() if read_only else call.outputs)]
        if operation in _CUT:
            for each in outputs:
                each.copy_in()
        scratch = torch.empty(nbytes if operation in _CUT else nbytes * self._size, dtype=torch.uint8, device="cpu")
        spans = Spans((_cut(inputs, call, schedule), _cut(outputs, call, schedule), _room(scratch, call, schedule)))
        _Execution(schedule, spans, self._wire, call, deadline_ns).run()
        for each in outputs:
            each.copy_out()

    def _choose(self, operation: Operation, nbytes: int) -> str:
        forced = self._forced if self._forced in offers(operation) else None
        return choose(UNMEASURED, operation, nbytes, self._size, self._hosts, forced).algorithm

    def _build(self, algorithm: str, operation: Operation, root: int) -> Schedule:
        return build(algorithm, operation, self._rank, self._size, root, self._hosts)


class _Started(NamedTuple):
    """A step whose messages are in progress."""

    step: Step
    transfers: list[Transfer]
    received: list[torch.Tensor]


class _Execution:
    def __init__(self, schedule: Schedule, spans: Spans, wire: Wire, call: Call, deadline_ns: int) -> None:
        self._schedule = schedule
        self._spans = spans
        self._wire = wire
        self._call = call
        self._deadline_ns = deadline_ns
        self._started: list[_Started] = []

    def run(self) -> None:
        for step in self._schedule.steps:
            self._finish([each for each in self._started if _conflict(each.step, step)])
            self._start(step)
        self._finish(list(self._started))

    def _start(self, step: Step) -> None:
        sources, targets = self._spans.of(step.src), self._spans.of(step.dst)
        if step.kind is Kind.COPY:
            for (source, nbytes), (target, _) in zip(sources, targets, strict=True):
                ctypes.memmove(target, source, nbytes)
            return
        transfers: list[Transfer] = []
        received: list[torch.Tensor] = []
        if step.kind is Kind.SEND:
            transfers = [self._wire.send(step.peer, *span) for span in sources if span[1]]
        elif step.kind is Kind.RECV:
            transfers = [self._wire.receive(step.peer, *span) for span in targets if span[1]]
        else:
            received = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _, nbytes in targets]
            transfers = [
                self._wire.receive(step.peer, each.data_ptr(), each.nbytes) for each in received if each.nbytes
            ]
        self._started.append(_Started(step, transfers, received))

    def _finish(self, started: Sequence[_Started]) -> None:
        for each in started:
            for transfer in each.transfers:
                transfer.wait(self._deadline_ns)
            if each.received:
                self._combine(each.step, each.received)
            self._started.remove(each)

    def _combine(self, step: Step, received: Sequence[torch.Tensor]) -> None:
        op = self._call.reduce_op
        if op == ReduceOp.PREMUL_SUM or (op == ReduceOp.AVG and not step.final):
            op = ReduceOp.SUM
        item_size = ITEM_SIZES[self._call.dtype]
        for (source, _), (target, nbytes), other in zip(
            self._spans.of(step.src), self._spans.of(step.dst), received, strict=True
        ):
            sources = [source, other.data_ptr()]
            _core.reduce(target, sources, nbytes // item_size, self._call.dtype, op, self._schedule.world_size)


def _conflict(earlier: Step, later: Step) -> bool:
    """Returns whether two steps touch the same blocks and at least one of them writes there."""
    written, also_written = _blocks(earlier.dst), _blocks(later.dst)
    touched, also_touched = written | _blocks(earlier.src), also_written | _blocks(later.src)
    return bool(written & also_touched or touched & also_written)


@functools.lru_cache(4096)
def _blocks(blocks: Slice | None) -> frozenset[tuple[Buffer, int]]:
    if blocks is None:
        return frozenset()
    return frozenset((blocks.buffer, blocks.first + at) for at in range(blocks.length))


def _cut(stretches: Sequence[FlatBuffer], call: Call, schedule: Schedule) -> list[tuple[int, int]]:
    if call.operation not in _CUT:
        return [(each.address, each.nbytes) for each in stretches]
    return [span for each in stretches for span in _nearly_equal(each.address, call, schedule.blocks)]


def _room(scratch: torch.Tensor, call: Call, schedule: Schedule) -> list[tuple[int, int]]:
    if call.operation in _CUT:
        return _nearly_equal(scratch.data_ptr(), call, schedule.blocks)
    each = call.count * ITEM_SIZES[call.dtype]
    return [(scratch.data_ptr() + rank * each, each) for rank in range(schedule.world_size)]


def _nearly_equal(address: int, call: Call, blocks: int) -> list[tuple[int, int]]:
    item_size = ITEM_SIZES[call.dtype]
    bounds = [call.count * block // blocks * item_size for block in range(blocks + 1)]
    return [(address + first, end - first) for first, end in itertools.pairwise(bounds)]
