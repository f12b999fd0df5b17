"""The machines of an elastic job, without sockets: their start, their slots, and the end of the job."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest

import paceline
from paceline.operate.launch.elastic.elastic_controller import ElasticController, ShutdownPlan
from paceline.operate.launch.elastic_options import ElasticOptions
from paceline.operate.launch.failures import Record, WorkerFailure
from paceline.operate.launch.multinode.membership import MembershipPolicy
from paceline.operate.launch.multinode.protocol import (
    ExitNotice,
    Follow,
    FollowLauncher,
    FollowResponse,
    JobEnded,
    JobMoved,
    JobRunning,
    JoinJob,
    NodeDropped,
    NodeStopped,
    Order,
    RecordFailures,
    Slots,
    StartSlots,
    WorkerExited,
    WorkerMessage,
    WorkerStarted,
)
from paceline.train.elastic.protocol import (
    FromWorker,
    LeaveNotice,
    MachineReport,
    NotifyOrder,
    ReplicatedJobState,
    SendOrder,
    View,
    ViewInstalled,
    WorkerReady,
)


@dataclass
class Play:
    """A scripted job, with the messages that each node has received since the last query."""

    least: int = 1
    most: int = 1
    now_s: float = 0.0
    told: dict[str, list[Order]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy = MembershipPolicy("job", self.least, self.most, join_timeout_s=60.0)
        self.steering = ElasticController(policy, ElasticOptions(), self.now_s)

    def take(self, orders) -> None:
        for node, order in orders:
            self.told.setdefault(node, []).append(order)

    def report(self, node: str, *reports: object) -> None:
        for each in reports:
            self.take(self.steering.reported(node, each, self.now_s))

    def join(self, node: str, workers: int = 1, **rest: object) -> None:
        version = {"version": paceline.__version__, "is_elastic": True, **rest}
        self.report(node, JoinJob(node, 1, f"10.0.0.{ord(node[0])}", 4000, workers, **version))

    def asked(self, node: str) -> list[Order]:
        return self.told.pop(node, [])

    def begin(self, node: str) -> StartSlots:
        (begin,) = [order for order in self.asked(node) if isinstance(order, StartSlots)]
        return begin

    def say(self, node: str, uid: str, *said: FromWorker) -> None:
        self.report(node, *(WorkerMessage(uid, each) for each in said))

    def run(self, node: str, *uids: str) -> None:
        """Starts workers, which become ready and enter the announced view."""
        for uid in uids:
            self.report(node, WorkerStarted(uid))
        for uid in uids:
            self.say(node, uid, WorkerReady("same"))
        self.enter()

    def enter(self) -> None:
        for _ in range(5):
            self.now_s += 1.0
            self.take(self.steering.tick(self.now_s))
            for node, orders in list(self.told.items()):
                tells = [each for each in orders if isinstance(each, SendOrder)]
                self.told[node] = [each for each in orders if each not in tells]
                for tell in tells:
                    match tell.message:
                        case View(generation, members) if tell.uid in members:
                            self.views[tell.uid] = members
                            self.say(node, tell.uid, ViewInstalled(generation, 0))

    views: dict[str, tuple[str, ...]] = field(default_factory=dict)


def failure(slot: int) -> WorkerFailure:
    return WorkerFailure(slot, 100 + slot, 1, 1.0 + slot, Record(1.0 + slot, "ValueError", "ValueError: x"), host="h")


def test_a_single_machine_begins_at_once_with_its_own_store():
    play = Play()
    play.join("here", 3, serves=True)
    assert play.begin("here") == StartSlots(0, 0, 3, "job", "")


def test_machines_begin_when_enough_are_there():
    play = Play(2, 3)
    play.join("b", 2)
    assert [type(each) for each in play.asked("b")] == [NotifyOrder]
    play.join("a", 1, serves=True)
    assert play.begin("b") == StartSlots(0, 0, 3, "job", "tcp:10.0.0.97:4000")
    assert play.begin("a") == StartSlots(1, 2, 3, "job", "tcp:10.0.0.97:4000")


def test_the_first_machines_wait_for_the_one_that_serves():
    play = Play(1, 3)
    play.join("b")
    assert [type(each) for each in play.asked("b")] == [NotifyOrder]
    play.join("a", serves=True)
    assert play.begin("b").machine == 0 and play.begin("a").machine == 1


def test_too_few_machines_are_given_up_in_time():
    play = Play(3, 3)
    play.join("a", serves=True)
    play.asked("a")
    assert play.steering.deadline_s == 60.0
    play.take(play.steering.tick(60.0))
    (end,) = play.asked("a")
    assert end.code == 1 and "waited 60 s for 3 machines; 1 arrived (a)" in end.reason
    assert play.steering.deadline_s is None


def test_a_later_machine_begins_at_once_in_the_first_free_slots():
    play = Play(2, 4)
    play.join("a", 2, serves=True)
    play.join("b", 2)
    play.begin("a"), play.begin("b")
    play.join("c", 2)
    assert play.begin("c") == StartSlots(2, 4, 6, "job", "tcp:10.0.0.97:4000")
    play.report("b", NodeStopped("SIGTERM"))
    assert JobEnded(0) in play.asked("b")
    play.join("d", 1)
    assert play.begin("d") == StartSlots(3, 2, 6, "job", "tcp:10.0.0.97:4000")


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [({"version": "0.0.1"}, "install the same version"), ({"is_elastic": False}, "was started without --elastic")],
)
def test_a_machine_that_does_not_fit_is_refused(rest, complaint):
    play = Play(1, 2)
    play.join("a", serves=True)
    play.join("b", **rest)
    (end,) = play.asked("b")
    assert end.code == 2 and complaint in end.reason


def test_workers_of_two_machines_meet_in_one_view():
    play = Play(2, 2)
    play.join("a", serves=True)
    play.join("b")
    play.run("a", "0.0.0")
    play.run("b", "1.1.0")
    assert sorted(play.views) == ["0.0.0", "1.1.0"]
    assert {tuple(sorted(members)) for members in play.views.values()} == {("0.0.0", "1.1.0")}


def test_the_workers_of_an_ended_launcher_are_dead_at_once():
    play = Play(2, 2)
    play.join("a", serves=True)
    play.join("b", 2)
    play.run("a", "0.0.0")
    play.run("b", "1.1.0", "1.2.0")
    play.take(play.steering.ended("b", "its launcher has ended", play.now_s))
    play.enter()
    assert play.views["0.0.0"] == ("0.0.0",), "though the others were the majority"


def test_a_silent_majority_is_waited_for():
    play = Play(2, 2)
    play.join("a", serves=True)
    play.join("b", 2)
    play.run("a", "0.0.0")
    play.run("b", "1.1.0", "1.2.0")
    play.take(play.steering.lost("b", "nothing was heard of it", play.now_s))
    play.enter()
    assert len(play.views["0.0.0"]) == 3


def test_when_no_slot_is_left_the_failures_are_told():
    play = Play()
    play.join("here", 2, serves=True)
    play.report("here", WorkerStarted("0.0.0"), WorkerStarted("0.1.0"))
    play.report("here", WorkerExited("0.0.0", "exit code 1", 1), Slots(1, (failure(0),)))
    assert not any(isinstance(each, JobEnded) for each in play.asked("here"))
    play.report("here", WorkerExited("0.1.0", "exit code 1", 1), Slots(0, (failure(0), failure(1))))
    (end,) = [each for each in play.asked("here") if isinstance(each, JobEnded)]
    assert end.code == 1 and [each.rank for each in end.failures] == [0, 1]


def test_scripts_that_say_nothing_and_end_well_end_the_job_well():
    play = Play()
    play.join("here", 1, serves=True)
    play.report("here", WorkerStarted("0.0.0"), WorkerExited("0.0.0", "exit code 0", 0), Slots(0))
    assert JobEnded(0) in play.asked("here")
    play.join("late")
    assert play.asked("late") == [JobEnded(1, "the job has ended")]


def test_the_job_ends_with_the_machine_that_serves():
    play = Play(2, 2)
    play.join("a", serves=True)
    play.join("b")
    play.asked("b")
    play.report("a", NodeStopped("SIGINT"))
    assert JobEnded(1, "a was stopped (SIGINT)") in play.asked("b")


def test_who_comes_back_after_the_end_learns_how_it_ended():
    play = Play(1, 2)
    play.join("a", serves=True)
    play.report("a", NodeStopped("SIGINT"))
    play.join("b", number=1)
    play.report("b", Follow(MachineReport(1, "b", 1, 1, ReplicatedJobState())))
    assert play.asked("b") == [JobEnded(1, "a was stopped (SIGINT)")]


def test_machines_remember_failures_for_another_coordinator():
    play = Play(2, 3)
    play.join("a", serves=True)
    play.join("b")
    play.report("b", Slots(0, (failure(1),)))
    for node in "ab":
        assert RecordFailures((failure(1),)) in play.asked(node)
    play.report("b", Slots(0, (failure(1),)))
    assert not any(isinstance(each, RecordFailures) for each in play.asked("a")), "it is known"
    play.join("c")
    assert RecordFailures((failure(1),)) in play.asked("c")


def test_a_coordinator_whose_launcher_ends_names_its_successor():
    play = Play(2, 3)
    for node in "abc":
        play.join(node, serves=node == "a", listens=f"{node}:29400")
    play.run("a", "0.0.0")
    play.run("b", "1.1.0")
    play.run("c", "2.2.0")
    play.report("a", Slots(0), ExitNotice())
    play.say("a", "0.0.0", LeaveNotice("SIGTERM"))
    play.enter()
    play.report("a", WorkerExited("0.0.0", "exit code 0", 0))
    assert play.views["1.1.0"] == ("1.1.0", "2.2.0")
    assert FollowLauncher(1, "b:29400") in play.asked("b") and play.steering.successor == (1, "b:29400")
    assert not play.steering.has_handed_over
    play.take(play.steering.lost("b", "it follows another", play.now_s))
    assert play.asked("c")[-1] == FollowLauncher(1, "b:29400")
    assert play.asked("a")[-1] == JobEnded(0, "machine 1 coordinates from now on")
    assert play.steering.has_handed_over


def departed(number: signal.Signals, **rest: bool) -> ShutdownPlan:
    return ShutdownPlan(**{"is_shared": True, "took_part": True, **rest}, number=number)


def test_a_launcher_that_coordinates_takes_no_leave():
    departure = departed(signal.SIGTERM)
    assert departure.announced() == [ExitNotice()] and departure.farewell(coordinates=True) == []
    assert departure.farewell(coordinates=False) == [NodeStopped("SIGTERM")]
    assert departure.farewell(coordinates=False) == [], "once"
    assert departed(signal.SIGTERM, insists=True).farewell(coordinates=True) == [NodeStopped("SIGTERM")]
    assert departed(signal.SIGINT).announced() == []
    assert departed(signal.SIGINT).farewell(coordinates=True) == [NodeStopped("SIGINT")]


def test_only_an_orderly_departure_is_well():
    assert departed(signal.SIGTERM).is_well(0)
    assert not departed(signal.SIGTERM).is_well(1)
    assert not departed(signal.SIGINT).is_well(0)
    assert not departed(signal.SIGTERM, insists=True).is_well(0)
    assert not departed(signal.SIGTERM, is_shared=False).is_well(0), "a job of one machine was cut short"
    assert not departed(signal.SIGTERM, took_part=False).is_well(0), "it has no elastic loop"


OTHER = JobRunning("other", "10.0.0.9:29400")


def test_only_a_lone_machine_trains_without_awaiting_calls():
    for most, waits_s in ((1, 0.0), (2, 2.0)):
        play = Play(1, most)
        play.join("a", serves=True)
        play.report("a", WorkerStarted("0.0.0"), WorkerStarted("0.0.0"))
        play.say("a", "0.0.0", WorkerReady("same"))
        if waits_s:
            assert not any(isinstance(each, SendOrder) for each in play.asked("a"))
            assert play.steering.deadline_s == waits_s
            play.now_s += waits_s
            play.take(play.steering.tick(play.now_s))
        assert any(isinstance(each, SendOrder) for each in play.asked("a"))


@pytest.mark.parametrize("trains", [False, True])
def test_a_job_gives_way_to_one_that_runs_already(trains):
    play = Play(1, 3)
    play.join("a", serves=True)
    if trains:
        play.run("a", "0.0.0")
        assert play.views == {"0.0.0": ("0.0.0",)}
    play.join("b")
    play.asked("a"), play.asked("b")
    play.take(play.steering.handle_running_job(OTHER, play.now_s))
    moved = JobMoved("other", OTHER.address)
    assert play.asked("a") == [moved] and play.asked("b") == [moved]
    play.join("late")
    assert play.asked("late") == [moved]
    assert play.steering.running() is None and play.steering.deadline_s is None


FOREIGN_JOB = "reported that a job with another secret is running at this rendezvous address"


@pytest.mark.parametrize("trains", [False, True])
def test_a_report_of_another_secret_ends_no_job(trains):
    play = Play(1, 3)
    assert play.steering.handle_foreign_job("10.0.0.9")
    play.take(play.steering.tick(play.now_s))
    assert play.told == {}, "no launcher can print it"
    play.join("a", serves=True)
    if trains:
        play.run("a", "0.0.0")
    else:
        play.take(play.steering.tick(play.now_s))
    first = [order.text for order in play.asked("a") if isinstance(order, NotifyOrder) and FOREIGN_JOB in order.text]
    assert len(first) == 1 and first[0].startswith("warning: 10.0.0.9 reported")
    assert "set its PACELINE_SECRET to join it" in first[0] and "a stranger may have sent it" in first[0]
    assert not play.steering.handle_foreign_job("10.0.0.9")
    assert play.steering.handle_foreign_job("10.0.0.8")
    play.take(play.steering.tick(play.now_s))
    (second,) = play.asked("a")
    assert isinstance(second, NotifyOrder) and second.text.startswith("warning: 10.0.0.8 reported")
    if not trains:
        play.run("a", "0.0.0")
    assert play.views == {"0.0.0": ("0.0.0",)}, "the job trains"


def test_a_flood_of_reports_of_another_secret_is_bounded():
    play = Play(1, 3)
    play.join("a", serves=True)
    play.asked("a")
    new = [play.steering.handle_foreign_job(f"10.0.{number // 250}.{number % 250}") for number in range(5000)]
    assert sum(new) == 3 and len(play.steering._foreign_hosts) == 3
    for _ in range(5):
        play.take(play.steering.tick(play.now_s))
    assert [type(order) for order in play.asked("a")] == [NotifyOrder] * 3


@pytest.mark.parametrize("least", [1, 2])
def test_a_job_that_times_out_quotes_reports_of_another_secret(least):
    play = Play(least, 3)
    play.join("a", serves=True)
    assert play.steering.handle_foreign_job("10.0.0.9") and play.steering.handle_foreign_job("10.0.0.8")
    play.now_s += 61.0
    play.take(play.steering.tick(play.now_s))
    end = play.asked("a")[-1]
    usual = (
        "0 of at least 1 workers are ready after 60 s" if least == 1 else "waited 60 s for 2 machines; 1 arrived (a)"
    )
    assert isinstance(end, JobEnded) and end.code == 1 and end.reason.startswith(usual)
    assert f"The likely reason: 10.0.0.9, 10.0.0.8 {FOREIGN_JOB}" in end.reason
    play = Play(least, 3)
    play.join("a", serves=True)
    play.now_s += 61.0
    play.take(play.steering.tick(play.now_s))
    assert play.asked("a")[-1].reason.startswith(usual)
    assert "likely reason" not in str(play.steering._end)


def test_machines_that_wait_for_others_join_another_job():
    play = Play(2, 3)
    play.join("a", serves=True)
    play.asked("a")
    play.take(play.steering.handle_running_job(OTHER, play.now_s))
    assert play.asked("a") == [JobMoved("other", OTHER.address)]


def test_no_view_is_given_while_another_job_seeks():
    play = Play(1, 3)
    play.join("a", serves=True)
    play.report("a", WorkerStarted("0.0.0"))
    play.say("a", "0.0.0", WorkerReady("same"))
    for _ in range(20):
        play.now_s += 1.0
        play.take(play.steering.handle_running_job(JobRunning("other"), play.now_s))
        play.take(play.steering.tick(play.now_s))
    told = play.asked("a")
    assert [each.text for each in told if isinstance(each, NotifyOrder)].count(
        "a job with this address is already running, and is looking for a coordinator; waiting for it"
    ) == 1
    assert not any(isinstance(each, SendOrder) for each in told)
    play.now_s += 5.0
    play.take(play.steering.tick(play.now_s))
    assert any(isinstance(each, SendOrder) for each in play.asked("a")), "they have given up"


def test_a_machine_of_another_job_is_a_stranger():
    play = Play(1, 3)
    play.join("a", serves=True)
    play.asked("a")
    play.join("b", number=1)
    play.report("b", Follow(MachineReport(1, "b", 1, 1, ReplicatedJobState(job="other"))))
    assert play.asked("b") == [FollowResponse(False, -1, is_stranger=True), NodeDropped()]
    assert play.asked("a") == [
        NotifyOrder("a job with this address is already running, and is looking for a coordinator; waiting for it")
    ]
    assert not play.steering.is_here(1)


def test_who_was_to_join_a_job_ends_as_it_ended():
    play = Play(1, 3)
    play.join("a", serves=True)
    play.report("a", WorkerStarted("0.0.0"), WorkerExited("0.0.0", "exit code 0", 0), Slots(0))
    assert JobEnded(0) in play.asked("a")
    play.join("b", job=play.steering.identity)
    assert play.asked("b") == [JobEnded(0, "the job has ended")]
    play.join("c")
    assert play.asked("c") == [JobEnded(1, "the job has ended")]
