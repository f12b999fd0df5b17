"""Link measurements between ranks that are busy when the measurement starts."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.comm.engine.native.cost_measurement import Probe, measure, note
from paceline.comm.schedule.cost_model import LinkCost
from paceline.comm.schedule.network import Pair

RATE = 12.5e6  # bytes/s
LATENCY_S = 50e-6


class Clocked(Probe):
    """A probe in virtual time, with a peer that is busy for some time before it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy_s: float, latency_s: float = LATENCY_S) -> None:
        self.now = 0.0
        self.busy_s = busy_s
        self.latency_s = latency_s
        self.sent: list[int] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def send(self, tensor: torch.Tensor) -> None:
        self.now += tensor.nbytes / RATE
        self.sent.append(tensor.nbytes)

    def receive(self, tensor: torch.Tensor) -> None:
        self.now += self.busy_s + 2 * self.latency_s
        self.busy_s = 0.0


@pytest.mark.parametrize("busy_s", [0.0, 0.03, 2.0])
def test_a_rank_that_comes_late_does_not_look_far(monkeypatch: pytest.MonkeyPatch, busy_s: float) -> None:
    probe = Clocked(monkeypatch, busy_s)
    cost = measure(probe)
    assert cost.alpha_s == pytest.approx(LATENCY_S, rel=0.1)
    assert 1 / cost.beta_s_per_byte == pytest.approx(RATE, rel=0.02)


def test_far_ranks_exchange_no_long_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Clocked(monkeypatch, 0.0, latency_s=0.02)
    cost = measure(probe)
    assert cost.alpha_s == pytest.approx(0.02, rel=0.1)
    assert max(probe.sent) == 8


@pytest.mark.parametrize("order", [1, -1])
def test_a_rate_that_was_not_measured_does_not_count(order: int) -> None:
    near, guessed = LinkCost(30e-6, 2e-8), LinkCost(0.011, 5e-10)
    found: dict[Pair, LinkCost] = {}
    for cost in (near, guessed)[::order]:
        note(found, (0, 1), cost)
    assert found == {(0, 1): near}


def test_of_two_measurements_the_shortest_times_count() -> None:
    found: dict[Pair, LinkCost] = {}
    for cost in (LinkCost(30e-6, 3e-8), LinkCost(40e-6, 2e-8)):
        note(found, (0, 1), cost)
    assert found == {(0, 1): LinkCost(30e-6, 2e-8)}
