"""Jobs on several machines, each a network namespace with a launcher."""

from __future__ import annotations

import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

from hosts.namespaces import enter
from hosts.network import Network, ipv4

from elastic_cases.jobs import ENVIRONMENT, HERE, Launched, popen

NEEDS_ROOT = "not measured, since network namespaces need root"


def elastic(
    network: Network, per_host: int, steps: int, *options: str, nnodes: str = "", script: str = "train_shards.py"
) -> Launched:
    """Starts an elastic job that runs `train_shards.py` or another script, with a launcher on each of the hosts."""
    launcher = [sys.executable, "-m", "paceline", "run", "--elastic", "--nproc-per-node", str(per_host)]
    rendezvous = ["--nnodes", nnodes or str(len(network.hosts)), "--rdzv-endpoint", f"{ipv4(0)}:29400"]
    program = [str(HERE / script), "{directory}", "--steps", str(steps), *options]
    environment = {**ENVIRONMENT, "PACELINE_SECRET": secrets.token_hex(16)}
    waiting = iter(network.hosts)

    def start(words: list[str], output: TextIO) -> subprocess.Popen[bytes]:
        host = next(waiting)

        def inside() -> subprocess.Popen[bytes]:
            enter(host)
            return popen(words, output, environment)

        with ThreadPoolExecutor(1) as thread:  # only this thread enters the host
            return thread.submit(inside).result()

    return Launched(*[[*launcher, *rendezvous, *program]] * len(network.hosts), start=start)
