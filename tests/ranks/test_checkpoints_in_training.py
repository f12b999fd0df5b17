"""CheckpointManager: a script that is killed, restarted or asked to exit resumes from its last checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import elastic_job
import forked_launcher
import launching
import pytest
import torch
from elastic_job import Outcome
from forked_scripts import run_script
from launching import wait_until
from torch import nn
from world import RankFailed, Ranks

import paceline as dist

SCRIPT = """
import os, signal, time
import torch
from torch import nn
import paceline as dist

dist.init_process_group({init})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
inputs = torch.randn(72, 8, generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
shards = dist.LogicalShards(model, 4)
loader = dist.ShardLoader(torch.utils.data.TensorDataset(inputs), 4, shards)
{make}
with dist.CheckpointManager({path!r}, every={every}, keep=2) as manager:
    manager.restore(state)
    for epoch in {epochs}:
        for batches in loader:
            optimizer.zero_grad()
            shards.backward(lambda x: model(x[0]).square().mean(), batches)
            optimizer.step()
            step = 5 * epoch + loader.state_dict()["step"]
            manager.save(step, state)
            {then}
total = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
print("digest", hash(tuple(total.tolist())), flush=True)
"""
PLAIN = {
    "init": "",
    "make": 'state = {"model": shards, "optimizer": optimizer, "loader": loader}',
    "epochs": "range(loader.epoch, 6)",
}
ELASTIC = {
    "init": "elastic=True",
    "make": 'elastic = dist.ElasticState(shards, optimizer=optimizer, loader=loader)\nstate = {"all": elastic}',
    "epochs": "elastic.epochs(6)",
}


def write(path: Path, parts: dict[str, str], then: str = "pass", every: int = 2) -> str:
    """Writes a script; `epochs` is evaluated after `restore`."""
    script = path / "train.py"
    script.write_text(SCRIPT.format(**parts, path=str(path / "checkpoints"), then=then, every=every))
    return str(script)


def digests(output: str) -> set[str]:
    return set(re.findall(r"digest (-?\d+)", output))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    (said,) = Ranks(1)(run_script, write(tmp_path_factory.mktemp("alone"), PLAIN))
    (digest,) = digests(str(said))
    return {digest}


def train_elastic(script: str, workers: int, **options: Any) -> Outcome:
    policy = {"gather_s": 0.02, "start_patience_s": 20.0}
    return elastic_job.run(run_script, script, workers=workers, policy=policy, **options)


def digests_of(outcome: Outcome) -> set[str]:
    assert (outcome.code, outcome.errors) == (0, {}), outcome
    return set().union(*(digests(str(said)) for said in outcome.results.values()))


DIES = 'if step == 13 and os.environ["{name}"] == "{value}": os.kill(os.getpid(), 9)'


def test_a_job_that_is_started_again_ends_with_the_same_bits(tmp_path: Path, undisturbed: set[str]) -> None:
    script = write(tmp_path, PLAIN, DIES.format(name="RANK", value="1"))
    with Ranks(2).start(run_script, script) as world, pytest.raises(RankFailed, match="PeerLostError"):
        world.join(expect_dead={1})
    for said in Ranks(2)(run_script, write(tmp_path, PLAIN)):
        assert digests(str(said)) == undisturbed


@pytest.mark.soak
def test_a_restarted_job_ends_with_the_same_bits(tmp_path: Path, undisturbed: set[str]) -> None:
    dies = 'if step == 13 and os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] == "10": '
    script = write(tmp_path, PLAIN, dies + "os.kill(os.getpid(), 9)")
    done = launching.run("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert done.returncode == 0, done.stderr
    assert digests(done.stdout) == undisturbed


def test_an_elastic_job_saves_while_workers_die(tmp_path: Path, undisturbed: set[str]) -> None:
    outcome = train_elastic(write(tmp_path, ELASTIC, DIES.format(name="PACELINE_WORKER", value="0.1.0")), 3)
    assert digests_of(outcome) == undisturbed
    assert outcome.ended["0.1.0"] == -9
    names = sorted(each.name for each in (tmp_path / "checkpoints").glob("step_*"))
    assert names[-1] == "step_0000000030"
    assert len(names) <= 3, "one more than are kept, if the removal of the oldest was cut short"


def test_an_elastic_job_goes_on_from_a_checkpoint(tmp_path: Path, undisturbed: set[str]) -> None:
    first = train_elastic(write(tmp_path, ELASTIC, "if step == 13: os._exit(3)"), 2, replaces=False)
    assert first.code != 0
    assert digests_of(train_elastic(write(tmp_path, ELASTIC), 3)) == undisturbed


def test_an_elastic_job_that_is_asked_to_end_saves(tmp_path: Path, undisturbed: set[str]) -> None:
    then = (
        'if step == 13 and os.environ["PACELINE_WORKER"] == "0.0.0": os.kill(os.getppid(), signal.SIGTERM)\n'
        "            if step >= 13: time.sleep(min(step - 12, 5))"
    )
    flags = ("--elastic", "--nproc-per-node", "2", "--shutdown-timeout", "1000")
    first = forked_launcher.run(*flags, write(tmp_path, ELASTIC, then, every=1000))
    assert not digests(first.stdout), "the job went on to its end"
    assert re.search(r"the job is stopping; the checkpoint of step \d+ is in ", first.stderr), first.stderr
    (saved,) = (tmp_path / "checkpoints").glob("step_*")
    assert int(saved.name.removeprefix("step_")) >= 13
    assert digests_of(train_elastic(write(tmp_path, ELASTIC), 2)) == undisturbed


def end_when_asked(root: Path) -> int:
    dist.init_process_group()
    model = nn.Linear(2, 2)
    manager = dist.CheckpointManager(root, every=1000)
    for step in range(1, 1_000_000):
        if step == 5:
            (root / f"rank{dist.get_rank()}").touch()
        with contextlib.suppress(SystemExit):
            manager.save(step, {"model": model, "step": step})
            continue
        return step
    return 0


def test_sigterm_to_one_rank_saves_one_step_of_all(ranks: type[Ranks], tmp_path: Path) -> None:
    world = ranks(3).start(end_when_asked, tmp_path)
    wait_until(lambda: all((tmp_path / f"rank{rank}").exists() for rank in range(3)))
    os.kill(world.pids[1], signal.SIGTERM)
    steps = world.join()
    assert len(set(steps)) == 1
    state = {"step": 0}
    assert dist.load(state, tmp_path) == steps[0] == state["step"]


def test_a_manager_saves_when_it_is_time_to(tmp_path: Path) -> None:
    state = {"step": 0}
    with dist.CheckpointManager(tmp_path, every=3, keep=2) as manager:
        assert manager.restore(state) is None
        saved = [step for step in range(1, 11) if manager.save(step, state | {"step": step})]
        assert saved == [3, 6, 9]
        assert manager.save(10, {"step": 10}, force=True)
        assert not manager.save(10, {"step": 10}, force=True), "it is there already"
    assert sorted(each.name for each in tmp_path.glob("step_*")) == ["step_0000000009", "step_0000000010"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with dist.CheckpointManager(tmp_path, every=timedelta(hours=1)) as manager:
        assert manager.restore(state) == 10
        assert state == {"step": 10}
        assert not manager.save(11, state)


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = dist.CheckpointManager(tmp_path, asynchronous=False)
    model = nn.Linear(300, 300)
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, step)
        manager.save(step, {"model": model})
    flipped, cut = (next((tmp_path / f"step_000000000{step}").glob("*.safetensors")) for step in (3, 2))
    content = bytearray(flipped.read_bytes())
    content[-5000] ^= 4
    flipped.write_bytes(content)
    os.truncate(cut, cut.stat().st_size - 1)
    assert manager.restore({"model": model}) == 1
    assert float(model.weight[0, 0].detach()) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"skipped the checkpoint step_0000000003: .*was changed: bytes .* of the tensor model/weight", said
    )
    assert re.search(r"skipped the checkpoint step_0000000002: .* bytes instead of ", said)
    next((tmp_path / "step_0000000001").glob("*.safetensors")).unlink()
    with pytest.raises(dist.CheckpointError, match="contains no complete checkpoint: .*step_0000000001: .* is missing"):
        manager.restore({"model": model})
    manager.close()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": timedelta(0)}, {"keep": 0}])
def test_senseless_rules_are_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        dist.CheckpointManager(tmp_path, **wrong)
