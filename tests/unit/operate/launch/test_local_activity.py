"""Samples of a launcher's own workers for the dashboard."""

from __future__ import annotations

from watched_output import Watch

from paceline.operate.dashboard.job_sample import JobInfo, JobSample, Line, RankSample
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
from paceline.operate.launch.job_dashboard import decode_update, encode_update
from paceline.operate.launch.local_activity import LocalActivity
from paceline.operate.launch.multinode.protocol import DashboardUpdate
from paceline.operate.launch.multinode.protocol import encode as encode_message


def test_of_much_output_the_latest_is_sent():
    lines = tuple(Line(float(number), 1, 1, f"line {number}") for number in range(3000))
    told = decode_update(encode_update(JobSample(1.0, JobInfo(""), lines=lines), 0.0)).lines
    assert told[-1].text == "line 2999" and len(told) == 501
    assert told[0].text == "(2500 lines of this machine's ranks are omitted here)"
    long = tuple(Line(1.0, 1, 1, "x" * 2000) for _ in range(400))
    body = encode_update(JobSample(1.0, JobInfo(""), lines=long), 0.0)
    assert len(encode_message(DashboardUpdate(body))) < 1 << 20


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
            watched(2, is_running=False),  # the launcher asked it to exit
            watched(4),
        ]
    )
    local.worker_ended(4, 104, "exit code 3")
    states = {rank.rank: (rank.state.value, rank.doing) for rank in lookout.look().ranks}
    assert states == {
        0: ("ended", ""),
        1: ("dead", "killed by SIGKILL"),
        2: ("ended", ""),
        3: ("ended", ""),  # this rank is no longer reported
        4: ("dead", "exit code 3"),
    }
    lookout.close()


def test_the_calls_of_another_machine_are_on_the_pages_clock():
    call = RankCall("g", 7, CallSignature("barrier"), 3.0)
    state = RankState(2, "node1", 5, {"g": GroupMembership(2, 4)}, (call,))
    sample = JobSample(9.0, JobInfo(""), (RankSample(2, pending=state),))
    (rank,) = decode_update(encode_update(sample, 100.0)).ranks
    assert rank.pending is not None and rank.pending.memberships == state.memberships
    assert [each.arrived_s for each in rank.pending.calls] == [103.0]
