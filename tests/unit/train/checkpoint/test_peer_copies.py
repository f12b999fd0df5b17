"""Copies of checkpoints in launchers' memory: the contents of a vault, and the newest complete copy."""

from __future__ import annotations

import re
import signal
from contextlib import closing
from pathlib import Path

import pytest
from restored_states import require_step, state_of

from paceline.train.checkpoint.manager import CheckpointManager
from paceline.train.checkpoint.peer_memory.server import CacheServer


def test_a_number_of_copies_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="peer_copies is -1; it must be a number of hosts"):
        CheckpointManager(tmp_path, peer_copies=-1)


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


def test_the_last_save_on_sigterm_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "disk"
    with closing(CacheServer(None)) as service:
        monkeypatch.setenv("PACELINE_COPIES", service.open(str(tmp_path / "door"), None))
        manager = CheckpointManager(path, every=100, peer_copies=1)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            manager.save(3, state_of(3))
        assert f"received a request to stop; the checkpoint of step 3 is in {path}" in capsys.readouterr().err
        next(path.glob("step_*/manifest.json")).write_text("{}")
        state = state_of(0)
        with CheckpointManager(path, peer_copies=1) as manager:
            assert manager.restore(state) == 3
    require_step(state, 3)
    assert "restored step 3 from memory" in capsys.readouterr().err
