"""Violations of each rule for addresses in `init_process_group` raise a ValueError with the rule and the solution."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline import FileStore, HashStore, PrefixStore, RendezvousError
from paceline.comm.rendezvous.environment import rank_and_world_size
from paceline.comm.rendezvous.rendezvous import rendezvous
from paceline.comm.security import own_files


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PACELINE_", "MASTER_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("init_method", "world_size", "rank", "said"),
    [
        ("mpi://", 1, 0, "use env://, tcp://host:port or file:///path"),
        ("tcp://localhost", 1, 0, "host and a port"),
        ("tcp://:29500", 1, 0, "host and a port"),
        ("tcp://localhost:port", 1, 0, "port"),
        ("tcp://localhost:29500", -1, 0, "tcp:// needs world_size"),
        ("tcp://localhost:29500", 1, -1, "tcp:// needs rank"),
        ("file:///tmp/x", -1, -1, "file:// needs rank and world_size"),
        ("file://tmp/x", 1, 0, "three slashes"),
        ("tcp://localhost:29500?rank=one", 1, -1, "'one'; it must be a whole number"),
        ("env://", 1, -1, "RANK, which is not set; start the script with `paceline run`"),
        ("env://", -1, 0, "WORLD_SIZE, which is not set"),
        (None, 1, 0, "MASTER_ADDR, which is not set"),
        ("tcp://localhost:29500", 0, 0, "world_size is 0"),
        ("tcp://localhost:29500", 2, 2, "it must be from 0 to 1"),
    ],
)
def test_a_broken_rule_is_named(init_method: str | None, world_size: int, rank: int, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace("`", ".")):
        rendezvous(init_method, None, world_size, rank, 1)


def test_a_store_and_an_address_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="are mutually exclusive"):
        rendezvous("env://", HashStore(), 1, 0, 1)


@pytest.mark.parametrize(("world_size", "rank"), [(-1, 0), (1, -1)])
def test_a_store_needs_rank_and_world_size(world_size: int, rank: int) -> None:
    with pytest.raises(ValueError, match="store requires world_size and rank"):
        rendezvous(None, HashStore(), world_size, rank, 1)


@pytest.mark.parametrize("value", ["first", "\u0663", "-1"])
def test_numbers_in_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RANK", value)
    with pytest.raises(ValueError, match=f"RANK is '{value}'; it must be a whole number of at least 0"):
        rendezvous("env://", None, 1, -1, 1)


@pytest.mark.parametrize("rank", [-1, 1])
def test_a_world_size_above_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"PACELINE_STORE": "unix:/nowhere", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("paceline.comm.rendezvous.environment.has_children", lambda: False)
    with pytest.raises(ValueError, match="rank 1: world_size is 3, but the launcher has started 2 ranks"):
        rank_and_world_size(rank, 3)
    assert rank_and_world_size(4, 8) == (4, 8), "a child process of a worker has a rank of its own"
    with monkeypatch.context() as in_child:
        in_child.setattr("multiprocessing.process.parent_process", lambda: object())
        assert rank_and_world_size(rank, 3) == (1, 3), "the rank of a child process may equal its parent's"
    assert rank_and_world_size(rank, 2) == (1, 2)
    monkeypatch.setattr("paceline.comm.rendezvous.environment.has_children", lambda: True)
    assert rank_and_world_size(rank, 3) == (1, 3), "its child may be a rank"


def test_the_launchers_store_is_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_STORE", "localhost:1")
    with pytest.raises(ValueError, match="unix:PATH"):
        rendezvous("env://", None, 1, 0, 1)


def test_arguments_may_stand_in_the_address(tmp_path: Path) -> None:
    joined = rendezvous(f"file://{tmp_path}/a%20store?rank=0&world_size=1", None, -1, -1, 5)
    assert (joined.rank, joined.world_size) == (0, 1)
    assert (tmp_path / "a store").exists()
    joined.store.close()


def test_one_store_serves_one_rendezvous_after_another() -> None:
    store = HashStore()
    first = rendezvous(None, store, 1, 0, 5)
    second = rendezvous(None, store, 1, 0, 5)
    first.store.set("key", b"first")
    assert not second.store.check(["key"])


def test_another_store_at_the_same_place_in_memory_begins_at_one() -> None:
    names = set()
    for _ in range(3):
        store = HashStore()  # often at the address of the previous store
        names.add(repr(rendezvous(None, store, 1, 0, 5).store))
        del store
    assert len(names) == 1


def test_a_file_left_by_an_earlier_run_does_not_join_the_next(tmp_path: Path) -> None:
    earlier = FileStore(tmp_path / "rendezvous")
    earlier.append("paceline/0/1/claims", b"0 2 1 elsewhere\n")
    earlier.close()
    joined = rendezvous(f"file://{tmp_path}/rendezvous", None, 1, 0, 5)
    assert joined.world_size == 1
    joined.store.close()


def test_beside_torchrun_a_directory_of_another_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "1",
        "RANK": "0",
        "TORCHELASTIC_RUN_ID": "../../run",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(own_files.tempfile, "gettempdir", lambda: str(tmp_path))
    rendezvous("env://", None, -1, -1, 5).store.close()
    own = tmp_path / f"paceline-{os.getuid()}"
    assert [each.name for each in own.iterdir()] == ["..%2F..%2Frun-29500-0"]
    own.chmod(0o777)
    with pytest.raises(RendezvousError, match="others could join"):
        rendezvous("env://", None, -1, -1, 5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_method='tcp://host:port'"):
        rendezvous("env://", None, -1, -1, 5)


def test_a_store_of_another_library_is_refused() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(TypeError, match=r"rank 1: store is a torch\..*HashStore; .*paceline\.TCPStore.*the backend"):
        rendezvous(None, store, world_size=2, rank=1, timeout_s=5.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"PrefixStore: store is a torch\..*HashStore; .*paceline\.TCPStore"):
        PrefixStore("run", store)  # type: ignore[arg-type]
