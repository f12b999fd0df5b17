"""Collection of recordings from a launcher's workers."""

from __future__ import annotations

import os
import time

from recording_writer import Writer, writer

from paceline.operate.dashboard.event_queue import EventQueue, WorkerEnded, WorkerRunning
from paceline.operate.dashboard.job_sample import JobEvent, JobInfo, Line, RankActivity, StallNotice
from paceline.operate.dashboard.local_collector import LocalCollector

__all__ = ["writer"]


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
        notes.leave(WorkerEnded(1, writer.process.pid, "killed by SIGKILL"))
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
    notes.leave(WorkerEnded(1, writer.process.pid, None))
    (rank,) = lookout.look().ranks
    assert (rank.state, rank.doing) == (RankActivity.DEAD, "has ended without completing its script")
    notes.leave(WorkerEnded(1, writer.process.pid, ""))
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
