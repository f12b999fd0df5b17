"""Real ranks meet, or learn why not."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest

import paceline as dist


def port() -> str:
    return os.environ["MASTER_PORT"]


def meet_twice(method: str, path: str) -> tuple[int, int]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = {"tcp": f"tcp://127.0.0.1:{port()}", "tcp6": f"tcp://[::1]:{port()}", "file": f"file://{path}"}.get(method)
    place = {} if method == "env" else {"rank": rank, "world_size": size}
    for _ in range(2):  # the second time at the same address
        dist.init_process_group(init_method=url, timeout=timedelta(seconds=20), **place)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
        dist.barrier()
        dist.destroy_process_group()
    return rank, size


@pytest.mark.parametrize("method", ["env", "tcp", "tcp6", "file"])
def test_ranks_meet_again_and_again_at_one_address(ranks, method, tmp_path):
    assert ranks(3)(meet_twice, method, str(tmp_path / "meet")) == [(0, 3), (1, 3), (2, 3)]


def meet_beside_torchrun() -> int:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_RUN_ID"] = f"test-{os.environ['PACELINE_SECRET']}"
    dist.init_process_group()
    return dist.get_world_size()


def test_ranks_meet_under_torchrun_which_holds_the_port(ranks):
    assert ranks(2)(meet_beside_torchrun) == [2, 2]


def come_alone() -> str:
    if os.environ["RANK"] == "2":
        time.sleep(30)
        return ""
    with pytest.raises(dist.RendezvousTimeoutError) as caught:
        dist.init_process_group(timeout=timedelta(seconds=2))
    return str(caught.value)


def test_a_rank_that_never_comes_is_named_by_all(ranks):
    with ranks(4).start(come_alone) as world:
        told = world.join(20, expect_dead=frozenset({2}))
    for rank in (0, 1, 3):
        assert f"rank {rank}: waited 2 s for 4 ranks; 0, 1, 3 arrived, 2 did not" in told[rank]


def claim(rank_of: list[int], size_of: list[int], path: str) -> str:
    place = int(os.environ["RANK"])
    started = time.monotonic()
    with pytest.raises(dist.RendezvousError) as caught:
        dist.init_process_group(
            init_method=f"file://{path}", rank=rank_of[place], world_size=size_of[place], timeout=timedelta(seconds=20)
        )
    assert time.monotonic() - started < 10
    return str(caught.value)


def test_a_rank_claimed_twice_fails_at_once_on_every_rank(ranks, tmp_path):
    for message in ranks(3)(claim, [0, 1, 1], [3, 3, 3], str(tmp_path / "meet")):
        assert "rank 1 was claimed twice: by process" in message


def test_different_world_sizes_fail_at_once_on_every_rank(ranks, tmp_path):
    for message in ranks(2)(claim, [0, 1], [3, 2], str(tmp_path / "meet")):
        assert "different world sizes" in message
