from __future__ import annotations

import torch

import paceline as dist


def _all_reduce() -> list[float]:
    dist.init_process_group()
    r, n = dist.get_rank(), dist.get_world_size()
    out = []
    for count in (1, 1000, 300_000, 3_000_001):
        t = torch.full((count,), float(r + 1))
        dist.all_reduce(t)
        assert (t == n * (n + 1) / 2).all(), t
        out.append(float(t[0]))
    dist.barrier()
    dist.destroy_process_group()
    return out


def test_all_reduce(hosts) -> None:
    print(hosts(2, 1)(_all_reduce))


def test_all_reduce22(hosts) -> None:
    print(hosts(2, 2)(_all_reduce))
