"""A launcher's responses to others that seek a coordinator, and the outcome of a candidacy."""

from __future__ import annotations

import time

import msgspec

import paceline
from paceline.operate.launch.elastic.elastic_controller import ElasticController
from paceline.operate.launch.elastic.standby_controller import StandbyController
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.multinode.membership import MembershipPolicy
from paceline.operate.launch.multinode.protocol import (
    ExitNotice,
    Follow,
    FollowLauncher,
    FollowResponse,
    JobMoved,
    JobRunning,
    JoinJob,
    NodeDropped,
    Order,
    StartSlots,
    WorkerExited,
    WorkerMessage,
)
from paceline.train.elastic.coordinator.coordinator import RESIGN_S
from paceline.train.elastic.protocol import (
    LauncherAddress,
    LeaveNotice,
    LoopFinished,
    MachineReport,
    NotifyOrder,
    ReplicatedJobState,
    ReplicateOrder,
    SendOrder,
    View,
    ViewInstalled,
    WorkerReady,
    WorkerReport,
)

FIRST = View((1 << 32) + 1, ("0.0.0", "1.0.0", "2.0.0"), is_planned=False, store="tcp:h0:1")
KNOWN = ReplicatedJobState(
    1, 0, "same", FIRST.generation, (FIRST,), peers=tuple(LauncherAddress(n, f"h{n}", f"h{n}:1") for n in range(3))
)
SAID = (WorkerReady("same"), ViewInstalled(FIRST.generation, 0))


def join(number: int) -> JoinJob:
    return JoinJob(
        f"h{number}", 1, f"h{number}", 7, 1, version=paceline.__version__, is_elastic=True, listens="x:1", number=number
    )


def follow(number: int) -> Follow:
    report = MachineReport(number, f"h{number}", 1, number, KNOWN, (WorkerReport(f"{number}.0.0", SAID),))
    return Follow(report)


def deputy() -> StandbyController:
    return StandbyController(MembershipPolicy("job", 1, 3), ElasticOptions(), None)


def follows(stands: StandbyController, number: int, now_s: float) -> list[tuple[str, Order]]:
    assert stands.reported(f"node-{number}", join(number), now_s) == []
    return stands.reported(f"node-{number}", follow(number), now_s)


def test_others_are_shown_whom_this_launcher_follows():
    aside = deputy()
    aside.follows(2, "h2:29400")
    assert follows(aside, 0, 0.0) == [("node-0", FollowResponse(False, 2, "h2:29400")), ("node-0", NodeDropped())]
    assert aside.reported("node-9", join(-1), 0.0) == [
        ("node-9", FollowResponse(False, 2, "h2:29400")),
        ("node-9", NodeDropped()),
    ]
    aside.follows(-1, "")
    assert follows(aside, 0, 0.0)[0] == ("node-0", FollowResponse(False, -1))


def test_one_that_stands_in_vain_sends_its_followers_away():
    stands = deputy()
    stands.stand(1, 0.5)
    now_s = time.monotonic()
    assert follows(stands, 1, now_s) == [("node-1", FollowResponse(True, 1))]
    assert stands.tick(now_s + 0.2) == [] and not stands.coordinates
    assert stands.tick(now_s + 0.6) == [("node-1", NodeDropped())]
    assert follows(stands, 2, now_s + 0.7)[0][1] == FollowResponse(False, -1), "it stands no more"


def elected() -> tuple[StandbyController, float]:
    """Returns a standby controller on machine 1 that machines 1 and 2 follow."""
    stands = deputy()
    stands.stand(1, 0.5)
    now_s = time.monotonic()
    follows(stands, 1, now_s)
    follows(stands, 2, now_s)
    said = WorkerMessage("2.0.0", LoopFinished(3))
    assert stands.reported("node-2", said, now_s) == [], "it is kept until the election is over"
    orders = stands.tick(now_s + 0.4)
    assert stands.coordinates
    assert {node for node, order in orders if isinstance(order, ReplicateOrder)} == {"node-1", "node-2"}
    assert any(isinstance(order, SendOrder) and order.uid == "1.0.0" for _, order in orders)
    return stands, now_s + 0.4


def test_a_candidate_with_a_quorum_takes_over():
    stands, now_s = elected()
    assert ("node-0", FollowResponse(True, 1)) in follows(stands, 0, now_s), "the third comes late"


def test_a_coordinator_without_a_quorum_resigns():
    stands = deputy()
    stands.stand(1, 0.5)
    now_s = time.monotonic()
    follows(stands, 1, now_s)
    follows(stands, 2, now_s)
    stands.tick(now_s + 0.4)
    stands.lost("node-2", "silence", now_s)
    for later_s in (4.0, 4.0 + RESIGN_S - 0.1):
        assert not [order for _, order in stands.tick(now_s + later_s) if isinstance(order, NodeDropped)]
    assert ("node-1", NodeDropped()) in stands.tick(now_s + 4.1 + RESIGN_S)
    assert not stands.coordinates


def test_a_coordinator_resigns_for_a_later_one():
    stands, now_s = elected()
    later = msgspec.structs.replace(KNOWN, term=1 << 20, coordinator=3)
    stands.reported("node-0", join(0), now_s)
    orders = stands.reported("node-0", Follow(msgspec.structs.replace(follow(0).report, job_state=later)), now_s)
    assert not [order for _, order in orders if isinstance(order, SendOrder)]
    assert any(isinstance(order, NotifyOrder) and "has followed machine 3" in order.text for _, order in orders)
    assert stands.deadline_s is not None and stands.deadline_s <= now_s
    assert {node for node, order in stands.tick(now_s) if isinstance(order, NodeDropped)} == {
        f"node-{n}" for n in range(3)
    }
    assert not stands.coordinates


def test_a_follower_that_goes_away_does_not_count():
    stands = deputy()
    stands.stand(1, 0.5)
    now_s = time.monotonic()
    follows(stands, 1, now_s)
    follows(stands, 2, now_s)
    stands.lost("node-2", "reset", now_s)
    assert stands.tick(now_s + 0.45) == [] and not stands.coordinates


def test_one_that_hands_over_shows_newcomers_the_successor():
    leaves, now_s = deputy(), time.monotonic()
    leaves.stand(1, 0.5)
    for number in range(3):
        follows(leaves, number, now_s)
    told = leaves.reported("node-1", ExitNotice(), now_s)
    told += leaves.reported("node-1", WorkerMessage("1.0.0", LeaveNotice("SIGTERM")), now_s)
    told += leaves.reported("node-1", WorkerExited("1.0.0", "exit code 0", 0), now_s)
    (view,) = {each.message for _, each in told if isinstance(each, SendOrder)}
    assert isinstance(view, View) and view.members == ("0.0.0", "2.0.0")
    for number in (0, 2):
        entered = WorkerMessage(f"{number}.0.0", ViewInstalled(view.generation, 1))
        told = leaves.reported(f"node-{number}", entered, now_s)
    assert [each for each in told if isinstance(each[1], FollowLauncher)] == [("node-0", FollowLauncher(0, "x:1"))]
    assert follows(leaves, 9, now_s) == [("node-9", FollowResponse(False, 0, "x:1")), ("node-9", NodeDropped())]
    assert leaves.coordinates
    assert ("node-2", FollowLauncher(0, "x:1")) in leaves.lost("node-0", "it follows another", now_s)
    assert not leaves.coordinates


def test_no_number_of_a_machine_is_given_again():
    stands, now_s = deputy(), time.monotonic()
    stands.stand(1, 0.5)
    known = msgspec.structs.replace(KNOWN, ended=(0, 7))
    for number in (1, 2):
        workers = (WorkerReport(f"{number}.0.0", SAID),)
        report = MachineReport(number, f"h{number}", 1, number, known, workers)
        stands.reported(f"node-{number}", join(number), now_s)
        stands.reported(f"node-{number}", Follow(report), now_s)
    assert stands.coordinates
    (begin,) = [each for _, each in stands.reported("node-9", join(-1), now_s) if isinstance(each, StartSlots)]
    assert begin.machine == 8


def test_calls_of_the_own_job_are_answered_and_others_obeyed():
    aside = deputy()
    assert aside.reported("x", JobRunning("job", "h1:1"), 0.0) == [], "it takes part in no job yet"
    aside.takes_part("job", 3)
    assert aside.reported("x", JobRunning("job", "h1:1"), 0.0) == [("x", FollowResponse(False, 3))]
    assert aside.reported("x", JobRunning("other", "h1:1"), 0.0) == []
    policy = MembershipPolicy("job", 1, 3)
    steering = ElasticController(policy, ElasticOptions())
    begins = StandbyController(policy, ElasticOptions(), steering)
    begins.reported("a", join(-1), 0.0)
    assert begins.reported("x", JobRunning(steering.identity, "h1:1"), 0.0) == [("x", FollowResponse(False, -1))]
    assert begins.reported("x", JobRunning("other", "h1:1"), 0.0) == [("a", JobMoved("other", "h1:1"))]


def test_a_coordinator_tells_of_its_job_and_knows_who_is_there():
    stands, _ = elected()
    assert stands.running() == JobRunning("", "x:1")
    assert stands.is_here(2) and not stands.is_here(0)
    assert deputy().running() is None and not deputy().is_here(1)


def test_one_that_stands_sends_the_machines_of_other_jobs_away():
    stands = deputy()
    stands.takes_part("mine", 1)
    stands.stand(1, 0.5)
    report = MachineReport(2, "h2", 1, 2, msgspec.structs.replace(KNOWN, job="theirs"))
    told = stands.reported("node-2", Follow(report), time.monotonic())
    assert told == [("node-2", FollowResponse(False, -1, is_stranger=True)), ("node-2", NodeDropped())]
