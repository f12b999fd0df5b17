"""A follower of a growing recording that a real recorder writes, and interval arithmetic."""

from __future__ import annotations

import time

import pytest
from recording_writer import writer

from paceline.comm.record.layout import EventKind
from paceline.operate.dashboard.job_sample import BucketTiming
from paceline.operate.dashboard.recording_follower import (
    PastCall,
    RecordingFollower,
    StepParts,
    joined,
    length,
    within,
    without,
)

__all__ = ["writer"]


def test_steps_come_when_they_have_ended_and_only_once(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    writer.do("step(1); step(2)")
    news = follower.update()
    assert news is not None and [step.step for step in news.steps] == [1, 2]
    assert (follower.rank, follower.pid, news.step) == (1, writer.process.pid, 2)
    first = news.steps[0]
    assert first.samples == 32
    assert 0.009 < first.forward_s < first.duration_s
    assert 0.009 < first.exposed_s < first.duration_s
    assert [bucket.nbytes for bucket in first.buckets] == [4096]
    assert ("exposed" in [name for name, _, _ in first.phases]) and first.backward_s > 0.009
    assert (1, "loss", 1.0) in news.values
    assert follower.update().steps == []


def test_an_open_step_is_taken_once_it_ends(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    writer.do("core.record_step(7); whole = begin_event(K.STEP, 'ddp', 7); wait = begin_event(K.DATA_WAIT, 'loader')")
    news = follower.update()
    assert news.steps == [] and EventKind.DATA_WAIT in news.open_kinds
    writer.do("core.record_end(wait); core.record_end(whole)")
    news = follower.update()
    assert [step.step for step in news.steps] == [7]
    assert news.steps[0].data_s > 0 and not news.open_kinds


def test_the_latest_steps_are_found_after_the_ring_came_round(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    follower.update()
    writer.do("for i in range(20000): core.record_mark(K.SPAN, 0, 0, 0)")
    writer.do("step(3)")
    news = follower.update()
    assert [step.step for step in news.steps] == [3]


def test_with_a_stride_every_other_step_is_worked_out(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    writer.do("[step(n) for n in range(1, 6)]")
    news = follower.update(stride=2)
    assert [step.step for step in news.steps] == [2, 4]
    assert [value[0] for value in news.values if value[1] == "loss"] == [1, 2, 3, 4, 5]


def test_a_call_that_lasts_is_what_the_rank_does(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    writer.do("group = core.record_group('default', 'test', 7, 1, [0, 1]); core.record_step(4)")
    writer.do("call = core.RecordedCall(group, 1, 11, 0, 5, 4096, -1, False, -1); call.start()")
    news = follower.update()
    assert [(call.operation, call.dtype, call.count, call.sequence) for call in news.open_calls] == [
        ("all_reduce", "float32", 4096, 5)
    ]
    assert abs(news.open_calls[0].arrived_s - time.monotonic()) < 60
    writer.do("call.end(0); whole = begin_event(K.STEP, 'ddp', 4); core.record_end(whole)")
    news = follower.update()
    assert news.open_calls == [] and news.steps[0].communication_s == 0  # the call ended before the step began
    assert (news.shm_nbytes, news.tcp_nbytes) == (0, 0)


def test_values_of_a_program_without_steps_are_counted(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    writer.do("core.record_step(0); log(loss=5.0); log(loss=4.0); log(lr=1.0)")
    assert follower.update().values == [(1, "loss", 5.0), (2, "loss", 4.0), (1, "lr", 1.0)]


def test_memory_without_a_recording_has_no_news():
    assert RecordingFollower(lambda offset, nbytes: b"").update() is None
    assert RecordingFollower(lambda offset, nbytes: bytes(nbytes)).update() is None


def test_intervals_are_joined_cut_and_taken_out():
    assert joined([(3, 4), (0, 1), (0.5, 2), (4, 5)]) == [(0, 2), (3, 5)]
    assert within([(0, 2), (3, 5)], 1, 4) == [(1, 2), (3, 4)]
    assert without([(0, 10)], [(1, 2), (4, 6), (9, 12)]) == [(0, 1), (2, 4), (6, 9)]
    assert without([(5, 6)], [(0, 5), (6, 7)]) == [(5, 6)]
    assert without([(0, 1), (2, 3)], [(0, 5)]) == []
    assert length([(0, 2), (3, 5)]) == 4


def test_what_is_hidden_behind_backward_is_not_exposed():
    pieces = StepParts(
        phases={"backward": [(0.0, 1.0)]}, buckets=[BucketTiming(0.2, 0.3, 0.5, 1), BucketTiming(0.8, 0.8, 1.0, 1)]
    )
    step = pieces.step(1, 0.0, 1.0)
    assert step.exposed_s == pytest.approx(0.2)
    assert step.backward_s == pytest.approx(0.8)
    assert step.communication_s == pytest.approx(0.4)


def test_a_step_is_predicted_from_its_calls():
    """Buckets are averaged sequentially, in 0.3 s and 0.4 s; the last call has no prediction."""
    buckets = [BucketTiming(0.1, 0.1, 0.6, 1), BucketTiming(0.8, 0.8, 1.5, 1)]
    calls = [PastCall(0.1, 0, 0.6, True, 0.3), PastCall(0.8, 0, 1.5, True, 0.4), PastCall(1.6, 0, 1.8, False)]
    step = StepParts(buckets=buckets, calls=calls).step(1, 0.0, 2.0)
    assert step.exposed_s == pytest.approx(0.9)
    assert step.predicted_s == pytest.approx(2.0 - 0.9 + 0.4 + 0.2)


def test_a_step_without_predictions_has_none():
    buckets, unpredicted = [BucketTiming(0.1, 0.1, 0.6, 1)], PastCall(0.1, 0, 0.6, True)
    assert StepParts(buckets=buckets, calls=[unpredicted]).step(1, 0.0, 1.0).predicted_s is None
    elsewhere = PastCall(0.7, 0, 0.8, False, 0.1)
    assert StepParts(buckets=buckets, calls=[unpredicted, elsewhere]).step(1, 0.0, 1.0).predicted_s is None


def test_a_bucket_waits_until_all_ranks_have_come():
    pieces = StepParts(buckets=[BucketTiming(0.1, 0.1, 0.9, 1)], calls=[PastCall(0.1, 0.7, 0.9, False)])
    assert pieces.step(1, 0.0, 1.0).buckets == (BucketTiming(0.1, 0.7, 0.9, 1),)


def test_a_synchronous_call_is_exposed_wherever_it_is():
    pieces = StepParts(
        phases={"forward": [(0.0, 1.0)]}, calls=[PastCall(0.25, 0.3, 0.5, False), PastCall(0.6, 0, 0.9, True)]
    )
    step = pieces.step(1, 0.0, 1.0)
    assert (step.exposed_s, step.forward_s) == (pytest.approx(0.25), pytest.approx(0.75))
    assert step.communication_s == pytest.approx(0.55)
