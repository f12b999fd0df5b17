"""What data parallel training costs for each parameter, and that it costs no memory with time.

pytest -m soak tests/ranks/test_ddp_soak.py -s
"""

from __future__ import annotations

import copy
import gc
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from training import batches, mlp

import paceline as dist
from paceline.parallel import hooks

pytestmark = [pytest.mark.soak, pytest.mark.timeout(330)]

TINY_BUCKETS = {"bucket_cap_mb": 0.0003, "overlap": True}
MOST_BYTES = 64 << 10


def own_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Anonymous"].split()[0]) << 10


def train(steps: int, model: nn.Module, accumulate: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
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
    "fp16": {},
    "int8": {},
    "PowerSGD": {},
}
HOOKS = {
    "fp16": (None, hooks.fp16_compress_hook),
    "int8": (hooks.Int8State(block_size=16), hooks.int8_hook),
    "PowerSGD": (hooks.PowerSGDState(start_powerSGD_iter=2, min_compression_rate=0.5), hooks.power_sgd_hook),
}


def grown(kind: str) -> tuple[int, int]:
    """By how many bytes and objects the process grew in 1,000 steps.

    The allocator takes a MiB or two at some time or other, of a bare model too; what leaks grows in all three spans.
    """
    dist.init_process_group()
    model = dist.DistributedDataParallel(mlp(), **KINDS[kind])
    if kind in HOOKS:
        model.register_comm_hook(*HOOKS[kind])
    train(100, model, kind == "accumulating")
    spans = []
    for _ in range(3):
        gc.collect()
        nbytes, objects = own_bytes(), len(gc.get_objects())
        train(1000, model, kind == "accumulating")
        gc.collect()
        spans.append((own_bytes() - nbytes, len(gc.get_objects()) - objects))
    return min(nbytes for nbytes, _ in spans), min(objects for _, objects in spans)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_thousand_steps_take_no_more_memory_than_the_first(ranks, kind):
    for nbytes, objects in ranks(2)(grown, kind, timeout_s=300):
        print(f"{kind}: {nbytes / 1024:.0f} KiB, {objects} objects more after 1,000 steps")
        assert nbytes < MOST_BYTES
        assert objects < 10


def step_times(rounds: int = 100) -> dict[str, float]:
    """The least seconds of processor time that a forward and backward of 400 small parameters take, in turns."""
    dist.init_process_group()
    bare = mlp(depth=200, width=16)
    wrap = dist.DistributedDataParallel
    models = {
        "bare": bare,
        "at the end": wrap(copy.deepcopy(bare)),
        "overlapped, 25 a bucket": dist.DistributedDataParallel(
            copy.deepcopy(bare), bucket_cap_mb=0.0131, overlap=True
        ),
        "overlapped, 1 a bucket": dist.DistributedDataParallel(copy.deepcopy(bare), bucket_cap_mb=1e-6, overlap=True),
    }
    x = torch.ones(2, 16)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            model.zero_grad()
            started = time.thread_time()
            model(x).sum().backward()
            times[name].append(time.thread_time() - started)
    return {name: min(each) for name, each in times.items()}


def test_a_parameter_costs_a_few_microseconds(ranks):
    (times,) = ranks(1)(step_times)
    each = {name: 1e6 * (seconds - times["bare"]) / 400 for name, seconds in times.items()}
    print(f"bare: {1e3 * times['bare']:.2f} ms; added for each of 400 parameters:")
    for name, added_us in each.items():
        print(f"{name}: {added_us:.2f} us")
    assert each["at the end"] < 5
    assert each["overlapped, 25 a bucket"] < 25
