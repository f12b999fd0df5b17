"""Runs a schedule in rounds for the pictures in this folder; in a round, each rank sends and receives one message.

The C++ core has no rounds: it runs each step as soon as possible. Rounds make an algorithm easier to explain.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.comm.schedule.algorithms import build
from paceline.comm.schedule.steps import ROOTED, Buffer, BufferSlice, Operation, Step, StepKind

Cell = tuple[int, Buffer, int]
"""A rank, one of its buffers, and a block of this buffer."""


@dataclass(frozen=True)
class Data:
    """The contents of a cell: the sum of part `part` of these ranks' tensors."""

    ranks: frozenset[int]
    part: int


@dataclass(frozen=True)
class Message:
    """Blocks in transit. If `adds` is true, the receiver adds them to its own blocks."""

    source: int
    target: int
    blocks: tuple[int, ...]
    into: tuple[int, ...]
    data: tuple[Data, ...]
    adds: bool


State = dict[Cell, Data]


@dataclass(frozen=True)
class Play:
    """The states before, between and after the rounds, and the messages of each round."""

    states: list[State]
    rounds: list[list[Message]]


def first_state(operation: Operation, n: int, blocks: int, root: int) -> State:
    """Returns the data on all ranks before the call, in the buffers described in comm/schedule/steps.py."""
    everywhere = range(n)
    parts = range(blocks)
    held = {
        Operation.ALL_REDUCE: [(rank, Buffer.OUTPUT, part) for rank in everywhere for part in parts],
        Operation.BROADCAST: [(root, Buffer.OUTPUT, part) for part in parts],
        Operation.REDUCE: [
            (rank, Buffer.OUTPUT if rank == root else Buffer.INPUT, part) for rank in everywhere for part in parts
        ],
        Operation.ALL_GATHER: [(rank, Buffer.INPUT, 0) for rank in everywhere],
        Operation.GATHER: [(rank, Buffer.INPUT, 0) for rank in everywhere],
        Operation.SCATTER: [(root, Buffer.INPUT, part) for part in everywhere],
        Operation.REDUCE_SCATTER: [(rank, Buffer.INPUT, part) for rank in everywhere for part in everywhere],
        Operation.ALL_TO_ALL: [(rank, Buffer.INPUT, part) for rank in everywhere for part in everywhere],
    }
    return {cell: Data(frozenset({cell[0]}), cell[2]) for cell in held[operation]}


def play(algorithm: str, operation: Operation, n: int, root: int = 0) -> Play:
    """Runs the schedules of all ranks to completion.

    Raises:
        RuntimeError: steps wait for each other, which never happens in a correct schedule.
    """
    schedules = [build(algorithm, operation, rank, n, root if operation in ROOTED else -1) for rank in range(n)]
    left = [list(schedule.steps) for schedule in schedules]
    state = first_state(operation, n, schedules[0].blocks, root)
    _copy_what_is_ready(left, state)
    states, rounds = [dict(state)], []
    while any(left):
        pairs = _of_a_round(left)
        if not pairs:
            raise RuntimeError(f"{algorithm} {operation} of {n} ranks cannot continue: its steps wait for each other")
        rounds.append([_message(state, rank, sent, received) for rank, sent, received in pairs])
        for rank, sent, received in pairs:
            left[rank].remove(sent)
            left[sent.peer].remove(received)
        for message, (_, sent, received) in zip(rounds[-1], pairs, strict=True):
            _receive(state, sent.peer, received, message)
        _copy_what_is_ready(left, state)
        states.append(dict(state))
    return Play(states, rounds)


def cells(rank: int, where: BufferSlice) -> list[Cell]:
    """Returns the cells of a slice of a rank's buffer."""
    return [(rank, where.buffer, block) for block in range(where.first, where.first + where.length)]


def _reads_and_writes(step: Step) -> tuple[set[Cell], set[Cell]]:
    reads = set(cells(0, step.src)) if step.src is not None else set()
    writes = set(cells(0, step.dst)) if step.dst is not None else set()
    return reads, writes


def _ready(steps: list[Step]) -> list[Step]:
    """Returns the steps that can run: no earlier step of the rank uses the same bytes or the same peer."""
    found: list[Step] = []
    read: set[Cell] = set()
    written: set[Cell] = set()
    links: set[tuple[bool, int]] = set()
    for step in steps:
        reads, writes = _reads_and_writes(step)
        link = (step.kind == StepKind.SEND, step.peer)
        if not (reads & written or writes & (read | written) or (step.peer >= 0 and link in links)):
            found.append(step)
        read, written, links = read | reads, written | writes, links | {link}
    return found


def _of_a_round(left: list[list[Step]]) -> list[tuple[int, Step, Step]]:
    """Returns the messages of a round: the sender, its step, and the receiver's step."""
    ready = [_ready(steps) for steps in left]
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    pairs = []
    for rank, steps in enumerate(ready):
        for step in steps:
            if step.kind != StepKind.SEND or sends[rank] or receives[step.peer]:
                continue
            taken = [
                each for each in ready[step.peer] if each.kind in (StepKind.RECV, StepKind.REDUCE) and each.peer == rank
            ]
            if taken:
                pairs.append((rank, step, taken[0]))
                sends[rank] += 1
                receives[step.peer] += 1
    return pairs


def _message(state: State, rank: int, sent: Step, received: Step) -> Message:
    assert sent.src is not None and received.dst is not None
    return Message(
        rank,
        sent.peer,
        tuple(block for _, _, block in cells(rank, sent.src)),
        tuple(block for _, _, block in cells(sent.peer, received.dst)),
        tuple(state[cell] for cell in cells(rank, sent.src)),
        received.kind == StepKind.REDUCE,
    )


def _receive(state: State, rank: int, step: Step, message: Message) -> None:
    assert step.dst is not None
    for at, cell in enumerate(cells(rank, step.dst)):
        ranks = message.data[at].ranks
        if step.kind == StepKind.REDUCE:
            assert step.src is not None
            ranks = ranks | state[cells(rank, step.src)[at]].ranks
        state[cell] = Data(ranks, message.data[at].part)


def _copy_what_is_ready(left: list[list[Step]], state: State) -> None:
    for rank, steps in enumerate(left):
        while found := [step for step in _ready(steps) if step.kind == StepKind.COPY]:
            for step in found:
                assert step.src is not None and step.dst is not None
                for target, source in zip(cells(rank, step.dst), cells(rank, step.src), strict=True):
                    state[target] = state[source]
                steps.remove(step)
