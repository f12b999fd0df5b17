"""Copies of checkpoints in launchers' memory: the contents of a vault, and the newest complete copy."""

from __future__ import annotations

import doctest
import os
import re
import threading
from contextlib import closing
from importlib import import_module
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from checkpoint_copies import ROOT, PipeChannel, copy_as, looked, steps_of, two_hosts

from paceline.errors import AuthenticationError, CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.manager import CheckpointManager
from paceline.train.checkpoint.peer_memory.cache import CheckpointCache, RefusedError, new_file
from paceline.train.checkpoint.peer_memory.client import dial
from paceline.train.checkpoint.peer_memory.protocol import BeginCopy, CachedCheckpoint, Commit, Finish, Inventory, Read
from paceline.train.checkpoint.peer_memory.replicate import newest_cached
from paceline.train.checkpoint.peer_memory.server import CacheServer


def begin(token: str, keep: str | None = None, nbytes: int = 10) -> BeginCopy:
    return BeginCopy(ROOT, token, int(token), int(token), keep, nbytes)


def put(vault: CheckpointCache, token: str, data: bytes) -> None:
    file = new_file()
    os.write(file, data)
    vault.finish(Finish(ROOT, token, "file", len(data)), file)


def test_a_vault_keeps_two_generations_of_a_root_at_most() -> None:
    with closing(CheckpointCache()) as vault:
        for number in range(1, 6):
            vault.begin(begin(str(number), str(number - 1)))
            put(vault, str(number), b"%d" % number)
            assert [each.token for each in vault.look(ROOT)] == [str(each) for each in (number - 1, number) if each]
        assert vault.read(Read(ROOT, "4", "file", 0, 10)) == b"4"
        with pytest.raises(RefusedError, match="another one was started"):
            vault.read(Read(ROOT, "3", "file", 0, 10))
        vault.begin(begin("7"))
        assert [each.token for each in vault.look(ROOT)] == ["7"]


def test_a_vault_refuses_what_the_memory_is_too_small_for() -> None:
    with closing(CheckpointCache(available=lambda: 1000)) as vault:
        vault.begin(begin("1", nbytes=900))
        with pytest.raises(RefusedError, match="is too large for the 1.0 kB of memory that are left"):
            vault.begin(begin("2", keep="1", nbytes=950))
        assert [each.token for each in vault.look(ROOT)] == ["1"]


def test_a_file_of_a_copy_that_was_given_up_is_refused() -> None:
    with closing(CheckpointCache()) as vault:
        vault.begin(begin("1"))
        vault.begin(begin("2"))
        with pytest.raises(RefusedError, match="discarded"):
            put(vault, "1", b"late")
        with pytest.raises(RefusedError, match="discarded"):
            vault.commit(Commit(ROOT, "1", {}, {}, 0), b"")


def inventory(vault: str, *entries: CachedCheckpoint) -> Inventory:
    return Inventory(vault, "", entries)


def test_the_newest_copy_with_all_files_is_found() -> None:
    files = {"a": 1, "b": 2}
    one = inventory("one", CachedCheckpoint("x", 4, 40, {"a": 1}, files), CachedCheckpoint("y", 5, 50, {"a": 1}, files))
    two = inventory(
        "two",
        CachedCheckpoint("x", 4, 40, {"b": 2}),
        CachedCheckpoint("y", 5, 50, {"b": 1}),
        CachedCheckpoint("z", 6, 60, {"b": 2}),
    )
    found, why = newest_cached([one, two, one])
    assert found is not None
    assert (found.token, found.sequence, found.step, found.describers) == ("x", 4, 40, ["one"])
    assert found.holders == {"a": ["one"], "b": ["two"]}
    assert why == ["the copies of step 60 were not finished", "no launcher has b of the copies of step 50"]
    assert newest_cached([two]) == (None, [f"the copies of step {step} were not finished" for step in (60, 50, 40)])
    assert newest_cached([]) == (None, [])


def copy_by_threads(step: int, keep: str | None, addresses: list[str]) -> None:
    ends = Pipe()
    with ends[0], ends[1]:
        other = threading.Thread(target=copy_as, args=(1, step, keep, addresses, PipeChannel(1, ends[1])))
        other.start()
        copy_as(0, step, keep, addresses, PipeChannel(0, ends[0]))
        other.join()


def test_either_host_has_all_of_a_copy(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as addresses:
        for step in (1, 2, 3):
            copy_by_threads(step, f"t{step - 1}", addresses)
        for left in ([addresses[0]], [addresses[1]], addresses):
            found, why = newest_cached(looked(left))
            assert found is not None
            assert (found.step, why) == (3, [])
            assert steps_of(found, left) == {3}


def test_a_copy_with_other_bytes_is_noticed(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as addresses:
        copy_by_threads(1, None, addresses)
        (whole, _) = looked(addresses)
        entry = whole.entries[0]
        with closing(dial(addresses[0])) as client:
            manifest = client.manifest(ROOT, entry.token)
            files = {}
            for name, nbytes in entry.held.items():
                files[name] = bytearray(nbytes)
                client.read_into(ROOT, entry.token, name, 0, memoryview(files[name]))
            files["rank_00001_000.safetensors"][-1] ^= 1
            client.begin(BeginCopy("/other", entry.token, 1, 1, None, 10))
            for name, data in files.items():
                client.write("/other", entry.token, name, [memoryview(data)])
                client.finish("/other", entry.token, name)
            client.commit("/other", entry.token, manifest, {**entry.held}, {})
            found, _ = newest_cached([client.look("/other")])
        assert found is not None
        with pytest.raises(CheckpointDamagedError, match="rank_00001_000.safetensors was changed"):
            steps_of(found, addresses[:1], root="/other")


def test_a_cut_file_is_not_taken(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as addresses, closing(dial(addresses[0])) as client:
        client.begin(BeginCopy(ROOT, "t", 1, 1, None, 10))
        client.write(ROOT, "t", "file", [memoryview(b"some bytes")])
        with pytest.raises(CheckpointError, match="nothing of other"):
            client.finish(ROOT, "t", "other")
        with closing(dial(addresses[0])) as unfinished:
            unfinished.write(ROOT, "t", "part", [memoryview(b"some")])
        assert [dict(each.held) for each in client.look(ROOT).entries] == [{}]
        client.finish(ROOT, "t", "file")
        assert [dict(each.held) for each in client.look(ROOT).entries] == [{"file": 10}]


def test_memory_outlives_the_doors_and_then_goes(tmp_path: Path) -> None:
    with closing(CacheServer("127.0.0.1")) as service:
        address = service.open(str(tmp_path / "first"), None)
        with closing(dial(address)) as client:
            client.begin(BeginCopy(ROOT, "t", 1, 1, None, 4))
            client.write(ROOT, "t", "file", [memoryview(b"kept")])
            client.finish(ROOT, "t", "file")
            service.shut()
            with pytest.raises(OSError, match=r".*"):
                client.look(ROOT)
        with pytest.raises(OSError, match=r".*"):
            dial(address)
        buffer = bytearray(4)
        with closing(dial(service.open(str(tmp_path / "second"), None))) as client:
            elsewhere = client.listen()
            with closing(dial(elsewhere.address)) as other:
                assert other.look(ROOT).vault == elsewhere.vault
                assert other.read_into(ROOT, "t", "file", 0, memoryview(buffer)) == 4
                with pytest.raises(CheckpointError, match="only workers of the vault's own host"):
                    other.listen()
        assert buffer == b"kept"


def test_strangers_are_not_let_in(tmp_path: Path) -> None:
    with closing(CacheServer(None)) as service:
        address = service.open(str(tmp_path / "door"), b"the secret of this job, which nobody knows")
        with pytest.raises(AuthenticationError):
            dial(address)


def test_a_number_of_copies_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="peer_copies is -1; it must be a number of hosts"):
        CheckpointManager(tmp_path, peer_copies=-1)


def state_of(step: int) -> dict[str, object]:
    return {"value": step, "tensor": torch.full((5,), float(step))}


def require_step(state: dict[str, object], step: int) -> None:
    assert state["value"] == step
    assert isinstance(state["tensor"], torch.Tensor)
    assert state["tensor"].tolist() == [float(step)] * 5


def test_without_a_launcher_the_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PACELINE_COPIES", raising=False)
    with CheckpointManager(tmp_path, peer_copies=1) as manager:
        assert manager.save(3, state_of(3))
    state = state_of(0)
    with CheckpointManager(tmp_path, peer_copies=1) as manager:
        assert manager.restore(state) == 3
    require_step(state, 3)
    said = capsys.readouterr().err
    assert "no copies are kept in memory, because not every rank reaches a launcher" in said
    assert "(rank 0: PACELINE_COPIES is not set)" in said
    assert "restored step 3 from the disk" in said


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_process_restores_from_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    path = tmp_path / "disk"
    with closing(CacheServer(None)) as service:
        monkeypatch.setenv("PACELINE_COPIES", service.open(str(tmp_path / "door"), None))
        with CheckpointManager(path, peer_copies=1, asynchronous=asynchronous) as manager:
            for step in (1, 2, 3):
                manager.save(step, state_of(step))
        for manifest in path.glob("step_*/manifest.json"):
            manifest.write_text("{}")
        state = state_of(0)
        with CheckpointManager(path, peer_copies=1) as manager:
            assert manager.restore(state) == 3
            require_step(state, 3)
            manager.save(4, state)
    newer = (path / "step_0000000004" / "manifest.json").read_text()
    assert re.search(r'"sequence": ?4', newer), newer
    assert "restored step 3 from memory; the launcher of this host had 1 of the 1 files" in capsys.readouterr().err


def test_a_newer_checkpoint_on_the_disk_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(CacheServer(None)) as service:
        monkeypatch.setenv("PACELINE_COPIES", service.open(str(tmp_path / "door"), None))
        with CheckpointManager(tmp_path / "disk", peer_copies=1) as manager:
            manager.save(1, state_of(1))
        with CheckpointManager(tmp_path / "disk") as manager:
            manager.save(2, state_of(2))
        state = state_of(0)
        with CheckpointManager(tmp_path / "disk", peer_copies=1) as manager:
            assert manager.restore(state) == 2
        require_step(state, 2)
    assert "restored step 2 from the disk (the copies of step 1 are older)" in capsys.readouterr().err


def test_examples_in_docstrings_hold() -> None:
    assert doctest.testmod(import_module("paceline.train.checkpoint.peer_memory.replicate")).failed == 0
