"""Votes by which members commit a round, and audits of their results."""

from __future__ import annotations

import pytest

from paceline.train.elastic.agreement import (
    deal_evenly,
)
from paceline.train.elastic.worker.vote import (
    AUDIT_EVERY,
    Audit,
    Ballot,
    DivergenceError,
    OthersOutvotedError,
    OutvotedError,
    audit_of,
    judge,
    suspects,
)


def test_equal_ballots_pass():
    judge([Ballot(1, 2, 3), Ballot(1, 2, 9)], 0, 5, ["a", "b"])


def test_the_minority_is_outvoted_and_nobody_commits():
    ballots = [Ballot(1, 2, 3), Ballot(1, 4, 3), Ballot(1, 2, 3)]
    with pytest.raises(OthersOutvotedError, match=r"round 5: another state than that of the majority: b"):
        judge(ballots, 0, 5, ["a", "b", "c"])
    with pytest.raises(OutvotedError, match=r"round 5: the state of worker b differs from that of 2 of 3 workers"):
        judge(ballots, 1, 5, ["a", "b", "c"])


def test_without_a_majority_all_get_an_error():
    for rank in range(2):
        with pytest.raises(DivergenceError, match=r"round 5: the result differs between the workers a, b") as raised:
            judge([Ballot(1, 2, 3), Ballot(7, 2, 3)], rank, 5, ["a", "b"])
        assert raised.value.workers == ("a", "b")


def test_audits_come_in_turns_and_name_their_owner():
    deal = deal_evenly(8, 4)
    audits = [audit for number in range(40 * AUDIT_EVERY) if (audit := audit_of(number, deal, 8)) is not None]
    assert len(audits) == 40
    assert {audit.shard for audit in audits} == set(range(8))
    for audit in audits:
        assert audit.owner == audit.shard // 2
        assert len(audit.others) == 2
        assert audit.owner not in audit.others


def test_an_audit_names_whom_two_others_contradict():
    audit = Audit(shard=3, owner=1, others=(2, 3))
    assert suspects(audit, [0, 5, 5, 5]) == ()
    assert suspects(audit, [0, 6, 5, 5]) == (1,)
    assert suspects(audit, [0, 5, 5, 6]) == (3,)
    assert suspects(audit, [0, 5, 6, 7]) == (1, 2, 3)
    assert suspects(Audit(shard=0, owner=0, others=(1,)), [4, 5]) == (0, 1)
    assert suspects(audit, [0, 0, 5, 5]) == ()


def test_a_guest_has_no_part_in_the_majority():
    ballots = [Ballot(1, 2, 3), Ballot(1, 4, 3)]
    with pytest.raises(OthersOutvotedError, match="another state than that of the majority: b"):
        judge(ballots, 0, 5, ["a", "b"], {1})
    with pytest.raises(OutvotedError, match="the state of worker b differs from that of 1 of 1"):
        judge(ballots, 1, 5, ["a", "b"], {1})
    with pytest.raises(DivergenceError):
        judge(ballots, 0, 5, ["a", "b"], {0, 1})
