"""Rendezvous that succeed or fail; after a failure, every rank raises an error with the reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts.talking import await_word, say
from launching import wait_until
from world import Ranks, reserved_port

from paceline import PacelineError
from paceline.comm.rendezvous.rendezvous import rendezvous

TIMEOUT_S = 60.0


def _own_rank() -> int:
    return int(os.environ["RANK"])


def _meet(url: str, world_size: int, rank: int, timeout_s: float) -> tuple[str, float]:
    """Returns a rank's error message ("" if the rendezvous succeeded), and the duration of the rendezvous."""
    started = time.monotonic()
    try:
        joined = rendezvous(url, None, world_size, rank, timeout_s)
    except PacelineError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    joined.store.add("here", 1)
    while joined.store.add("here", 0) < world_size:
        time.sleep(0.005)
    joined.store.add("bye", 1)
    while rank == 0 and joined.store.add("bye", 0) < world_size:
        time.sleep(0.005)
    joined.store.close()
    return "", time.monotonic() - started


def _claim(url: str, ranks: list[int], world_sizes: list[int], timeout_s: float) -> tuple[str, float]:
    own = _own_rank()
    return _meet(url, world_sizes[own], ranks[own], timeout_s)


@pytest.fixture(params=["tcp", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"tcp://127.0.0.1:{reserved_port()}" if request.param == "tcp" else f"file://{tmp_path}/rendezvous"


def _three_times(url: str) -> list[tuple[str, float]]:
    return [_meet(url, 3, _own_rank(), TIMEOUT_S) for _ in range(3)]


def test_ranks_meet_again_and_again_at_one_address(ranks: type[Ranks], url: str) -> None:
    for told in ranks(3)(_three_times, url):
        assert [each[0] for each in told] == [""] * 3


def _env_meet() -> str:
    joined = rendezvous(None, None, -1, -1, TIMEOUT_S)
    assert joined.rank == _own_rank()
    joined.store.add("here", 1)
    while joined.rank == 0 and joined.store.add("here", 0) < joined.world_size:
        time.sleep(0.005)
    return f"{joined.rank} of {joined.world_size}"


def test_the_environment_says_where(ranks: type[Ranks]) -> None:
    assert ranks(2)(_env_meet) == ["0 of 2", "1 of 2"]


@pytest.mark.parametrize("claimed", [[0, 1, 1], [0, 0, 1]], ids=["rank 1 twice", "rank 0 twice"])
def test_a_rank_claimed_twice_fails_at_once_on_every_rank(ranks: type[Ranks], url: str, claimed: list[int]) -> None:
    world = ranks(3).start(_claim, url, claimed, [3, 3, 3], TIMEOUT_S)
    with world:
        results = world.join()
        rank = max(set(claimed), key=claimed.count)
        pids = [pid for pid, each in zip(world.pids, claimed, strict=True) if each == rank]
    for told, seconds in results:
        assert f"rank {rank} was claimed twice" in told
        for pid in pids:
            assert f"process {pid} on {socket.gethostname()}" in told
        assert seconds < TIMEOUT_S / 2


def test_different_world_sizes_fail_at_once_on_every_rank(ranks: type[Ranks], url: str) -> None:
    for told, seconds in ranks(3)(_claim, url, [0, 1, 2], [3, 3, 4], TIMEOUT_S):
        assert "different world sizes" in told
        assert "has 3" in told
        assert "has 4" in told
        assert seconds < TIMEOUT_S / 2


def _claim_together(directory: str, url: str, ranks: list[int], world_size: int, timeout_s: float) -> str:
    """Starts only when all ranks are ready, so that no rank times out before another starts."""
    say(directory, str(_own_rank()))
    await_word(directory, *map(str, range(len(ranks))))
    return _claim(url, ranks, [world_size] * len(ranks), timeout_s)[0]


def test_a_rank_that_does_not_come_is_named_on_every_rank(ranks: type[Ranks], url: str, tmp_path: Path) -> None:
    directory = tmp_path / "words"
    directory.mkdir()
    for told in ranks(3)(_claim_together, str(directory), url, [0, 1, 3], 4, 2.0):
        assert told.startswith("RendezvousTimeoutError: ")
        assert "waited 2 s for 4 ranks; 0, 1, 3 arrived, 2 did not" in told


def test_rank_0_that_does_not_come_is_named(ranks: type[Ranks]) -> None:
    url = f"tcp://127.0.0.1:{reserved_port()}"
    for told, _ in ranks(2)(_claim, url, [1, 2], [3, 3], 1.0):
        assert told.startswith("RendezvousTimeoutError: ")
        assert "waited 1 s for 3 ranks; rank 0" in told
        assert "did not arrive" in told


def test_a_port_held_by_another_program_is_reported_with_it(ranks: type[Ranks]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ((told, _),) = ranks(1)(_claim, f"tcp://127.0.0.1:{port}", [0], [1], TIMEOUT_S)
    assert f"port {port} of 127.0.0.1 is in use by process {os.getpid()} (" in told


def test_a_second_job_at_the_same_address_disturbs_nobody(ranks: type[Ranks], tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{reserved_port()}"
    with ranks(2).start(_stay, url, str(tmp_path)) as running:
        wait_until(lambda: len(list(tmp_path.glob("met-*"))) == 2)
        answers = [_start_stranger(url, rank) for rank in range(2)]
        for each in answers:
            told = each.communicate(timeout=TIMEOUT_S)[0]
            assert "AuthenticationError" in told or "PortInUseError" in told
        (tmp_path / "over").touch()
        assert running.join() == ["", ""]


def _stay(url: str, directory: str) -> str:
    joined = rendezvous(url, None, 2, _own_rank(), TIMEOUT_S)
    (Path(directory) / f"met-{joined.rank}").touch()
    while not (Path(directory) / "over").exists():
        joined.store.add("n", 1)
        time.sleep(0.01)
    joined.store.add("bye", 1)
    while joined.rank == 0 and joined.store.add("bye", 0) < 2:
        time.sleep(0.005)
    return ""


def _start_stranger(url: str, rank: int) -> subprocess.Popen[str]:
    script = f"from paceline.comm.rendezvous.rendezvous import rendezvous\nrendezvous({url!r}, None, 2, {rank}, 2.0)\n"
    environment = {**os.environ, "PACELINE_SECRET": "of another job, and long enough"}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
