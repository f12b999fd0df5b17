"""The state that the page shows, computed from samples without files, sockets or a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated_training import Training

from paceline.operate.dashboard.aggregator import DashboardAggregator, StragglerWatch, what_if_of
from paceline.operate.dashboard.dashboard_state import PARTS, CallRow, DashboardState
from paceline.operate.dashboard.job_sample import (
    CallStatistics,
    JobInfo,
    JobSample,
    RankActivity,
    RankSample,
    RankStep,
    StallNotice,
)
from paceline.operate.diagnosis.job_snapshot import CallSignature, GroupMembership, RankCall, RankState
from paceline.operate.diagnosis.stragglers import StepWork


def pictured(training: Training, seconds: float = 20.0, looks: int = 4) -> DashboardState:
    board = DashboardAggregator()
    for _ in range(looks):
        training.run(seconds / looks)
        board.take(training.look())
    return board.state()


def test_the_header_is_one_sentence_with_the_time_left():
    header = pictured(Training(4, restarts=1)).header
    assert header.sentence == f"training, step {header.step:,} of 5,000, 4 of 4 ranks, 1 restart, about 7 min left"
    assert header.health == "good"
    assert header.left_s == pytest.approx((5000 - header.step) * 0.093, rel=0.05)


def test_a_slow_rank_is_named_with_what_it_costs():
    picture = pictured(Training(4, slow={3: 1.3}))
    assert picture.what_if is not None and picture.what_if.ranks == (3,)
    assert "if rank 3 were like the others, a step would take" in picture.what_if.sentence
    assert [row.rank for row in picture.ranks if row.is_slow] == [3]
    healthy = pictured(Training(4))
    assert healthy.what_if is None
    assert picture.what_if.then == pytest.approx(healthy.figures.step, rel=0.04)
    assert not any(row.is_slow for row in healthy.ranks)
    slowest = max(picture.ranks, key=lambda row: row.slowness)
    assert slowest.rank == 3 and slowest.wait == min(row.wait for row in picture.ranks)


def test_the_parts_of_a_step_add_up_to_it():
    for column in pictured(Training(8)).steps.items:
        assert sum(column.parts) == pytest.approx(column.duration, abs=0.05)
        assert len(column.parts) == len(PARTS)


def test_a_stuck_job_says_so_and_blames_the_rank():
    picture = pictured(Training(4, hangs=(3, 100)), seconds=30)
    assert picture.header.health == "bad"
    assert picture.header.sentence.startswith("stuck for ")
    assert picture.header.left_s is None
    assert [row.rank for row in picture.ranks if row.is_blamed] == [3]
    assert [row.state for row in picture.ranks] == ["waiting"] * 3 + ["loading"]


def test_during_a_hang_the_page_shows_owed_calls():
    header, membership = CallSignature("all_reduce", "float32", 5), GroupMembership
    calls = [[(8, 0.0, 1.0), (9, 1.0, None)], [(8, 0.0, 1.0)], [(8, 0.0, 1.0), (9, 2.0, None)], []]
    states = [
        RankState(
            rank,
            memberships={"g": membership(rank, 4)},
            calls=tuple(RankCall("g", number, header, begin_s, end_s) for number, begin_s, end_s in own),
        )
        for rank, own in enumerate(calls)
    ]
    message = RankCall("g", 3, CallSignature("recv", "int64", 1, peer=0), 5.0)
    states[3] = RankState(3, memberships={"g": membership(3, 4)}, calls=(message,))
    ranks = tuple(RankSample(state.rank, pending=state) for state in states)
    board = DashboardAggregator()
    board.take(JobSample(21.0, JobInfo("job", world_size=4), ranks))
    assert board.state().owed == (
        "ranks 0, 2 wait for ranks 1, 3 in all_reduce(float32, 5) call 9, for 20 s",
        "rank 3 waits for rank 0 in recv(int64, 1, peer 0) call 3, for 16 s",
    )
    board.take(JobSample(22.0, JobInfo("job", world_size=4, outcome="stopped"), ranks))
    assert board.state().owed == ()
    board.take(JobSample(22.0, JobInfo("job", world_size=4), tuple(RankSample(rank) for rank in range(4))))
    assert board.state().owed == ()


def test_a_failure_is_not_called_a_stall():
    board = DashboardAggregator()
    notice = StallNotice("rank 1 failed: exit code 3", (1,), is_failure=True)
    board.take(JobSample(9.0, JobInfo("job", world_size=2), (RankSample(0, step=4), RankSample(1)), verdict=notice))
    assert board.state().header.sentence.startswith("ending after a failure, ")


def test_before_the_first_step_the_page_says_that_it_starts():
    board = DashboardAggregator()
    with pytest.raises(ValueError, match="no sample"):
        board.state()
    board.take(JobSample(5.0, JobInfo("job", world_size=2), (RankSample(0, state=RankActivity.STARTING),)))
    picture = board.state()
    assert picture.header.sentence == "starting, 0 of 2 ranks"
    assert picture.figures is None and picture.timeline is None and picture.what_if is None


def test_the_end_of_a_job_is_told():
    board = DashboardAggregator()
    board.take(
        JobSample(
            64.0, JobInfo("job", world_size=2, outcome="finished"), (RankSample(0, step=9, state=RankActivity.ENDED),)
        )
    )
    assert board.state().header.sentence == "finished after 64 s, step 9"


def step_of(number: int, seconds: float = 0.1) -> RankStep:
    return RankStep(number, number * 0.1, number * 0.1 + seconds)


def test_a_step_is_shown_when_every_rank_has_finished_it():
    board = DashboardAggregator()
    facts = JobInfo("job", world_size=2)
    board.take(
        JobSample(1.0, facts, (RankSample(0, steps=(step_of(1), step_of(2))), RankSample(1, steps=(step_of(1),))))
    )
    assert [column.step for column in board.state().steps.items] == [1]
    board.take(JobSample(1.1, facts, (RankSample(0), RankSample(1, steps=(step_of(2),)))))
    assert [column.step for column in board.state().steps.items] == [1, 2]


def test_a_rank_that_is_gone_does_not_hold_up_the_others():
    board = DashboardAggregator()
    facts = JobInfo("job", world_size=2)
    board.take(JobSample(1.0, facts, (RankSample(0), RankSample(1))))
    board.take(JobSample(2.0, facts, (RankSample(0, steps=tuple(map(step_of, range(20)))), RankSample(1))))
    assert not board.state().steps.items, "its steps may still come"
    for at_s in (3.0, 4.0, 5.0):
        board.take(JobSample(at_s, facts, (RankSample(0), RankSample(1))))
    shown = board.state().steps.items
    assert len(shown) == 20
    assert shown[0].compute == (100.0,)


def test_calls_are_shown_beside_what_was_predicted():
    """The duration is that on the rank that waits least; kinds are sorted by total time, longest first."""
    board = DashboardAggregator()
    for _ in range(3):
        quick, slow = (
            CallStatistics("all_reduce", "float32", 1000, "ring", 2, took_s, 1e-3) for took_s in (2.1e-3, 9e-3)
        )
        short = CallStatistics("broadcast", "int64", 8, "tree", 1, 5e-5, 1e-4)
        board.take(JobSample(1.0, JobInfo("job"), (RankSample(0, calls=(slow, short)), RankSample(1, calls=(quick,)))))
    assert board.state().calls == (
        CallRow("all_reduce of 1,000 float32, ring", 6, predicted=1.0, actual=1.05, is_far=False),
        CallRow("broadcast of 8 int64, tree", 3, predicted=0.1, actual=0.05, is_far=True),
    )


def test_a_step_is_shown_beside_what_was_predicted():
    board = DashboardAggregator()
    steps = tuple(replace(step_of(number), predicted_s=0.08) for number in range(4))
    board.take(JobSample(1.0, JobInfo("job"), (RankSample(0, steps=steps),)))
    assert board.state().figures.predicted == 80.0
    assert [column.predicted for column in board.state().steps.items] == [80.0] * 4


def test_values_are_joined_over_the_ranks_that_log_them():
    board = DashboardAggregator()
    for step in range(8):
        ranks = tuple(RankSample(rank, values=((step, "loss", rank + step / 1),)) for rank in range(2))
        only_first = replace(ranks[0], values=(*ranks[0].values, (step, "lr", 0.1)))
        board.take(JobSample(step / 1, JobInfo("job"), (only_first, ranks[1])))
    points = board.state().curves.items
    losses = [point for point in points if point.name == "loss"]
    assert [(point.low, point.mean, point.high) for point in losses[:2]] == [(0, 0.5, 1), (1, 1.5, 2)]
    assert {point.step for point in losses} == set(range(8))
    assert {point.step for point in points if point.name == "lr"} == set(range(8))


def work(*own_s: float) -> StepWork:
    return StepWork(0, max(own_s), dict(enumerate(own_s)))


def test_a_rank_that_becomes_slow_is_named_while_it_is():
    watch = StragglerWatch(steps_kept=120)
    watch.take([work(0.1, 0.101, 0.102)] * 300)
    assert what_if_of(watch.costs, is_over=False) is None
    watch.take([work(0.1, 0.15, 0.11)] * 120)
    guess = what_if_of(watch.costs, is_over=False)
    assert guess is not None
    assert (guess.ranks, guess.now, guess.then) == ((1,), 150, 110)
    assert guess.sentence.startswith("Rank 1 needs 45.0 ms more than the median of the others")
    ended = what_if_of(watch.costs, is_over=True)
    assert ended is not None and ended.sentence.startswith("Rank 1 needed 45.0 ms more")
    watch.take([work(0.1, 0.101, 0.102)] * 120)
    assert what_if_of(watch.costs, is_over=False) is None


def test_a_stall_is_not_part_of_what_a_step_takes():
    board = DashboardAggregator()
    steps = [step_of(number) for number in range(40)]
    steps[30] = step_of(30, seconds=16.0)
    board.take(JobSample(1.0, JobInfo("job"), (RankSample(0, steps=tuple(steps)), RankSample(1, steps=tuple(steps)))))
    assert board.state().figures.step == 100
    assert board.state().ranks[0].compute == 100
    assert max(column.duration for column in board.state().steps.items) == 16000, "the chart still shows it"


def test_after_a_restart_steps_and_curves_go_on():
    board = DashboardAggregator()
    facts = JobInfo("job", world_size=1)

    def take(first: int, last: int) -> None:
        steps = tuple(map(step_of, range(first, last)))
        values = tuple((step, "loss", float(step)) for step in range(first, last))
        board.take(JobSample(1.0, facts, (RankSample(0, step=last, steps=steps, values=values),)))

    take(1, 60)
    take(1, 30)
    take(30, 40)
    steps = [column.step for column in board.state().steps.items]
    assert steps == [*range(1, 60), *range(1, 40)]
    points = [point.step for point in board.state().curves.items]
    assert points == sorted(set(points)) and 30 <= points[-1] < 40
