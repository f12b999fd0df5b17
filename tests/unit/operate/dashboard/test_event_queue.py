"""The job events that the page shows, which are generated from the launcher's events."""

from __future__ import annotations

from paceline.operate.dashboard.event_queue import EventFormatter


def texts(*events: tuple[str, dict]) -> list[tuple[str, str, float | None]]:
    formatter = EventFormatter()
    told = [each for at, (event, facts) in enumerate(events) for each in formatter.format(event, facts, float(at))]
    return [(each.kind, each.text, each.cost_s) for each in told]


def test_a_start_and_a_restart_are_told_apart():
    assert texts(("start", {"generation": 1, "ranks": [0, 1]}), ("start", {"generation": 2, "ranks": [0]})) == [
        ("start", "2 workers, 0 to 1 started", None),
        ("restart", "worker 0 restarted (start number 2)", None),
    ]


def test_a_view_after_a_death_says_what_it_cost():
    first = (1 << 32) + 1
    assert texts(
        ("installed", {"view": first}),
        ("ended", {"uid": "0.1.0", "how": "killed by SIGKILL"}),
        ("installed", {"view": first + 1}),
        ("installed", {"view": first + 1}),
    ) == [
        ("view", "view 1: the workers train together", None),
        ("death", "worker 0.1.0: killed by SIGKILL", None),
        ("view", "view 2: the workers train together", 1.0),
    ]


def test_failures_and_the_end_are_told():
    assert texts(("failure", {"rank": 2, "pid": 7, "how": "exit code 3"}), ("end", {"code": 3}), ("ready", {})) == [
        ("failure", "rank 2 (process 7): exit code 3", None),
        ("end", "the job has failed, exit code 3", None),
    ]


def test_a_stall_and_its_end_are_events():
    stall = {"reason": "rank 1 does not call all_reduce", "ranks": [1]}
    assert texts(("stall", stall), ("stall", stall), ("resume", {"reason": "the job continues", "ranks": []})) == [
        ("stall", "rank 1 does not call all_reduce", None),
        ("stall", "rank 1 does not call all_reduce", None),
        ("resume", "the job continues", 2.0),
    ]


def test_a_worker_whose_script_ends_has_not_died():
    assert texts(("ended", {"uid": "0.1.0", "how": "exit code 0"}), ("installed", {"view": 1})) == [
        ("exit", "worker 0.1.0: its script has finished", None),
        ("view", "view 1: the workers train together", None),
    ]
