"""Predictions that can be calculated by hand from the few numbers in each case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from planned import LINKS, MB, Timing, calibration, prediction, simulate

from paceline.comm.schedule.network import Network, NetworkLink
from paceline.comm.schedule.steps import Operation
from paceline.operate.plan.calibration import CalibrationError, HostCall, network_of, with_rate
from paceline.operate.plan.formatting import facts_of, table_text
from paceline.operate.plan.prediction import (
    LEAST_NOISE,
    StepInterval,
    advise,
    call_factors,
    changes,
    machine_noise,
    memory_of,
    slowest_of,
    traffic_of,
    work_rate,
)
from paceline.operate.plan.step_time import (
    CallTimes,
    Strategy,
    interpolated,
    measured,
    with_bandwidth_factor,
)
from paceline.operate.plan.step_watch import CoreUsage


def test_the_rate_and_its_cost_follow_from_the_step():
    found = prediction(calibration())
    assert found.samples_per_s == pytest.approx(2 * 32 / 0.063)
    assert found.efficiency == pytest.approx(50 / 63)
    assert found.node_hours == pytest.approx(2 * 1e6 / (64 / 0.063) / 3600)
    assert found.traffic_nbytes == pytest.approx(30 * MB)


def test_the_slowest_of_many_ranks_sets_the_pace():
    spread = [1.0, 1.0, 1.0, 1.0, 1.5]
    assert slowest_of(spread, 1, 0.5) == 1.0
    assert slowest_of(spread, 10_000, 0.05) == pytest.approx(1.5, abs=0.01)
    assert slowest_of([2.0], 8, 0.95) == 2.0


def test_the_band_is_that_of_the_slowest_rank():
    found = prediction(calibration(step_s=(0.050, 0.050, 0.050, 0.050, 0.100)), nodes=1)
    assert found.variation.less == 0
    assert found.step.seconds == pytest.approx(0.050)
    assert 0 < found.variation.more < 1
    assert found.network == StepInterval(0, 0), "one rank makes no calls"


def test_the_band_adds_what_is_not_known():
    """A step of 63 ms takes 61.5 or 64.5 ms with 5% machine noise, and 59.9 or 69.6 ms with call errors."""
    found = prediction(calibration())
    assert found.variation == StepInterval(0, 0), "a single step was measured"
    assert (found.machine.less, found.machine.more) == pytest.approx((1.5 / 63, 1.5 / 63))
    assert (found.network.less, found.network.more) == pytest.approx((3.1 / 63, 6.6 / 63))
    assert found.low_s == pytest.approx(0.063 - math.hypot(0.0015, 0.0031))
    assert found.high_s == pytest.approx(0.063 + math.hypot(0.0015, 0.0066))
    told = table_text([found])
    assert "-2% +2%  this machine's noise between runs, which is unknown" in told
    assert "-5% +10%  the network and its calls, whose prediction errors are unknown" in told
    assert facts_of(found)["deviations"]["network"]["more"] == pytest.approx(6.6 / 63)


def test_a_step_takes_some_time_however_much_it_varies():
    wild = prediction(calibration(step_s=(0.001, 0.050, 0.200)), nodes=1)
    assert math.hypot(wild.variation.less, wild.machine.less, wild.network.less) > 1
    assert 0 < wild.low_s < wild.step.seconds < wild.high_s


def test_a_machine_that_is_noisy_in_its_steps_is_so_in_its_runs():
    assert machine_noise([0.05] * 9 + [1.0]) == LEAST_NOISE, "a single pause is no noise"
    assert machine_noise([0.05, 0.04, 0.06, 0.05, 0.055, 0.045]) == pytest.approx(1.645 * 1.4826 * 0.1)
    assert machine_noise([0.01, 0.05, 0.2]) == 0.5
    assert machine_noise([0.05], contention=0.3) == 0.3


def test_other_processes_count_as_far_as_cores_were_not_idle():
    before = CoreUsage(0.0, 100.0, 1.0)
    assert before.contention(CoreUsage(10.0, 120.0, 5.0), ranks=2, cores=2) == pytest.approx(12 / 20), (
        "no core was idle"
    )
    assert before.contention(CoreUsage(10.0, 110.0, 5.0), ranks=2, cores=2) == 0, "2 s of others, and 10 s idle"
    assert CoreUsage.now().contention(CoreUsage.now(), 1, 2) >= 0


def test_calls_of_ranks_without_a_core_to_spare_may_take_longer():
    origin = calibration().origin
    assert call_factors(replace(origin, cores=2, threads=1, together=2)) == pytest.approx((0.9, 1.2))
    assert call_factors(replace(origin, cores=2, threads=1, together=8)) == pytest.approx((0.9, 1.4))


def test_zero_divides_the_memory_stage_by_stage():
    def nbytes(stage: int) -> int:
        return memory_of(calibration(), Strategy((MB,), overlaps=True, zero=stage), 10).nbytes

    assert [nbytes(stage) // MB for stage in (0, 1, 2, 3)] == [220, 166, 139, 112]


def test_a_host_sends_no_byte_twice():
    base = measured(calibration())
    assert traffic_of(calibration(), base, 1) == 0
    assert traffic_of(calibration(), base, 4) == pytest.approx(2 * 0.75 * 30 * MB)
    assert traffic_of(calibration(), replace(base, wire="bf16"), 4) == pytest.approx(0.75 * 30 * MB)
    assert traffic_of(calibration(), replace(base, period=10), 4) == pytest.approx(0.15 * 30 * MB)


@pytest.mark.parametrize(
    ("link", "bottleneck"),
    [
        (NetworkLink(0.0, 1e12), "computing"),
        (NetworkLink(1e-6, 1e8), "links of hosts"),
        (NetworkLink(0.2, 1e12), "latency"),
    ],
)
def test_the_bottleneck_is_what_would_help_most(link, bottleneck):
    assert prediction(calibration(links=replace(LINKS, node=link))).bottleneck == bottleneck


def test_waiting_for_data_can_be_the_bottleneck():
    slow = replace(calibration().times, data_s=0.2)
    assert prediction(calibration(times=slow, links=replace(LINKS, node=NetworkLink(0.0, 1e12)))).bottleneck == "data"


def test_waiting_for_the_slowest_can_be_the_bottleneck():
    uneven = (0.050,) * 60 + (0.150,) * 40
    found = calibration(step_s=uneven, links=replace(LINKS, node=NetworkLink(0.0, 1e12)))
    assert prediction(found, nodes=64).bottleneck == "stragglers"


def test_advice_is_ranked_by_what_it_gains():
    found = calibration(links=replace(LINKS, node=NetworkLink(1e-3, 1e8)))
    now = prediction(found, nodes=4)
    advice = advise(found, now, lambda nodes, per_node: network_of(found.links, nodes, per_node), simulate)
    gains = [each.gain for each in advice]
    assert gains == sorted(gains, reverse=True)
    best = advice[0]
    assert best.change.what.startswith("DiLoCo")
    assert best.gain == pytest.approx(work_rate(best.prediction) / work_rate(now) - 1)
    assert {'wire="int4"', "accumulate 4 backward passes per step (no_sync)"} <= {each.change.what for each in advice}


def test_no_change_is_the_job_as_it_is():
    now = prediction(calibration(), nodes=4)
    assert all(change.strategy != now.strategy or change.per_node != 1 for change in changes(now, calibration()))
    assert list(changes(prediction(calibration(), nodes=1), calibration())) == []


def test_regions_share_their_uplinks():
    links = replace(LINKS, region=NetworkLink(0.02, 1e7))
    network = network_of(links, 5, 2, regions=2)
    assert [group.hosts for group in network.groups] == [(0, 1), (2, 3, 4)]
    assert {group.uplink for group in network.groups} == {links.region}
    assert network.hosts[4] == (8, 9)


def test_a_network_needs_the_links_that_it_uses():
    with pytest.raises(CalibrationError, match=r"no link between hosts; specify one, such as --links node=25gbit"):
        network_of(replace(LINKS, node=None), 2, 1)
    assert len(network_of(replace(LINKS, node=None), 1, 2).hosts) == 1
    with pytest.raises(CalibrationError, match=r"between regions is not known; specify it, such as --links region="):
        network_of(LINKS, 4, 1, regions=2)
    with pytest.raises(ValueError, match="2 nodes with 1 ranks each in 3 regions are not a valid network"):
        network_of(LINKS, 2, 1, regions=3)


def test_faster_links_are_those_between_hosts():
    faster = with_rate(LINKS, 4)
    assert faster.node == NetworkLink(1e-3, 4e9)
    assert faster.within_host == LINKS.within_host
    more = with_bandwidth_factor(network_of(LINKS, 2, 1), 2)
    assert (more.node.bytes_per_s, more.within_host) == (2e9, LINKS.within_host)


def test_calls_on_one_host_are_those_that_were_measured():
    calls = (HostCall(2, 1000, 1e-5), HostCall(2, 3000, 2e-5))
    assert interpolated(calls, 2, 10) == pytest.approx(1e-5)
    assert interpolated(calls, 2, 2000) == pytest.approx(1.5e-5)
    assert interpolated(calls, 2, 6000) == pytest.approx(4e-5)
    assert interpolated(calls, 4, 3000) == pytest.approx(4e-5)
    call = CallTimes(network_of(LINKS, 1, 2), calls, simulate).call(Operation.ALL_REDUCE, 3000)
    assert (call.algorithm, call.seconds) == ("shared memory", pytest.approx(2e-5))


def test_large_worlds_are_simulated_at_few_sizes():
    asked: list[int] = []

    def counting(algorithm: str, operation: Operation, nbytes: int, network: Network) -> Timing:
        asked.append(nbytes)
        return simulate(algorithm, operation, nbytes, network)

    many = CallTimes(network_of(LINKS, 300, 1), (), counting)
    for nbytes in (5 << 20, 6 << 20, 7 << 20):
        assert many.call(Operation.ALL_REDUCE, nbytes, algorithm="ring").seconds == pytest.approx(1e-3 + nbytes / 1e9)
    assert sorted(asked) == [4 << 20, 16 << 20]
