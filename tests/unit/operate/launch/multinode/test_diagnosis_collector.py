"""Snapshots that the launchers of a job collect, and the diagnoses based on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observed_world import loop, play

from paceline.operate.diagnosis import machine_snapshot, stragglers
from paceline.operate.diagnosis.job_snapshot import (
    CallSignature,
    ExitReason,
    ProcessActivity,
    ProcessState,
    RankExitStatus,
    RankState,
    StackLocation,
)
from paceline.operate.diagnosis.machine_snapshot import MachineSnapshot
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.operate.launch.multinode.diagnosis_collector import (
    FAILURE_LAST_PATIENCE_S,
    FAILURE_PATIENCE_S,
    HOLD_S,
    LAST_PATIENCE_S,
    PATIENCE_S,
    DiagnosisCollector,
)
from paceline.operate.launch.multinode.protocol import (
    JobEnded,
    JoinJob,
    RequestSnapshot,
    SnapshotReport,
    UserMessage,
)

SUM = CallSignature("all_reduce", "float32", 4096, "SUM")


class Inner:
    """A controller that only ends the job when a node leaves."""

    deadline_s = None
    failures: tuple[WorkerFailure, ...] = ()

    def reported(self, node, report, now_s):
        return []

    def tick(self, now_s):
        return []

    code = 1

    def ended(self, node, why, now_s):
        return [("a", JobEnded(self.code, failures=self.failures))]

    def lost(self, node, why, now_s, silent_s=0.0):
        return self.ended(node, why, now_s)


def nodes(count=2):
    sightings = DiagnosisCollector(Inner())
    for name in "abc"[:count]:
        sightings.reported(name, JoinJob(name, 1, name, 1, 2, serves=name == "a"), 0.0)
    return sightings


def scene(size=4, stray=3):
    like = RankState(
        0,
        place=StackLocation("DataLoader.__next__", "train.py:71", is_loader=True),
        process=ProcessActivity(ProcessState.SLEEPS),
    )
    return play([loop([SUM], 8) for _ in range(size)], stopped=(stray, 5), like=like)


def of_node(seen, ranks, clock_s=0.0, is_stalled=True):
    """Returns the snapshot of a node that runs these ranks. The node's clock is ahead by `clock_s`."""
    shown = tuple(machine_snapshot.shifted(seen.ranks[rank], clock_s) for rank in ranks)
    return SnapshotReport(
        machine_snapshot.encode(MachineSnapshot(seen.now_s + clock_s, shown, seen.now_s - 12 if is_stalled else None))
    )


def test_the_other_nodes_look_and_the_one_that_serves_tells():
    sightings, seen = nodes(), scene()
    assert sightings.reported("b", of_node(seen, [2, 3]), 1.0) == [("a", RequestSnapshot())]
    [(node, told)] = sightings.reported("a", of_node(seen, [0, 1], clock_s=5000.0, is_stalled=False), 2.0)
    assert node == "a"
    assert (
        "ranks 0-2 wait in all_reduce(float32, 4096) call 6 (train.py:88); rank 3 has not reached this call"
        in told.text
    )
    assert "DataLoader.__next__ (train.py:71), for 21 s" in told.text, "the picture of b is a second old"


def test_a_diagnosis_that_fails_ends_no_job(monkeypatch, capsys):
    def diagnose(scene):
        raise ValueError("min() arg is an empty sequence")

    monkeypatch.setattr("paceline.operate.diagnosis.diagnosis.diagnose", diagnose)
    sightings, seen = nodes(), scene()
    sightings.reported("b", of_node(seen, [2, 3]), 1.0)
    assert sightings.reported("a", of_node(seen, [0, 1], is_stalled=False), 2.0) == []
    assert "could not be analyzed (ValueError: min() arg is an empty sequence, in " in capsys.readouterr().err


def test_a_node_that_does_not_look_is_not_waited_for():
    sightings, seen = nodes(), scene()
    sightings.reported("a", of_node(seen, [0, 1]), 1.0)
    assert sightings.tick(1.0 + PATIENCE_S) == [], "what is missing may be the cause"
    assert sightings.deadline_s == 1.0 + LAST_PATIENCE_S
    [(_, told)] = sightings.tick(1.0 + LAST_PATIENCE_S)
    assert "ranks 2, 3 did not reach this call and left no recording" in told.text


def test_a_node_that_is_slow_to_look_is_not_accused():
    sightings, seen = nodes(), scene()
    sightings.reported("a", of_node(seen, [0, 1]), 1.0)
    assert sightings.tick(1.0 + PATIENCE_S) == []
    [(_, told)] = sightings.reported("b", of_node(seen, [2, 3]), 7.0)
    assert "rank 3 has not reached this call: it is in DataLoader.__next__" in told.text and told.blamed == (3,)


def test_a_cause_that_is_known_needs_no_other_node():
    sightings, seen = nodes(3), scene(6, 3)
    sightings.reported("a", of_node(seen, [0, 1]), 1.0)
    sightings.reported("b", of_node(seen, [2, 3]), 2.0)
    [(_, told)] = sightings.tick(1.0 + PATIENCE_S)
    assert "rank 3 has not reached this call: it is in DataLoader.__next__" in told.text


def test_the_end_of_a_stall_is_told_once():
    sightings, seen = nodes(1), scene()
    [(_, first)] = sightings.reported("a", of_node(seen, range(4)), 1.0)
    assert sightings.reported("a", of_node(seen, range(4)), 9.0) == []
    assert sightings.reported("a", SnapshotReport(""), 21.0) == [("a", UserMessage("the job continues after 32 s"))]
    assert sightings.reported("a", SnapshotReport(""), 22.0) == []
    assert first.text.startswith("step 6: ranks 0-2 wait")


def test_the_cause_of_a_failure_is_told_with_its_end():
    sightings, seen = nodes(1), scene()
    sightings.inner.failures = (WorkerFailure(3, 1, 1, 0.0, Record(0.0, "ValueError", "ValueError: bad")),)
    ending = RankExitStatus(ExitReason.EXCEPTION, seen.now_s, "ValueError: bad", "train.py:5")
    ranks = (*seen.ranks[:3], replace(seen.ranks[3], ending=ending))
    last = SnapshotReport(machine_snapshot.encode(MachineSnapshot(seen.now_s, ranks)), is_last=True)
    assert sightings.reported("a", last, 1.0) == []
    told, end = sightings.ended("a", "", 2.0)
    assert told[1].is_last and "rank 3 failed: ValueError: bad (train.py:5)" in told[1].text
    assert isinstance(end[1], JobEnded)


def failed(seen, ranks, stray=None):
    """Returns the snapshot of the node that runs these ranks, one of which may have raised an exception."""
    ending = RankExitStatus(ExitReason.EXCEPTION, seen.now_s, "ValueError: bad", "train.py:5")
    shown = tuple(replace(seen.ranks[rank], ending=ending if rank == stray else None) for rank in ranks)
    return SnapshotReport(machine_snapshot.encode(MachineSnapshot(seen.now_s, shown)), is_failure=True)


def test_a_failure_is_told_as_soon_as_all_nodes_have_looked():
    sightings, seen = nodes(), scene()
    assert sightings.reported("b", failed(seen, [2, 3], 3), 1.0) == [("a", RequestSnapshot(is_failure=True))]
    assert sightings.reported("a", failed(seen, [0, 1]), 1.1) == []
    [(node, told)] = sightings.tick(sightings.deadline_s)
    assert (node, told.blamed, told.is_last) == ("a", (3,), False)
    assert "rank 3 failed: ValueError: bad (train.py:5)" in told.text and "ranks 0-2 wait in" in told.text
    assert sightings.reported("a", failed(seen, [0, 1], 1), 1.2) == [], "one failure of a generation is told at once"


def test_a_failure_is_told_without_a_node_that_does_not_look():
    sightings, seen = nodes(), scene()
    sightings.reported("b", failed(seen, [2, 3], 3), 1.0)
    assert sightings.tick(1.0 + FAILURE_PATIENCE_S / 2) == []
    assert sightings.tick(1.0 + FAILURE_PATIENCE_S) == []
    [(_, told)] = sightings.tick(sightings.deadline_s)
    assert "rank 3 failed: ValueError: bad (train.py:5)" in told.text


def finished(seen, ranks, left, lost):
    """Returns the ranks' state after `left` has exited with code 0 and `lost` has failed because of that."""
    endings = {
        left: RankExitStatus(ExitReason.FINISHED, seen.now_s - 1),
        lost: RankExitStatus(ExitReason.CONSEQUENCE, seen.now_s, "PeerLostError: rank 3 left the group"),
    }
    shown = tuple(replace(seen.ranks[rank], ending=endings.get(rank)) for rank in ranks)
    return machine_snapshot.encode(MachineSnapshot(seen.now_s, shown))


def test_a_rank_that_left_early_is_told_before_the_job_ends():
    sightings, seen = nodes(), scene()
    sightings.inner.failures = (WorkerFailure(0, 1, 1, 0.0, Record(0.0, "PeerLostError", "PeerLostError: rank 3")),)
    sightings.reported("a", SnapshotReport(finished(seen, [0, 1], 3, 0), is_failure=True), 1.0)
    assert sightings.reported("b", SnapshotReport(finished(seen, [2, 3], 3, 0), is_failure=True), 1.1) == []
    [(_, told)] = sightings.tick(1.1 + HOLD_S)
    assert told.text.startswith(
        "step 6: rank 3 exited too early, with exit code 0 after all_reduce(float32, 4096) call 5"
    )
    assert told.blamed == (3,)
    (_, last), _ = sightings.ended("b", "", 60.0)
    assert last.text == "the cause was explained above: a rank's script ended before the others' (rank 3)"


def test_the_cause_precedes_failures_that_are_all_consequences():
    sightings, seen = nodes(1), scene()
    sightings.inner.failures = (WorkerFailure(0, 1, 1, 0.0, Record(0.0, "PeerLostError", "PeerLostError: rank 3")),)
    sightings.reported("a", SnapshotReport(finished(seen, range(4), 3, 0), is_failure=True), 1.0)
    (_, headline), (_, last), (_, end) = sightings.ended("a", "", 1.0 + HOLD_S / 2)
    assert headline.is_headline and "rank 3 exited too early" in headline.text
    assert last.text == "the cause was explained above: a rank's script ended before the others' (rank 3)"
    assert (last.is_last, last.is_headline) == (True, False)
    assert isinstance(end, JobEnded)


def test_a_rank_that_was_stopped_keeps_its_location():
    sightings, seen = nodes(1), scene()
    sightings.inner.failures = (WorkerFailure(0, 1, 1, 0.0, Record(0.0, "PeerLostError", "PeerLostError: rank 3")),)
    sightings.reported("a", failed(seen, range(4)), 1.0)
    ranks = tuple(replace(rank, place=None, process=None) for rank in seen.ranks)
    last = machine_snapshot.encode(MachineSnapshot(seen.now_s, ranks))
    sightings.reported("a", SnapshotReport(last, is_last=True), 2.0)
    (_, told), *_ = sightings.ended("a", "", 3.0)
    assert "rank 3 has not reached this call: it is in DataLoader.__next__ (train.py:71)" in told.text


def test_a_job_that_ends_soon_is_explained_only_once():
    sightings, seen = nodes(1), scene()
    sightings.inner.failures = (WorkerFailure(3, 1, 1, 0.0, Record(0.0, "ValueError", "ValueError: bad")),)
    assert sightings.reported("a", failed(seen, range(4), 3), 1.0) == []
    (_, told), (_, end) = sightings.ended("a", "", 1.0 + HOLD_S / 2)
    assert told.is_last and "rank 3 failed: ValueError: bad (train.py:5)" in told.text
    assert isinstance(end, JobEnded)
    assert sightings.tick(1.0 + HOLD_S) == []


def test_a_cause_is_told_after_a_consequence_that_told_nothing():
    sightings, seen = nodes(1), scene()
    lost = RankExitStatus(ExitReason.CONSEQUENCE, seen.now_s, "PeerLostError")
    sightings.reported("a", SnapshotReport(ended(seen, range(4), 0, lost), is_failure=True), 1.0)
    assert sightings.tick(9.0) == []
    sightings.reported("a", failed(seen, range(4), 3), 10.0)
    [(_, told)] = sightings.tick(10.0 + HOLD_S)
    assert "rank 3 failed: ValueError: bad (train.py:5)" in told.text


def test_an_error_that_others_caused_is_not_told_without_them():
    sightings, seen = nodes(), scene()
    ended = replace(seen.ranks[0], ending=RankExitStatus(ExitReason.CONSEQUENCE, seen.now_s, "PeerLostError"))
    picture_of_it = machine_snapshot.encode(MachineSnapshot(seen.now_s, (ended, seen.ranks[1])))
    sightings.reported("a", SnapshotReport(picture_of_it, is_failure=True), 1.0)
    assert sightings.tick(1.0 + FAILURE_PATIENCE_S) == []


def test_calls_that_do_not_fit_need_a_long_history():
    sightings, seen = nodes(), scene()
    unfit = RankExitStatus(ExitReason.MISMATCH, seen.now_s, "CollectiveMismatchError")
    orders = sightings.reported("b", SnapshotReport(ended(seen, [2, 3], 3, unfit), is_failure=True), 1.0)
    assert orders == [("a", RequestSnapshot(is_failure=True, is_deep=True))]


def ended(seen, ranks, stray, ending):
    """Returns a node's view of these ranks, one of which has exited."""
    shown = tuple(replace(seen.ranks[rank], ending=ending if rank == stray else None) for rank in ranks)
    return machine_snapshot.encode(MachineSnapshot(seen.now_s, shown))


def test_a_cause_that_is_seen_late_is_told():
    sightings, seen = nodes(), scene()
    lost = RankExitStatus(ExitReason.CONSEQUENCE, seen.now_s, "PeerLostError")
    sightings.reported("a", SnapshotReport(ended(seen, [0, 1], 0, lost), is_failure=True), 1.0)
    assert sightings.tick(1.0 + FAILURE_PATIENCE_S) == []
    assert sightings.reported("b", failed(seen, [2, 3], 3), 3.0) == []
    [(_, told)] = sightings.tick(3.0 + HOLD_S)
    assert "rank 3 failed: ValueError: bad (train.py:5)" in told.text


def test_an_error_that_was_wrapped_waits_for_its_cause():
    sightings, seen = nodes(), scene()
    sum_of_0 = seen.ranks[0].calls[-1]
    lost = replace(sum_of_0, ended_s=seen.now_s - 1, outcome="peer_lost")
    wrapped = replace(seen.ranks[0], calls=(*seen.ranks[0].calls[:-1], lost))
    seen = replace(seen, ranks=(wrapped, *seen.ranks[1:]))
    ending = RankExitStatus(ExitReason.EXCEPTION, seen.now_s - 1, "RuntimeError: training failed", "train.py:99")
    sightings.reported("a", SnapshotReport(ended(seen, [0, 1], 0, ending), is_failure=True), 1.0)
    assert sightings.tick(1.0 + FAILURE_PATIENCE_S) == []
    assert sightings.tick(1.0 + FAILURE_LAST_PATIENCE_S) == []
    [(_, told)] = sightings.tick(1.0 + FAILURE_LAST_PATIENCE_S + HOLD_S)
    assert "rank 0 failed: RuntimeError" in told.text, "nothing else is known"


def test_the_first_of_failures_on_two_nodes_is_blamed():
    """The nodes' clocks differ by four seconds, so that the later failure has the earlier clock time."""
    sightings, seen = nodes(), scene()
    sightings.inner.failures = (WorkerFailure(3, 1, 1, 0.0, None),)
    first = RankExitStatus(ExitReason.EXCEPTION, seen.now_s - 0.5, "ValueError: the first", "train.py:5")
    second = RankExitStatus(ExitReason.EXCEPTION, seen.now_s - 1.0, "KeyError: the second", "train.py:9")
    sightings.reported("b", SnapshotReport(ended(seen, [2, 3], 3, first), is_last=True), 1.0)
    sightings.reported("a", SnapshotReport(ended(seen, [0, 1], 0, second), is_last=True), 5.0)
    (_, told), _ = sightings.ended("a", "", 5.0)
    assert "rank 3 failed: ValueError: the first" in told.text


@pytest.mark.parametrize("is_short", [False, True])
def test_only_long_runs_are_searched_for_stragglers(monkeypatch, is_short):
    sightings, seen, searched = nodes(), scene(), []
    monkeypatch.setattr(stragglers, "describe_slowdowns", lambda snapshots, word: searched.extend(snapshots) or [])
    sightings.inner.code = 0
    last = machine_snapshot.encode(MachineSnapshot(seen.now_s, seen.ranks[2:]))
    sightings.reported("b", SnapshotReport(last, is_last=True, is_short=is_short), 1.0)
    assert all(isinstance(order, JobEnded) for _, order in sightings.ended("a", "", 5.0))
    assert len(searched) == (0 if is_short else 1)


def test_a_failure_is_told_when_its_node_is_lost():
    sightings, seen = nodes(), scene()
    sightings.reported("b", failed(seen, [2, 3], 3), 1.0)
    (_, told), (_, end) = sightings.lost("b", "its launcher has ended", 1.1)
    assert told.is_last and "rank 3 failed: ValueError: bad (train.py:5)" in told.text
    assert isinstance(end, JobEnded)


def test_a_picture_that_is_none_is_ignored():
    assert nodes(1).reported("a", SnapshotReport('{"taken_s": "x"}'), 1.0) == []
