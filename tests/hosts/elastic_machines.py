"""Machines that run the workers of an elastic job, and a training program for them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hosts.machines import Machines, lent
from hosts.network import ipv4

TOY = Path(__file__).parents[1] / "support" / "elastic_toy.py"
TRAINS = """
import os, sys, time, torch, paceline
paceline.init_process_group(elastic=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.zeros(32, dtype=torch.long))
shards = paceline.LogicalShards(model, 4)
loader = paceline.ShardLoader(data, batch_size=2, shards=shards)
state = paceline.ElasticState(shards, loader=loader)
for epoch in state.epochs(6):
    for batches in loader:
        model.zero_grad()
        shards.backward(lambda xy: torch.nn.functional.cross_entropy(model(xy[0]), xy[1]), batches)
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        with open(sys.argv[1] + "/steps", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.1)
print("digest", state.digest())
"""


class ElasticMachines(Machines):
    """Machines on which the workers of one elastic job run."""

    def join(
        self, host: int, nnodes: str, workers: int = 1, *flags: str, script: str = str(TOY), at: int = 0
    ) -> subprocess.Popen:
        """Starts a launcher on a host. The launcher joins the job through host `at`."""
        rendezvous = ("--nnodes", nnodes, "--rdzv-endpoint", f"{ipv4(at)}:29400")
        words = ("--elastic", f"--nproc-per-node={workers}", *rendezvous, *flags, script, str(self.directory))
        return self.start(host, *words)

    def workers(self) -> dict[str, list[str]]:
        """Returns the process id, slot and number of slots of each worker."""
        return {line[0]: line[1:4] for line in self.log() if len(line) == 5}

    def latest(self) -> dict[str, list[str]]:
        with contextlib.suppress(OSError):
            lines = [line.split() for line in (self.directory / "views").read_text().splitlines()]
            return {line[0]: sorted(line[1:]) for line in lines}
        return {}

    def wait_for_view(self, *members: str) -> None:
        self.wait(lambda: all(self.latest().get(uid) == sorted(members) for uid in members))

    def host_of(self, uid: str) -> str:
        return (self.directory / f"host-{uid}").read_text()

    def pid(self, uid: str) -> int:
        return int(self.workers()[uid][0])


@pytest.fixture
def machines() -> Iterator[Callable[..., ElasticMachines]]:
    """`machines(3)` creates three hosts, on which a test can start launchers of an elastic job."""
    yield from lent(ElasticMachines)
