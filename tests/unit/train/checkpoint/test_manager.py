"""The last checkpoint of an elastic job whose workers may be lost during the save."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as dist
from paceline.train.checkpoint import manager as manager_module


class LostWorkers:
    """A mock of a background save that fails because another worker has died."""

    @staticmethod
    def finish() -> None:
        raise dist.CheckpointError("rank 1 died")


@pytest.mark.parametrize("saved", [3, 2])
def test_a_worker_that_is_left_writes_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int) -> None:
    manager = dist.CheckpointManager(tmp_path, every=1)
    manager._is_elastic, manager._saved, manager._latest = True, saved, (3, {"step": 3})
    monkeypatch.setattr(manager_module, "BACKGROUND", LostWorkers)
    manager.close()
    monkeypatch.undo()
    state = {"step": 0}
    with dist.CheckpointManager(tmp_path) as other:
        newest = other.restore(state)
    assert (newest, state) == ((3, {"step": 3}) if saved == 3 else (None, {"step": 0}))


def test_in_other_jobs_the_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = dist.CheckpointManager(tmp_path, every=1)
    monkeypatch.setattr(manager_module, "BACKGROUND", LostWorkers)
    with pytest.raises(dist.CheckpointError, match="rank 1 died"):
        manager.close()
