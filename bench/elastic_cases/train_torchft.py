"""A worker of torchft: one replica group of one process, as in torchft's train_ddp.py.

If a step is not committed, the next step uses the same samples again. torchft's own example continues with the next
batch instead, so these samples are lost.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elastic_cases.task import Network, Samples, arguments, batch_of, leave_result, optimizer_of
from elastic_cases.timeline import Recorder

_RENDEZVOUS_S = 120.0


def meet(directory: Path, replica: int, replicas: int) -> None:
    """Waits until all replicas have started, because early replicas would otherwise begin to train without late ones.

    Raises:
        TimeoutError: A replica does not start in time.
    """
    (directory / f"here-{replica}").touch()
    deadline = time.monotonic() + _RENDEZVOUS_S
    while len(here := list(directory.glob("here-*"))) < replicas:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {sorted(path.name for path in here)} of {replicas} replicas came")
        time.sleep(0.02)


def main() -> None:
    parser = arguments()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    samples = Samples(options.steps, options.replicas)
    network = Network(len(samples))
    inner = optimizer_of(network)

    def load_state_dict(state: dict[str, Any]) -> None:
        network.load_state_dict(state["network"])
        inner.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"network": network.state_dict(), "optimizer": inner.state_dict()}

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{options.replica}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    model = DistributedDataParallel(manager, network)
    optimizer = Optimizer(manager, inner)
    recorder = Recorder(options.directory, options.replica)
    meet(Path(options.directory), options.replica, options.replicas)
    while manager.current_step() < options.steps:
        step = manager.current_step()
        optimizer.zero_grad()  # starts the quorum; only then does a worker that joins late receive the current step
        model(batch_of(samples, step, options.replica)).backward()
        optimizer.step()
        if manager.current_step() > step:
            recorder.committed(manager.current_step())
        else:
            recorder.given_up(step + 1)
    leave_result(options.directory, options.replica, network)
    os._exit(0)  # the manager's threads would wait for the other replicas


if __name__ == "__main__":
    main()
