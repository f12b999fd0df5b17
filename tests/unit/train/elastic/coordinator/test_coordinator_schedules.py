"""Random schedules of elastic jobs in virtual time, with deaths, freezes and cuts; no invariant is violated.

The suite runs 5,000 schedules, which are enough to detect each missing rule. The nightly run uses 400,000.

The message of a failure contains the seed, and the command that runs and prints the schedule of this seed.
"""

from __future__ import annotations

import gc
from collections import Counter

import pytest
from elastic_model.faults import KINDS
from elastic_model.members import Violation
from elastic_model.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import FACTOR, examples

from paceline.train.elastic.coordinator import membership_rules, views
from paceline.train.elastic.coordinator.elastic_job import ElasticJob
from paceline.train.elastic.coordinator.views import Views
from paceline.train.elastic.protocol import FenceStalledOrder

BLOCK = 2_500
BLOCKS = 1 if FACTOR == 1 else 8 * FACTOR
pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_goes_wrong(block):
    ends: Counter[str] = Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        over = World(seed).run().over
        ends[over.reason[:20] if over.code else "well"] += 1
        if seed % 2000 == 0:
            gc.collect()
    assert ends["well"] > 0.9 * BLOCK
    assert ends["The job's state is l"] < 0.05 * BLOCK, "only where everybody died"
    assert len(ends) >= 6, "the schedules do not reach all ways to end"


@settings(max_examples=examples(100), deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 120), st.sampled_from(KINDS)), max_size=6),
)
def test_no_short_list_of_faults_goes_wrong(seed, sites, faults):
    assert World(seed, sites, faults).run().over is not None


def test_a_schedule_is_the_same_each_time():
    logs: list[list[str]] = []
    for _ in range(2):
        world = World(7, 3, [(40, "kill"), (45, "kill newest")])
        world.log = []
        world.run()
        logs.append([line for line in world.log if "SAY" in line])
    assert logs[0] == logs[1] != []


def without_waiting_for_newcomers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(views, "has_arrived", lambda newcomer: True)


def without_a_memory_of_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Views, "has_begun", property(lambda self: False, lambda self, value: None), raising=False)


def without_a_quorum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(views, "has_quorum", lambda members, dead, reachable: True)


def without_the_older_views_quorum(patch: pytest.MonkeyPatch) -> None:
    everything = Views.is_allowed

    def only_the_latest(self: Views) -> bool:
        self.since_complete = self.since_complete[-1:]
        return everything(self)

    patch.setattr(Views, "is_allowed", only_the_latest)


def without_draining_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "drains", False)


def without_agreeing_on_views(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "agrees_on_views", False)


def without_waiting_for_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "waits_for_the_log", False)


def without_snapshots_at_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "snapshots_at_batches", False)


def fences_whoever_is_stopped(job: ElasticJob) -> None:
    for worker in job.registry.workers.values():
        if worker.is_stopped and not worker.is_fenced:
            worker.is_fenced = True
            job.orders.append(FenceStalledOrder(worker.machine.name, worker.uid))


def without_sparing_the_last_holder(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership_rules, "fence", fences_whoever_is_stopped)


MUTATIONS = {
    without_waiting_for_newcomers: "in the middle of a batch",
    without_a_memory_of_the_state: "another result",
    without_a_quorum: "without the majority",
    without_the_older_views_quorum: "without the majority",
    without_draining_the_dead: "PYTHONPATH=tests:tests/support",
    without_agreeing_on_views: "without a cause",
    without_waiting_for_the_log: "comes in with round",
    without_snapshots_at_batches: "is given the state in the middle of a batch",
    without_sparing_the_last_holder: "is killed, and is one of",
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda each: each.__name__)
def test_the_schedules_notice_a_missing_rule(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(Violation, match=MUTATIONS[mutate]):
        for seed in range(5_000):
            World(seed).run()
