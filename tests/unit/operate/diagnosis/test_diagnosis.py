"""Faults of all classes, in many kinds of loops and locations: the right rank and cause are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed_world import CALLING, IDLE, Planned, loop, play
from sampling import examples

from paceline.operate.diagnosis.diagnosis import diagnose, diagnose_exit
from paceline.operate.diagnosis.finding import Cause
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
)

_HEADERS = [
    CallSignature("all_reduce", "float32", 4096, "SUM"),
    CallSignature("all_reduce", "float32", 128, "SUM"),
    CallSignature("all_reduce", "int64", 1, "MAX"),
    CallSignature("broadcast", "float32", 128, root=0),
    CallSignature("all_gather", "float32", 4096),
    CallSignature("barrier"),
]
_STRAY = CallSignature("all_reduce", "float32", 77, "SUM")
_STEPS = 8


@st.composite
def _faults(draw, least=1):
    """Returns the number of ranks, the calls of a step, the rank at fault, and the call at which the fault occurs."""
    size = draw(st.integers(2, 5))
    step = draw(st.lists(st.sampled_from(_HEADERS), min_size=least, max_size=5))
    at = draw(st.integers(3, _STEPS - 3)) * len(step) + draw(st.integers(0, len(step) - 1))
    return size, step, draw(st.integers(0, size - 1)), at


def _plans(size, step, marks=True):
    return [loop(step, _STEPS, marks) for _ in range(size)]


@settings(max_examples=examples(50), deadline=None)
@given(_faults(), st.booleans())
def test_healthy_loops_get_no_verdict(fault, marks):
    size, step, _, _ = fault
    assert diagnose(play(_plans(size, step, marks))) is None


@settings(max_examples=examples(80), deadline=None)
@given(_faults())
def test_a_skipped_call_is_found_in_loops_with_steps(fault):
    size, step, stray, at = fault
    plans = _plans(size, step)
    del plans[stray][at]
    verdict = diagnose(play(plans))
    assert verdict.blamed == (stray,)
    assert verdict.cause in (Cause.SKIPPED, Cause.SKIPPED_OR_TWICE)
    assert f"rank {stray}" in verdict.sentence


@settings(max_examples=examples(80), deadline=None)
@given(_faults())
def test_an_extra_call_is_found_in_loops_with_steps(fault):
    size, step, stray, at = fault
    plans = _plans(size, step)
    plans[stray].insert(at, plans[stray][at])
    verdict = diagnose(play(plans))
    assert verdict.blamed == (stray,)
    assert verdict.cause in (Cause.TWICE, Cause.SKIPPED_OR_TWICE)


@settings(max_examples=examples(60), deadline=None)
@given(_faults(), st.booleans())
def test_another_shape_is_found(fault, marks):
    size, step, stray, at = fault
    plans = _plans(size, step, marks)
    plans[stray][at] = replace(plans[stray][at], header=_STRAY)
    verdict = diagnose(play(plans))
    assert verdict.blamed == (stray,)
    assert verdict.cause in (Cause.OTHER_SHAPE, Cause.OTHER_CALL)
    assert "77" in verdict.sentence


@settings(max_examples=examples(60), deadline=None)
@given(_faults(least=2), st.booleans())
def test_another_order_is_found(fault, marks):
    size, step, stray, at = fault
    plans = _plans(size, step, marks)
    here, after = plans[stray][at : at + 2]
    if here.header == after.header:
        return
    plans[stray][at], plans[stray][at + 1] = replace(after, step=here.step), replace(here, step=after.step)
    verdict = diagnose(play(plans))
    assert verdict.blamed == (stray,)
    assert verdict.cause in (Cause.SKIPPED, Cause.ORDER, Cause.TWICE, Cause.SKIPPED_OR_TWICE)


_ABSENCES = {
    Cause.STOPPED: RankState(0, process=ProcessActivity(ProcessState.STOPPED)),
    Cause.SWAPPING: RankState(0, process=ProcessActivity(ProcessState.SWAPS)),
    Cause.LOADER: RankState(0, place=StackLocation("DataLoader.__next__", "train.py:71", is_loader=True), process=IDLE),
    Cause.USER_CODE: RankState(0, place=StackLocation("evaluate", "train.py:90"), process=IDLE),
    Cause.BUSY: RankState(
        0, place=StackLocation("evaluate", "train.py:90"), process=ProcessActivity(ProcessState.RUNS, cores=1.0)
    ),
    Cause.EXCEPTION: RankState(0, ending=RankExitStatus(ExitReason.EXCEPTION, 0.0, "ValueError: bad", "train.py:5")),
    Cause.KILLED: RankState(0, ending=RankExitStatus(ExitReason.KILLED, 0.0, "killed by SIGKILL")),
    Cause.OUT_OF_MEMORY: RankState(
        0, ending=RankExitStatus(ExitReason.OUT_OF_MEMORY, 0.0, "killed by the kernel, out of memory")
    ),
}


@pytest.mark.parametrize("cause", _ABSENCES)
@settings(max_examples=examples(10), deadline=None)
@given(_faults(), st.booleans())
def test_a_rank_that_does_not_come_is_explained(cause, fault, marks):
    size, step, stray, at = fault
    verdict = diagnose(play(_plans(size, step, marks), stopped=(stray, at), like=_ABSENCES[cause]))
    assert (verdict.cause, verdict.blamed) == (cause, (stray,))
    assert verdict.is_fault == (cause is not Cause.BUSY)


def test_the_sentence_has_who_waits_where_and_since_when():
    like = _ABSENCES[Cause.LOADER]
    scene = play([loop(_HEADERS[:1], _STEPS) for _ in range(4)], stopped=(3, 5), like=like)
    scene = replace(scene, now_s=scene.ranks[3].since_s + 14)
    assert diagnose(scene).sentence == (
        "step 6: ranks 0-2 wait in all_reduce(float32, 4096) call 6 (train.py:88); rank 3 has not reached this call: "
        "it is in DataLoader.__next__ (train.py:71), for 14 s"
    )


def test_two_groups_that_wait_for_each_other_are_both_named():
    groups = {"left#2": [0, 1], "right#3": [0, 1]}
    a, b = Planned(_HEADERS[0], "left#2"), Planned(_HEADERS[1], "right#3")
    verdict = diagnose(play([[a, b], [b, a], [], []], groups))
    assert (verdict.cause, verdict.blamed) == (Cause.DEADLOCK, (0, 1))
    assert "of the left#2" in verdict.sentence and "of the right#3" in verdict.sentence


def test_a_group_whose_formation_waits_for_a_call_is_named():
    """Rank 1 is not in the group yet, so only rank 0's recording shows that it is expected."""
    seen = play([loop(_HEADERS[:1], _STEPS, marks=False) for _ in range(2)], stopped=(0, 4))
    forming = RankCall("new", 0, CallSignature("new_group"), seen.now_s - 12, line="train.py:9")
    first = replace(
        seen.ranks[0],
        calls=(*seen.ranks[0].calls, forming),
        memberships={**seen.ranks[0].memberships, "new": GroupMembership(0, 2, "group of ranks [0, 1]", ranks=(0, 1))},
        place=StackLocation("init.new_group", "train.py:9", is_call=True),
    )
    verdict = diagnose(replace(seen, ranks=(first, seen.ranks[1])))
    assert (verdict.cause, verdict.blamed) == (Cause.DEADLOCK, (0, 1))
    assert "rank 0 waits in new_group() of the group of ranks [0, 1] (train.py:9) for rank 1" in verdict.sentence
    assert "rank 1 waits in all_reduce(float32, 4096) call 5 of the " in verdict.sentence


def test_an_open_call_counts_before_one_of_an_earlier_group():
    scene = play([loop(_HEADERS[:1], _STEPS) for _ in range(4)], stopped=(3, 5), like=_ABSENCES[Cause.LOADER])

    def with_past(rank: RankState) -> RankState:
        return replace(
            rank,
            calls=(
                *(replace(call, arrived_s=0.0, ended_s=0.1, outcome="ok") for call in rank.calls if call.is_open),
                *rank.calls,
            ),
        )

    again = replace(scene, ranks=tuple(map(with_past, scene.ranks)))
    assert diagnose(again) == diagnose(scene)


def test_a_rank_that_computes_beside_its_call_is_no_deadlock():
    groups = {"left#2": [0, 1], "right#3": [0, 1]}
    a, b = Planned(_HEADERS[0], "left#2"), Planned(_HEADERS[1], "right#3")
    scene = play([[a, b], [b, a]], groups)
    computing = replace(
        scene.ranks[1],
        place=StackLocation("evaluate", "train.py:9"),
        process=ProcessActivity(ProcessState.RUNS, cores=1.0),
    )
    verdict = diagnose(replace(scene, ranks=(scene.ranks[0], computing)))
    assert (verdict.cause, verdict.blamed, verdict.is_fault) == (Cause.BUSY, (1,), False)


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (ProcessActivity(ProcessState.RUNS, cores=0.1), "it uses 0.1 cores"),
        (ProcessActivity(ProcessState.RUNS), "it waits for a core"),
        (ProcessActivity(ProcessState.SLEEPS, cores=0.05, waited_share=0.9), "it waits for a core 90% of the time"),
        (ProcessActivity(ProcessState.SLEEPS, disk_bytes_s=1e6), "it reads or writes files"),
        (ProcessActivity(ProcessState.WAITS_FOR_DISK), "it reads or writes files"),
        (ProcessActivity(ProcessState.SLEEPS, moves=True), "it moves from line to line"),
    ],
)
def test_a_rank_that_works_is_not_accused(process, why):
    like = RankState(0, place=StackLocation("evaluate", "train.py:90"), process=process)
    verdict = diagnose(play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(0, 4), like=like))
    assert (verdict.cause, verdict.is_fault) == (Cause.BUSY, False)
    assert f"is working ({why})" in verdict.sentence


def test_a_rank_that_only_polls_is_not_said_to_work():
    polls = ProcessActivity(ProcessState.RUNS, cores=0.01, wakes_hz=10.0)  # runnable by chance, on a busy machine
    like = RankState(0, place=StackLocation("wait_for_file", "train.py:90"), process=polls)
    verdict = diagnose(play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(0, 4), like=like))
    assert (verdict.cause, verdict.blamed, verdict.is_fault) == (Cause.USER_CODE, (0,), True)


_SUBPROCESS = StackLocation("subprocess.run", "train.py:7", activity="waits for a child process")
_COMPILE = StackLocation("eval_frame.compile_wrapper", "train.py:8", activity="compiles")
_DOWNLOAD = StackLocation("socket.readinto", "train.py:9", activity="uses the network")


@pytest.mark.parametrize(
    ("place", "process", "why"),
    [
        (_SUBPROCESS, ProcessActivity(ProcessState.SLEEPS, child="cc1plus"), "it runs other programs, such as cc1plus"),
        (_SUBPROCESS, ProcessActivity(ProcessState.SLEEPS, cores=0.02), "it waits for a child process"),
        (_COMPILE, ProcessActivity(ProcessState.SLEEPS, cores=0.02), "it compiles"),
        (_DOWNLOAD, ProcessActivity(ProcessState.SLEEPS, wakes_hz=40.0), "it uses the network"),
    ],
)
def test_a_rank_whose_work_shows_little_is_not_accused(place, process, why):
    like = RankState(0, place=place, process=process)
    verdict = diagnose(play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(0, 4), like=like))
    assert (verdict.cause, verdict.is_fault) == (Cause.BUSY, False)
    assert f"is working ({why})" in verdict.sentence


@pytest.mark.parametrize("place", [_SUBPROCESS, _COMPILE, _DOWNLOAD])
def test_a_rank_whose_work_shows_nothing_is_accused(place):
    like = RankState(0, place=place, process=IDLE)
    verdict = diagnose(play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(0, 4), like=like))
    assert (verdict.cause, verdict.blamed) == (Cause.USER_CODE, (0,))


def test_a_rank_that_waits_for_input_is_named_so():
    process = ProcessActivity(ProcessState.SLEEPS, reads_stdin=True)
    like = RankState(0, place=StackLocation("", "train.py:6"), process=process)
    verdict = diagnose(play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(0, 4), like=like))
    assert (verdict.cause, verdict.blamed) == (Cause.INPUT, (0,))
    assert "rank 0 has not reached this call: it waits for input at train.py:6" in verdict.sentence


def _between_calls(**places: RankState) -> JobSnapshot:
    """Returns two ranks that have completed the same calls, and are not in a call."""
    seen = play([loop(_HEADERS[:1], _STEPS, marks=False) for _ in range(2)])
    ranks = tuple(
        replace(rank, process=like.process, place=like.place, since_s=seen.now_s - 31, ending=None)
        for rank, like in zip(seen.ranks, places.values(), strict=True)
    )
    return replace(seen, ranks=ranks)


def test_ranks_that_neither_call_nor_work_are_described():
    at = StackLocation("queue.get", "train.py:6")
    same = diagnose(_between_calls(one=RankState(0, place=at, process=IDLE), two=RankState(1, place=at, process=IDLE)))
    assert (same.cause, same.blamed, same.is_fault) == (Cause.IDLE, (), False)
    assert same.sentence == "no rank has made a call or worked for 31 s: ranks 0, 1 are in queue.get (train.py:6)"
    stopped = RankState(1, place=at, process=ProcessActivity(ProcessState.STOPPED))
    differs = diagnose(_between_calls(one=RankState(0, place=at, process=IDLE), two=stopped))
    assert (differs.cause, differs.blamed) == (Cause.STOPPED, (1,))
    assert "rank 0 is in queue.get (train.py:6); rank 1 is stopped by a signal" in differs.sentence


def test_threads_on_which_idle_ranks_depend_are_described():
    at = StackLocation("queue.get", "train.py:6")
    seen = _between_calls(one=RankState(0, place=at, process=IDLE), two=RankState(1, place=at, process=IDLE))
    ranks = tuple(replace(rank, thread_error="OSError: no file (train.py:3)") for rank in seen.ranks)
    verdict = diagnose(replace(seen, ranks=ranks))
    assert verdict.sentence.endswith("; a thread of ranks 0, 1 has ended with OSError: no file (train.py:3)")


def test_ranks_of_which_one_works_are_left_in_peace():
    at, works = StackLocation("evaluate", "train.py:6"), ProcessActivity(ProcessState.RUNS, cores=1.0)
    seen = _between_calls(one=RankState(0, place=at, process=IDLE), two=RankState(1, place=at, process=works))
    assert diagnose(seen) is None


def test_messages_that_wait_for_each_other_are_a_deadlock():
    sends = [Planned(CallSignature("recv", "float32", 4, peer=1 - rank)) for rank in range(2)]
    verdict = diagnose(_receiving(sends))
    assert (verdict.cause, verdict.blamed) == (Cause.DEADLOCK, (0, 1))


def _receiving(planned):
    scene = play([loop(_HEADERS[:1], 1) for _ in range(2)])
    ranks = []
    for rank, own in zip(scene.ranks, planned, strict=True):
        call = replace(rank.calls[0], header=own.header, sequence=0, ended_s=None, outcome="")
        ranks.append(replace(rank, calls=(call,), ending=None, place=CALLING))
    return JobSnapshot(scene.now_s, tuple(ranks))


def test_a_rank_stopped_inside_a_call_is_blamed():
    scene = play([loop(_HEADERS[:1], 2) for _ in range(3)])
    ranks = tuple(
        replace(rank, calls=(replace(rank.calls[0], ended_s=None, outcome=""),), ending=None, process=IDLE)
        for rank in scene.ranks
    )
    ranks = (*ranks[:2], replace(ranks[2], process=ProcessActivity(ProcessState.STOPPED)))
    assert diagnose(replace(scene, ranks=ranks)).blamed == (2,)


def test_a_rank_without_a_recording_is_named():
    scene = play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(1, 4), like=_ABSENCES[Cause.LOADER])
    verdict = diagnose(replace(scene, ranks=(scene.ranks[0], scene.ranks[2])))
    assert (verdict.cause, verdict.blamed) == (Cause.UNKNOWN, (1,))


def test_a_loop_that_ran_fewer_times_is_found():
    plans = [loop(_HEADERS[:1], _STEPS - (rank == 2), marks=False) for rank in range(3)]
    verdict = diagnose(play(plans))
    assert (verdict.cause, verdict.blamed) == (Cause.LEFT, (2,))
    assert verdict.sentence.startswith(
        "rank 2 exited too early, with exit code 0 after all_reduce(float32, 4096) call 7"
    )


def test_the_line_of_an_early_exit_is_named():
    plans = [loop(_HEADERS[:1], _STEPS - (rank == 1), marks=False) for rank in range(2)]
    scene = play(plans)
    left = replace(scene.ranks[1], ending=replace(scene.ranks[1].ending, line="train.py:14"))
    verdict = diagnose(replace(scene, ranks=(scene.ranks[0], left)))
    assert (verdict.cause, verdict.blamed) == (Cause.LEFT, (1,))
    assert verdict.sentence.startswith(
        "rank 1 exited too early, with exit code 0 (sys.exit or SystemExit at train.py:14) after all_reduce("
    )


def test_of_two_ranks_the_one_that_left_early_is_blamed():
    plans = [loop(_HEADERS[:1], _STEPS - (rank == 1), marks=False) for rank in range(2)]
    verdict = diagnose(play(plans))
    assert (verdict.cause, verdict.blamed) == (Cause.LEFT, (1,))
    assert "rank 0 waits in all_reduce(float32, 4096) call 8" in verdict.sentence


def test_a_call_is_named_with_the_line_that_made_it():
    """A root need not wait for the other ranks, so it may have continued to its next call."""
    plans = _plans(2, _HEADERS[:2])
    plans[0][8] = replace(plans[0][8], header=_HEADERS[3])
    seen = play(plans)

    def with_lines(rank: RankState) -> RankState:
        made = tuple(replace(call, line=f"train.py:{100 * rank.rank + call.sequence}") for call in rank.calls)
        return replace(rank, calls=made, place=StackLocation("all_gather_object", "other.py:7", is_call=True))

    verdict = diagnose(replace(seen, ranks=tuple(map(with_lines, seen.ranks))))
    assert verdict.blamed == (0,)
    assert "broadcast(float32, 128, root 0) as call 9 (train.py:9)" in verdict.sentence
    assert "(train.py:109)" in verdict.sentence and "other.py" not in verdict.sentence


def test_the_first_of_several_failures_is_blamed():
    like = replace(
        _ABSENCES[Cause.EXCEPTION], ending=RankExitStatus(ExitReason.EXCEPTION, 1.0, "ValueError: bad", "train.py:5")
    )
    scene = play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(1, 4), like=like)
    later = replace(scene.ranks[2], ending=RankExitStatus(ExitReason.KILLED, 2.0, "killed by SIGTERM"))
    verdict = diagnose(replace(scene, ranks=(*scene.ranks[:2], later)))
    assert verdict.blamed == (1,)
    assert "rank 1 failed: ValueError: bad (train.py:5)" in verdict.sentence


def test_an_error_that_was_wrapped_is_not_taken_for_the_cause():
    scene = play([loop(_HEADERS[:1], _STEPS) for _ in range(3)], stopped=(1, 4), like=_ABSENCES[Cause.KILLED])
    ending = RankExitStatus(ExitReason.EXCEPTION, 1.0, "RuntimeError: training failed", "train.py:5")
    lost = replace(scene.ranks[0].calls[-1], ended_s=1.0, outcome="peer_lost")
    wrapping = replace(scene.ranks[0], calls=(*scene.ranks[0].calls[:-1], lost), ending=ending)
    seen_later = replace(scene.ranks[1], ending=RankExitStatus(ExitReason.KILLED, 2.0, "killed by SIGKILL"))
    verdict = diagnose(replace(scene, ranks=(wrapping, seen_later, scene.ranks[2])))
    assert (verdict.cause, verdict.blamed) == (Cause.KILLED, (1,))


def _call(sequence: int, arrived_s: float, ended_s: float | None) -> RankCall:
    return RankCall(
        "world", sequence, CallSignature("all_reduce", "float32", 4), arrived_s, ended_s, "ok" if ended_s else ""
    )


def test_calls_of_a_group_that_was_made_anew_are_told_apart():
    """For example, the workers of an elastic job form a group with the same name in each view."""
    calls = (_call(1, 1.0, 1.1), _call(2, 1.2, 1.3), _call(1, 2.0, None))
    ranks = tuple(RankState(number, "h", 7, {"world": GroupMembership(number, 2)}, calls) for number in range(2))
    verdict = diagnose(JobSnapshot(30.0, ranks))
    assert verdict is not None and "all_reduce(float32, 4) call 1" in verdict.sentence


def test_a_death_is_told_from_what_is_known_of_one_rank():
    ending = RankExitStatus(ExitReason.KILLED, 3.0, "killed by SIGKILL", "")
    rank = RankState(
        1, "h", 7, {"world": GroupMembership(1, 2)}, (_call(0, 1.0, 1.1), _call(1, 1.2, None)), ending=ending
    )
    verdict = diagnose_exit(rank, "slot")
    assert verdict is not None
    assert verdict.sentence == "slot 1 failed: killed by SIGKILL, in all_reduce(float32, 4) call 1"
    assert diagnose_exit(replace(rank, ending=None)) is None
