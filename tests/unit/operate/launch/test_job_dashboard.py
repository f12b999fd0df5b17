"""Ranks on other machines, as shown on the live page: their launchers' messages, and the timing of messages."""

from __future__ import annotations

import pytest
from simulated_training import Training
from watched_output import Watch

from paceline.operate.dashboard.event_queue import EventQueue
from paceline.operate.dashboard.job_sample import JobEvent, JobInfo, JobSample, Line, Stack
from paceline.operate.dashboard.local_collector import LocalCollector
from paceline.operate.launch.job_dashboard import decode_update, encode_update
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay
from paceline.operate.launch.multinode.protocol import DashboardUpdate, DashboardWatched, JoinJob, StacksRequest
from paceline.operate.launch.multinode.protocol import decode as decode_message
from paceline.operate.launch.multinode.protocol import encode as encode_message
from paceline.train.elastic.protocol import NotifyOrder


class Inner:
    """A controller that makes no decisions."""

    deadline_s = None

    def reported(self, node, report, now_s):
        return [(node, NotifyOrder("here"))]

    def ended(self, node, why, now_s):
        return []

    def lost(self, node, why, now_s, silent_s=0.0):
        return []

    def tick(self, now_s):
        return []


def join(serves: bool) -> JoinJob:
    return JoinJob("host", 1, "10.0.0.1", 1, 2, "default", None, serves, "1", False)


def test_others_are_asked_only_while_somebody_looks():
    viewing = DashboardRelay(Inner())
    viewing.reported("a", join(True), 0.0)
    viewing.reported("b", join(False), 0.0)
    assert viewing.reported("a", DashboardWatched(True), 1.0) == [("b", DashboardWatched(True))]
    assert viewing.reported("c", join(False), 2.0) == [("c", NotifyOrder("here")), ("c", DashboardWatched(True))]
    assert viewing.reported("b", DashboardUpdate("x"), 3.0) == [("a", DashboardUpdate("x"))]
    assert viewing.reported("a", StacksRequest(), 3.0) == [("b", StacksRequest()), ("c", StacksRequest())]
    viewing.lost("b", "gone", 4.0)
    assert viewing.reported("a", DashboardWatched(False), 5.0) == [("c", DashboardWatched(False))]
    assert viewing.reported("d", join(False), 6.0) == [("d", NotifyOrder("here"))]


@pytest.mark.parametrize("message", [DashboardWatched(True), StacksRequest(), DashboardUpdate('[{"rank": 1}]')])
def test_the_messages_travel(message):
    assert decode_message(encode_message(message)[4:]) == message


def test_what_is_sent_is_small_and_on_the_pages_clock():
    training = Training(8)
    training.run(3.0)
    training.look()
    training.run(1.0)
    sample = training.look()
    ranks = sample.ranks
    body = encode_update(sample, 1000.0)
    assert len(body) / len(ranks) < 4096
    told = decode_update(body).ranks
    assert [each.rank for each in told] == list(range(8))
    assert told[3].steps[-1].begin_s == pytest.approx(ranks[3].steps[-1].begin_s + 1000, abs=1e-5)
    assert told[3].steps[-1].duration_s == pytest.approx(ranks[3].steps[-1].duration_s, abs=1e-5)
    assert told[3].steps[-1].buckets and not told[3].steps[0].buckets
    with pytest.raises(ValueError, match="int"):
        decode_update('{"ranks": [{"rank": "one"}]}')


def test_samples_from_elsewhere_are_taken_once():
    training = Training(2)
    training.run(1.0)
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("job", world_size=2))
    for _ in range(2):
        training.run(0.5)
        notes.leave(decode_update(encode_update(training.look(), 0.0)))
    sample = lookout.look()
    numbers = [step.step for step in sample.ranks[1].steps]
    assert numbers == sorted(set(numbers)) and len(numbers) > 10
    assert lookout.look().ranks[1].steps == ()
    lookout.close()


def test_what_others_print_and_do_is_shown_on_the_pages_clock():
    sample = JobSample(
        5.0,
        JobInfo(""),
        events=(JobEvent(4.0, "failure", "rank 2 (process 7): killed"),),
        lines=(Line(3.0, 2, 2, "Traceback"),),
        stacks=(Stack(3, 4.5, "train.py:8"),),
    )
    notes = EventQueue()
    lookout = LocalCollector(notes, JobInfo("job", world_size=4))
    notes.leave(decode_update(encode_update(sample, 100.0)))
    seen = lookout.look()
    assert seen.events == (JobEvent(104.0, "failure", "rank 2 (process 7): killed"),)
    assert seen.lines == (Line(103.0, 2, 2, "Traceback"),)
    assert seen.stacks == (Stack(3, 104.5, "train.py:8"),)
    again = lookout.look()
    assert (again.events, again.lines, again.stacks) == ((), (), ())


def test_events_that_every_launcher_tells_are_left_to_one():
    watch = Watch()
    watch.local.note_event("start", {"generation": 1, "ranks": [2, 3]})
    watch.local.note_event("end", {"code": 0})
    watch.begin().tick(1.0)
    assert [event.text for event in decode_update(watch.sent[0].body).events] == ["2 workers, 2 to 3 started"]
