"""The nccl engine on GPUs: one rank, several ranks on one GPU, streams and timeouts."""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import pytest
import torch
from nccl_checks import CHECKS
from shared_gpu import share_gpu

import paceline as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU"),
    pytest.mark.timeout(300),
]


def start(timeout_s: float = 60) -> tuple[int, int]:
    share_gpu(int(os.environ["RANK"]))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:paceline,cuda:nccl", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def do_everything() -> None:
    rank, size = start()
    with torch.device("cuda"):
        for check in CHECKS:
            if size >= {"pass_messages": 2, "use_groups": 3}.get(check.__name__, 1):
                check(rank, size)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_everything_that_a_group_can_do_is_done_on_gpus(ranks, size):
    ranks(size)(do_everything, timeout_s=240)


def order_streams() -> None:
    """Calls run after the work already in the program's stream, and before the work that is added later."""
    rank, size = start()
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        value = torch.full((1 << 20,), float(rank), device="cuda")
        for _ in range(20):
            big = torch.tanh(big @ big)
        value += big[0, 0] * 0 + 1
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        work.wait()
        value *= 2
        assert value.eq(size * (size + 1)).all().item()
    dist.destroy_process_group()


def test_calls_are_in_order_with_the_programs_stream(ranks):
    ranks(2)(order_streams, timeout_s=120)


def stay_away() -> str | None:
    rank, _ = start(timeout_s=5)
    dist.all_reduce(torch.ones(3, device="cuda"))
    if rank == 0:
        tensor = torch.ones(3, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()  # this waits until the engine has terminated the call
        with pytest.raises(dist.CollectiveTimeoutError) as caught:
            dist.all_reduce(tensor)
        dist.barrier()
        return str(caught.value)
    dist.barrier(timeout=timedelta(seconds=60))
    return None


def test_a_rank_that_stays_away_is_named_and_the_gpu_goes_on(ranks):
    told, _ = ranks(2)(stay_away, timeout_s=120)
    assert "rank 1 (" in str(told) and "did not reach the call" in str(told)


def share_one_gpu() -> str:
    with pytest.raises(dist.CollectiveError) as caught:
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:paceline,cuda:nccl", timeout=timedelta(seconds=30))
        dist.all_reduce(torch.ones(3, device="cuda"))
    return str(caught.value)


def test_two_ranks_on_one_gpu_are_refused(ranks):
    for message in ranks(2)(share_one_gpu, timeout_s=120):
        assert "both use one GPU" in str(message) and "torch.cuda.set_device(LOCAL_RANK)" in str(message)


def train_on_gpus() -> None:
    rank, size = start()
    torch.manual_seed(rank)
    make = [torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    module = torch.nn.Sequential(*make).cuda().bfloat16()
    model = dist.DistributedDataParallel(module, device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    before = copy.deepcopy(module.state_dict())
    for step in range(5):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float32)
        optimizer.zero_grad()
        model(inputs.bfloat16()).float().square().mean().backward()  # device_ids moves the inputs
        optimizer.step()
    parameters = torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])
    everyones = [torch.empty_like(parameters) for _ in range(size)]
    dist.all_gather(everyones, parameters)
    assert all(torch.equal(each, parameters) for each in everyones)
    assert not torch.equal(before["0.weight"], module.state_dict()["0.weight"])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_distributed_data_parallel_trains_on_gpus(ranks, size):
    ranks(size)(train_on_gpus, timeout_s=120)
