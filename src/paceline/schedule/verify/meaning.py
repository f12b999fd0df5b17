"""Says symbolically what the buffers of an operation hold before and after it, for the proof in `symbolic.py`.

A block's value is (identity, contributors): which block of the tensors it is, and the set of ranks, as bits, whose
contributions are summed in it.
"""

from __future__ import annotations

from typing import TypeAlias

from paceline.schedule.steps import Operation, Schedule

Value: TypeAlias = tuple[int, int]
Blocks: TypeAlias = list[Value | None]

REDUCING = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER))
CUT_LIKE_THE_TENSOR = frozenset((Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST))


def initial_buffers(schedule: Schedule) -> tuple[Blocks, Blocks, Blocks]:
    """Returns INPUT, OUTPUT and SCRATCH of the schedule's rank before its first step; None is undefined."""
    n, rank, blocks = schedule.world_size, schedule.rank, schedule.blocks
    is_root = rank == schedule.root
    tensor: Blocks = [(block, 1 << rank) for block in range(blocks)]
    of_each: Blocks = [(block, 1 << rank) for block in range(n)]
    own: Blocks = [(rank, 1 << rank)]
    match schedule.operation:
        case Operation.ALL_REDUCE:
            return [], tensor, [None] * blocks
        case Operation.REDUCE:
            return ([], tensor, [None] * blocks) if is_root else (tensor, [], [None] * blocks)
        case Operation.BROADCAST:
            return [], tensor if is_root else [None] * blocks, []
        case Operation.ALL_GATHER:
            return own, [None] * n, []
        case Operation.GATHER:
            return own, [None] * n if is_root else [], [None] * n
        case Operation.SCATTER:
            return of_each if is_root else [], [None], [None] * n
        case Operation.REDUCE_SCATTER:
            return of_each, [None], [None] * n
        case Operation.ALL_TO_ALL:
            return of_each, [None] * n, []
        case Operation.BARRIER:
            return [], [], []


def required_output(schedule: Schedule) -> Blocks:
    """Returns what OUTPUT of the schedule's rank must hold after its last step."""
    n, rank, root = schedule.world_size, schedule.rank, schedule.root
    everyone = (1 << n) - 1
    match schedule.operation:
        case Operation.ALL_REDUCE:
            return [(block, everyone) for block in range(schedule.blocks)]
        case Operation.REDUCE:
            return [(block, everyone) for block in range(schedule.blocks)] if rank == root else []
        case Operation.BROADCAST:
            return [(block, 1 << root) for block in range(schedule.blocks)]
        case Operation.ALL_GATHER:
            return [(source, 1 << source) for source in range(n)]
        case Operation.GATHER:
            return [(source, 1 << source) for source in range(n)] if rank == root else []
        case Operation.SCATTER:
            return [(rank, 1 << root)]
        case Operation.REDUCE_SCATTER:
            return [(rank, everyone)]
        case Operation.ALL_TO_ALL:
            return [(rank, 1 << source) for source in range(n)]
        case Operation.BARRIER:
            return []


def fits(operation: Operation, rank: int, index: int, value: Value) -> bool:
    """Returns whether a block of a writable buffer has the size of the value: not all blocks are equally long."""
    if operation in CUT_LIKE_THE_TENSOR:
        return value[0] == index
    return operation is not Operation.ALL_TO_ALL or value == (rank, 1 << index)
