"""Statistics about a run with injected faults."""

from __future__ import annotations

import pytest

from paceline.operate.launch.elastic.chaos_runner import ChaosStats


def test_the_ledger_tells_pauses_and_replacements():
    ledger = ChaosStats(100.0)
    ledger.acted("kill")
    ledger.lost(1, {"a", "c"}, 101.0)
    ledger.entered(0, "a", False, 101.1)
    assert ledger.pauses_s == []
    ledger.entered(2, "c", False, 101.3)
    ledger.entered(1, "b2", True, 102.0)
    assert ledger.pauses_s == pytest.approx([0.3]) and ledger.replaced_s == pytest.approx([1.0])
    told = "\n".join(ledger.summary("kill:1s,seed=0", 110.0))
    assert "chaos (kill:1s,seed=0): 1 actions in 10.0 s (kill 1)" in told
    assert "1 workers replaced; until each participated: median 1.00 s, longest 1.00 s" in told
    assert "the others resumed; after each loss: median 0.30 s" in told


def test_the_ledger_does_not_wait_for_the_dead():
    ledger = ChaosStats(0.0)
    ledger.lost(1, {"a", "c"}, 1.0)
    ledger.lost(2, {"a"}, 1.1)  # the job loses c before it has recovered
    ledger.entered(0, "a", False, 1.5)
    assert ledger.pauses_s == pytest.approx([0.5, 0.4])
    assert "the last worker of slot 1, 2" in "\n".join(ledger.summary("x", 2.0))
