"""A rank dies while others wait for a late rank: the waiting ranks and the late rank report the death immediately."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import Ranks
from launching import sleep_for_a_while, wait_until
from world import reserved_port

import paceline as dist
from paceline.comm.group import default, init
from paceline.comm.security.secret import job_secret
from paceline.comm.store.tcp_store import StoreServer

ENDLESS = timedelta(minutes=5)
AT_ONCE_S = 30.0  # normally about a second, but the machine may be busy
_LATE, _VICTIM = 1, 2

Told = tuple[str, str, float]


_kept: list[dist.TCPStore] = []


def _init(kind: str, place: str) -> None:
    if kind == "store":
        host, port = place.split(":")
        store = dist.TCPStore(host, int(port), is_master=os.environ["RANK"] == "0", wait_for_workers=False)
        _kept.append(store)
        dist.init_process_group(
            store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=ENDLESS
        )
    elif kind == "unix":
        os.environ["PACELINE_STORE"] = f"unix:{place}"
        dist.init_process_group(timeout=ENDLESS)
    elif kind == "env":
        dist.init_process_group(timeout=ENDLESS)
    else:
        dist.init_process_group(
            init_method=f"{kind}://{place}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=ENDLESS,
        )


def _come(kind: str, place: str, directory: str) -> Told:
    rank = int(os.environ["RANK"])
    if rank == 0 and kind == "unix":
        StoreServer.on_unix_path(place, job_secret())
    late = Path(directory) / "late"
    if rank == _LATE:
        while not late.exists():
            time.sleep(0.005)
    (Path(directory) / f"came-{rank}").touch()
    started = time.time()
    with pytest.raises(dist.RendezvousError) as caught:
        _init(kind, place)
    took_s = time.time() - max(started, float((Path(directory) / "died").read_text()))
    (Path(directory) / f"heard-{rank}").touch()
    while kind in ("unix", "store") and rank == 0 and not (Path(directory) / f"heard-{_LATE}").exists():
        time.sleep(0.005)  # this rank serves the store
    return type(caught.value).__name__, str(caught.value), took_s


def _await(paths: list[Path]) -> None:
    wait_until(lambda: all(path.exists() for path in paths))


@pytest.fixture(params=["tcp", "env", "unix", "store", "file"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_death_is_told_to_those_that_wait_and_to_the_late(ranks: type[Ranks], tmp_path: Path, kind: str) -> None:
    place = str(tmp_path / "store") if kind in ("unix", "file") else f"127.0.0.1:{reserved_port()}"
    with ranks(4).start(_come, kind, place, str(tmp_path)) as world:
        _await([tmp_path / f"came-{rank}" for rank in (0, _VICTIM, 3)])
        time.sleep(0.5)  # time for the claims; without it, the test would cover less
        (tmp_path / "died").write_text(str(time.time()))
        world.kill(_VICTIM)
        _await([tmp_path / f"heard-{rank}" for rank in (0, 3)])
        if kind == "file":  # its contents are discarded when its last user exits
            world.kill(_LATE)
            told = world.join(60, expect_dead={_VICTIM, _LATE})
        else:
            (tmp_path / "late").touch()
            told = world.join(60, expect_dead={_VICTIM})
    for rank in (0, 3) if kind == "file" else (0, _LATE, 3):
        error, message, took_s = told[rank]
        assert error == "RendezvousError"
        dead = f"rank {_VICTIM} ({os.uname().nodename}, pid {world.pids[_VICTIM]})"
        assert f"{dead} died during the rendezvous; look at its output" in message
        assert took_s < AT_ONCE_S, message


def connections_to(port: int) -> int:
    """Returns the number of established connections to a port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def _serve_and_die(place: str, directory: str) -> Told:
    (Path(directory) / f"came-{os.environ['RANK']}").touch()
    with pytest.raises(dist.RendezvousError) as caught:
        _init("tcp", place)
    return type(caught.value).__name__, str(caught.value), 0.0


def test_the_death_of_the_rank_that_serves_is_told(ranks: type[Ranks], tmp_path: Path) -> None:
    place = f"127.0.0.1:{reserved_port()}"
    with ranks(4).start(_serve_or_stay_away, place, str(tmp_path)) as world:
        _await([tmp_path / f"came-{rank}" for rank in (0, 1, 2)])
        # Connected ranks that are asleep are waiting for the last rank, and open no further connections.
        port = int(place.rpartition(":")[2])
        wait_until(lambda: connections_to(port) >= 2 and sleep_for_a_while(*world.pids[:3]))
        world.kill(0)
        told = world.join(60, expect_dead={0, 3})
    for rank in (1, 2):
        assert told[rank][0] == "RendezvousError"
        assert "the process that serves the ranks' store (rank 0, or the launcher) died" in told[rank][1]


def _serve_or_stay_away(place: str, directory: str) -> Told:
    if os.environ["RANK"] == "3":
        time.sleep(300)
    return _serve_and_die(place, directory)


def _die_between_rendezvous_and_forming(kind: str, place: str) -> Told:
    if os.environ["RANK"] == str(_VICTIM):
        init.Formation = _die
    started = time.monotonic()
    with pytest.raises(dist.RendezvousError) as caught:
        _init(kind, place)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_death_before_the_group_forms_is_told(ranks: type[Ranks], tmp_path: Path, kind: str) -> None:
    place = str(tmp_path / "store") if kind == "file" else f"127.0.0.1:{reserved_port()}"
    with ranks(3).start(_die_between_rendezvous_and_forming, kind, place) as world:
        told = world.join(60, expect_dead={_VICTIM})
    for rank in (0, 1):
        _, message, took_s = told[rank]
        assert (
            f"rank {_VICTIM} ({os.uname().nodename}, pid {world.pids[_VICTIM]}) died during the rendezvous" in message
        )
        assert took_s < AT_ONCE_S, message


def _meet_twice_and_stay(place: str, directory: str) -> str:
    rank = int(os.environ["RANK"])
    with pytest.raises(dist.RendezvousError, match="was claimed twice"):
        dist.init_process_group(
            init_method=f"tcp://{place}", rank=min(rank, 1), world_size=3, timeout=timedelta(seconds=30)
        )
    _init("tcp", place)
    dist.barrier()
    store = default.default_world().store
    verdict = store.get("verdict").decode()
    dist.barrier()
    dist.destroy_process_group()
    return verdict


def test_a_new_rendezvous_at_the_address_is_not_spoiled(ranks: type[Ranks], tmp_path: Path) -> None:
    place = f"127.0.0.1:{reserved_port()}"
    assert ranks(3)(_meet_twice_and_stay, place, str(tmp_path)) == ["complete"] * 3


def _share_a_store(place: str) -> list[bool]:
    rank = int(os.environ["RANK"])
    host, port = place.split(":")
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    store.set_last_will(f"gone/{rank}", "of the program's own")
    dist.init_process_group(store=dist.PrefixStore("job", store), rank=rank, world_size=2, timeout=ENDLESS)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 1:
        store.close()  # this also closes the connection
        return []
    store.wait(["gone/1"], timedelta(seconds=60))
    return [store.check([key]) for key in ("gone/0", "job/paceline/1/engine/gave_up")]


def test_a_programs_own_last_wills_are_kept(ranks: type[Ranks]) -> None:
    assert ranks(2)(_share_a_store, f"127.0.0.1:{reserved_port()}") == [[False, False], []]
