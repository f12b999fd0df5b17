"""`paceline run` and `spawn` as users run them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import forked_launcher
import pytest
from launching import ENVIRONMENT, command, is_alive, run, wait_until

import paceline as dist
from paceline.comm.rendezvous.rendezvous import rendezvous


def test_workers_find_their_place_and_every_line_has_its_rank(script):
    text = (
        "import os, sys; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')), sys.argv[1:], __name__)"
    )
    done = run("--standalone", "--nproc-per-node", "3", script(text), "--flag", "x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {r}] {r} 3 {r} ['--flag', 'x'] __main__" for r in range(3)]
    assert "OMP_NUM_THREADS=" in done.stderr


def test_a_module_runs_with_m():
    done = run("--nproc-per-node", "1", "-m", "this")
    assert done.returncode == 0
    assert "[rank 0] Beautiful is better than ugly." in done.stdout


def test_the_last_failure_stands_last(script):
    text = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # before torch, whose import takes long
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), 9)
    time.sleep(300)
import torch
import paceline as dist
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
dist.all_reduce(total)
print("reduced", total.item(), flush=True)
if dist.get_rank() == 1:
    raise ValueError("the cause")
dist.all_reduce(total)
"""
    done = forked_launcher.run("--nproc-per-node", "2", "--max-restarts", "1", script(text))
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] reduced 4.0" for rank in range(2)]
    assert "restart 1 of 1 in 0.25 s: rank 0 failed" in done.stderr
    last = done.stderr[done.stderr.rindex("paceline: rank 1 failed first (") :]
    cause, *consequences, verdict = last.splitlines()
    told = [
        "rank 1 failed: ValueError: the cause (script.py:15)",
        "the cause was explained above: an exception (rank 1)",
    ]
    assert any(sentence in verdict for sentence in told), "a job that is slow to end is explained before"
    assert done.stderr.count('raise ValueError("the cause")') == 1
    assert cause.endswith("exit code 1): ValueError: the cause; its traceback is above")
    assert all(line.startswith("paceline: rank 0 (") and ", a consequence: " in line for line in consequences)
    assert "bootstrap.py" not in last


SLEEPER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
with open(sys.argv[1] + os.environ["RANK"] + ".tmp", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(file.name, file.name[:-4])
time.sleep(300)
"""


@pytest.fixture
def sleepers(script, tmp_path):
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], list[int]]:
        base = tmp_path / "pid"
        arguments = command("--nproc-per-node", "2", script(SLEEPER), str(base))
        launcher = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        started.append(launcher)
        files = [Path(f"{base}{rank}") for rank in range(2)]
        wait_until(lambda: all(file.exists() for file in files))
        return launcher, [int(pid) for file in files for pid in file.read_text().split()]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_every_worker(sleepers, number):
    launcher, pids = sleepers()
    launcher.send_signal(number)
    assert launcher.wait(60) == 1
    wait_until(lambda: not any(map(is_alive, pids)))


def test_no_orphan_when_the_launcher_is_killed(sleepers):
    launcher, pids = sleepers()
    os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


def meet(rank: int, directory: str) -> None:
    joined = rendezvous(None, None, -1, -1, 30)
    Path(directory, str(rank)).write_text(f"{joined.rank} of {joined.world_size}")


def reduce_and_fail(rank: int, directory: str) -> None:
    import torch

    dist.init_process_group()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    Path(directory, str(rank)).write_text(str(total.item()))
    if rank == 1:
        raise KeyError("lost")
    dist.barrier()


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_spawn_calls_the_function_on_every_rank(tmp_path, start_method):
    assert dist.spawn(meet, (str(tmp_path),), nprocs=3, start_method=start_method) is None
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [f"{rank} of 3" for rank in range(3)]


def test_spawn_raises_the_first_failure_with_its_rank(tmp_path):
    spawned = dist.spawn(reduce_and_fail, (str(tmp_path),), nprocs=2, join=False, start_method="forkserver")
    assert len(spawned.pids()) == 2
    with pytest.raises(dist.WorkerError, match=r"rank 1 .* failed first(?s:.*)KeyError: 'lost'") as caught:
        spawned.join(60)
    assert caught.value.rank == 1
    assert caught.value.exit_code == 1
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1", "1"]
    assert not any(map(is_alive, spawned.pids()))


def test_spawn_of_no_process_is_refused():
    with pytest.raises(ValueError, match="nprocs is 0"):
        dist.spawn(meet, nprocs=0)
