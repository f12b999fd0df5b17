"""The memory usage of data-parallel training does not increase over time.

pytest -m soak tests/ranks/test_ddp_soak.py -s
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from training import batches, mlp

import paceline as dist
from paceline.train.ddp import hooks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(330)]

TINY_BUCKETS = {"bucket_cap_mb": 0.0003, "overlap": True}
MOST_BYTES = 64 << 10


def own_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Anonymous"].split()[0]) << 10


def train(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, accumulate: bool) -> None:
    x = batches(4, 8)[dist.get_rank()]
    for _ in range(steps):
        optimizer.zero_grad()
        if accumulate:
            with model.no_sync():
                model(x).square().sum().backward()
        model(x).square().sum().backward()
        optimizer.step()


KINDS = {
    "at the end": {},
    "overlapped": TINY_BUCKETS,
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True, **TINY_BUCKETS},
    "devices": {"device_ids": ["cpu", "cpu"]},
    "accumulating": {},
    "deterministic": {"deterministic": True, "logical_shards": 4},
    "ZeRO": {},
    "fp16": {},
    "int8": {},
    "PowerSGD": {},
}
HOOKS = {
    "fp16": (None, hooks.fp16_compress_hook),
    "int8": (hooks.Int8State(block_size=16), hooks.int8_hook),
    "PowerSGD": (hooks.PowerSGDState(start_powerSGD_iter=2, min_compression_rate=0.5), hooks.power_sgd_hook),
}


def memory_grown_by_steps(kind: str) -> tuple[int, int]:
    """Returns the number of bytes and objects by which the process grew in 1,000 steps.

    The result is the minimum of three runs. Even for an unwrapped model, the allocator requests one or two MiB in one
    of the runs, whereas a leak adds memory in all three.
    """
    dist.init_process_group()
    model = mlp() if kind == "ZeRO" else dist.DistributedDataParallel(mlp(), **KINDS[kind])
    if kind in HOOKS:
        model.register_comm_hook(*HOOKS[kind])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if kind == "ZeRO":
        optimizer = dist.ZeroRedundancyOptimizer(model, torch.optim.AdamW, stage=3, lr=1e-3)
    train(100, model, optimizer, kind == "accumulating")
    spans = []
    for _ in range(3):
        gc.collect()
        nbytes, objects = own_bytes(), len(gc.get_objects())
        train(1000, model, optimizer, kind == "accumulating")
        gc.collect()
        spans.append((own_bytes() - nbytes, len(gc.get_objects()) - objects))
    return min(nbytes for nbytes, _ in spans), min(objects for _, objects in spans)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_thousand_steps_take_no_more_memory_than_the_first(ranks, kind):
    for nbytes, objects in ranks(2)(memory_grown_by_steps, kind, timeout_s=300):
        print(f"{kind}: {nbytes / 1024:.0f} KiB, {objects} objects more after 1,000 steps")
        assert nbytes < MOST_BYTES
        assert objects < 10
