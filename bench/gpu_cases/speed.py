"""Measures the bandwidth of all_reduce, the host time of a call, and the memory of a communicator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as torch_dist

import paceline as dist
from gpu_cases.session import Session, Setting, session

SIZES = [8 << (2 * power) for power in range(13)] + [256 << 20]  # 8 B, 32 B, ... 128 MiB, 256 MiB


def _seconds(here: Session, call: Callable[[], object], calls: int) -> float:
    """Returns the duration of a call on the device, in seconds."""
    here.meet()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    here.synchronize()
    return (time.perf_counter() - started) / calls


def bandwidth(setting: Setting) -> list[dict[str, object]]:
    """Returns a row for each size: both libraries' medians, and bus bandwidths (2 (n - 1) / n times size over time)."""
    rows: list[dict[str, object]] = []
    with session(setting) as here:
        for nbytes in SIZES if here.device.type == "cuda" else SIZES[:9]:
            tensor = torch.ones(nbytes // 4, device=here.device)
            other = tensor.to(here.reference_device)
            calls = 20 if nbytes <= 1 << 20 else 4
            contestants = {
                "paceline": lambda t=tensor: dist.all_reduce(t),
                "torch": lambda t=other: torch_dist.all_reduce(t),
            }
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for call in contestants.values():
                _seconds(here, call, 2)
            for _ in range(setting.rounds(5)):
                for name, call in contestants.items():
                    times[name].append(_seconds(here, call, calls))
            medians = {name: statistics.median(each) for name, each in times.items()}
            row: dict[str, object] = {"ranks": here.size, "bytes": nbytes}
            for name, median in medians.items():
                row[f"{name} µs"] = 1e6 * median
                if here.size > 1:
                    row[f"{name} GB/s"] = nbytes * 2 * (here.size - 1) / here.size / median / 1e9
            rows.append({**row, "ratio": medians["torch"] / medians["paceline"]})
            tensor.fill_(1)
    return rows


def host_time(setting: Setting) -> list[dict[str, object]]:
    """Returns the host time of a small all_reduce in µs, for both libraries, while the device is not a bottleneck."""
    rows: list[dict[str, object]] = []
    with session(setting) as here:
        tensor = torch.ones(4, device=here.device)
        other = tensor.to(here.reference_device)
        calls = {
            "all_reduce": (lambda: dist.all_reduce(tensor), lambda: torch_dist.all_reduce(other)),
            "all_reduce async, wait": (
                lambda: dist.all_reduce(tensor, async_op=True).wait(),
                lambda: torch_dist.all_reduce(other, async_op=True).wait(),
            ),
            "broadcast": (lambda: dist.broadcast(tensor, 0), lambda: torch_dist.broadcast(other, 0)),
        }
        for name, (ours, theirs) in calls.items():
            times: dict[str, list[float]] = {"paceline": [], "torch": []}
            for _ in range(setting.rounds(7)):
                for by, call in (("paceline", ours), ("torch", theirs)):
                    here.meet()
                    started = time.perf_counter()
                    for _ in range(30):
                        call()
                    times[by].append((time.perf_counter() - started) / 30)
                    here.synchronize()
            medians = {by: 1e6 * statistics.median(each) for by, each in times.items()}
            row: dict[str, object] = {"ranks": here.size, "call": name}
            row |= {f"{by} µs": value for by, value in medians.items()}
            rows.append({**row, "ratio": medians["torch"] / medians["paceline"]})
    return rows


def memory(setting: Setting) -> list[dict[str, object]]:
    """Returns the device memory that a group's first all_reduce allocates, for both libraries."""
    rows: list[dict[str, object]] = []
    with session(setting) as here:
        tensor = torch.ones(1 << 20, device=here.device)
        here.synchronize()

        def free() -> int:
            torch.cuda.synchronize()
            dist.barrier()
            return int(torch.cuda.mem_get_info()[0])

        groups = {"paceline": (dist, dist.new_group()), "torch": (torch_dist, torch_dist.new_group())}
        for module, _ in groups.values():
            module.all_reduce(tensor)  # the default group, which includes the library's one-time allocations
        for by, (module, group) in groups.items():
            before = free()
            started = time.perf_counter()
            module.all_reduce(tensor, group=group)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            sharing = -(-here.size // torch.cuda.device_count())
            taken = (before - free()) / sharing / (1 << 20)
            rows.append({"by": by, "ranks": here.size, "MiB of a rank": taken, "first call ms": 1e3 * seconds})
    return rows
