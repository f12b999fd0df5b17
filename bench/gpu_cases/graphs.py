"""Captures CUDA graphs while a process group exists, with and without collectives in the graph."""

from __future__ import annotations

import time

import torch

import paceline as dist
from gpu_cases.session import Session, Setting, session


def beside_calls(setting: Setting) -> None:
    """Captures a graph without collectives while calls are pending, and replays the graph between calls."""
    with session(setting, theirs=False) as here:
        tensor, x = torch.ones(1 << 20, device=here.device), torch.ones(100, device=here.device)
        dist.all_reduce(tensor)
        here.synchronize()
        works = [dist.all_reduce(torch.ones(1 << 20, device=here.device), async_op=True) for _ in range(5)]
        graph = _captured(lambda: x.mul_(2))
        time.sleep(0.2)  # the engine's threads query the group's calls only while no graph is being captured
        for work in works:
            work.wait()
        x.fill_(1)
        for _ in range(3):
            graph.replay()
            dist.all_reduce(tensor)
        if x[0].item() != 8.0:
            raise AssertionError(f"three replays made {x[0].item()} of 1 instead of 8")
        _close(here, graph)


def with_calls(setting: Setting) -> None:
    """Captures an all_reduce between two kernels and replays it."""
    with session(setting, theirs=False) as here:
        x = torch.ones(1000, device=here.device)
        dist.all_reduce(x)
        here.synchronize()

        def step() -> None:
            x.mul_(2)
            dist.all_reduce(x)
            x.div_(here.size)

        graph = _captured(step)
        x.fill_(here.rank + 1.0)
        for _ in range(3):
            graph.replay()
        wanted = 8 * (here.size + 1) / 2
        if x[0].item() != wanted:
            raise AssertionError(f"three replays made {x[0].item()} instead of {wanted}")
        dist.all_reduce(x)
        _close(here, graph)


def _captured(step: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # type: ignore[operator]
    return graph


def _close(here: Session, graph: torch.cuda.CUDAGraph) -> None:
    here.synchronize()
    graph.reset()
