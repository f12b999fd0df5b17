"""Runs every program of the conformance suite in one world, each in its own group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta

import torch
from one_world import run_in_turn

import paceline as dist
from engines import failing, moving, ordering, reducing

Program = Callable[[dist.ProcessGroup], None]

_TIMEOUT = timedelta(seconds=30)
_PROGRAMS: list[Program] = [*reducing.PROGRAMS, *moving.PROGRAMS, *ordering.PROGRAMS, *failing.PROGRAMS]


# NCCL lacks some types and reductions, cannot receive from an unspecified rank, and does not detect messages of the
# wrong size.
_BEYOND_NCCL = [
    reducing.all_types_and_reductions,
    reducing.unsigned_and_scaled,
    ordering.messages,
    ordering.a_message_that_does_not_fit,
]
_LEFT_OUT: dict[str, list[Program]] = {
    "mpi": failing.COMPARING,
    "nccl": [*failing.COMPARING, failing.groups_wait_for_each_other, *_BEYOND_NCCL],
}


def programs(backend: str) -> dict[str, Program]:
    """Returns the programs by name."""
    left_out = _LEFT_OUT.get(backend, [])
    return {each.__name__: each for each in (*_PROGRAMS, *failing.COMPARING) if each not in left_out}


def run_all(backend: str) -> dict[str, str]:
    """Runs all programs on a rank; returns a dict from the name of each failed program to its error."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    assert dist.get_backend() == backend
    reports = run_in_turn(
        {name: functools.partial(_in_a_group, program, backend) for name, program in programs(backend).items()}
    )
    dist.destroy_process_group()
    return reports


def _in_a_group(program: Program, backend: str) -> None:
    program(dist.new_group(backend=backend))
