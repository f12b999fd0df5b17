"""A worker of torchrun: DistributedDataParallel over gloo, and a checkpoint every few steps."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elastic_cases.task import Network, Samples, arguments, batch_of, leave_result, optimizer_of
from elastic_cases.timeline import Recorder

CHECKPOINT_STEPS = 10


def main() -> None:
    options = arguments().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    samples = Samples(options.steps, dist.get_world_size())
    network = Network(len(samples))
    optimizer = optimizer_of(network)
    done, path = 0, Path(options.directory, "checkpoint")
    if path.exists():
        saved = torch.load(path)
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    model = torch.nn.parallel.DistributedDataParallel(network)
    recorder = Recorder(options.directory, rank)
    for step in range(done, options.steps):
        optimizer.zero_grad()
        model(batch_of(samples, step, rank)).backward()
        optimizer.step()
        recorder.committed(step + 1)
        if rank == 0 and (step + 1) % CHECKPOINT_STEPS == 0:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            torch.save(state, path.with_suffix(".new"))
            os.rename(path.with_suffix(".new"), path)
    leave_result(options.directory, rank, network)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
