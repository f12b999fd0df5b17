"""The core rejects invalid schedules, and never hangs in a schedule that was not verified."""

from __future__ import annotations

import socket
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline import _core
from paceline.comm.engine.channel import DTYPE_CODES, NO_REDUCTION, CollectiveCall, OutcomeCode, ReduceOp
from paceline.comm.engine.failures import RankIdentity, to_error
from paceline.comm.schedule.steps import Operation

SEND, RECEIVE, REDUCE, COPY, PACK, UNPACK, ADD = range(7)
INPUT, OUTPUT, SCRATCH, WIRE = range(4)
INT8 = 2
MILLISECOND_NS = 1_000_000

Step = tuple[int, int, int, int, int, int, int, int, int]


def made(steps: list[Step], blocks: int = 2, rank: int = 0, size: int = 2) -> _core.Schedule:
    flat = array("i", [number for step in steps for number in step])
    return _core.Schedule.make(1, blocks, rank, size, flat.tobytes(), INT8)


class Pair:
    """Rank 0's end of a group of two ranks, in which rank 1 sends nothing."""

    def __init__(self) -> None:
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        self._silent = theirs
        self._mesh = _core.HostMesh.join(0, 1)
        group = _core.ScheduleGroup.create(self._mesh, 1, 0, [0, -1], [[], [end.detach() for end in ours]], 5.0)
        assert group is not None
        self.group = group

    def run(
        self, schedule: _core.Schedule, operation: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> _core.Outcome | None:
        reduction = ReduceOp.SUM if operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER) else NO_REDUCTION
        count = (outputs or inputs)[0].numel()
        pieces = [[[each.data_ptr(), each.nbytes] for each in tensors] for tensors in (inputs, outputs)]
        root = 0 if operation == Operation.BROADCAST else -1
        call = CollectiveCall(operation, DTYPE_CODES[torch.float32], reduction, root, count, MILLISECOND_NS, *pieces)
        return self.group.run(schedule, call)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()
        self._mesh.close()
        for end in self._silent:
            end.close()


@pytest.mark.parametrize(
    "step",
    [
        (SEND, 0, 0, OUTPUT, 0, 0, OUTPUT, 0, 1),
        (SEND, 0, 2, OUTPUT, 0, 0, OUTPUT, 0, 1),
        (COPY, 0, 1, OUTPUT, 0, 1, OUTPUT, 1, 1),
        (RECEIVE, 0, 1, INPUT, 0, 1, OUTPUT, 0, 0),
        (REDUCE, 0, 1, OUTPUT, 0, 2, OUTPUT, 0, 1),
        (PACK, 0, -1, OUTPUT, 0, 1, OUTPUT, 1, 1),
        (UNPACK, 0, -1, WIRE, 0, 1, WIRE, 1, 1),
        (ADD, 0, -1, OUTPUT, 0, 2, WIRE, 0, 2),
        (SEND, 0, 1, OUTPUT, 0, 0, WIRE, 0, 2),
    ],
    ids=[
        "to itself",
        "to nobody",
        "a copy with a peer",
        "into the input",
        "of unequal slices",
        "packed into floats",
        "unpacked into packed blocks",
        "two packed blocks at once",
        "two packed blocks in a message",
    ],
)
def test_steps_that_are_no_schedule_are_named(step: Step) -> None:
    good = (SEND, 0, 1, OUTPUT, 0, 0, OUTPUT, 0, 1)
    with pytest.raises(ValueError, match=r"no schedule for rank 0 of 2: see step 1 "):
        made([good, step])


def test_a_schedule_with_blocks_that_the_call_lacks_is_refused() -> None:
    schedule = made([(COPY, 0, -1, OUTPUT, 0, 1, OUTPUT, 1, 1), (SEND, 0, 1, OUTPUT, 0, 0, OUTPUT, 1, 2)])
    with Pair() as pair:
        outcome = pair.run(schedule, Operation.ALL_REDUCE, [], [torch.ones(4)])
        assert outcome is not None and outcome.code == OutcomeCode.SCHEDULE_UNFIT
        error = to_error(
            outcome, [RankIdentity(0, "here", 7), RankIdentity(1, "here", 8)], 0, "all_reduce(float32, 4 elements)"
        )
    assert str(error).startswith("rank 0 (here, pid 7): all_reduce(float32, 4 elements) was not started: step 1 ")


slices = st.tuples(st.integers(INPUT, WIRE), st.integers(0, 4), st.integers(0, 3))
steps = st.builds(
    lambda kind, final, to, source: (kind, final, -1 if kind >= COPY else 1, *to, *source),
    st.integers(SEND, ADD),
    st.integers(0, 1),
    slices,
    slices,
)
floats = st.tuples(st.sampled_from([OUTPUT, SCRATCH]), st.integers(0, 1), st.just(1))
packed = st.tuples(st.just(WIRE), st.integers(0, 2), st.just(1))
sound_steps_of_packed_blocks = st.one_of(
    st.builds(lambda to, source: (PACK, 0, -1, *to, *source), packed, floats),
    st.builds(lambda kind, to, source: (kind, 0, -1, *to, *source), st.sampled_from([UNPACK, ADD]), floats, packed),
    st.builds(lambda source: (SEND, 0, 1, OUTPUT, 0, 0, *source), packed),
    st.builds(lambda to: (RECEIVE, 0, 1, *to, OUTPUT, 0, 0), packed),
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(st.one_of(steps, sound_steps_of_packed_blocks), max_size=6),
    st.integers(0, 5),
    st.sampled_from([Operation.ALL_REDUCE, Operation.BROADCAST, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL]),
    st.integers(0, 30),
)
def test_any_steps_are_refused_or_come_to_an_end(steps: list[Step], blocks: int, operation: int, count: int) -> None:
    try:
        schedule = made(steps, blocks)
    except ValueError:
        return
    inputs = [torch.ones(count), torch.ones(count)] if operation > Operation.BROADCAST else []
    outputs = [torch.ones(count)] * (2 if operation == Operation.ALL_TO_ALL else 1)
    with Pair() as pair:
        outcome = pair.run(schedule, operation, inputs, outputs)
    assert outcome is None or outcome.code in (OutcomeCode.SCHEDULE_UNFIT, OutcomeCode.TIMED_OUT)
