"""Measures how long the first barrier of many ranks on one host takes after the last rank has joined.

    python bench/many_ranks.py [--ranks 256] [--rounds 5] [--json FILE]

The ranks are forked from a process that has imported torch and Paceline, and are limited to 1,024 file descriptors
each. They also run every collective and check the results. The other rows are the time from a rank's death until all
other ranks have detected it, and the time from then until all have left. The last line is the total memory (Pss) of the
ranks.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import statistics
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
from report import parser, show

import paceline as dist
from paceline.comm.engine.native import engine as _native  # noqa: F401 what Paceline otherwise imports on first use
from paceline.comm.group import init as _init  # noqa: F401
from paceline.comm.group.collectives import collectives as _collectives  # noqa: F401

DESCRIPTORS = 1024
_TIMEOUT = timedelta(seconds=120)
_RESULTS = 6  # the number of values that each rank reports


def pss_mib() -> float:
    """Returns this process's memory in MiB; a page shared by n processes counts as 1/n."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def check_collectives(rank: int, size: int) -> None:
    """Runs every collective once, with small tensors and with tensors of several chunks, and checks the results."""
    total = size * (size - 1) // 2
    for count in (1, 4096, 100_000):
        tensor = torch.full((count,), float(rank))
        dist.all_reduce(tensor)
        assert bool((tensor == total).all())
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, size - 1)
    assert tensor.item() == size - 1
    tensor = torch.tensor([rank])
    dist.reduce(tensor, 0)
    assert tensor.item() == (rank or total)
    numbers = torch.empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(numbers, torch.tensor([rank]))
    assert numbers.tolist() == list(range(size))
    own = torch.empty(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(own, torch.arange(size))
    assert own.item() == rank * size
    parts = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.gather(torch.tensor([rank]), parts if rank == 0 else None, 0)
    assert rank or torch.cat(parts).tolist() == list(range(size))
    dist.scatter(own, [torch.tensor([r]) for r in range(size)] if rank == 0 else None, 0)
    assert own.item() == rank
    dist.all_to_all_single(numbers, torch.arange(size) + rank)
    assert numbers.tolist() == [r + rank for r in range(size)]


def rank_program(rank: int, size: int, port: int) -> list[float]:
    """Returns the rank's memory in MiB, its start time, and the time at which it completed each stage."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    torch.set_num_threads(1)
    times = [time.monotonic()]
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=_TIMEOUT)
    dist.barrier()
    times.append(time.monotonic())
    check_collectives(rank, size)
    dist.barrier()
    times.append(time.monotonic())
    times.insert(0, pss_mib())
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.5)  # by then all other ranks are waiting in the call
        times += [time.monotonic()] * 2
        return times
    lost = None
    try:
        dist.barrier()
    except dist.PeerLostError as error:
        lost = error.rank
    if lost != size - 1:
        raise AssertionError(f"rank {size - 1} is dead, and the barrier says {lost}")
    times.append(time.monotonic())
    dist.destroy_process_group()
    times.append(time.monotonic())
    return times


def fork_rank(program: Callable[[], list[float]], is_to_die: bool) -> tuple[int, int]:
    """Forks a rank; returns its process and the pipe from which the rank's results can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.write(writing, " ".join(map(repr, program())).encode())
        code = 0
        if is_to_die:
            os.kill(os.getpid(), signal.SIGKILL)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def one_round(size: int) -> list[list[float]]:
    """Runs one round, and returns the values that every rank reports."""
    os.environ["PACELINE_SECRET"] = secrets.token_hex(16)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forked = [
        fork_rank(lambda rank=rank: rank_program(rank, size, port), rank == size - 1)  # type: ignore[misc]
        for rank in range(size)
    ]
    results, failed = [], []
    for rank, (pid, reading) in enumerate(forked):
        with os.fdopen(reading) as pipe:
            results.append([float(text) for text in pipe.read().split()])
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if len(results[-1]) != _RESULTS:
            failed.append(f"rank {rank} ended with {ended}")
    if failed:
        raise SystemExit(f"{len(failed)} of {size} ranks failed: {'; '.join(failed[:8])}")
    return results


def main() -> None:
    arguments = parser(__doc__.split("\n")[0])
    arguments.add_argument("--ranks", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    spans: dict[str, list[float]] = {}
    memory = []
    for _ in range(options.rounds):
        by_rank = one_round(options.ranks)
        had, came, met, checked, knew, left = zip(*by_rank, strict=True)
        memory.append(sum(had))
        for name, span in (
            ("last arrival to end of first barrier", max(met) - max(came)),
            ("every collective, checked", max(checked) - max(met)),
            ("a death until all know", max(knew[:-1]) - knew[-1]),
            ("all have left", max(left[:-1]) - max(knew[:-1])),
        ):
            spans.setdefault(name, []).append(span)
    rows: list[dict[str, object]] = [
        {"what": name, "ranks": options.ranks, "n": len(took), "p50 s": statistics.median(took), "max s": max(took)}
        for name, took in spans.items()
    ]
    show("Many ranks on one host", rows, options.json)
    print(f"memory of all ranks: {max(memory):.0f} MiB")


if __name__ == "__main__":
    main()
