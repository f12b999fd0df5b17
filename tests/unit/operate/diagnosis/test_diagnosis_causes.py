"""Causes that a call alone does not show: store keys, nested errors, abandoned calls, and tags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observed_world import IDLE, Planned, loop, play

from paceline.operate.diagnosis.diagnosis import diagnose
from paceline.operate.diagnosis.finding import Cause, Diagnosis
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    ExitReason,
    GroupMembership,
    JobSnapshot,
    ProcessActivity,
    ProcessState,
    RankCall,
    RankExitStatus,
    RankState,
    StackLocation,
    StoreWait,
)

_SUM = CallSignature("all_reduce", "float32", 4096, "SUM")
_STEPS = 8


def _loops(ranks: int, steps: int = _STEPS) -> list[list[Planned]]:
    return [loop([_SUM], steps, marks=False) for _ in range(ranks)]


def _between_calls(*like: RankState) -> JobSnapshot:
    seen = play(_loops(len(like)))
    ranks = tuple(
        replace(rank, process=IDLE, place=own.place, store_wait=own.store_wait, ending=own.ending)
        for rank, own in zip(seen.ranks, like, strict=True)
    )
    return replace(seen, ranks=ranks)


def _waiter(key: str = "'ready'", count: int = 1) -> RankState:
    return RankState(0, place=StackLocation("", "train.py:7"), store_wait=StoreWait("get", key, count, 0.5))


def _elsewhere(line: str = "train.py:9") -> RankState:
    return RankState(0, place=StackLocation("", line))


def _verdict(snapshot: JobSnapshot) -> Diagnosis:
    verdict = diagnose(snapshot)
    assert verdict is not None
    return verdict


def test_an_absent_rank_is_told_with_the_key_it_awaits():
    seen = play(_loops(3), stopped=(2, 4), like=RankState(2, place=StackLocation("", "train.py:7"), process=IDLE))
    waiting = replace(seen.ranks[2], store_wait=StoreWait("get", "'ready'", 1, seen.now_s - 14.0))
    verdict = _verdict(replace(seen, ranks=(*seen.ranks[:2], waiting)))
    assert (verdict.cause, verdict.blamed) == (Cause.STORE, (2,))
    assert (
        "rank 2 has not reached this call: it waits in store.get (train.py:7) for the key 'ready', which no rank"
        in (verdict.sentence)
    )


def test_an_absent_rank_that_awaits_no_key_is_blamed():
    plans = [loop([_SUM], 4, marks=False), loop([_SUM], 4, marks=False), loop([_SUM], 5, marks=False)]
    seen = play(plans)
    ranks = tuple(
        replace(rank, ending=None, process=IDLE, place=like.place, store_wait=like.store_wait)
        for rank, like in zip(seen.ranks[:2], (_waiter(), _elsewhere()), strict=True)
    )
    verdict = _verdict(replace(seen, ranks=(*ranks, seen.ranks[2])))
    assert verdict.blamed == (1,)
    assert "rank 0 waits in store.get (train.py:7) for the key 'ready'" in verdict.sentence


def test_the_rank_that_has_not_set_a_key_is_blamed():
    verdict = _verdict(_between_calls(_elsewhere(), _waiter(), _waiter()))
    assert (verdict.cause, verdict.blamed) == (Cause.USER_CODE, (0,))
    assert verdict.sentence.startswith(
        "ranks 1, 2 wait in store.get (train.py:7) for the key 'ready', which no rank has set, for "
    )
    assert verdict.sentence.endswith("; rank 0 is at train.py:9")


def test_work_before_a_key_is_set_is_no_fault():
    seen = _between_calls(_elsewhere(), _waiter())
    works = replace(seen.ranks[0], process=ProcessActivity(ProcessState.RUNS, cores=1.0))
    verdict = _verdict(replace(seen, ranks=(works, seen.ranks[1])))
    assert (verdict.blamed, verdict.is_fault) == ((0,), False)


def test_ranks_that_all_await_keys_are_told_with_them():
    verdict = _verdict(_between_calls(_waiter("'a', 'b'", 2), _waiter("'c'")))
    assert (verdict.cause, verdict.blamed) == (Cause.STORE, (0, 1))
    assert "rank 0 waits in store.get (train.py:7) for the keys 'a', 'b', of which at least one has not been set" in (
        verdict.sentence
    )
    assert "rank 1 waits in store.get (train.py:7) for the key 'c'" in verdict.sentence


def test_a_short_wait_for_a_key_is_left_in_peace():
    seen = _between_calls(_elsewhere(), _waiter())
    works = replace(seen.ranks[0], process=ProcessActivity(ProcessState.RUNS, cores=1.0))
    waits = replace(seen.ranks[1], store_wait=StoreWait("get", "'ready'", 1, seen.now_s - 3.0))
    assert diagnose(replace(seen, ranks=(works, waits))) is None


def test_an_exit_during_an_async_call_is_an_early_exit():
    seen = play(_loops(3), stopped=(2, 5))
    call = replace(seen.ranks[0].calls[-1], line="train.py:20")
    left = replace(
        seen.ranks[2], calls=(*seen.ranks[2].calls, call), ending=RankExitStatus(ExitReason.FINISHED, 1.0, "")
    )
    verdict = _verdict(replace(seen, ranks=(*seen.ranks[:2], left)))
    assert (verdict.cause, verdict.blamed) == (Cause.LEFT, (2,))
    assert "with exit code 0 before all_reduce(float32, 4096) call 6 (train.py:20) had completed" in verdict.sentence


def test_an_abandoned_call_may_have_completed_elsewhere():
    seen = play(_loops(3), stopped=(2, 5))
    abandoned = replace(seen.ranks[2].calls[-1], ended_s=None, outcome="")
    left = replace(
        seen.ranks[2], calls=(*seen.ranks[2].calls[:-1], abandoned), ending=RankExitStatus(ExitReason.FINISHED, 1.0)
    )
    verdict = _verdict(replace(seen, ranks=(*seen.ranks[:2], left)))
    assert (verdict.cause, verdict.blamed) == (Cause.LEFT, (2,))


def test_an_early_exit_counts_before_wrapped_errors():
    seen = play([loop([_SUM], _STEPS - (rank == 2), marks=False) for rank in range(3)])
    ending = RankExitStatus(ExitReason.EXCEPTION, 9.0, "RuntimeError: training failed", "train.py:5")
    ranks = tuple(
        replace(
            rank, calls=(*rank.calls[:-1], replace(rank.calls[-1], ended_s=8.0, outcome="peer_lost")), ending=ending
        )
        for rank in seen.ranks[:2]
    )
    verdict = _verdict(replace(seen, ranks=(*ranks, seen.ranks[2])))
    assert (verdict.cause, verdict.blamed) == (Cause.LEFT, (2,))


def test_ranks_that_raise_the_same_exception_are_named_together():
    seen = play(_loops(3))
    ranks = tuple(
        replace(
            rank,
            ending=RankExitStatus(
                ExitReason.EXCEPTION, 9.0 - rank.rank, f"ValueError: rank {rank.rank} has 3 files", "train.py:5"
            ),
        )
        for rank in seen.ranks
    )
    verdict = _verdict(replace(seen, ranks=ranks))
    assert (verdict.cause, verdict.blamed) == (Cause.EXCEPTION, (0, 1, 2))
    assert "ranks 0-2 failed in the same way, rank 2 first: ValueError: rank 2 has 3 files (train.py:5)" in (
        verdict.sentence
    )


def test_another_root_or_reduction_is_told_as_such():
    for theirs, what in (
        (CallSignature("broadcast", "float32", 4, root=1), "its root differs"),
        (CallSignature("broadcast", "float32", 5, root=0), "the number or type of its elements differs"),
    ):
        plans = [[Planned(CallSignature("broadcast", "float32", 4, root=0))] for _ in range(3)]
        plans[2] = [Planned(theirs)]
        verdict = _verdict(play(plans))
        assert (verdict.cause, verdict.blamed) == (Cause.OTHER_SHAPE, (2,))
        assert verdict.sentence.endswith(what)
    plans = [[Planned(replace(_SUM, reduction="MAX" if rank == 2 else "SUM"))] for rank in range(3)]
    assert _verdict(play(plans)).sentence.endswith("its reduction differs")


def test_each_of_two_ranks_is_told_with_its_call():
    plans = [[Planned(_SUM)], [Planned(CallSignature("barrier"))]]
    told = _verdict(play(plans)).sentence
    assert "rank 0 called all_reduce(float32, 4096) (train.py:88), rank 1 called barrier() (train.py:88)" in told


def test_a_crash_in_calls_that_differ_is_a_consequence():
    plans = _loops(3)
    plans[2][5] = replace(plans[2][5], header=replace(_SUM, count=77))
    seen = play(plans)
    killed = RankExitStatus(ExitReason.KILLED, 9.0, "killed by SIGABRT")
    ranks = tuple(
        replace(
            rank,
            calls=(*rank.calls[:-1], replace(rank.calls[-1], ended_s=None, outcome="")),
            ending=killed if rank.rank == 1 else None,
        )
        for rank in seen.ranks
    )
    verdict = _verdict(replace(seen, ranks=ranks))
    assert (verdict.cause, verdict.blamed) == (Cause.OTHER_SHAPE, (2,))
    assert verdict.sentence.endswith("; rank 1 was killed by SIGABRT")


@pytest.mark.parametrize("size", [2, 3])
def test_a_different_root_is_found_after_the_call_has_ended(size):
    """Between hosts, a broadcast with two roots can complete, and the next call fails on all ranks."""
    ending = RankExitStatus(ExitReason.MISMATCH, 9.0, "CollectiveMismatchError: the calls do not match", "train.py:21")

    def rank(number: int) -> RankState:
        roots = [0, 0, size - 1 if number == size - 1 else 0]
        calls = [
            RankCall("0", 1 + i, CallSignature("broadcast", root=r), i, i + 0.5, "ok") for i, r in enumerate(roots)
        ]
        failed = RankCall("0", 4, CallSignature("all_gather"), 5.0, 6.0, "mismatch", line="train.py:21")
        seats = {"0": GroupMembership(number, size, "group default")}
        lines = [replace(call, line="train.py:20") for call in calls]
        return RankState(number, memberships=seats, calls=(*lines, failed), ending=ending)

    verdict = _verdict(JobSnapshot(20.0, tuple(map(rank, range(size)))))
    assert verdict.blamed == (size - 1,), verdict.sentence
    assert f"rank {size - 1} called broadcast(root {size - 1}) as call 3 (train.py:20), where rank" in verdict.sentence
    assert verdict.sentence.endswith("its root differs")


def test_a_disagreement_beyond_calls_is_told_with_its_line():
    seen = play(_loops(2))
    ending = RankExitStatus(ExitReason.MISMATCH, 9.0, "CollectiveMismatchError: the models differ", "train.py:20")
    verdict = _verdict(replace(seen, ranks=tuple(replace(rank, ending=ending) for rank in seen.ranks)))
    assert verdict.sentence == "ranks 0, 1 disagreed (train.py:20): CollectiveMismatchError: the models differ"


def test_messages_with_different_tags_are_a_deadlock():
    seen = play(_loops(2, 1))
    headers = (
        CallSignature("send", "float32", 4, peer=1, tag=1),
        CallSignature("recv", "float32", 4, peer=0, tag=2),
    )
    ranks = tuple(
        replace(
            rank,
            calls=(replace(rank.calls[0], header=header, sequence=0, ended_s=None, outcome=""),),
            ending=None,
            place=StackLocation("send", "train.py:9", is_call=True),
        )
        for rank, header in zip(seen.ranks, headers, strict=True)
    )
    verdict = _verdict(replace(seen, ranks=ranks))
    assert verdict.cause is Cause.DEADLOCK
    assert "send(float32, 4, peer 1, tag 1)" in verdict.sentence and "tag 2)" in verdict.sentence
    assert verdict.sentence.endswith("same tag. rank 0 sent tag 1 to rank 1, which waits for tag 2")
    alike = replace(ranks[1].calls[0], header=replace(headers[1], tag=1))
    assert diagnose(replace(seen, ranks=(ranks[0], replace(ranks[1], calls=(alike,))))) is None


def test_the_tag_of_a_message_that_was_sent_is_told():
    """Small messages are sent before they are received, so rank 0 already waits in its next call."""
    seen = play(_loops(2, 1))
    call, place = seen.ranks[0].calls[0], StackLocation("recv", "train.py:9", is_call=True)
    sent = [CallSignature("send", "float32", 4, peer=1, tag=tag) for tag in (5, 3)]
    received = CallSignature("recv", "float32", 4, peer=0, tag=5)
    waits = [CallSignature("recv", "float32", 4, peer=1), CallSignature("recv", "float32", 4, peer=0, tag=4)]
    done = [[replace(call, header=header, sequence=0) for header in headers] for headers in (sent, [received])]
    ranks = tuple(
        replace(
            rank,
            calls=(*made, replace(call, header=wait, sequence=0, ended_s=None, outcome="")),
            place=place,
            ending=None,
        )
        for rank, made, wait in zip(seen.ranks, done, waits, strict=True)
    )
    verdict = _verdict(replace(seen, ranks=ranks))
    assert verdict.sentence.endswith("rank 0 sent tag 3 to rank 1, which waits for tag 4")
    sends_4 = replace(ranks[0].calls[0], header=replace(sent[0], tag=4))
    both = replace(ranks[0], calls=(sends_4, *ranks[0].calls))
    assert "which waits for tag" not in _verdict(replace(seen, ranks=(both, ranks[1]))).sentence


def test_an_exception_that_led_to_another_call_is_told():
    plans = _loops(3)
    plans[2][5] = replace(plans[2][5], header=CallSignature("barrier"))
    seen = play(plans)
    assert seen.ranks[2].ending is not None
    ending = replace(seen.ranks[2].ending, handled="ValueError: bad sample (train.py:20)")
    verdict = _verdict(replace(seen, ranks=(*seen.ranks[:2], replace(seen.ranks[2], ending=ending))))
    assert (
        "rank 2 called barrier() as call 6 (train.py:88) while it handled ValueError: bad sample (train.py:20), "
        in (verdict.sentence)
    )


def test_a_rank_that_destroyed_the_group_is_told_as_such():
    seen = play(_loops(2), stopped=(1, 4), like=RankState(1, place=StackLocation("", "train.py:9"), process=IDLE))
    ((group, membership),) = seen.ranks[1].memberships.items()
    destroyed = replace(seen.ranks[1], memberships={group: replace(membership, is_closed=True)})
    told = _verdict(replace(seen, ranks=(seen.ranks[0], destroyed))).sentence
    assert "rank 1 has not reached this call: it has destroyed the group and is at train.py:9" in told
    told = _verdict(replace(seen, ranks=(seen.ranks[0], replace(destroyed, place=None, process=None)))).sentence
    assert "it has destroyed the group after all_reduce(float32, 4096) call 4" in told


def test_a_rank_that_the_others_await_in_init_is_told():
    forming = RankCall("init", 0, CallSignature("new_group"), 5.0, line="train.py:9")
    seats = {"init": GroupMembership(0, 2, "group default", ranks=(0, 1))}
    waits = RankState(0, memberships=seats, calls=(forming,), place=StackLocation("init", "train.py:9", is_call=True))
    absent = RankState(1, place=StackLocation("", "train.py:6"), process=IDLE)
    verdict = _verdict(JobSnapshot(20.0, (waits, absent)))
    assert verdict.blamed == (1,)
    assert verdict.sentence.startswith("rank 0 waits in init_process_group() (train.py:9); rank 1 has not reached this")
    named = replace(waits, memberships={"init": GroupMembership(0, 2, "group of ranks [0, 1]", ranks=(0, 1))})
    told = _verdict(JobSnapshot(20.0, (named, absent))).sentence
    assert told.startswith("rank 0 waits in new_group() of the group of ranks [0, 1] (train.py:9); rank 1 has")


def test_an_early_exit_is_uncertain_while_other_absent_ranks_run():
    seen = play([loop([_SUM], _STEPS - (rank != 3), marks=False) for rank in range(4)])
    running = tuple(replace(rank, ending=None, process=IDLE, place=None) for rank in seen.ranks[1:3])
    verdict = _verdict(replace(seen, ranks=(seen.ranks[0], *running, seen.ranks[3])))
    assert (verdict.cause, verdict.is_certain) == (Cause.LEFT, False)
    decided = _verdict(seen)
    assert (decided.blamed, decided.is_certain) == ((3,), True)
    assert "ranks 0-2 have finished the script without it" in decided.sentence


def test_of_two_ranks_either_may_have_caused_an_early_exit():
    told = _verdict(play([loop([_SUM], _STEPS - (rank == 1), marks=False) for rank in range(2)])).sentence
    assert told.endswith("or for an exit before the last call, or for a call that only rank 0 makes")


def test_a_failure_without_a_line_has_that_of_its_last_call():
    seen = play(_loops(2), stopped=(1, 4))
    calls = tuple(replace(call, line="train.py:20") for call in seen.ranks[1].calls)
    killed = replace(seen.ranks[1], calls=calls, ending=RankExitStatus(ExitReason.KILLED, 9.0, "killed by SIGKILL"))
    told = _verdict(replace(seen, ranks=(seen.ranks[0], killed))).sentence
    assert "rank 1 failed: killed by SIGKILL, after all_reduce(float32, 4096) call 4 (train.py:20)" in told
    exited = replace(killed, ending=RankExitStatus(ExitReason.EXITED, 9.0, "exit code 3", "train.py:9"))
    told = _verdict(replace(seen, ranks=(seen.ranks[0], exited))).sentence
    assert "rank 1 failed: exit code 3 (train.py:9), after all_reduce(float32, 4096) call 4;" in told


def _forming(number: int, group: str, ranks: tuple[int, ...]) -> RankState:
    call = RankCall(group, 0, CallSignature("new_group"), 5.0, line="train.py:9")
    membership = GroupMembership(ranks.index(number), len(ranks), f"group {group}", ranks=ranks)
    place = StackLocation("new_group", "train.py:9", is_call=True)
    return RankState(number, memberships={group: membership}, calls=(call,), place=place)


def test_groups_created_in_different_orders_are_told_as_such():
    verdict = _verdict(JobSnapshot(20.0, (_forming(0, "2", (0, 1)), _forming(1, "1", (0, 1)))))
    assert verdict.cause is Cause.DEADLOCK
    assert verdict.sentence.endswith(
        "All ranks must create all groups in the same order, including those that they are not members of"
    )


def test_a_rank_that_has_not_opened_the_group_yet_is_no_stranger():
    membership = GroupMembership(0, 2, "group default", has_job_ranks=True)
    waiting = RankState(0, memberships={"0": membership}, calls=(RankCall("0", 1, CallSignature("barrier"), 5.0),))
    place = StackLocation("init.init_process_group", "train.py:9")
    told = _verdict(JobSnapshot(20.0, (waiting, RankState(1, place=place)))).sentence
    assert "rank 1 has not reached this call: it is in init.init_process_group (train.py:9)" in told
    told = _verdict(
        JobSnapshot(20.0, (replace(waiting, memberships={"0": replace(membership, has_job_ranks=False)}),))
    ).sentence
    assert "rank 1 did not reach this call and left no recording" in told


def test_a_world_size_that_is_too_great_is_suggested():
    told = _verdict(JobSnapshot(20.0, tuple(_forming(rank, "0", (0, 1, 2)) for rank in range(2)))).sentence
    assert "rank 2 did not reach this call and left no recording. Check that world_size is not greater than" in told
    told = _verdict(JobSnapshot(20.0, (_forming(0, "0", (0, 1, 2)),))).sentence
    assert "Check that world_size" in told, "it may also be another machine that is missing"
    told = _verdict(JobSnapshot(20.0, (_forming(1, "0", (0, 1, 2)),))).sentence
    assert "world_size" not in told, "rank 0 is missing"


def test_a_failure_is_told_with_the_handled_exception():
    ending = RankExitStatus(
        ExitReason.EXCEPTION, 1.0, "RuntimeError: unexpected pos", "train.py:9", "OSError: No space left on device"
    )
    verdict = _verdict(_between_calls(RankState(0, ending=ending), _elsewhere()))
    assert "RuntimeError: unexpected pos (train.py:9) while it handled OSError: No space left on device" in (
        verdict.sentence
    )


def test_a_rank_whose_script_has_ended_has_ended():
    verdict = _verdict(_between_calls(RankState(0, ending=RankExitStatus(ExitReason.FINISHED, 1.0)), _waiter()))
    assert "rank 0 has ended" in verdict.sentence and "()" not in verdict.sentence


def _initializing(number: int, membership: GroupMembership, key: str = "g") -> RankState:
    call = RankCall(key, 0, CallSignature("new_group"), 5.0, line="train.py:6")
    return RankState(
        number, memberships={key: membership}, calls=(call,), place=StackLocation("", "train.py:6", is_call=True)
    )


def test_different_world_sizes_are_told():
    ranks = [
        _initializing(0, GroupMembership(0, 2, "group default", (0, 1)), "one"),
        _initializing(1, GroupMembership(1, 3, "group default", (0, 1, 2)), "other"),
    ]
    verdict = _verdict(JobSnapshot(20.0, tuple(ranks)))
    assert (verdict.cause, verdict.blamed) == (Cause.OTHER_SHAPE, (1,))
    told = "the world sizes passed to init_process_group() (train.py:6) differ: rank 0 has 2, rank 1 has 3; all ranks"
    assert verdict.sentence.startswith(told)


def test_processes_with_the_same_rank_are_told():
    ranks = [_initializing(number, GroupMembership(0, 3, "group 0", (0, 1, 2))) for number in range(2)]
    ranks.append(_initializing(2, GroupMembership(2, 3, "group 0", (0, 1, 2))))
    verdict = _verdict(JobSnapshot(20.0, tuple(ranks)))
    assert (verdict.cause, verdict.blamed) == (Cause.OTHER_SHAPE, (1,))
    assert verdict.sentence.startswith(
        "the processes of ranks 0, 1 wait in init_process_group() (train.py:6), and all of them have called it as rank"
    )


def test_smaller_worlds_of_a_job_may_have_the_same_ranks():
    ranks = [_initializing(number, GroupMembership(0, 2, "group 0", (0, 1)), f"w{number}") for number in (0, 2)]
    others = [RankState(number, place=StackLocation("load", "train.py:3"), process=IDLE) for number in (1, 3)]
    verdict = _verdict(JobSnapshot(20.0, tuple(sorted((*ranks, *others), key=lambda rank: rank.rank))))
    assert verdict.cause is not Cause.OTHER_SHAPE


def test_a_rank_that_cannot_connect_has_made_the_call():
    place = StackLocation("distributed_c10d.init_process_group", "train.py:6")
    ranks = (
        _initializing(0, GroupMembership(0, 2, "group 0", (0, 1))),
        RankState(1, place=place, process=IDLE),
    )
    verdict = _verdict(JobSnapshot(20.0, ranks))
    assert verdict.blamed == (1,)
    assert verdict.sentence == (
        "rank 0 waits in init_process_group() (train.py:6); rank 1 has called it too, but has not connected to the "
        "others (train.py:6): check MASTER_ADDR, MASTER_PORT and the network there"
    )


def test_a_rank_that_makes_other_calls_is_not_accused():
    seen = _between_calls(RankState(0, place=StackLocation("", "train.py:15")), _elsewhere())
    waits_since_s = seen.now_s - 14.0
    barrier = RankCall("late", 1, CallSignature("barrier"), waits_since_s, line="train.py:16")
    trained = RankCall("pair", 40, _SUM, seen.now_s - 0.4, seen.now_s - 0.3, "ok")
    seats = {"late": GroupMembership(0, 2), "pair": GroupMembership(0, 2)}
    busy = replace(seen.ranks[0], memberships=seats, calls=(trained,), since_s=seen.now_s - 0.3)
    waiter = replace(seen.ranks[1], memberships={"late": GroupMembership(1, 2)}, calls=(barrier,), ending=None)
    verdict = _verdict(replace(seen, ranks=(busy, waiter)))
    assert (verdict.cause, verdict.blamed, verdict.is_fault) == (Cause.BUSY, (0,), False)
    assert "it is at train.py:15 and is making other calls, most recently all_reduce(float32, 4096) call 40" in (
        verdict.sentence
    )


def test_an_exception_that_ended_a_thread_is_told():
    like = RankState(2, place=StackLocation("queue.get", "train.py:19"), process=IDLE)
    seen = play(_loops(3), stopped=(2, 4), like=like)
    waits = replace(seen.ranks[2], thread_error="OSError: truncated file (train.py:15)")
    verdict = _verdict(replace(seen, ranks=(*seen.ranks[:2], waits)))
    assert (verdict.cause, verdict.blamed) == (Cause.USER_CODE, (2,))
    assert verdict.sentence.endswith("; one of its threads has ended with OSError: truncated file (train.py:15)")


def test_a_job_without_ranks_gets_no_verdict():
    assert diagnose(JobSnapshot(1.0, ())) is None
