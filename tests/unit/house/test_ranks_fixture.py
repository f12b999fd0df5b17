"""Tests of the `ranks` fixture."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import RankFailed
from launching import is_alive, wait_until


def place_of_this_rank(extra: str) -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return (*(os.environ[name] for name in names), extra)


def rendezvous_point() -> tuple[int, str, int]:
    import torch

    return int(os.environ["MASTER_PORT"]), os.environ["PACELINE_SECRET"], torch.get_num_threads()


def fail_after_rank_2(directory: str) -> None:
    file = Path(directory, "2.pid")
    if os.environ["RANK"] == "2":
        file.with_suffix(".tmp").write_text(str(os.getpid()))
        file.with_suffix(".tmp").rename(file)
        raise KeyError("the cause")
    wait_until(file.exists)
    wait_until(lambda: not is_alive(int(file.read_text())))
    raise RuntimeError("a consequence")


def return_what_cannot_be_sent() -> object:
    return lambda: None


def exit_without_a_word() -> None:
    os._exit(3)


def sleep_for_ever(directory: str) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
    draft = Path(directory, f"{os.environ['RANK']}.tmp")
    draft.write_text(f"{os.getpid()} {child.pid}")
    draft.rename(draft.with_suffix(".pids"))
    time.sleep(300)


def rank_1_sleeps_for_ever() -> str:
    if os.environ["RANK"] == "1":
        time.sleep(300)
    return "done"


def pids_in(directory: Path, size: int) -> list[int]:
    wait_until(lambda: len(list(directory.glob("*.pids"))) == size)
    return [int(pid) for file in directory.glob("*.pids") for pid in file.read_text().split()]


def test_the_values_of_ranks_come_back_in_rank_order(ranks):
    told = ranks(3)(place_of_this_rank, "x")
    assert told == [(str(rank), str(rank), "3", "3", "127.0.0.1", "1", "x") for rank in range(3)]


def test_each_world_has_a_port_and_a_secret_of_its_own(ranks):
    (first, second), (other, _) = ranks(2)(rendezvous_point), ranks(2)(rendezvous_point)
    assert first == second
    assert first[1] != other[1]
    assert first[2] == 1


def test_the_first_failure_is_raised_with_its_rank_and_traceback(ranks, tmp_path):
    with pytest.raises(RankFailed, match=r"rank 2 failed:\nTraceback(?s:.*)KeyError: 'the cause'"):
        ranks(3)(fail_after_rank_2, str(tmp_path))


def test_a_rank_that_dies_is_told_with_its_exit_code(ranks):
    with pytest.raises(RankFailed, match="rank [01] died with exit code 3"):
        ranks(2)(exit_without_a_word)


def test_a_value_that_cannot_be_sent_is_a_failure_of_its_rank(ranks):
    with pytest.raises(RankFailed, match="rank 0 failed:(?s:.*)return_what_cannot_be_sent"):
        ranks(1)(return_what_cannot_be_sent)


def test_at_the_deadline_the_silent_ranks_are_named_and_killed(ranks, tmp_path):
    with ranks(2).start(sleep_for_ever, str(tmp_path)) as world:
        pids = pids_in(tmp_path, 2)
        with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not finish within 0.05 s"):
            world.join(0.05)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_what_ranks_have_started_ends_with_the_world(ranks, tmp_path):
    with ranks(2).start(sleep_for_ever, str(tmp_path)) as world:
        pids = pids_in(tmp_path, 2)
        world.kill(0, signal.SIGSTOP)
    wait_until(lambda: not any(map(is_alive, pids)))
    world.close()


def test_an_expected_death_is_no_failure(ranks):
    with ranks(3).start(rank_1_sleeps_for_ever) as world:
        world.kill(1)
        assert world.join(60, expect_dead={1}) == ["done", None, "done"]
