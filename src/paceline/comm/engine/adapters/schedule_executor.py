"""Runs schedules over plain sends and receives, for operations that an engine's library lacks.

Steps start in order, although a schedule does not require this (`comm/schedule/steps.py`). Each step waits only for
earlier steps on the same blocks. Every block is sent as one message, so both ends divide the data in the same way,
regardless of their memory layout. `FlatBuffer` presents a tensor in several pieces as one contiguous buffer.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from paceline import _core
from paceline.comm.engine.channel import ITEM_SIZES, CollectiveCall, Pieces, ReduceOp
from paceline.comm.engine.network_settings import ALL_TO_ALL_NBYTES, UNMEASURED
from paceline.comm.schedule.algorithms import algorithms_offering, build, choose
from paceline.comm.schedule.steps import Buffer, BufferSlice, Operation, Schedule, Step, StepKind


def tensor_at(address: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Returns a flat tensor that is a view of CPU memory; the caller must keep the memory alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)


class FlatBuffer:
    """Presents pieces as one contiguous buffer, which is a copy unless the pieces are already contiguous.

    `copy_in` fills the copy and `copy_out` writes it back; both do nothing if there is no copy.
    """

    def __init__(self, pieces: Iterable[Pieces]) -> None:
        self._pieces = adjacent_spans(pieces)
        self.nbytes = sum(nbytes for _, nbytes in self._pieces)
        self._copy: torch.Tensor | None = None
        if len(self._pieces) > 1:
            self._copy = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            self.address = self._copy.data_ptr()
        else:
            self.address = self._pieces[0][0] if self._pieces else 0

    def copy_in(self) -> FlatBuffer:
        """Fills the copy from the pieces and returns this buffer."""
        target = self.address
        for address, nbytes in self._pieces if self._copy is not None else ():
            ctypes.memmove(target, address, nbytes)
            target += nbytes
        return self

    def copy_out(self) -> None:
        """Writes the copy back to the pieces."""
        source = self.address
        for address, nbytes in self._pieces if self._copy is not None else ():
            ctypes.memmove(address, source, nbytes)
            source += nbytes

    def tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns the buffer as a flat tensor of `dtype`, without a further copy."""
        if self._copy is not None:
            return self._copy.view(dtype)
        return tensor_at(self.address, self.nbytes, dtype)


def adjacent_spans(pieces: Iterable[Pieces]) -> list[tuple[int, int]]:
    """Returns the pieces' addresses and their lengths in bytes; pieces that are adjacent in memory are merged."""
    joined: list[tuple[int, int]] = []
    for tensor in pieces:
        for address, nbytes in zip(tensor[::2], tensor[1::2], strict=True):
            if nbytes and joined and sum(joined[-1]) == address:
                joined[-1] = joined[-1][0], joined[-1][1] + nbytes
            elif nbytes:
                joined.append((address, nbytes))
    return joined


_DIVISIBLE = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST)  # can be divided into blocks of any size


class BlockTransfer(Protocol):
    """A message in progress."""

    def wait(self, deadline_ns: int) -> None:
        """Waits for the message to complete, at most until `deadline_ns` (on the monotonic clock).

        Raises:
            CallTimeout, LibraryError: see `SerialChannel.perform`.
        """


class BlockTransport(Protocol):
    """Interface through which schedules send messages. Messages arrive in order and proceed without further calls."""

    def send(self, peer: int, address: int, nbytes: int) -> BlockTransfer:
        """Starts a send of `nbytes` bytes at `address` to a group rank."""
        ...

    def receive(self, peer: int, address: int, nbytes: int) -> BlockTransfer:
        """Starts a receive of `nbytes` bytes into `address` from a group rank."""
        ...


_Spans = list[tuple[int, int]]
"""The address and the number of bytes of each block in a buffer."""


class PythonExecutor:
    """Runs a group's calls as schedules over a transport.

    Args:
        hosts: the group ranks on each host.
        algorithm: the algorithm to use for every operation that it implements. The default is the algorithm that is
            predicted to be the fastest.
    """

    def __init__(
        self, transport: BlockTransport, rank: int, hosts: Sequence[Sequence[int]], algorithm: str | None = None
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._hosts = [list(ranks) for ranks in hosts]
        self._size = sum(map(len, hosts))
        self._forced = algorithm
        self._algorithm = functools.lru_cache(1024)(self._choose)
        self._schedule = functools.lru_cache(256)(self._build)

    def run(self, call: CollectiveCall, deadline_ns: int) -> None:
        """Runs a call to completion; the call may be any operation except a barrier.

        Raises:
            CallTimeout, LibraryError: see `SerialChannel.perform`.
        """
        operation = call.operation
        nbytes = call.count * ITEM_SIZES[call.dtype]
        longest = nbytes if operation in _DIVISIBLE else nbytes * self._size if call.count else ALL_TO_ALL_NBYTES
        schedule = self._schedule(self._algorithm(operation, longest), operation, call.root)
        read_only = operation is Operation.REDUCE and call.root != self._rank
        inputs = [FlatBuffer([pieces]).copy_in() for pieces in (call.outputs if read_only else call.inputs)]
        outputs = [FlatBuffer([pieces]) for pieces in (() if read_only else call.outputs)]
        if operation in _DIVISIBLE:
            for output in outputs:
                output.copy_in()
        scratch = torch.empty(
            nbytes if operation in _DIVISIBLE else nbytes * self._size, dtype=torch.uint8, device="cpu"
        )
        spans = _spans(inputs, call, schedule), _spans(outputs, call, schedule), _scratch_spans(scratch, call, schedule)
        _Execution(schedule, spans, self._transport, call, deadline_ns).run()
        for output in outputs:
            output.copy_out()

    def _choose(self, operation: Operation, nbytes: int) -> str:
        forced = self._forced if self._forced in algorithms_offering(operation) else None
        return choose(UNMEASURED, operation, nbytes, self._size, self._hosts, forced).algorithm

    def _build(self, algorithm: str, operation: Operation, root: int) -> Schedule:
        return build(algorithm, operation, self._rank, self._size, root, self._hosts)


class _StartedStep(NamedTuple):
    """A step whose messages are in progress."""

    step: Step
    transfers: list[BlockTransfer]
    received: list[torch.Tensor]


class _Execution:
    def __init__(
        self,
        schedule: Schedule,
        spans: tuple[_Spans, _Spans, _Spans],  # of the three buffers
        transport: BlockTransport,
        call: CollectiveCall,
        deadline_ns: int,
    ) -> None:
        self._schedule = schedule
        self._spans = spans
        self._transport = transport
        self._call = call
        self._deadline_ns = deadline_ns
        self._started: list[_StartedStep] = []

    def run(self) -> None:
        for step in self._schedule.steps:
            self._finish([started for started in self._started if _conflict(started.step, step)])
            self._start(step)
        self._finish(list(self._started))

    def _spans_of(self, blocks: BufferSlice | None) -> _Spans:
        return [] if blocks is None else self._spans[blocks.buffer][blocks.first : blocks.first + blocks.length]

    def _start(self, step: Step) -> None:
        sources, targets = self._spans_of(step.src), self._spans_of(step.dst)
        if step.kind is StepKind.COPY:
            for (source, nbytes), (target, _) in zip(sources, targets, strict=True):
                ctypes.memmove(target, source, nbytes)
            return
        transfers: list[BlockTransfer] = []
        received: list[torch.Tensor] = []
        if step.kind is StepKind.SEND:
            transfers = [self._transport.send(step.peer, *span) for span in sources if span[1]]
        elif step.kind is StepKind.RECV:
            transfers = [self._transport.receive(step.peer, *span) for span in targets if span[1]]
        else:
            received = [torch.empty(nbytes, dtype=torch.uint8, device="cpu") for _, nbytes in targets]
            transfers = [
                self._transport.receive(step.peer, block.data_ptr(), block.nbytes) for block in received if block.nbytes
            ]
        self._started.append(_StartedStep(step, transfers, received))

    def _finish(self, started: Sequence[_StartedStep]) -> None:
        for entry in started:
            for transfer in entry.transfers:
                transfer.wait(self._deadline_ns)
            if entry.received:
                self._combine(entry.step, entry.received)
            self._started.remove(entry)

    def _combine(self, step: Step, received: Sequence[torch.Tensor]) -> None:
        op = self._call.reduce_op
        if op == ReduceOp.PREMUL_SUM or (op == ReduceOp.AVG and not step.final):
            op = ReduceOp.SUM
        item_size = ITEM_SIZES[self._call.dtype]
        for (source, _), (target, nbytes), other in zip(
            self._spans_of(step.src), self._spans_of(step.dst), received, strict=True
        ):
            sources = [source, other.data_ptr()]
            _core.reduce(target, sources, nbytes // item_size, self._call.dtype, op, self._schedule.world_size)


def divide_average(address: int, call: CollectiveCall, size: int) -> None:
    """For the reduction AVG, divides the sum at `address` by `size` in place."""
    if call.reduce_op == ReduceOp.AVG and call.count:
        _core.reduce(address, [address], call.count, call.dtype, ReduceOp.AVG, size)


def _conflict(earlier: Step, later: Step) -> bool:
    """Returns True if two steps access the same blocks and at least one of them writes."""
    written, also_written = _blocks(earlier.dst), _blocks(later.dst)
    touched, also_touched = written | _blocks(earlier.src), also_written | _blocks(later.src)
    return bool(written & also_touched or touched & also_written)


@functools.lru_cache(4096)
def _blocks(blocks: BufferSlice | None) -> frozenset[tuple[Buffer, int]]:
    if blocks is None:
        return frozenset()
    return frozenset((blocks.buffer, blocks.first + offset) for offset in range(blocks.length))


def _spans(buffers: Sequence[FlatBuffer], call: CollectiveCall, schedule: Schedule) -> _Spans:
    if call.operation not in _DIVISIBLE:
        return [(buffer.address, buffer.nbytes) for buffer in buffers]
    return [span for buffer in buffers for span in _nearly_equal(buffer.address, call, schedule.blocks)]


def _scratch_spans(scratch: torch.Tensor, call: CollectiveCall, schedule: Schedule) -> _Spans:
    if call.operation in _DIVISIBLE:
        return _nearly_equal(scratch.data_ptr(), call, schedule.blocks)
    nbytes = call.count * ITEM_SIZES[call.dtype]
    return [(scratch.data_ptr() + rank * nbytes, nbytes) for rank in range(schedule.world_size)]


def _nearly_equal(address: int, call: CollectiveCall, blocks: int) -> _Spans:
    item_size = ITEM_SIZES[call.dtype]
    bounds = [call.count * block // blocks * item_size for block in range(blocks + 1)]
    return [(address + first, end - first) for first, end in itertools.pairwise(bounds)]
