"""Messages about processes of `spawn` that hang or fail."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess

import pytest
import torch

import paceline as dist


def evaluate() -> None:
    time.sleep(60)


def train(rank: int, fault: str) -> None:
    dist.init_process_group()
    tensor = torch.ones(4096)
    for step in range(20):
        if step == 10 and rank == 1:
            if fault == "stuck":
                evaluate()
            if fault == "raise":
                raise ValueError("bad sample")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)


@pytest.fixture(autouse=True)
def records_of_its_own(monkeypatch, tmp_path):
    """Separates the recordings from those of other tests, because the other tests' recordings would displace them."""
    directory = tmp_path / "recordings"
    monkeypatch.setenv("PACELINE_RECORD_DIR", str(directory))


def fail_when_told(_: int, path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.001)
    raise ValueError("bad sample")


def test_who_fails_right_after_a_look_has_failed(monkeypatch, tmp_path):
    """A process that fails between two checks is not reported as successful."""
    told, look = tmp_path / "told", BaseProcess.exitcode.fget

    def looked_at(process):
        found = look(process)
        if not told.exists():
            told.touch()
            process.join(60)
        return found

    monkeypatch.setattr(BaseProcess, "exitcode", property(looked_at))
    with pytest.raises(dist.WorkerError, match="ValueError: bad sample"):
        dist.spawn(fail_when_told, (str(told),), 1, start_method="forkserver")


def test_a_hang_of_spawned_ranks_is_explained(capfd):
    spawned = dist.spawn(train, ("stuck",), 2, join=False, start_method="forkserver", stall_after=1.5)
    assert spawned is not None
    said, deadline_s = "", time.monotonic() + 60
    try:
        while "has not reached this call" not in said:
            assert time.monotonic() < deadline_s, said
            assert not spawned.join(0.2)
            said += capfd.readouterr().err
    finally:
        spawned.end()
    assert "paceline: rank 0 waits in all_reduce(float32, 4096) call " in said
    assert "rank 1 has not reached this call: it is in evaluate (test_spawn_verdicts.py:" in said


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise", "rank 1 failed: ValueError: bad sample (test_spawn_verdicts.py:"),
        ("kill", "rank 1 failed: killed by SIGKILL, after all_reduce(float32, 4096) call "),
    ],
)
def test_the_failure_of_a_spawned_rank_ends_with_its_cause(fault, sentence):
    with pytest.raises(dist.WorkerError) as caught:
        dist.spawn(train, (fault,), 2, start_method="forkserver")
    assert sentence in str(caught.value).splitlines()[-1]
