"""What the coordinator of an elastic job decides, event by event; chance is in test_elastic_schedules.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline.elastic.coordinator import Coordinator
from paceline.elastic.messages import Broken, Dismissed, Finished, FromWorker, Installed, Leaving, Ready, View, Wait
from paceline.elastic.orders import Begin, End, Orders, Say, StopReplacing, Tell
from paceline.elastic.policy import Policy
from paceline.elastic.quorum import has_quorum
from paceline.elastic.standing import Standing


@dataclass
class Play:
    """A job on stage. A worker's name is its machine's and a digit: `a0`, `b1`."""

    policy: Policy = field(default_factory=lambda: Policy(max_machines=3))
    now_s: float = 0.0
    orders: Orders = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.policy, 0.0)

    def take(self, orders: Orders) -> None:
        self.orders += orders

    def machines(self, **slots: int) -> None:
        for name, count in slots.items():
            self.take(self.coordinator.machine_joined(name, f"host-{name}", count, self.now_s))
            self.take(self.coordinator.machine_listed(name, self.now_s))

    def ready(self, *uids: str, fingerprint: str = "same") -> None:
        for uid in uids:
            self.take(self.coordinator.worker_started(uid, uid[0], self.now_s))
            self.say(uid, Ready(fingerprint))

    def say(self, uid: str, message: FromWorker) -> None:
        self.take(self.coordinator.worker_said(uid, message, self.now_s))

    def install(self, view: View, *uids: str, round_: int = 0) -> None:
        for uid in uids or view.members:
            self.say(uid, Installed(view.generation, round_))

    def kill(self, *uids: str, code: int = -9) -> None:
        for uid in uids:
            self.take(self.coordinator.worker_ended(uid, f"exit code {code}", code, self.now_s))

    def lose(self, machine: str) -> None:
        self.take(self.coordinator.machine_lost(machine, "silence", self.now_s))

    def come_back(self, machine: str, **standings: Standing) -> None:
        self.take(self.coordinator.machine_joined(machine, f"host-{machine}", len(standings), self.now_s))
        for uid, standing in standings.items():
            self.take(self.coordinator.worker_started(uid, machine, self.now_s, standing.messages))
        self.take(self.coordinator.machine_listed(machine, self.now_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.coordinator.tick(self.now_s))

    def told(self, uid: str) -> list[object]:
        return [order.message for order in self.orders if isinstance(order, Tell) and order.uid == uid]

    def view(self) -> View:
        """Returns the view that was told last, after checking that all its members were told."""
        view = next(order.message for order in reversed(self.orders) if isinstance(order, Tell) and is_view(order))
        assert isinstance(view, View)
        assert all(view in self.told(uid) for uid in view.members)
        return view

    def end(self) -> End:
        last = self.orders[-1]
        assert isinstance(last, End), last
        return last


def is_view(order: Tell) -> bool:
    return isinstance(order.message, View)


def running(*uids: str, **rest: object) -> Play:
    """Returns a job whose first view has been entered by these workers."""
    play = Play(Policy(max_machines=3, **rest))
    slots: dict[str, int] = {}
    for uid in uids:
        slots[uid[0]] = slots.get(uid[0], 0) + 1
    play.machines(**slots)
    play.ready(*uids)
    play.install(play.view())
    return play


def test_the_first_view_waits_for_all_that_were_started():
    play = Play()
    play.machines(a=3)
    assert play.orders == [Begin("a")]
    play.ready("a0", "a1")
    assert not [each for each in play.orders if isinstance(each, Tell)]
    play.ready("a2")
    assert play.view().members == ("a0", "a1", "a2") and not play.view().is_planned


def test_the_first_view_waits_for_ten_seconds_at_most():
    play = Play()
    play.machines(a=3)
    play.ready("a0", "a1")
    play.wait(9.9)
    assert play.coordinator.deadline_s == 10.0
    play.wait(0.1)
    assert play.view().members == ("a0", "a1")


def test_a_death_forces_the_others_into_a_view_at_once():
    play = running("a0", "a1", "a2")
    play.kill("a1")
    assert play.view().members == ("a0", "a2")
    assert not play.view().is_planned and not play.view().must_wait


def test_deaths_in_a_row_each_make_a_smaller_view():
    play = running("a0", "a1", "a2", "a3")
    before = play.view().generation
    play.kill("a1", "a0", "a3")
    assert play.view().members == ("a2",)
    assert play.view().generation == before + 3


def test_broken_connections_wait_for_the_death_behind_them():
    play = running("a0", "a1", "a2")
    first = play.view()
    play.say("a0", Broken(first.generation, 3, "lost a1"))
    play.wait(0.2)
    assert play.view() == first
    play.kill("a1")
    assert play.view().members == ("a0", "a2"), "one view, and not two"


def test_broken_connections_alone_bring_the_same_members_together():
    play = running("a0", "a1")
    play.say("a0", Broken(play.view().generation, 3, "reset"))
    play.wait(0.3)
    assert play.view().members == ("a0", "a1") and not play.view().is_planned


def test_connections_that_break_for_ever_end_the_job():
    play = running("a0", "a1")
    for _ in range(6):
        play.say("a0", Broken(play.view().generation, 3, "no route to host"))
        play.wait(0.3)
    assert play.end().code == 1
    assert "more than 5 times" in play.end().reason and "worker a0: no route to host" in play.end().reason


def test_breaks_count_anew_after_a_round():
    play = running("a0", "a1")
    for round_ in range(20):
        play.say("a0", Broken(play.view().generation, round_, "reset"))
        play.wait(0.3)
    assert play.view().members == ("a0", "a1")


def test_newcomers_are_gathered_into_one_planned_view():
    play = running("a0", "a1")
    play.ready("a2")
    play.wait(0.1)
    play.ready("a3")
    play.wait(0.1)
    assert play.view().members == ("a0", "a1", "a2", "a3") and play.view().is_planned


def test_a_newcomer_without_the_state_is_not_in_a_forced_view():
    play = running("a0", "a1")
    play.ready("a2")
    play.wait(0.2)
    planned = play.view()
    play.kill("a1")
    assert play.view().members == ("a0",)
    assert play.told("a2") == [planned, play.view()], "it learns that it is out"


def test_a_newcomer_that_has_entered_is_in_a_forced_view():
    play = running("a0", "a1")
    play.ready("a2")
    play.wait(0.2)
    play.install(play.view(), "a2")
    play.kill("a1")
    assert play.view().members == ("a0", "a2")


def test_a_newcomer_may_turn_out_to_hold_the_state():
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    planned = play.view()
    play.kill("a0")
    assert any(isinstance(each, Wait) for each in play.told("a1")) and play.view() == planned
    play.install(planned, "a1")
    assert play.view().members == ("a1",)


def test_a_newcomer_given_the_state_but_not_the_others_counts():
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    play.kill("a0")
    play.say("a1", Broken(play.view().generation, 5, "lost a0"))
    assert play.view().members == ("a1",)


@pytest.mark.parametrize("says_so", [True, False])
def test_a_newcomer_without_the_state_is_no_truth(says_so):
    play = running("a0")
    play.ready("a1")
    play.wait(0.2)
    play.kill("a0")
    if says_so:
        play.say("a1", Broken(play.view().generation, -1, "lost a0"))
    else:
        play.wait(10.0)
    assert play.end().code == 1 and "state is lost" in play.end().reason and "a0" in play.end().reason


def test_deaths_before_any_round_begin_the_job_again():
    play = Play()
    play.machines(a=2)
    play.ready("a0", "a1")
    play.install(play.view(), "a0")
    play.kill("a0", "a1")
    play.ready("a2", "a3")
    assert play.view().members == ("a2", "a3") and not play.view().is_planned


def test_an_entry_reported_late_still_counts_as_a_beginning():
    play = Play()
    play.machines(a=2)
    play.ready("a0", "a1")
    first = play.view()
    play.install(first, "a0")
    play.kill("a0")
    play.install(first, "a1")  # it was sent before the second view arrived
    play.kill("a1")
    assert "state is lost" in play.end().reason


def test_one_that_leaves_is_left_out_by_a_planned_view():
    play = running("a0", "a1")
    play.say("a1", Leaving("SIGTERM"))
    view = play.view()
    assert view.members == ("a0",) and view.is_planned and play.told("a1")[-1] == view
    play.kill("a1", code=0)
    assert play.view() == view


def test_leaving_and_a_death_make_one_forced_view():
    play = running("a0", "a1", "a2")
    play.say("a1", Leaving("SIGTERM"))
    play.kill("a2")
    assert play.view().members == ("a0",) and not play.view().is_planned
    assert play.told("a1")[-1] == play.view()


def test_the_last_one_hands_over_before_it_leaves():
    play = running("a0")
    play.ready("a1")
    play.say("a0", Leaving("SIGTERM"))
    both = play.view()
    assert both.members == ("a0", "a1")
    play.install(both)
    assert play.view().members == ("a1",) and play.view().is_planned


def test_the_last_one_leaves_when_nobody_comes():
    play = running("a0")
    play.say("a0", Leaving("SIGTERM"))
    play.wait(10.0)
    assert play.told("a0")[-1] == Dismissed("asked to end: SIGTERM")
    play.kill("a0", code=0)
    assert play.end().code == 1 and "asked to leave" in play.end().reason


def test_too_few_workers_wait_until_there_are_more():
    play = running("a0", "a1", min_workers=2)
    play.kill("a1")
    assert play.view().must_wait
    play.install(play.view())
    assert isinstance(play.orders[-1], Say) and "1 of at least 2 workers" in play.orders[-1].text
    play.ready("a2")
    play.wait(0.2)
    assert play.view().members == ("a0", "a2") and play.view().is_planned and not play.view().must_wait


def test_too_few_workers_end_when_no_other_can_come():
    play = running("a0", "a1", min_workers=2)
    play.machines(b=1, c=1)
    for machine in "abc":
        play.take(play.coordinator.slots_changed(machine, 0, play.now_s))
    play.kill("a1")
    play.install(play.view())
    assert play.end().code == 1 and "1 of at least 2" in play.end().reason


def test_too_few_workers_wait_ten_minutes_at_most():
    play = running("a0", "a1", min_workers=2)
    play.kill("a1")
    play.install(play.view())
    play.wait(599.0)
    assert not isinstance(play.orders[-1], End)
    play.wait(1.0)
    assert "1 of at least 2 workers are left, and waited 600 s" in play.end().reason


def test_a_worker_of_other_bits_is_refused_with_both_texts():
    play = running("a0", "a1")
    play.machines(b=1)
    play.ready("b0", fingerprint="other")
    dismissed = play.told("b0")[-1]
    assert isinstance(dismissed, Dismissed) and dismissed.code == 2
    assert "'other'" in dismissed.reason and "'same'" in dismissed.reason
    assert any(isinstance(each, StopReplacing) and each.machine == "b" for each in play.orders)


def test_at_the_start_the_majority_decides_which_bits():
    play = Play()
    play.machines(a=3)
    play.ready("a0", fingerprint="other")
    play.ready("a1", "a2")
    assert play.view().members == ("a1", "a2")
    assert isinstance(play.told("a0")[-1], Dismissed)


def test_the_job_ends_when_all_have_finished_and_ended():
    play = running("a0", "a1")
    for uid in ("a0", "a1"):
        play.say(uid, Finished(9))
    play.kill("a0", code=0)
    assert not isinstance(play.orders[-1], End), "a1 may still be writing a file"
    play.kill("a1", code=0)
    assert play.end() == End(0)


def test_one_finished_and_one_died_is_a_good_end():
    play = running("a0", "a1")
    play.say("a0", Finished(9))
    play.kill("a1")
    play.kill("a0", code=0)
    assert play.end() == End(0)


def test_a_failure_after_the_loop_is_the_jobs():
    play = running("a0")
    play.say("a0", Finished(9))
    play.kill("a0", code=3)
    assert play.end().code == 3 and "a0" in play.end().reason


def test_late_workers_are_dismissed_when_one_has_finished():
    play = running("a0", "a1")
    play.ready("a2")
    play.say("a0", Finished(9))
    assert play.told("a2") == [Dismissed("the job is done")]
    play.ready("a3")
    assert play.told("a3") == [Dismissed("the job is done")]


def test_the_majority_goes_on_without_a_machine():
    play = running("a0", "a1", "b0")
    play.lose("b")
    assert play.view().members == ("a0", "a1")


def test_the_minority_waits_and_says_for_whom():
    play = running("a0", "b0", "b1")
    first = play.view()
    play.lose("b")
    assert play.view() == first and isinstance(play.told("a0")[-1], Wait)
    assert "b0, b1" in [each.text for each in play.orders if isinstance(each, Say)][-1]
    play.wait(120.0)
    assert play.end().code == 1 and "host-b" in play.end().reason


def test_a_machine_that_comes_back_in_time_loses_nothing():
    play = running("a0", "b0", "b1")
    view = play.view()
    play.lose("b")
    standing = Standing([Ready("same"), Installed(view.generation, 0)])
    play.come_back("b", b0=standing, b1=standing)
    play.wait(200.0)
    assert play.view() == view and not isinstance(play.orders[-1], End)
    play.kill("a0")
    assert play.view().members == ("b0", "b1")


def test_a_machine_that_comes_back_late_learns_that_it_is_out():
    play = running("a0", "a1", "b0")
    first = play.view()
    play.lose("b")
    view = play.view()
    play.come_back("b", b0=Standing([Ready("same"), Installed(first.generation, 0)]))
    assert play.told("b0")[-1] == view
    play.install(view)
    play.wait(0.2)
    assert play.view() == view, "its old readiness does not count"
    play.say("b0", Ready("same"))
    play.wait(0.2)
    assert play.view().members == ("a0", "a1", "b0") and play.view().is_planned


def test_a_worker_that_a_returning_machine_does_not_name_is_dead():
    play = running("a0", "b0", "b1")
    play.lose("b")
    play.come_back("b", b0=Standing([Ready("same"), Installed(play.view().generation, 0)]))
    assert play.view().members == ("a0", "b0")


def test_a_stopped_worker_is_left_out_and_may_come_back():
    play = running("a0", "a1")
    play.take(play.coordinator.worker_stalled("a1", "stopped", play.now_s))
    play.install(play.view())
    assert play.view().members == ("a0",)
    play.say("a1", Ready("same"))
    play.wait(0.2)
    assert play.view().members == ("a0", "a1")


def test_the_only_worker_is_waited_for_when_it_is_stopped():
    play = running("a0")
    view = play.view()
    play.take(play.coordinator.worker_stalled("a0", "stopped", play.now_s))
    play.wait(60.0)
    play.take(play.coordinator.worker_started("a0", "a", play.now_s))
    play.wait(100.0)
    assert play.view() == view and play.told("a0")[-1] == view


def test_nothing_follows_the_end():
    play = running("a0")
    play.kill("a0")
    end = play.end()
    play.orders.clear()
    play.ready("a1")
    play.machines(b=1)
    play.wait(1000.0)
    assert play.orders == [end] and play.coordinator.deadline_s is None, "the machine that comes learns of it"


@pytest.mark.parametrize(
    ("dead", "reachable", "may"),
    [
        ("", "abc", True),
        ("", "d", False),
        ("", "ab", True),
        ("", "cd", False),
        ("a", "cd", True),
        ("abc", "d", True),
        ("abcd", "", True),
    ],
)
def test_a_half_with_the_lowest_name_has_a_quorum(dead, reachable, may):
    assert has_quorum("abcd", dead, reachable) is may


def test_a_standing_keeps_what_still_matters():
    standing = Standing()
    for message in (Ready("x"), Installed(1, 0), Broken(1, 4, "lost"), Installed(2, 4), Broken(2, 5, "lost")):
        standing.heard(message)
    assert standing.messages == [Ready("x"), Installed(2, 4), Broken(2, 5, "lost")]
    standing.heard(Leaving("SIGTERM"))
    standing.heard(Ready("x"))
    assert standing.messages == [Leaving("SIGTERM"), Ready("x")]
