"""The symbolic executor detects every kind of fault, and reports its location."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.schedule.algorithms import build
from paceline.comm.schedule.steps import (
    NOTHING,
    OWN_INPUT,
    OWN_OUTPUT,
    Buffer,
    BufferSlice,
    Operation,
    Schedule,
    StepKind,
    combine,
    copy,
    receive,
    send,
)
from paceline.comm.schedule.verify import ScheduleError, verify


def world(algorithm, operation, world_size, root=-1):
    hosts = [range(world_size // 2), range(world_size // 2, world_size)]
    return [build(algorithm, operation, rank, world_size, root, hosts) for rank in range(world_size)]


def by_hand(operation, *steps, root=-1, blocks=1):
    return [
        Schedule(operation, "by hand", rank, len(steps), root, blocks, tuple(own)) for rank, own in enumerate(steps)
    ]


def edited(schedules, rank, number, *instead):
    steps = list(schedules[rank].steps)
    steps[number : number + 1] = instead
    return [*schedules[:rank], schedules[rank]._replace(steps=tuple(steps)), *schedules[rank + 1 :]]


ANY = st.sampled_from(
    [
        world(algorithm, operation, size, root)
        for algorithm, operation, root in [
            ("ring", Operation.ALL_REDUCE, -1),
            ("ring", Operation.ALL_GATHER, -1),
            ("ring", Operation.ALL_TO_ALL, -1),
            ("halving_doubling", Operation.ALL_REDUCE, -1),
            ("halving_doubling", Operation.REDUCE_SCATTER, -1),
            ("halving_doubling", Operation.BARRIER, -1),
            ("tree", Operation.REDUCE, 1),
            ("tree", Operation.GATHER, 2),
            ("star", Operation.SCATTER, 0),
            ("star", Operation.BARRIER, -1),
            ("hierarchical", Operation.ALL_REDUCE, -1),
        ]
        for size in (4, 6)
    ]
)


@given(ANY, st.data())
def test_a_dropped_step_is_found(schedules, data):
    rank = data.draw(st.sampled_from([schedule.rank for schedule in schedules if schedule.steps]))
    number = data.draw(st.integers(0, len(schedules[rank].steps) - 1))
    with pytest.raises(ScheduleError):
        verify(edited(schedules, rank, number))


@given(ANY, st.data())
def test_another_peer_is_found(schedules, data):
    rank = data.draw(st.sampled_from([schedule.rank for schedule in schedules if schedule.steps]))
    number = data.draw(st.integers(0, len(schedules[rank].steps) - 1))
    step = schedules[rank].steps[number]
    if step.kind == StepKind.COPY:
        return
    peer = data.draw(st.sampled_from([other for other in range(-1, len(schedules) + 1) if other != step.peer]))
    with pytest.raises(ScheduleError):
        verify(edited(schedules, rank, number, step._replace(peer=peer)))


@given(ANY, st.data())
def test_a_reduction_with_final_turned_round_is_found(schedules, data):
    reductions = [
        (schedule.rank, number)
        for schedule in schedules
        for number, step in enumerate(schedule.steps)
        if step.kind == StepKind.REDUCE
    ]
    if not reductions:
        return
    rank, number = data.draw(st.sampled_from(reductions))
    step = schedules[rank].steps[number]
    said = rf"rank {rank}, step {number} .*(is marked final, but|but is not marked final)"
    with pytest.raises(ScheduleError, match=said):
        verify(edited(schedules, rank, number, step._replace(final=not step.final)))


def test_a_contribution_counted_twice_is_found():
    schedules = by_hand(
        Operation.ALL_REDUCE,
        [combine(1, OWN_OUTPUT, OWN_OUTPUT, final=True), combine(1, OWN_OUTPUT, OWN_OUTPUT), send(1, OWN_OUTPUT)],
        [send(0, OWN_OUTPUT), send(0, OWN_OUTPUT), receive(0, OWN_OUTPUT)],
    )
    with pytest.raises(ScheduleError, match=r"rank 0, step 1 \(REDUCE .*counts the contributions of ranks 1 twice"):
        verify(schedules)


def test_a_cycle_of_waits_is_found():
    relay = [receive(1, OWN_OUTPUT), send(1, OWN_OUTPUT)], [receive(0, OWN_OUTPUT), send(0, OWN_OUTPUT)]
    with pytest.raises(ScheduleError, match=r"rank 0, step 1 \(SEND OUTPUT\[0\] to 1\): waits forever"):
        verify(by_hand(Operation.BROADCAST, *relay, root=0))


def test_a_cycle_that_only_a_buffering_link_would_break_is_found():
    exchange = [
        [send(1, OWN_OUTPUT), combine(1, OWN_OUTPUT, OWN_OUTPUT, final=True)],
        [send(0, OWN_OUTPUT), combine(0, OWN_OUTPUT, OWN_OUTPUT, final=True)],
    ]
    with pytest.raises(ScheduleError, match="waits forever"):
        verify(by_hand(Operation.ALL_REDUCE, *exchange))


def test_a_cycle_of_waits_in_a_barrier_is_found():
    with pytest.raises(ScheduleError, match="waits forever"):
        verify(
            by_hand(Operation.BARRIER, [receive(1, NOTHING), send(1, NOTHING)], [receive(0, NOTHING), send(0, NOTHING)])
        )


def test_a_barrier_that_lets_a_rank_leave_early_is_found():
    steps = [send(1, NOTHING)], [receive(0, NOTHING), send(2, NOTHING)], [receive(1, NOTHING)]
    with pytest.raises(ScheduleError, match="rank 0 may leave before rank 2 has arrived"):
        verify(by_hand(Operation.BARRIER, *steps))


def test_a_barrier_does_not_pass_for_news_that_come_by_chance():
    """All messages are present, but rank 0 answers before it waits for rank 2."""
    steps = (
        [receive(1, NOTHING), send(1, NOTHING), receive(2, NOTHING), send(2, NOTHING)],
        [send(0, NOTHING), receive(0, NOTHING)],
        [send(0, NOTHING), receive(0, NOTHING)],
    )
    with pytest.raises(ScheduleError, match="rank 1 may leave before rank 2 has arrived"):
        verify(by_hand(Operation.BARRIER, *steps))


def test_a_write_to_the_input_is_found():
    reduce = [combine(1, OWN_OUTPUT, OWN_OUTPUT, final=True)], [copy(OWN_INPUT, BufferSlice(Buffer.SCRATCH, 0))]
    with pytest.raises(
        ScheduleError, match=r"rank 1, step 0 \(COPY INPUT\[0\] = SCRATCH\[0\]\): INPUT is never written"
    ):
        verify(by_hand(Operation.REDUCE, *reduce, root=0))


def test_a_read_of_what_was_never_written_is_found():
    reduce = [combine(1, OWN_OUTPUT, OWN_OUTPUT, final=True)], [send(0, BufferSlice(Buffer.SCRATCH, 0))]
    with pytest.raises(ScheduleError, match=r"rank 1, step 0 .*SCRATCH\[0\] is undefined"):
        verify(by_hand(Operation.REDUCE, *reduce, root=0))


def test_a_message_nobody_takes_is_found():
    broadcast = [send(1, OWN_OUTPUT), send(1, OWN_OUTPUT)], [receive(0, OWN_OUTPUT)]
    with pytest.raises(ScheduleError, match=r"rank 0, step 1 .*rank 1 never receives it"):
        verify(by_hand(Operation.BROADCAST, *broadcast, root=0))


def test_different_numbers_of_blocks_are_found():
    broadcast = [send(1, BufferSlice(Buffer.OUTPUT, 0, 2))], [receive(0, BufferSlice(Buffer.OUTPUT, 0, 1))]
    with pytest.raises(ScheduleError, match=r"rank 1, step 0 .*rank 0 sends 2 blocks for it"):
        verify(by_hand(Operation.BROADCAST, *broadcast, root=0, blocks=2))


def test_blocks_in_exchanged_places_are_found():
    broadcast = [send(1, BufferSlice(Buffer.OUTPUT, 0))], [receive(0, BufferSlice(Buffer.OUTPUT, 1))]
    with pytest.raises(ScheduleError, match=r"block 0 is stored in OUTPUT\[1\]"):
        verify(by_hand(Operation.BROADCAST, *broadcast, root=0, blocks=2))


def test_a_relay_in_all_to_all_is_found():
    """Blocks of another pair have a different size."""
    exchange = (
        [copy(OWN_OUTPUT, OWN_INPUT), send(1, BufferSlice(Buffer.INPUT, 1)), receive(1, BufferSlice(Buffer.OUTPUT, 1))],
        [receive(0, BufferSlice(Buffer.OUTPUT, 1)), send(0, BufferSlice(Buffer.OUTPUT, 1))],
    )
    with pytest.raises(ScheduleError, match="a different size"):
        verify(by_hand(Operation.ALL_TO_ALL, *exchange, blocks=2))


def test_an_end_without_its_result_is_found():
    with pytest.raises(
        ScheduleError, match=r"rank 1, at the end: OUTPUT\[0\] holds nothing instead of block 0 of ranks 0"
    ):
        verify(by_hand(Operation.BROADCAST, [], [], root=0))


def test_a_slice_beyond_its_buffer_is_found():
    with pytest.raises(ScheduleError, match=r"rank 0, step 0 .*OUTPUT has 1 blocks"):
        verify(by_hand(Operation.BROADCAST, [send(1, BufferSlice(Buffer.OUTPUT, 0, 2))], [], root=0))


def test_a_final_step_that_reduces_nothing_is_found():
    broadcast = [send(1, OWN_OUTPUT)], [receive(0, OWN_OUTPUT)._replace(final=True)]
    with pytest.raises(ScheduleError, match=r"rank 1, step 0 .*only a REDUCE or an ADD is final"):
        verify(by_hand(Operation.BROADCAST, *broadcast, root=0))


def test_a_copy_onto_itself_is_found():
    with pytest.raises(ScheduleError, match=r"rank 0, step 0 .*src and dst overlap"):
        verify(by_hand(Operation.BROADCAST, [copy(OWN_OUTPUT, OWN_OUTPUT)], root=0))


def test_schedules_of_different_calls_are_found():
    tree, ring = world("tree", Operation.ALL_REDUCE, 4), world("ring", Operation.ALL_REDUCE, 4)
    with pytest.raises(ScheduleError, match="rank 1 and rank 0 differ"):
        verify([tree[0], *ring[1:]])
