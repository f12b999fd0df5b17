"""Membership in a job: arrivals, failures and departures, without a process or a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

import paceline
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.operate.launch.multinode.membership import Membership, MembershipPhase, MembershipPolicy, Orders, pause_s
from paceline.operate.launch.multinode.protocol import (
    JobEnded,
    JoinJob,
    NodeStopped,
    Order,
    Start,
    Stop,
    WorkerFailed,
    WorkersFinished,
    WorkersStopped,
)
from paceline.train.elastic.protocol import NotifyOrder


def policy(least: int = 1, most: int = 1, **rest: object) -> MembershipPolicy:
    return MembershipPolicy("job", least, most, **rest)


def failure(rank: int = 0, kind: str | None = "ValueError", code: int = 1) -> WorkerFailure:
    return WorkerFailure(rank, 100 + rank, code, 1.0, Record(1.0, kind, f"{kind}: x") if kind else None, host="h")


@dataclass
class Play:
    """A scripted job, with the messages that each node has received since the last query."""

    policy: MembershipPolicy
    now_s: float = 0.0
    told: dict[str, list[Order]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.membership = Membership(self.policy, 0.0)

    def take(self, orders: Orders) -> None:
        for node, order in orders:
            self.told.setdefault(node, []).append(order)

    def join(self, node: str, workers: int = 1, **rest: object) -> None:
        join = JoinJob(node, 1, f"address-{node}", 1000, workers, **{"version": paceline.__version__, **rest})
        self.take(self.membership.joined(node, join, self.now_s))

    def fail(self, node: str, what: WorkerFailure) -> None:
        self.take(self.membership.failed(node, WorkerFailed(self.membership.generation, what), self.now_s))

    def finish(self, *nodes: str) -> None:
        for node in nodes:
            self.take(self.membership.finished(node, WorkersFinished(self.membership.generation), self.now_s))

    def stop(self, *nodes: str, failures: tuple[WorkerFailure, ...] = ()) -> None:
        for node in nodes:
            report = WorkersStopped(self.membership.generation, 2000, failures)
            self.take(self.membership.stopped(node, report, self.now_s))

    def leave(self, node: str) -> None:
        self.take(self.membership.left(node, NodeStopped("SIGTERM"), self.now_s))

    def lose(self, node: str) -> None:
        self.take(self.membership.lost(node, "silence", self.now_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.membership.tick(self.now_s))

    def hear(self, node: str) -> list[Order]:
        return self.told.pop(node, [])

    def last(self, node: str) -> Order:
        return self.hear(node)[-1]


@pytest.mark.parametrize("rendezvous_host_first", [False, True])
def test_the_node_that_serves_has_the_first_ranks_if_asked(rendezvous_host_first):
    play = Play(policy(3, 3, rendezvous_host_first=rendezvous_host_first))
    play.join("a", workers=2)
    play.join("b", workers=1, serves=True)
    play.join("c")
    firsts = {node: next(each for each in play.hear(node) if isinstance(each, Start)).first_rank for node in "abc"}
    assert firsts == ({"b": 0, "a": 1, "c": 3} if rendezvous_host_first else {"a": 0, "b": 2, "c": 3})


@pytest.mark.parametrize(("version", "told"), [("9.8.7", "9.8.7"), ("", "older than 0.1.0")])
def test_a_machine_with_another_version_is_told_both(version, told):
    play = Play(policy(2, 2))
    play.join("a")
    play.hear("a")
    play.join("b", version=version)
    end = play.last("b")
    assert isinstance(end, JobEnded) and end.code == 2
    assert f"b (pid 1) runs Paceline {told}" in end.reason and f"runs {paceline.__version__};" in end.reason
    assert not play.hear("a") and play.membership.phase is MembershipPhase.GATHERING


def test_one_machine_starts_at_once_and_ends_well():
    play = Play(policy())
    play.join("a", workers=4)
    start = play.last("a")
    assert isinstance(start, Start)
    assert (start.generation, start.first_rank, start.world_size, start.restart_count) == (1, 0, 4, 0)
    play.finish("a")
    assert play.last("a") == JobEnded(0)
    assert play.membership.deadline_s is None


def test_ranks_are_counted_through_the_machines():
    play = Play(policy(3, 3, is_static=True))
    for node, number, workers in (("c", 2, 1), ("a", 0, 2), ("b", 1, 3)):
        play.join(node, workers, node_rank=number, role="eval" if node == "c" else "train")
    starts = {node: play.last(node) for node in "abc"}
    assert [(starts[node].group_rank, starts[node].first_rank) for node in "abc"] == [(0, 0), (1, 2), (2, 5)]
    assert {start.world_size for start in starts.values()} == {6}
    assert [(starts[node].role_first_rank, starts[node].role_world_size) for node in "abc"] == [(0, 5), (2, 5), (0, 1)]
    assert {(start.master_addr, start.master_port) for start in starts.values()} == {("address-a", 1000)}


@pytest.mark.parametrize(
    ("number", "complaint"), [(0, "is already used by a"), (2, "not from 0 to 1"), (None, "not from 0 to 1")]
)
def test_a_wrong_machine_number_is_refused(number, complaint):
    play = Play(policy(2, 2, is_static=True))
    play.join("a", node_rank=0)
    play.join("b", node_rank=number)
    end = play.last("b")
    assert isinstance(end, JobEnded)
    assert end.code == 2
    assert complaint in end.reason


def test_each_arrival_between_min_and_max_prolongs_the_wait():
    play = Play(policy(1, 3, last_call_s=0.5))
    play.join("a")
    play.wait(0.4)
    play.join("b")
    play.wait(0.4)
    assert not play.hear("a")
    play.wait(0.1)
    assert play.last("a").world_size == 2


def test_with_max_machines_nobody_is_awaited():
    play = Play(policy(1, 2))
    play.join("a")
    play.join("b")
    assert isinstance(play.last("b"), Start)


def test_too_few_machines_end_the_wait_with_their_names():
    play = Play(policy(2, 2, join_timeout_s=10))
    play.join("a")
    play.wait(9)
    assert play.hear("a") == [NotifyOrder("1 of 2 machines have joined; waiting for the others")]
    play.wait(1)
    end = play.last("a")
    assert end.code == 1
    assert "waited 10 s for 2 machines; 1 arrived (a)" in end.reason


def test_a_failure_ends_all_and_starts_them_anew_after_a_pause():
    play = Play(policy(2, 2, max_restarts=1))
    play.join("a")
    play.join("b")
    play.told.clear()
    play.fail("a", failure())
    assert play.last("b") == Stop(1, "rank 0 failed on h", is_failure=True)
    assert not play.hear("a"), "it ends its workers by itself"
    play.stop("a", failures=(failure(),))
    play.stop("b")
    assert "restart 1 of 1 in 0.25 s: rank 0 failed" in play.last("b").text
    play.told.clear()
    play.wait(0.2)
    assert not play.hear("a")
    play.wait(0.1)
    start = play.last("a")
    assert (start.generation, start.restart_count, start.max_restarts, start.master_port) == (2, 1, 1, 2000)


def test_no_restart_is_left_and_all_failures_are_told():
    play = Play(policy(2, 2))
    play.join("a")
    play.join("b")
    play.fail("b", failure(1, "PeerLostError"))
    play.stop("b", failures=(failure(1, "PeerLostError"),))
    play.stop("a", failures=(failure(0, None, -9),))
    end = play.last("a")
    assert end.code == 1
    assert [each.rank for each in end.failures] == [1, 0]


def test_pauses_double_up_to_half_a_minute():
    assert [pause_s(n) for n in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert pause_s(50) == 30.0


def test_pauses_begin_anew_after_a_steady_run():
    play = Play(policy(max_restarts=9))
    play.join("a")
    for run_s, pause in ((1, 0.25), (1, 0.5), (1000, 0.25)):
        play.now_s += run_s
        play.fail("a", failure())
        play.stop("a", failures=(failure(),))
        assert f"in {pause:g} s" in play.last("a").text
        play.wait(pause)


def test_a_newcomer_gets_its_place_and_that_is_no_restart():
    play = Play(policy(1, 2))
    play.join("a")
    play.wait(0.5)
    play.told.clear()
    play.join("b")
    assert play.last("a") == Stop(1, "b joins")
    play.stop("a", failures=(failure(0, "ConnectionResetError"),))
    play.wait(0.5)
    start = play.last("b")
    assert (start.generation, start.world_size, start.restart_count, start.group_rank) == (2, 2, 0, 1)
    assert play.last("a").group_rank == 0, "those that were there keep their ranks"


def test_one_more_than_max_waits_for_a_place():
    play = Play(policy(1, 2))
    for node in "abc":
        play.join(node)
    assert isinstance(play.last("c"), NotifyOrder)
    play.lose("a")
    play.stop("b")
    assert [type(play.last(node)) for node in "bc"] == [Start, Start]


def test_a_lost_machine_is_replaced_by_fewer():
    play = Play(policy(1, 2))
    play.join("a")
    play.join("b")
    play.told.clear()
    play.fail("a", failure(0, "PeerLostError"))
    play.lose("b")
    play.now_s += 1
    play.stop("a", failures=(failure(0, "PeerLostError"),))
    start = play.last("a")
    assert (start.generation, start.world_size, start.restart_count) == (2, 1, 0), "the loss explains the failure"


def test_a_lost_machine_leaves_too_few_and_the_rest_wait():
    play = Play(policy(2, 2))
    play.join("a")
    play.join("b")
    play.lose("b")
    play.stop("a")
    wait = play.last("a")
    assert "b (address-b, pid 1) was lost: silence; waiting for 1 more" in wait.text
    play.join("c")
    assert [play.last(node).world_size for node in "ac"] == [2, 2]


def test_numbered_machines_end_with_any_of_them():
    play = Play(policy(2, 2, is_static=True))
    play.join("a", node_rank=0)
    play.join("b", node_rank=1)
    play.lose("b")
    assert "b (address-b, pid 1) was lost" in play.last("a").reason
    assert play.membership.phase is MembershipPhase.OVER


@pytest.mark.parametrize(("kind", "count"), [("ValueError", 1), ("PeerLostError", 0)])
def test_what_failed_is_told_if_a_machine_is_lost_after_it(kind, count):
    play = Play(policy(2, 2, is_static=True))
    play.join("a", node_rank=0)
    play.join("b", node_rank=1)
    play.fail("b", failure(1, kind))
    play.lose("b")
    end = play.last("a")
    assert "b (address-b, pid 1) was lost" in end.reason
    assert len(end.failures) == count, "a lost machine explains what it did to others"


def test_a_machine_that_leaves_is_told_to_end_and_the_rest_go_on():
    play = Play(policy(1, 2))
    play.join("a", serves=True)
    play.join("b")
    play.leave("b")
    assert play.last("b") == JobEnded(1)
    play.now_s += 1
    play.stop("a")
    assert play.last("a").world_size == 1


def test_the_machine_that_serves_takes_all_with_it():
    play = Play(policy(1, 2))
    play.join("a", serves=True)
    play.join("b")
    play.leave("a")
    assert play.last("b") == JobEnded(1, "a was stopped (SIGTERM)")


def test_a_machine_that_had_finished_may_go():
    play = Play(policy(1, 2))
    play.join("a")
    play.join("b")
    play.finish("b")
    play.lose("b")
    play.finish("a")
    assert play.last("a") == JobEnded(0)


def test_reports_of_an_older_generation_change_nothing():
    play = Play(policy(max_restarts=5))
    play.join("a")
    play.fail("a", failure())
    play.stop("a", failures=(failure(),))
    play.wait(1)
    before = play.membership.generation
    play.take(play.membership.finished("a", WorkersFinished(before - 1), play.now_s))
    play.take(play.membership.failed("a", WorkerFailed(before - 1, failure()), play.now_s))
    assert play.membership.phase is MembershipPhase.RUNNING


EVENTS = st.tuples(
    st.sampled_from(["join", "lose", "leave", "fail", "finish", "stop", "wait"]), st.sampled_from("abcd")
)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_whatever_happens_nobody_runs_in_two_generations(events, is_static):
    """Nodes respond to start and stop orders as launchers do; other events are random."""
    least, most = (2, 2) if is_static else (1, 3)
    play = Play(policy(least, most, is_static=is_static, max_restarts=2))
    running: dict[str, int] = {}  # the generation of each node whose workers are running
    there: set[str] = set()
    for event, node in events:
        if event == "join" and node not in there:
            there.add(node)
            play.join(node, node_rank="abcd".index(node))
        elif event in ("lose", "leave") and node in there:
            there.discard(node)
            running.pop(node, None)
            play.lose(node) if event == "lose" else play.leave(node)
        elif event == "fail" and node in running:
            play.fail(node, failure())
        elif event in ("finish", "stop") and node in running:
            del running[node]
            play.finish(node) if event == "finish" else play.stop(node)
        elif event == "wait":
            play.wait(1.0)
        for told, orders in list(play.told.items()):
            for order in orders:
                if isinstance(order, Start):
                    assert told not in running, "it was started while its workers ran"
                    assert not set(running.values()) - {order.generation}, "two generations ran at once"
                    running[told] = order.generation
                    assert least <= order.group_world_size <= most
                elif isinstance(order, JobEnded):
                    running.pop(told, None)
                    there.discard(told)
        play.told.clear()
        assert play.membership.restarts <= 2
