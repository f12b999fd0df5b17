"""Schedules that round between hosts implement their operation, with bitwise equal results on all ranks."""

from __future__ import annotations

import pytest
from equal_bits import require_equal_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples

from paceline.comm.schedule.algorithms import ALGORITHMS, QUANTIZED, algorithms_offering, build, name_of, number_of
from paceline.comm.schedule.steps import (
    OWN_OUTPUT,
    Buffer,
    BufferSlice,
    Operation,
    Schedule,
    StepKind,
    add,
    combine,
    copy,
    pack,
    receive,
    send,
    unpack,
)
from paceline.comm.schedule.verify import ScheduleError, verify

OPERATIONS = list(QUANTIZED["int8"])
SLOT = BufferSlice(Buffer.WIRE, 0)


def world(operation, hosts, algorithm="int8"):
    return [
        build(algorithm, operation, rank, sum(map(len, hosts)), hosts=hosts) for rank in range(sum(map(len, hosts)))
    ]


def equal_hosts(n_hosts, ranks_a_host):
    return [range(first, first + ranks_a_host) for first in range(0, n_hosts * ranks_a_host, ranks_a_host)]


def prove(schedules):
    verify(schedules)
    if schedules[0].operation is not Operation.REDUCE_SCATTER:
        require_equal_bits(schedules)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_equal_hosts_end_right_and_with_equal_bits(operation):
    for n_hosts in range(1, 8):
        for ranks_a_host in range(1, 6):
            prove(world(operation, equal_hosts(n_hosts, ranks_a_host)))


@st.composite
def topologies(draw, most=24):
    """Generates ranks in any order on hosts of any size."""
    ranks = draw(st.permutations(range(draw(st.integers(1, most)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(ranks) - 1)), max_size=6)))
    hosts = [ranks[first:last] for first, last in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    return [host for host in hosts if host]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(topologies(), st.sampled_from(OPERATIONS))
def test_any_ranks_on_any_hosts_end_with_equal_bits(hosts, operation):
    prove(world(operation, hosts))


@pytest.mark.parametrize("hosts", [equal_hosts(2, 1), equal_hosts(2, 3), [[0, 1], [2]]])
def test_two_hosts_wait_for_each_other_once(hosts):
    """The data that a rank sends to the other host does not depend on data received from there."""
    for schedule in world(Operation.ALL_REDUCE, hosts):
        others = [rank for host in hosts if schedule.rank not in host for rank in host]
        between = [step.kind for step in schedule.steps if step.peer in others]
        assert between == [StepKind.SEND] * (len(between) // 2) + [StepKind.RECV] * (len(between) // 2)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_packed_blocks_leave_a_host(operation):
    for hosts in (equal_hosts(3, 2), [[0, 1], [2], [3, 4, 5]]):
        host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        for schedule in world(operation, hosts):
            for step in schedule.steps:
                if step.kind is StepKind.SEND:
                    leaves = host_of[step.peer] != host_of[schedule.rank]
                    assert (step.src.buffer is Buffer.WIRE) == leaves


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_packs_each_block_once_in_a_call(operation):
    """One residual array, with an entry for each element, is therefore sufficient."""
    for hosts in (equal_hosts(3, 2), [[0, 1], [2], [3, 4, 5]]):
        for schedule in world(operation, hosts):
            packed = [step.src for step in schedule.steps if step.kind is StepKind.PACK]
            assert len(packed) == len(set(packed))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_rounded_on_one_host(operation):
    for schedule in world(operation, [range(5)]):
        assert all(step.kind not in (StepKind.PACK, StepKind.UNPACK, StepKind.ADD) for step in schedule.steps)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree", "star", "hierarchical", "circulant"])
@pytest.mark.parametrize("hosts", [equal_hosts(2, 3), [[0, 1, 2], [3]]], ids=["equal", "unequal"])
def test_exact_all_reduces_give_all_ranks_the_same_bits_too(algorithm, hosts):
    require_equal_bits(world(Operation.ALL_REDUCE, hosts, algorithm))


def two_ranks(*steps):
    return [Schedule(Operation.ALL_REDUCE, "by hand", rank, 2, -1, 1, tuple(own)) for rank, own in enumerate(steps)]


def test_an_owner_that_keeps_its_exact_sum_is_found():
    """Every other rank has the rounded sum."""
    schedules = two_ranks(
        [combine(1, OWN_OUTPUT, OWN_OUTPUT, final=True), pack(SLOT, OWN_OUTPUT), send(1, SLOT)],
        [send(0, OWN_OUTPUT), receive(0, SLOT), unpack(OWN_OUTPUT, SLOT)],
    )
    verify(schedules)
    with pytest.raises(ScheduleError, match=r"OUTPUT\[0\] of ranks 0 and 1 may differ in their bits"):
        require_equal_bits(schedules)


def test_an_operation_with_results_of_each_rank_is_refused():
    with pytest.raises(ValueError, match="reduce_scatter does not give all ranks the same result"):
        require_equal_bits(world(Operation.REDUCE_SCATTER, equal_hosts(2, 1)))


def test_a_rank_that_waits_for_ever_is_named():
    with pytest.raises(ScheduleError, match=r"rank 0, step 0 .*waits forever"):
        require_equal_bits(two_ranks([receive(1, OWN_OUTPUT)], [receive(0, OWN_OUTPUT)]))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([send(1, BufferSlice(Buffer.WIRE, 0, 2))], "one by one"),
        ([copy(OWN_OUTPUT, SLOT)], "COPY cannot use blocks of WIRE"),
        ([combine(1, SLOT, SLOT)], "REDUCE cannot use blocks of WIRE"),
        ([pack(OWN_OUTPUT, SLOT)], "PACK writes into WIRE"),
        ([unpack(SLOT, OWN_OUTPUT)], "UNPACK and ADD read from there"),
        ([add(SLOT, SLOT)], "UNPACK and ADD read from there"),
        ([pack(SLOT, OWN_OUTPUT), send(1, SLOT)], r"rank 0 sends WIRE\[0\] for it"),
        ([unpack(OWN_OUTPUT, SLOT), send(1, OWN_OUTPUT)], r"WIRE\[0\] is undefined"),
        ([pack(SLOT, OWN_OUTPUT), add(OWN_OUTPUT, SLOT), send(1, OWN_OUTPUT)], "counts the contributions of ranks 0"),
    ],
)
def test_wrong_uses_of_packed_blocks_are_named(steps, said):
    with pytest.raises(ScheduleError, match=said):
        verify(two_ranks(steps, [receive(0, OWN_OUTPUT)]))


def test_a_packed_block_is_not_kept_where_another_was():
    blocks = [BufferSlice(Buffer.OUTPUT, 0), BufferSlice(Buffer.OUTPUT, 1)]
    steps = [pack(SLOT, blocks[0]), pack(SLOT, blocks[1])]
    schedules = [schedule._replace(blocks=2) for schedule in two_ranks(steps, [])]
    with pytest.raises(ScheduleError, match="is stored in place of another block"):
        verify(schedules)


def test_what_is_on_the_wire_has_numbers_of_its_own():
    assert [name_of(number_of(name)) for name in (*ALGORITHMS, *QUANTIZED)] == [*ALGORITHMS, *QUANTIZED]
    assert [number_of(name) for name in QUANTIZED] == [65, 66, 67]  # 64 is kQuantized in native/call/call.hpp
    assert name_of(0) is None and name_of(64) is None
    assert not set(algorithms_offering(Operation.ALL_REDUCE)) & set(QUANTIZED)  # they are not used unless requested
