"""The groups that torch.distributed forms are told apart in recordings."""

from __future__ import annotations

from datetime import timedelta

from paceline.interop.torch_backend.rendezvous import GroupRendezvous


def rendezvous(name: str, rank: int = 0, occasion: str = "") -> GroupRendezvous:
    return GroupRendezvous(None, rank, 2, timedelta(seconds=1), [0, 1], name, occasion)


def test_groups_of_the_same_ranks_have_different_identities():
    assert rendezvous("1").identity != rendezvous("2").identity
    assert rendezvous("1").identity != rendezvous("1", occasion="reconfigure/1").identity
    assert rendezvous("1").identity not in (0, rendezvous("").identity)


def test_all_members_have_the_same_identity():
    assert rendezvous("1", rank=0).identity == rendezvous("1", rank=1).identity
