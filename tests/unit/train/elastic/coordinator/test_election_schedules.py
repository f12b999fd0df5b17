"""Random schedules of elastic jobs that also lose their coordinator: crashes, cuts and resets of launchers.

The message of a failure contains the seed, and the command that runs and prints the schedule of this seed.
"""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest
from elastic_model.launchers import Launcher
from elastic_model.members import Violation
from elastic_model.realm import FAULTS, Realm
from sampling import FACTOR

from paceline.train.elastic.coordinator import handover
from paceline.train.elastic.coordinator.coordinator import Coordinator
from paceline.train.elastic.coordinator.elastic_job import ElasticJob
from paceline.train.elastic.coordinator.election import GATHER_S, ConnectionLoss
from paceline.train.elastic.coordinator.handover import CoordinatorHandover, choose_successor
from paceline.train.elastic.coordinator.views import Views
from paceline.train.elastic.protocol import CoordinatorOrders, MachineReport, ReplicatedJobState

BLOCK = 1_000  # enough to detect each missing rule
BLOCKS = 1 if FACTOR == 1 else 2 * FACTOR
pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_has_two_truths(block):
    elections = well = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        realm = Realm(seed).run()
        elections += realm.elections
        well += len(realm.results) == realm.rounds
        if seed % 500 == 0:
            gc.collect()
    assert elections > 0.1 * BLOCK
    assert well > 0.9 * BLOCK


CUT_OFF_AS_IT_DECIDES = ([(20, "split at view"), (60, "freeze machine")], [1, 1, 1], 60)


def test_a_coordinator_that_is_cut_off_as_it_decides():
    for seed in range(100):
        Realm(seed, *CUT_OFF_AS_IT_DECIDES).run()


def test_the_schedules_notice_views_that_others_do_not_know(monkeypatch):
    monkeypatch.setattr(Views, "is_known", lambda self: True)
    with pytest.raises(Violation, match="two views at once"):
        for seed in range(300):
            Realm(seed, *CUT_OFF_AS_IT_DECIDES).run()


def restarts(seed: int) -> Realm:
    """Runs a schedule in which the launcher at the rendezvous address is restarted and another fault occurs."""
    when = 100 + seed % 100
    other = FAULTS[seed % len(FAULTS)]
    return Realm(seed, [(when, "restart"), (when + seed % 30, other)], rounds=60).run()


def test_a_launcher_that_starts_again_joins_the_job():
    realms = [restarts(seed) for seed in range(200)]
    assert sum(each.joined_again for each in realms) > 150
    assert not [each.seed for each in realms if each.second_jobs]


def test_the_schedules_notice_calls_of_coordinators_only(monkeypatch):
    monkeypatch.setattr(Realm, "calls_while_seeking", False)
    assert any(restarts(seed).second_jobs for seed in range(200))


def changes_sides(seed: int) -> Realm:
    """Runs a schedule in which a machine leaves the new coordinator's side of a partition for the old coordinator's."""
    return Realm(seed, [(60 + seed % 60, "change sides")], [1, 1, 1], 60).run()


def test_a_coordinator_resigns_for_a_later_one():
    assert sum(changes_sides(seed).superseded for seed in range(100)) > 10


def test_the_schedules_notice_ignored_terms(monkeypatch):
    returned = Coordinator.machine_returned

    def forgets_the_term(self: Coordinator, report: MachineReport, *args: Any) -> CoordinatorOrders:
        job_state = msgspec.structs.replace(report.job_state, term=0)
        return returned(self, msgspec.structs.replace(report, job_state=job_state), *args)

    monkeypatch.setattr(Coordinator, "machine_returned", forgets_the_term)
    with pytest.raises(Violation):
        for seed in range(200):
            changes_sides(seed)


STORMS = 150 * FACTOR


def test_storms_of_partitions_have_one_truth():
    well = 0
    for seed in range(STORMS):
        realm = Realm(seed, [(60 + seed % 100, "storm")], rounds=200)
        realm.is_lasting = True  # a job may end without a quorum
        well += len(realm.run().results) == 200
    assert well > 0.3 * STORMS


def leaves(seed: int) -> Realm:
    """Runs a schedule in which the coordinating launcher receives a SIGTERM and no other fault occurs."""
    return Realm(seed, [(100 + seed % 100, "leave coordinator")], rounds=60).run()


def check_that_nobody_was_disturbed(realm: Realm) -> None:
    story = realm.history()
    assert sum(not view.is_planned for view in realm.views.values()) == 1, story
    assert len(realm.elected_s) == len(realm.handed_over_s), story
    for elected_s, handed_s in zip(realm.elected_s, realm.handed_over_s, strict=True):
        assert elected_s - handed_s < GATHER_S, f"it has waited for a timeout; {story}"
    assert not realm.stores_lost, story


def test_a_planned_handover_disturbs_nobody():
    handed = 0
    for realm in filter(lambda each: not each.is_rude, map(leaves, range(200))):
        check_that_nobody_was_disturbed(realm)
        handed += len(realm.handed_over_s)
    assert handed > 100


def without_moving_the_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "choose_successor", keeps_the_store)


def keeps_the_store(job: ElasticJob, retirement: CoordinatorHandover, now_s: float) -> None:
    choose_successor(job, retirement, now_s)
    job.views.store, job.must_move = retirement.store, False


def without_waiting_for_the_members(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handover, "_has_settled", lambda job: True)


CARELESS = [without_moving_the_store, without_waiting_for_the_members]


@pytest.mark.parametrize("mutate", CARELESS, ids=lambda each: each.__name__)
def test_the_schedules_notice_a_careless_handover(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for realm in filter(lambda each: not each.is_rude, map(leaves, range(100))):
            check_that_nobody_was_disturbed(realm)


def without_a_quorum_of_followers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicatedJobState, "allows", lambda self, reached: True)


def without_a_quorum_in_office(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Views, "is_allowed", lambda self: True)


def without_distinguishing_silence(patch: pytest.MonkeyPatch) -> None:
    lost = Launcher.lost
    patch.setattr(Launcher, "lost", lambda self, link, loss: lost(self, link, ConnectionLoss.ENDED))


def without_growing_terms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("elastic_model.launchers.next_term", lambda term, number: 2)


MUTATIONS = [
    without_a_quorum_of_followers,
    without_a_quorum_in_office,
    without_distinguishing_silence,
    without_growing_terms,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda each: each.__name__)
def test_the_schedules_notice_a_missing_rule(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(BLOCK):
            Realm(seed).run()
