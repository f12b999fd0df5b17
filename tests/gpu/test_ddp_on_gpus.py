"""DistributedDataParallel on GPUs: the same results as on the CPU, in steps without host synchronization."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from shared_gpu import share_gpu
from torch import nn
from torch.nn.utils import rnn

import paceline as dist
from paceline.train.checks.device_values import DeviceDigests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="there is no GPU"),
    pytest.mark.timeout(300),
]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, packed: rnn.PackedSequence) -> torch.Tensor:
        return self.last(self.lstm(packed)[1][0][-1])


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return dist.convert_sync_batchnorm(nn.Sequential(*layers))


def rows(step: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def sequences(step: int) -> rnn.PackedSequence:
    made = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return rnn.pack_sequence([torch.randn(n, 4, generator=made) for n in (2, 5, 3)], enforce_sorted=False)


def trained(module: nn.Module, device: str, inputs: Callable[[int], Any], **options: Any) -> list[torch.Tensor]:
    model = dist.DistributedDataParallel(module.to(device), [device], overlap=True, bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(inputs(step)).square().mean().backward()
        optimizer.step()
    return [tensor.detach().cpu().double() for tensor in module.state_dict().values()]


def train_as_on_the_cpu() -> None:
    for make, inputs in ((network, rows), (Recurrent, sequences)):
        module = make()
        on_cpu = trained(copy.deepcopy(module), "cpu", inputs)
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            on_gpu = trained(copy.deepcopy(module), "cuda:0", inputs, **options)
            for left, right in zip(on_cpu, on_gpu, strict=True):
                torch.testing.assert_close(right, left, rtol=1e-3, atol=1e-4)


def train_without_waiting() -> None:
    model = dist.DistributedDataParallel(network().cuda(), bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    x = torch.randn(32, 64, device="cuda")
    for step in range(24):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step creates the communicator
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")


def tell_of_nan_later() -> None:
    module = nn.Linear(4, 2).cuda()
    model = dist.DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            value = float("nan") if step == 0 and dist.get_rank() == 0 else 1.0
            optimizer.zero_grad()
            model(torch.full((2, 4), value, device="cuda")).sum().backward()
            optimizer.step()
            torch.cuda.synchronize()
    told = [str(each.message) for each in caught if "in step 1 this rank's own gradients have NaN" in str(each.message)]
    assert len(told) == (dist.get_rank() == 0), [str(each.message) for each in caught]


def digest_on_the_gpu() -> None:
    tensors = [torch.randn(n, device="cuda") for n in (1, 7, 100_001, 10_000_003)]

    def digests() -> list[int]:
        values: dict[str, int] = {}
        made = DeviceDigests()
        for number, tensor in enumerate(tensors):
            made.add(values, str(number), tensor)
        made.read()
        return list(values.values())

    before = digests()
    assert before == digests()
    for number, tensor in enumerate(tensors):
        tensor[-1] += 1
        assert [left == right for left, right in zip(before, digests(), strict=True)] == [
            each > number for each in range(len(tensors))
        ]


def do_all() -> None:
    share_gpu(int(os.environ["RANK"]))
    torch.cuda.set_device(0)
    torch.backends.cudnn.deterministic = True
    dist.init_process_group("cpu:paceline,cuda:nccl", timeout=timedelta(seconds=60))
    for program in (train_as_on_the_cpu, train_without_waiting, tell_of_nan_later, digest_on_the_gpu):
        program()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2])
def test_data_parallel_training_on_gpus(ranks, size):
    ranks(size)(do_all, timeout_s=240)
