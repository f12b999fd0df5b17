"""Diagnosis of a failed call in a library that does not report the rank at fault."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline as dist
from paceline.comm.engine.adapters.library_engine import FailureDiagnosis
from paceline.comm.engine.channel import CallFailure, OutcomeCode
from paceline.comm.engine.failures import ProcessIdentity, RankIdentity, to_error

HISTORY = [(7, 2, 11, 0, -1, 3)]

ELSEWHERE = ProcessIdentity("another boot/1/2", 4321, 99)


class Gone(dist.HashStore):
    """A store whose server has exited."""

    def _apply(self, *_: object) -> object:
        raise dist.StoreConnectionError("the process that serves it has ended")


def members(*processes: ProcessIdentity | None) -> list[RankIdentity]:
    return [RankIdentity(rank, "host", 100 + rank, process) for rank, process in enumerate(processes)]


def finds(store: dist.Store, them: list[RankIdentity], said: str = "", rank: int = 0):
    failure = FailureDiagnosis(store, 1, them, rank).diagnose(HISTORY, said, 10**9)
    return failure, str(to_error(failure, them, rank, "all_reduce(float32, 3 elements, SUM)"))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("paceline.comm.engine.adapters.library_engine._PATIENCE_S", 0.2)
    monkeypatch.setattr("paceline.comm.engine.adapters.library_engine._MESSAGE_PATIENCE_S", 0.2)


def test_a_silent_rank_elsewhere_did_not_come():
    failure, text = finds(dist.HashStore(), members(ProcessIdentity.mine(), ELSEWHERE))
    assert failure.code == OutcomeCode.TIMED_OUT and failure.missing == [1]
    assert "rank 1 (host, pid 101) did not reach the call" in text


def test_a_silent_rank_elsewhere_did_not_answer_rather_than_die():
    failure, text = finds(dist.HashStore(), members(ProcessIdentity.mine(), ELSEWHERE), "Connection closed by peer")
    assert failure.code == OutcomeCode.PEER_LOST and failure.gone == [1]
    assert "rank 1 (host, pid 101) did not answer" in text and "died" not in text
    assert "Connection closed by peer" in text


def test_a_rank_elsewhere_died_if_the_store_says_so():
    store = dist.HashStore()
    store.set("fate/1", "died")
    _, text = finds(store, members(ProcessIdentity.mine(), ELSEWHERE), "Connection closed by peer")
    assert "rank 1 (host, pid 101) died" in text


def test_a_rank_that_left_after_its_time_was_over_left():
    store = dist.HashStore()
    store.set("fate/1", "left")
    ended = dataclasses.replace(ProcessIdentity.mine(), started=1)
    _, text = finds(store, members(ProcessIdentity.mine(), ended), "Connection closed by peer")
    assert "rank 1 (host, pid 101) left the group" in text


def test_the_rank_that_died_is_named_before_those_that_left():
    store = dist.HashStore()
    store.set("inquiry/1/1", "left")
    ended = dataclasses.replace(ProcessIdentity.mine(), started=1)
    failure, text = finds(store, members(ProcessIdentity.mine(), ProcessIdentity.mine(), ended))
    assert failure.gone == [2] and "rank 2 (host, pid 102) died" in text


def test_a_rank_does_not_name_itself_when_the_store_is_gone():
    failure, text = finds(Gone(), members(ELSEWHERE, ProcessIdentity.mine()), "Connection closed by peer", rank=1)
    assert failure.gone == [0]
    assert "rank 0 (host, pid 100) did not answer" in text
    failure, text = finds(Gone(), members(ELSEWHERE, ProcessIdentity.mine()), rank=1)
    assert (
        failure.code == OutcomeCode.TIMED_OUT
        and "the engine cannot identify the ranks that did not reach the call" in text
    )


def test_a_process_that_ended_with_the_store_is_not_called_dead():
    ended = dataclasses.replace(ProcessIdentity.mine(), started=1)
    _, text = finds(Gone(), members(ended, ProcessIdentity.mine()), "Connection closed by peer", rank=1)
    assert "rank 0 (host, pid 100) ended (it died or left" in text


def test_a_message_to_another_rank_is_given_up_without_verdict():
    them = members(ProcessIdentity.mine(), ELSEWHERE)
    assert FailureDiagnosis(dist.HashStore(), 1, them, 0).about_message(1, "", 10**9).code == OutcomeCode.TIMED_OUT
    assert FailureDiagnosis(Gone(), 1, them, 0).about_message(1, "", 10**9).code == OutcomeCode.TIMED_OUT


def at_once(*diagnoses: tuple[FailureDiagnosis, str]) -> list[CallFailure]:
    """Returns the failures of ranks that time out at the same time, each in a collective or a message."""
    with ThreadPoolExecutor(len(diagnoses)) as ranks:
        found = [
            ranks.submit(each.diagnose, HISTORY, "", 10**9) if kind else ranks.submit(each.about_message, 1, "", 10**9)
            for each, kind in diagnoses
        ]
        return [each.result() for each in found]


def test_groups_that_wait_for_each_other_are_followed():
    store, them = dist.HashStore(), members(ProcessIdentity.mine(), ProcessIdentity.mine())
    first, second = at_once(*[(FailureDiagnosis(store, group, them, rank), "call") for group, rank in ((1, 0), (2, 1))])
    assert (first.missing, first.waiting, first.blocked_by) == ([1], [1], [])
    assert (second.missing, second.waiting, second.blocked_by) == ([0], [0], [])
    assert store.get("waiting/0") == store.get("waiting/1") == b"", "they no longer wait"
    text = str(to_error(first, them, 0, "barrier()"))
    assert "rank 1 (host, pid 101) did not reach the call because it waits in another call" in text
    assert "The ranks wait for each other" in text


def test_a_rank_outside_the_group_may_be_at_fault():
    store, them = dist.HashStore(), members(*[ProcessIdentity.mine()] * 3)
    message = FailureDiagnosis(store, 1, them[:2], 0), ""
    first, second = at_once(message, (FailureDiagnosis(store, 2, them[1:], 0), "call"))
    assert (first.missing, first.waiting, first.blocked_by) == ([1], [1], [2])
    assert (second.missing, second.waiting, second.blocked_by) == ([1], [], [])
    text = str(to_error(first, them[:2], 0, "recv()", engine_members=them))
    assert "it waits in another call, which is delayed by rank 2 (host, pid 102)" in text
