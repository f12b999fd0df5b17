"""Persistent calls between hosts give the same results as plain ones."""

from __future__ import annotations

import pytest
import torch
from persistent_cases import Case, agree, drawn

import paceline as dist


def compare_between_hosts(cases: list[Case]) -> int:
    dist.init_process_group()
    world = dist.GroupMember.WORLD
    assert world is not None
    compared = agree(cases, world)
    rank = dist.get_rank()
    call = dist.all_reduce_init(torch.ones(3 + rank % 2))
    with pytest.raises(dist.CollectiveMismatchError, match=r"all_reduce\(float32, 4 elements, SUM\)"):
        call()
    return compared


@pytest.mark.parametrize("layout", [(2, 1), (2, 2)], ids=str)
def test_persistent_calls_between_hosts(hosts, layout):
    assert min(hosts(*layout)(compare_between_hosts, drawn(8))) > 100
