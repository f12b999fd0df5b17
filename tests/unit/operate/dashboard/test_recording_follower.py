"""Following a growing recording in the memory of a real recorder, and interval arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from paceline.comm.record.layout import NBYTES, EventKind
from paceline.comm.record.recorder import HANDED_VARIABLE, HandedMemory
from paceline.operate.dashboard.event_queue import EventQueue, WorkerGone, WorkerRunning
from paceline.operate.dashboard.job_sample import BucketTiming, JobEvent, JobInfo, Line, RankActivity, StallNotice
from paceline.operate.dashboard.local_collector import LocalCollector
from paceline.operate.dashboard.recording_follower import (
    PastCall,
    RecordingFollower,
    StepParts,
    joined,
    length,
    within,
    without,
)

WRITER = """
import sys, time
import paceline._core as core
from paceline.comm.record.recorder import begin, identify
from paceline.comm.record.layout import EventKind as K
from paceline.comm.record.spans import begin_event
from paceline.comm.record.log import log

begin(); identify(1, 4)

def step(number):
    core.record_step(number)
    whole = begin_event(K.STEP, "ddp", number)
    for kind in (K.FORWARD, K.BACKWARD):
        part = begin_event(kind)
        if kind == K.BACKWARD:
            time.sleep(0.01)
            bucket = begin_event(K.BUCKET, "ddp", 0, 4096)
            core.record_sent(bucket)
        time.sleep(0.01)
        if kind == K.BACKWARD:
            core.record_end(bucket)
        core.record_end(part)
    log(loss=1.0 / number, samples=32, **({"total_steps": 50} if number == 1 else {}))
    core.record_end(whole)

for line in sys.stdin:
    command, _, number = line.partition(" ")
    exec(line)
    print("done", flush=True)
"""


class Writer:
    """A process that records events as instructed."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("recording")
        os.ftruncate(self.fd, NBYTES)
        handed = HandedMemory(self.fd, os.fstat(self.fd).st_ino, os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, HANDED_VARIABLE: str(handed)},
        )  # fmt: skip

    def do(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.fd)


@pytest.fixture
def writer():
    writer = Writer()
    writer.do("pass")
    yield writer
    writer.close()


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
    assert news.open_calls == [] and news.steps[0].communication_s == 0  # it was over before the step began
    assert (news.shm_nbytes, news.tcp_nbytes) == (0, 0)


def test_values_of_a_program_without_steps_are_counted(writer):
    follower = RecordingFollower.of_descriptor(writer.fd)
    writer.do("core.record_step(0); log(loss=5.0); log(loss=4.0); log(lr=1.0)")
    assert follower.update().values == [(1, "loss", 5.0), (2, "loss", 4.0), (1, "lr", 1.0)]


def test_memory_without_a_recording_has_no_news():
    assert RecordingFollower(lambda offset, nbytes: b"").update() is None
    assert RecordingFollower(lambda offset, nbytes: bytes(nbytes)).update() is None


def test_a_lookout_sees_workers_and_what_is_noted(writer):
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("job", world_size=2))
    try:
        notes.leave_worker(1, writer.process.pid, "node0", writer.fd)
        notes.leave(WorkerRunning(0, 1, "node0"))
        writer.do("step(1)")
        notes.leave(Line(time.monotonic(), 1, 1, "hello"))
        notes.leave(JobEvent(time.monotonic(), "start", "2 ranks"))
        sample = lookout.look()
        assert [(each.rank, each.state) for each in sample.ranks] == [
            (0, RankActivity.STARTING),
            (1, RankActivity.TRAINING),
        ]
        assert sample.ranks[1].memory_nbytes > 1 << 20
        assert sample.facts.total_steps == 50
        assert [line.text for line in sample.lines] == ["hello"] and len(sample.events) == 1
        notes.leave(StallNotice("rank 1 is stuck", (1,)))
        notes.leave(WorkerGone(1, writer.process.pid, "killed by SIGKILL"))
        sample = lookout.look()
        assert sample.verdict is not None and sample.lines == ()
        assert (sample.ranks[1].state, sample.ranks[1].doing) == (RankActivity.DEAD, "killed by SIGKILL")
    finally:
        lookout.close()
    notes.leave_worker(1, 1, "node0", writer.fd)  # no reader is left, so the descriptor is not kept
    os.fstat(writer.fd)


def test_an_incomplete_script_makes_a_worker_dead(writer):
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("job", world_size=1))
    notes.leave_worker(1, writer.process.pid, "node0", writer.fd)
    writer.do("step(1)")
    notes.leave(WorkerGone(1, writer.process.pid, None))
    (rank,) = lookout.look().ranks
    assert (rank.state, rank.doing) == (RankActivity.DEAD, "has ended without completing its script")
    notes.leave(WorkerGone(1, writer.process.pid, ""))
    (rank,) = lookout.look().ranks
    assert (rank.state, rank.doing) == (RankActivity.ENDED, "")
    lookout.close()


def test_a_rank_in_a_long_call_keeps_its_links(writer):
    now_s = time.monotonic()
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("job", world_size=1), clock=lambda: now_s)
    notes.leave_worker(1, writer.process.pid, "node0", writer.fd)
    writer.do("group = core.record_group('default', 'test', 7, 1, [0, 1])")
    writer.do("call = core.RecordedCall(group, 1, 11, 0, 5, 4096, -1, False, -1); call.end(0, 4096)")
    assert lookout.look().ranks[0].pending is None
    now_s += 2
    writer.do("call = core.RecordedCall(group, 1, 11, 0, 6, 4096, -1, False, -1); call.end(0, 4096)")
    assert [link.kind for link in lookout.look().links] == ["shared memory"]
    writer.do("stuck = core.RecordedCall(group, 1, 11, 0, 7, 4096, -1, False, -1)")
    now_s = time.monotonic() + 60
    sample = lookout.look()
    assert [link.nbytes_per_s for link in sample.links] == [0.0]
    pending = sample.ranks[0].pending
    assert pending is not None and [call.is_open for call in pending.calls] == [False, False, True]
    lookout.close()


def test_a_worker_that_joins_late_counts_as_the_others(writer):
    late = Writer()
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("job", world_size=2))
    try:
        notes.leave_worker(0, writer.process.pid, "node0", writer.fd)
        writer.do("[step(n) for n in range(1, 12)]")
        lookout.look()
        notes.leave_worker(1, late.process.pid, "node0", late.fd)
        late.do("step(1)")
        lookout.look()
        late.do("step(2)")
        sample = lookout.look()
        assert [each.step for each in sample.ranks] == [11, 12]
        assert [step.step for step in sample.ranks[1].steps] == [12]
        assert [step for step, _, _ in sample.ranks[1].values] == [12]
    finally:
        lookout.close()
        late.close()


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
