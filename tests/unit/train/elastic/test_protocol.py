"""Rules and messages in the protocol for elastic jobs."""

from __future__ import annotations

import msgspec
import pytest
from successor_coordinators import FIRST, KNOWN, report

from paceline.train.elastic.protocol import (
    MachineReport,
    ReplicatedJobState,
    View,
    has_quorum,
    merge_job_states,
    next_term,
)


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


def replace_generation(view: View, more: int) -> View:
    return msgspec.structs.replace(view, generation=view.generation + more)


def test_knowledge_of_several_is_put_together():
    second = replace_generation(FIRST, 1)
    one = msgspec.structs.replace(KNOWN, dead=("2.0.0",))
    other = msgspec.structs.replace(KNOWN, complete=second.generation, views=(second,))
    known = merge_job_states([one, other])
    assert known.views == (second,) and known.complete == second.generation and known.dead == ("2.0.0",)
    assert merge_job_states([]) == ReplicatedJobState()


def test_no_two_machines_have_the_same_term():
    assert len({next_term(term, number) for term in (1, 65537) for number in range(3)}) == 6
    assert next_term(1, 0) > 1 and next_term(next_term(1, 2), 0) > next_term(1, 2)


def test_reports_and_knowledge_survive_the_wire():
    told = report(1, ended=(("1.0.1", "killed", -9),))
    assert msgspec.json.decode(msgspec.json.encode(told), type=MachineReport) == told
