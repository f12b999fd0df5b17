"""Rules of the rendezvous, and how claims are judged; real ranks meet in tests/ranks."""

from __future__ import annotations

import pytest

import paceline as dist
from paceline.rendezvous.claims import Claim, decode_claims, describe_absence, judge
from paceline.rendezvous.methods import rendezvous


def claims(*pairs: tuple[int, int]) -> list[Claim]:
    return [Claim(rank, size, "host", 100 + at) for at, (rank, size) in enumerate(pairs)]


def test_claims_survive_the_store():
    made = claims((0, 2), (1, 2))
    assert decode_claims(b"".join(each.encode() for each in made)) == made


def test_all_ranks_once_is_complete():
    assert judge(claims((1, 3), (0, 3))) is None
    assert judge(claims((1, 3), (0, 3), (2, 3))) == "complete"


def test_a_rank_claimed_twice_names_both_processes():
    verdict = judge(claims((0, 3), (1, 3), (1, 3)))
    assert verdict is not None
    assert "rank 1 was claimed twice: by process 101 on host and by process 102 on host" in verdict


def test_different_world_sizes_name_both():
    verdict = judge(claims((0, 3), (1, 4)))
    assert verdict is not None
    assert "rank 0 (process 100 on host) has 3, rank 1 (process 101 on host) has 4" in verdict


def test_absence_names_who_came_and_who_did_not():
    told = describe_absence(claims((3, 4), (0, 4), (1, 4)), 4, 30)
    assert told.startswith("waited 30 s for 4 ranks; 0, 1, 3 arrived, 2 did not")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init_method": "tcp://localhost:1", "store": dist.HashStore()}, "exclude each other"),
        ({"store": dist.HashStore()}, "world_size and rank must be given"),
        ({"init_method": "tcp://localhost:1"}, "tcp:// needs rank and world_size"),
        ({"init_method": "tcp://localhost", "rank": 0, "world_size": 1}, "must name rank 0's host and a port"),
        ({"init_method": "file:///x", "rank": 0}, "file:// needs world_size"),
        ({"init_method": "file://x/y", "rank": 0, "world_size": 1}, "absolute path after three slashes"),
        ({"init_method": "mpi://", "rank": 0, "world_size": 1}, "is not known; use env://"),
        ({"init_method": "tcp://localhost:1", "rank": 2, "world_size": 2}, "must be from 0 to 1"),
        ({"init_method": "tcp://localhost:1", "rank": 0, "world_size": 0}, "must be at least 1"),
        ({}, "needs the environment variable RANK.*paceline run.*rank="),
    ],
)
def test_a_broken_rule_is_named_with_its_fix(arguments, message, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PACELINE_STORE"):
        monkeypatch.delenv(variable, raising=False)
    filled = {"init_method": None, "store": None, "world_size": -1, "rank": -1, **arguments}
    with pytest.raises(ValueError, match=message):
        rendezvous(**filled, timeout_s=1)


def test_an_unknown_backend_and_a_missing_group_are_named():
    with pytest.raises(ValueError, match="backend 'nccl' is not known; this version has 'paceline'"):
        dist.init_process_group("nccl")
    with pytest.raises(ValueError, match="call paceline.init_process_group"):
        dist.get_rank()
    assert not dist.is_initialized()
    assert dist.is_available()


def test_one_process_is_a_group_of_one_again_and_again():
    import torch

    for _ in range(2):
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.sum() == 1000
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "paceline")
        with pytest.raises(ValueError, match="exists already"):
            dist.init_process_group()
        dist.destroy_process_group()
