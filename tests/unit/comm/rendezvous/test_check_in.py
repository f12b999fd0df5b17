"""The verdict on the ranks' check-ins, without a process or a clock."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import HashStore, RendezvousError, RendezvousTimeoutError
from paceline.comm.rendezvous.check_in import Claim, claim_rank, decode_claims, describe_absence, verdict_on


def _claims(*ranks: int, world_size: int = 4) -> list[Claim]:
    return [Claim(rank, world_size, f"host{at}", 100 + at) for at, rank in enumerate(ranks)]


@given(st.permutations(range(5)), st.integers(1, 5))
def test_the_rendezvous_is_complete_once_every_rank_is_there(order: list[int], arrived: int) -> None:
    verdict = verdict_on(_claims(*order[:arrived], world_size=5))
    assert verdict == ("complete" if arrived == 5 else None)


def test_a_rank_claimed_twice_is_told_with_both_processes() -> None:
    verdict = verdict_on(_claims(0, 1, 1))
    assert verdict is not None
    assert "rank 1 was claimed twice" in verdict
    assert "process 101 on host1" in verdict
    assert "process 102 on host2" in verdict


def test_different_world_sizes_are_told_with_both_processes() -> None:
    verdict = verdict_on([Claim(0, 2, "a", 1), Claim(1, 3, "b", 2)])
    assert verdict is not None
    for part in ("world sizes", "process 1 on a", "has 2", "process 2 on b", "has 3"):
        assert part in verdict


def test_absence_names_who_came_and_who_did_not() -> None:
    told = describe_absence(_claims(0, 3, 1), 4, 30.2)
    assert "waited 30 s for 4 ranks; 0, 1, 3 arrived, 2 did not" in told
    assert "and 79 more" in describe_absence(_claims(0, world_size=100), 100, 1)


@given(
    st.lists(
        st.builds(
            Claim,
            st.integers(0, 99),
            st.integers(1, 99),
            st.from_regex(r"[a-z0-9 .-]{1,20}", fullmatch=True),
            st.integers(1),
        )
    )
)
def test_claims_come_back_from_the_store_as_they_were(claims: list[Claim]) -> None:
    received = decode_claims(b"".join(claim.encode() for claim in claims))
    assert [vars(each) for each in received] == [vars(each) for each in claims]


def test_a_claim_after_the_verdict_is_one_too_many() -> None:
    store = HashStore()
    claim_rank(store, Claim(0, 1, "a", 1), 5)
    with pytest.raises(RendezvousError, match="claimed twice: by process 1 on a and by process 2 on b"):
        claim_rank(store, Claim(0, 1, "b", 2), 5)
    assert store.get("verdict") == b"complete"


def test_all_hear_the_first_timeout() -> None:
    store = HashStore()
    for rank in (1, 0):
        with pytest.raises(RendezvousTimeoutError, match="1 arrived, 0, 2 did not"):
            claim_rank(store, Claim(rank, 3, "a", rank), 0.05)


def test_one_that_comes_a_moment_after_the_verdict_hears_it() -> None:
    store = HashStore()
    told: list[str] = []

    def come(rank: int, pid: int) -> None:
        try:
            claim_rank(store, Claim(rank, 3, "a", pid), 20)
        except RendezvousError as error:
            told.append(str(error))

    threads = [threading.Thread(target=come, args=each) for each in ((1, 1), (1, 2))]
    for thread in threads:
        thread.start()
    store.wait(["verdict"])
    time.sleep(0.2)
    assert told == []  # both keep the store open for the third rank
    come(0, 3)
    for thread in threads:
        thread.join(60)
    assert len(told) == 3
    assert all("rank 1 was claimed twice" in each for each in told)
