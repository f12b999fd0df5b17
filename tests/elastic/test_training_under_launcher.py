"""Training under `paceline run --elastic` with real kills: the digest equals that of a single process."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import elastic_job
import forked_launcher
import launching
import pytest
from forked_scripts import run_alone, run_script
from launching import processes_in, wait_until
from world import Ranks

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import torch
from torch import nn
import paceline as dist

torch.multiprocessing.set_start_method("fork", force=True)  # the other methods would import this script
dist.init_process_group(elastic=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
shards = dist.LogicalShards(model, 4)
loader = dist.ShardLoader(torch.utils.data.TensorDataset(inputs), 4, shards, num_workers={num_workers})
state = dist.ElasticState(shards, optimizer=optimizer, loader=loader)
leaver = {leaver!r}
for epoch in state.epochs({epochs}):
    for batches in loader:
        optimizer.zero_grad()
        shards.backward(lambda x: model(x[0]).square().mean(), batches)
        optimizer.step()
        time.sleep({step_s})
        if epoch == 2 and os.environ.get("PACELINE_WORKER") == leaver:
            leaver = ""
            os.kill({ended}, signal.SIGTERM)
print("digest", state.digest())
"""
TESTS = str(Path(__file__).parents[1] / "support")


def write(
    path: Path,
    *,
    epochs: int,
    num_workers: int = 0,
    step_s: float = 0.02,
    leaver: str = "",
    ended: str = "os.getpid()",
) -> Path:
    """Writes the script, in which worker `leaver` sends a SIGTERM to the process `ended` after some time."""
    text = SCRIPT.format(tests=TESTS, epochs=epochs, num_workers=num_workers, step_s=step_s, leaver=leaver, ended=ended)
    path.write_text(text)
    return path


def digests(output: str) -> list[str]:
    return re.findall(r"digest ([0-9a-f]{64})", output)


@functools.cache
def alone(epochs: int) -> str:
    """Returns the digest of an undisturbed process, whose steps are not slowed down."""
    with tempfile.TemporaryDirectory() as directory:
        (said,) = Ranks(1)(run_alone, str(write(Path(directory, "train.py"), epochs=epochs, step_s=0)))
    (digest,) = digests(str(said))
    return digest


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_random_kills_do_not_change_a_bit(tmp_path: Path, num_workers: int) -> None:
    script = write(tmp_path / "train.py", epochs=10, num_workers=num_workers)
    every_s = 1 if num_workers else 0.3  # without loader processes, the job takes about a second
    flags = ("--elastic", "--nproc-per-node", "3", "--chaos", f"kill:{every_s}s,seed=5")
    done = forked_launcher.run(*flags, str(script), cwd=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\) failed: killed by SIGKILL.*; another worker replaces it", done.stderr)
    assert set(digests(done.stdout)) == {alone(10)}
    wait_until(lambda: not processes_in(tmp_path))  # no loader's process has outlived the job


def test_a_worker_that_is_told_to_leave_costs_nothing(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", epochs=5, leaver="0.1.0")
    outcome = elastic_job.run(run_script, str(script), policy={"gather_s": 0.02, "start_patience_s": 20.0})
    assert (outcome.code, outcome.errors) == (0, {}), outcome
    assert [digests(str(outcome.results[uid])) for uid in ("0.0.0", "0.2.0")] == [[alone(5)]] * 2
    assert outcome.ended == {"0.0.0": 0, "0.1.0": 0, "0.2.0": 0}, "another worker took its place"


@pytest.mark.soak
def test_a_worker_that_leaves_a_launcher_costs_nothing(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", epochs=5, leaver="0.1.0")
    done = launching.run("--elastic", "--nproc-per-node", "3", str(script))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(digests(done.stdout)) == 2
    assert set(digests(done.stdout)) == {alone(5)}
    assert "another worker replaces it" not in done.stderr


def test_a_launcher_that_is_told_to_end_waits_for_one_step_only(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", epochs=1_000_000, leaver="0.1.0", ended="os.getppid()")
    flags = ("--elastic", "--nproc-per-node", "2", "--shutdown-timeout", "1000")
    done = forked_launcher.run(*flags, str(script), timeout_s=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "SIGTERM: passed on to 2 workers" in done.stderr
    assert done.stderr.count(" ends: asked to leave: SIGTERM") >= 1, "the last one was dismissed, and nobody killed"
