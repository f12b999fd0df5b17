"""torch.distributed works on the fake device over `fake_collectives`, in stream order."""

from __future__ import annotations

import fake_collectives
import fake_device
import pytest
import torch
import torch.distributed as dist
from one_world import Program, merged, name_of, require, run_in_turn
from torch.nn.parallel import DistributedDataParallel
from world import Ranks

pytestmark = pytest.mark.timeout(400)


def calls_are_made_in_the_order_of_the_streams():
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in range(1, 6):
        with torch.fake.delays(seed, 2000), torch.fake.counted() as counts:
            x = torch.full((1000,), float(rank), device="fake:0")
            x += 1
            dist.all_reduce(x)
            x *= 2
            gathered = torch.empty(size * 1000, device="fake:0")
            work = dist.all_gather_into_tensor(gathered, x * (rank + 1), async_op=True)
            work.wait()
            part = torch.empty(1000, device="fake:0")
            dist.reduce_scatter_tensor(part, gathered + 1)
        assert counts["synchronizations"] == 0
        total = 2 * size * (size + 1) / 2
        assert bool((x == total).all()) and bool((gathered[:1000] == total).all())
        assert bool((part == size * (total * (rank + 1) + 1)).all())


def messages_and_means():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((3,), float(rank), device="fake:1"), torch.empty(3, device="fake:1")
    works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert y.tolist() == [(rank - 1) % size] * 3
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [(size - 1) / 2] * 3
    dist.barrier()


def pytorchs_ddp_trains():
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("fake:0")
    alone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    alone.load_state_dict(network.state_dict())
    model = DistributedDataParallel(network, device_ids=[0])
    inputs = torch.randn(2, 6, 4)
    with torch.fake.delays(seed=4, most_us=500):
        for _ in range(2):
            model(inputs[rank].to("fake:0")).pow(2).mean().backward()
    for _ in range(2):
        sum(alone(part).pow(2).mean() / 2 for part in inputs).backward()
    for mine, theirs in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    assert fake_collectives.COLLECTIVES["allreduce"] > 0


PROGRAMS: tuple[Program, ...] = (
    calls_are_made_in_the_order_of_the_streams,
    messages_and_means,
    pytorchs_ddp_trains,
)


def on_the_device() -> dict[str, str]:
    fake_collectives.register()
    torch.set_num_threads(1)
    dist.init_process_group("fccl")
    return run_in_turn({name_of(program): program for program in PROGRAMS})


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    fake_device.build()
    return merged(Ranks(2)(on_the_device, timeout_s=60))


@pytest.mark.parametrize("name", [name_of(program) for program in PROGRAMS])
def test_torch_distributed(reports, name):
    require(reports, name)
