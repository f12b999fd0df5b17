"""`CheckpointManager(peer_copies=1)` under `paceline run` restores the launcher's copy without reading the disk."""

from __future__ import annotations

import re
from pathlib import Path

import forked_launcher
import launching
import pytest

SCRIPT = """
import os, shutil, sys, time
from pathlib import Path
import torch
import paceline as dist

dist.init_process_group({init})
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
shards = dist.LogicalShards(model, 4)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 6, generator=torch.Generator().manual_seed(1)))
loader = dist.ShardLoader(dataset, 4, shards)
path = sys.argv[1]
{make}
if {loses_disk}:
    shutil.rmtree(path, ignore_errors=True)
with dist.CheckpointManager(path, every=3, peer_copies=1) as manager:
    if manager.restore(state):
        Path(path + "-restored").touch()
    for epoch in {epochs}:
        for batches in loader:
            optimizer.zero_grad()
            shards.backward(lambda x: model(x[0]).square().mean(), batches)
            optimizer.step()
            step = 4 * epoch + loader.state_dict()["step"]
            manager.save(step, state)
            if step == 7:
                {in_step_7}
print("digest", hash(tuple(model.weight.detach().flatten().tolist())), flush=True)
"""
PLAIN = {
    "init": "",
    "make": 'state = {"model": shards, "optimizer": optimizer, "loader": loader}',
    "epochs": "range(loader.epoch, 2)",
    "loses_disk": 'os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"',
}
ELASTIC = {
    "init": "elastic=True",
    "make": 'elastic = dist.ElasticState(shards, optimizer=optimizer, loader=loader)\nstate = {"all": elastic}',
    "epochs": "elastic.epochs(2)",
    "loses_disk": "False",
}


def digests(output: str) -> set[str]:
    return {line.split("digest ")[1] for line in output.splitlines() if "digest " in line}


def test_restarted_workers_go_on_without_the_disk(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    kill = 'if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), 9)'
    script.write_text(SCRIPT.format(**PLAIN, in_step_7=kill))
    done = forked_launcher.run("--nproc-per-node", "2", "--max-restarts", "1", str(script), str(tmp_path / "disk"))
    assert done.returncode == 0, done.stderr
    # The copy of step 6 may have been incomplete when the worker died.
    assert re.search("restored step [36] from memory", done.stderr), done.stderr
    assert len(digests(done.stdout)) == 1


# The others wait until the replacement for the dead worker has restored its state.
DIE_OR_WAIT = """
                if os.environ["PACELINE_WORKER"] == "0.1.0":
                    os.kill(os.getpid(), 9)
                deadline_s = time.monotonic() + 60
                while not Path(path + "-restored").exists() and time.monotonic() < deadline_s:
                    time.sleep(0.02)
"""


@pytest.mark.soak
def test_a_worker_that_is_replaced_reads_no_disk(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**ELASTIC, in_step_7=DIE_OR_WAIT.strip()))
    done = launching.run("--elastic", "--nproc-per-node", "2", str(script), str(tmp_path / "disk"))
    assert done.returncode == 0, done.stderr
    assert re.search("restored step [36] from memory", done.stderr), done.stderr
    assert len(digests(done.stdout)) == 1
