"""A worker of Paceline's elastic job with the usual loop, DistributedDataParallel and StatefulLoader."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import paceline as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elastic_cases.task import BATCH, SHARDS, Network, Samples, arguments, leave_result, optimizer_of
from elastic_cases.timeline import Recorder


class Count:
    """The number of completed steps, as part of the state."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def main() -> None:
    parser = arguments()
    parser.add_argument(
        "--ballast", type=int, default=0, metavar="MIB", help="size of the parameters that are not trained"
    )
    options = parser.parse_args()
    slot = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    dist.init_process_group(elastic=True)
    samples = Samples(options.steps, SHARDS)
    network = Network(len(samples))
    optimizer = optimizer_of(network)
    network.ballast = nn.Parameter(torch.full((options.ballast << 18,), 1.0), requires_grad=False)
    model = dist.DistributedDataParallel(network)
    loader = dist.StatefulLoader(samples, BATCH)
    count = Count()
    state = dist.ElasticState(model, optimizer=optimizer, loader=loader, count=count)
    recorder = Recorder(options.directory, slot)
    for _ in state.epochs(1):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            count.steps += 1
            recorder.committed(count.steps)
    leave_result(options.directory, slot, network, state.digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
