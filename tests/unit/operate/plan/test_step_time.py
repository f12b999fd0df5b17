"""The duration of a step: its calls, and the part of the calls that overlaps with the backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import LINKS, MB, Timing, calibration, simulate

from paceline.comm.schedule.algorithms import predict as predict_call
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.steps import Operation
from paceline.operate.plan.calibration import Links, MeasuredGradient, network_of
from paceline.operate.plan.step_time import (
    CallTimes,
    Strategy,
    buckets_of,
    measured,
    step_of,
)


def times(nodes: int = 2, links: Links = LINKS) -> CallTimes:
    return CallTimes(network_of(links, nodes, 1), (), simulate)


def test_buckets_are_those_of_the_module():
    made = buckets_of(calibration().gradients, (10 * MB,))
    assert [(bucket.nbytes, bucket.ready_s) for bucket in made] == [
        (10 * MB, 0.010),
        (10 * MB, 0.020),
        (10 * MB, 0.030),
    ]


def test_a_bucket_waits_for_those_before_it():
    late = tuple(
        MeasuredGradient(name, 10 * MB, "float32", ready_s) for name, ready_s in (("a", 0.01), ("b", 0.02), ("c", 0.03))
    )
    assert [bucket.ready_s for bucket in buckets_of(late, (10 * MB,))] == [0.030, 0.030, 0.030]


def test_one_rank_waits_for_nobody():
    step = step_of(calibration(), measured(calibration()), times(nodes=1))
    assert step.seconds == pytest.approx(0.050)
    assert step.exposed_s == step.communication_s == 0
    assert step.overlap == 1


def test_without_overlap_all_calls_are_exposed():
    """Each call takes 11 ms: a latency of 1 ms, and 10 ms for 10 MB at 1 GB/s."""
    step = step_of(calibration(), Strategy((10 * MB,), overlaps=False), times())
    assert (step.exposed_s, step.communication_s) == pytest.approx((3 * 0.011, 3 * 0.011))
    assert step.overlap == pytest.approx(0)


def test_overlap_hides_what_fits_into_backward():
    """The first two buckets run from 10 to 21 ms and from 21 to 32 ms, and the last one from 32 to 43 ms."""
    step = step_of(calibration(), measured(calibration()), times())
    assert step.exposed_s == pytest.approx(0.013)
    assert step.overlap == pytest.approx(20 / 33)
    assert step.seconds == pytest.approx(0.063)


def test_a_slower_rank_moves_the_gradients_too():
    """On a rank half as fast, the last gradient is ready at 60 ms, and only its own call is exposed."""
    step = step_of(calibration(), measured(calibration()), times(), factor=2.0)
    assert step.exposed_s == pytest.approx(0.011)
    assert step.seconds == pytest.approx(0.111)


def test_accumulation_averages_once():
    step = step_of(calibration(), replace(measured(calibration()), forwards=4), times())
    assert step.exposed_s == pytest.approx(0.013)
    assert step.seconds == pytest.approx(4 * 0.045 + 0.005 + 0.013)


def test_buffers_are_sent_before_the_forward():
    step = step_of(calibration(buffer_nbytes=MB), measured(calibration()), times())
    assert step.exposed_s == pytest.approx(0.013 + 0.002)


def test_exchanges_now_and_then_are_hidden():
    """Sending 30 MB takes 31 ms, less than the duration of 16 steps."""
    step = step_of(calibration(), replace(measured(calibration()), period=16), times())
    assert step.exposed_s == 0
    assert step.communication_s == pytest.approx(0.031 / 16)


def test_zero_collects_the_parameters_after_the_step():
    """The gather of 30 MB takes 31 ms; the optimizer has half of the parameters."""
    step = step_of(calibration(), replace(measured(calibration()), zero=1), times())
    assert step.exposed_s == pytest.approx(0.013 + 0.031)
    assert step.optimizer_s == pytest.approx(0.0025)


def test_packed_gradients_follow_a_schedule_of_their_own():
    step = step_of(calibration(), replace(measured(calibration()), wire="bf16"), times())
    assert step.exposed_s == pytest.approx(0.006)  # from the last call, which begins at 30 ms
    assert step.algorithm == "bf16"


def test_packed_gradients_take_less_of_the_links_of_many():
    call = times(nodes=300).call(Operation.ALL_REDUCE, 4 << 20, wire="bf16")
    assert call.seconds == pytest.approx(1e-3 + (2 << 20) / 1e9)


def test_many_unlike_ranks_are_predicted_by_closed_forms():
    def none(algorithm: str, operation: Operation, nbytes: int, network: Network) -> Timing:
        raise AssertionError("so many ranks are not simulated one by one")

    links = replace(LINKS, region=LINKS.node)
    uneven, even = (CallTimes(network_of(links, 3000, 1, regions), (), none) for regions in (2, 1))
    by_form = predict_call(
        uneven.network.cost_model(), "ring", Operation.ALL_REDUCE, 1 << 20, 3000, uneven.network.hosts
    )
    assert uneven.call(Operation.ALL_REDUCE, 1 << 20, algorithm="ring").seconds == pytest.approx(by_form)
    with pytest.raises(AssertionError, match="one by one"):
        even.call(Operation.ALL_REDUCE, 1 << 20, algorithm="ring")  # one host represents all hosts
