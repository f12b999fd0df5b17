"""A worker of Paceline's elastic job. Without a launcher, this script is the undisturbed run in one process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import paceline as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elastic_cases.task import BATCH, SHARDS, Batch, Network, Samples, arguments, leave_result, optimizer_of
from elastic_cases.timeline import Recorder


class Ballast:
    """A state of a given size that training does not change."""

    def __init__(self, mib: int) -> None:
        self._tensor = torch.full((mib << 18,), 1.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self._tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._tensor.copy_(state["tensor"])


def seconds_of_a_shard(network: Network, samples: Samples, size: int) -> float:
    """Returns the duration of a forward and backward pass for `samples` samples; leaves no gradients."""
    batch = torch.utils.data.default_collate([samples[i] for i in range(size)])
    taken_s = []
    for _ in range(5):
        started = time.perf_counter()
        network(batch).backward()
        taken_s.append(time.perf_counter() - started)
    network.zero_grad()
    return min(taken_s)


def main() -> None:
    parser = arguments()
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--batch", type=int, default=BATCH, help="number of samples per shard")
    parser.add_argument("--ballast", type=int, default=0, metavar="MIB", help="size of the additional state")
    parser.add_argument("--no-tally", action="store_true", help="do not count how often each sample was used")
    parser.add_argument("--times", type=float, nargs="+", default=[], help="slowdown factor of each slot")
    parser.add_argument("--cgroups", nargs="+", default=[], help="the cgroup of each slot")
    options = parser.parse_args()
    slot = int(os.environ.get("RANK", "0"))
    if options.cgroups:
        Path(options.cgroups[slot], "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    dist.init_process_group(elastic=True)
    samples = Samples(options.steps, options.shards, options.batch)
    network = Network(1 if options.no_tally else len(samples))
    times = options.times[slot] if options.times else 1.0
    delay_s = (times - 1.0) * seconds_of_a_shard(network, samples, options.batch) if times > 1.0 else 0.0
    optimizer = optimizer_of(network)
    shards = dist.LogicalShards(network, options.shards)
    loader = dist.ShardLoader(samples, options.batch, shards)
    state = dist.ElasticState(shards, optimizer=optimizer, loader=loader, ballast=Ballast(options.ballast))
    recorder = Recorder(options.directory, slot)

    def loss_of(batch: Batch) -> torch.Tensor:
        time.sleep(delay_s)  # emulates a slower core without using processor time
        loss: torch.Tensor = network(batch)
        return loss

    for _ in state.epochs(1):
        for batches in loader:
            optimizer.zero_grad()
            shards.backward(loss_of, batches)
            optimizer.step()
            if not state.is_replaying:
                recorder.committed(loader.state_dict()["step"])
    leave_result(options.directory, slot, network, state.digest(), options.shards * options.batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
