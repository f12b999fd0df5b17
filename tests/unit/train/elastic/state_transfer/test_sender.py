"""Messages from a sender about a receiver that others wait for."""

from __future__ import annotations

from paceline.train.elastic.state_transfer.sender import ReceiverDelays


def test_waits_for_a_learner_are_told_once_and_when_they_double():
    delays = ReceiverDelays("2.0.0")
    said = [delays.waited(0.5) for _ in range(20)]
    assert [at for at, text in enumerate(said) if text] == [0, 2, 5, 11]
    assert said[2] == "the others waited for worker 2.0.0, which receives the state more slowly: 3 times, 1.5 s in all"
    assert "20 times, 10.0 s in all" in str(delays.over()) and delays.over() is None
    assert ReceiverDelays("2.0.0").over() is None
