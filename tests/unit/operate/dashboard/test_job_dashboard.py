"""Ranks of other machines on the live page: the messages of their launchers, and their timing."""

from __future__ import annotations

import pytest
from simulated_training import Training

from paceline.operate.dashboard.event_queue import EventQueue
from paceline.operate.dashboard.job_sample import JobEvent, JobInfo, JobSample, Line, RankSample, Stack
from paceline.operate.dashboard.local_collector import LocalCollector
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    ExitReason,
    GroupMembership,
    RankCall,
    RankExitStatus,
    RankState,
)
from paceline.operate.diagnosis.stall_detector import WatchedWorker
from paceline.operate.launch.dashboard_link import LocalActivity
from paceline.operate.launch.job_dashboard import RemoteDashboardFeed, decode_update, encode_update
from paceline.operate.launch.multinode.diagnosis_collector import DashboardRelay
from paceline.operate.launch.multinode.protocol import AskStacks, DashboardUpdate, DashboardWatched, JoinJob
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
    assert viewing.reported("a", AskStacks(), 3.0) == [("b", AskStacks()), ("c", AskStacks())]
    viewing.lost("b", "gone", 4.0)
    assert viewing.reported("a", DashboardWatched(False), 5.0) == [("c", DashboardWatched(False))]
    assert viewing.reported("d", join(False), 6.0) == [("d", NotifyOrder("here"))]


@pytest.mark.parametrize("message", [DashboardWatched(True), AskStacks(), DashboardUpdate('[{"rank": 1}]')])
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


def test_of_much_output_the_latest_is_sent():
    lines = tuple(Line(float(number), 1, 1, f"line {number}") for number in range(3000))
    told = decode_update(encode_update(JobSample(1.0, JobInfo(""), lines=lines), 0.0)).lines
    assert told[-1].text == "line 2999" and len(told) == 501
    assert told[0].text == "(2500 lines of this machine's ranks are omitted here)"
    long = tuple(Line(1.0, 1, 1, "x" * 2000) for _ in range(400))
    body = encode_update(JobSample(1.0, JobInfo(""), lines=long), 0.0)
    assert len(encode_message(DashboardUpdate(body))) < 1 << 20


class Watch:
    """A launcher without a page, whose state is observed by another launcher or not."""

    def __init__(self) -> None:
        self.local = LocalActivity(is_observed=False, has_all_events=False)
        self.sent: list[DashboardUpdate] = []
        self.ear = self.local.sink(1, 1)

    def begin(self) -> RemoteDashboardFeed:
        return RemoteDashboardFeed(self.local, list, lambda: 0.0, self.sent.append)

    def lines(self) -> list[str]:
        return [line.text for seen in self.sent for line in decode_update(seen.body).lines]


def test_output_from_before_anybody_looked_is_kept():
    watch = Watch()
    watch.ear.feed(b"first\nsec")
    assert watch.local.notes.take() == []
    outlook = watch.begin()
    watch.ear.feed(b"ond\n")
    outlook.tick(5.0)
    assert watch.lines() == ["first", "second"]
    outlook.close()
    watch.ear.feed(b"third\n")
    assert watch.lines() == ["first", "second"]
    watch.begin().tick(9.0)
    assert watch.lines() == ["first", "second", "third"]


def test_only_so_much_output_is_kept_for_later():
    watch = Watch()
    for number in range(10_000):
        watch.ear.feed(b"%08d %s\n" % (number, b"x" * 100))
    watch.begin().tick(1.0)
    assert 100 < len(watch.lines()) < 1000
    assert watch.lines()[-1].startswith("00009999")


def test_events_that_every_launcher_tells_are_left_to_one():
    watch = Watch()
    watch.local.note_event("start", {"generation": 1, "ranks": [2, 3]})
    watch.local.note_event("end", {"code": 0})
    watch.begin().tick(1.0)
    assert [event.text for event in decode_update(watch.sent[0].body).events] == ["2 workers, 2 to 3 started"]


def watched(number: int, ending: RankExitStatus | None = None, is_running: bool = True) -> WatchedWorker:
    return WatchedWorker(number, 100 + number, None, ending, is_running)


def test_only_a_worker_that_failed_is_dead():
    local = LocalActivity()
    lookout = LocalCollector(local.notes, JobInfo("job", world_size=5))
    local.watch([watched(number) for number in range(5)])
    local.watch(
        [
            watched(0, RankExitStatus(ExitReason.FINISHED, 1.0, "its script has ended"), is_running=False),
            watched(1, RankExitStatus(ExitReason.KILLED, 1.0, "killed by SIGKILL"), is_running=False),
            watched(2, is_running=False),  # the launcher asked it to end
            watched(4),
        ]
    )
    local.worker_ended(4, 104, "exit code 3")
    states = {rank.rank: (rank.state.value, rank.doing) for rank in lookout.look().ranks}
    assert states == {
        0: ("ended", ""),
        1: ("dead", "killed by SIGKILL"),
        2: ("ended", ""),
        3: ("ended", ""),  # no longer reported
        4: ("dead", "exit code 3"),
    }
    lookout.close()


def test_the_calls_of_another_machine_are_on_the_pages_clock():
    call = RankCall("g", 7, CallSignature("barrier"), 3.0)
    state = RankState(2, "node1", 5, {"g": GroupMembership(2, 4)}, (call,))
    sample = JobSample(9.0, JobInfo(""), (RankSample(2, pending=state),))
    (rank,) = decode_update(encode_update(sample, 100.0)).ranks
    assert rank.pending is not None and rank.pending.seats == state.seats
    assert [each.arrived_s for each in rank.pending.calls] == [103.0]
