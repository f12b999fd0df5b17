"""Every program of the suite on one world, each in a group of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta

import torch

import paceline as dist
from engines import failing, moving, ordering, reducing

Program = Callable[[dist.ProcessGroup], None]

_TIMEOUT = timedelta(seconds=30)
_PROGRAMS: list[Program] = [*reducing.PROGRAMS, *moving.PROGRAMS, *ordering.PROGRAMS, *failing.PROGRAMS]


def programs(backend: str) -> dict[str, Program]:
    """By name; mpi compares nothing."""
    chosen = [*_PROGRAMS, *([] if backend == "mpi" else failing.COMPARING)]
    return {program.__name__: program for program in chosen}


def run_all(backend: str) -> dict[str, str]:
    """Runs on a rank. How each program failed, by its name; nothing for those that did not."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    assert dist.get_backend() == backend
    reports: dict[str, str] = {}
    for name, program in programs(backend).items():
        group = dist.new_group(backend=backend)
        try:
            program(group)
            reports[name] = ""
        except BaseException:
            reports[name] = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
            break  # the ranks are no longer at the same place
    dist.destroy_process_group()
    return reports
