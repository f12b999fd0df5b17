"""Programs for the ranks of the grid: short training runs, all-reduces, and their calibration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import nn

MIB = 1 << 20
BUCKET_MB = 1.0
LEARNING_RATE = 1e-6
TURNS = 5
CALLS = 3


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Returns a model and a batch. The gradients occupy about 4 MB and take 0.3 s to send at 100 Mbit/s."""
    if name == "wide MLP":
        layers = (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 10))
        return nn.Sequential(*layers), torch.randn(32, 256)
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 5, enable_nested_tensor=False), torch.randn(16, 32, 128)


MODELS = ("wide MLP", "transformer")


def train(model: nn.Module, x: torch.Tensor, steps: int, seconds: float = 0.0) -> list[float]:
    """Trains for at least the given number of steps and the given time; returns the seconds of each step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    began, times = time.perf_counter(), []
    while len(times) < steps or time.perf_counter() - began < seconds:
        before = time.perf_counter()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        times.append(time.perf_counter() - before)
    return times


def measure_two() -> object:
    """Measures the link between ranks 0 and 1, and the reduction time per byte; returns both on rank 0."""
    import paceline as dist
    from paceline.operate.plan.measure_worker import measure_link
    from paceline.operate.plan.step_watch import reduction_s_per_byte

    dist.init_process_group()
    link = measure_link(0, 1)
    dist.barrier()
    dist.destroy_process_group()
    return link, reduction_s_per_byte()


def calibrate(models: Sequence[str], steps: int) -> dict[str, bytes]:
    """Calibrates each model while all ranks train independently, without a link between hosts.

    The ranks of the grid share the cores of one machine, so the calibration must also run on all ranks.
    """
    import paceline as dist
    from paceline.operate.plan.calibration import Links, encode
    from paceline.operate.plan.measure_worker import UNMEASURED_WITHIN
    from paceline.operate.plan.step_watch import StepWatch, calibration_of, reduction_s_per_byte

    torch.set_num_threads(1)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    groups = [dist.new_group([each]) for each in range(ranks)]
    links = Links(UNMEASURED_WITHIN, None, None, reduction_s_per_byte())
    found = {}
    for name in models:
        model, x = build(name)
        wrapped = dist.DistributedDataParallel(model, process_group=groups[rank], bucket_cap_mb=BUCKET_MB, overlap=True)
        dist.barrier()
        watch = StepWatch(lambda _: None)
        try:
            train(wrapped, x, steps, seconds=2.0)
        finally:
            watch.close()
        calibration = calibration_of(watch, links, [name], ranks)
        everyones: list[object] = [None] * ranks
        dist.all_gather_object(everyones, calibration.step_s)
        pooled = tuple(seconds for each in everyones for seconds in each)
        found[name] = encode(replace(calibration, step_s=pooled))
    dist.destroy_process_group()
    return found


def measure(algorithm: str, sizes: Sequence[int], models: Sequence[str], steps: int) -> dict[str, float]:
    """Returns the median duration, in seconds, of an all-reduce of each size and of a step of each model."""
    import paceline as dist

    torch.set_num_threads(1)
    dist.init_process_group(algorithm=algorithm)
    torch.manual_seed(dist.get_rank())  # all ranks start from rank 0's model, with different batches
    found = {}
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4)
        turns = []
        for _ in range(TURNS):
            # The call before the timed ones empties the token buckets, which let 128 KiB pass at any rate.
            dist.all_reduce(tensor)
            began = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(tensor)
            turns.append((time.perf_counter() - began) / CALLS)
        found[f"all_reduce {nbytes / MIB:.3g} MiB"] = median(turns)
    for name in models:
        model, x = build(name)
        wrapped = dist.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, overlap=True)
        found[f"step, {name}"] = median(train(wrapped, x, steps)[2:])
    dist.barrier()
    dist.destroy_process_group()
    return found
