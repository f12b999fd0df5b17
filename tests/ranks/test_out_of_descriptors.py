"""If a rank runs out of file descriptors while a group forms or in a call, all ranks raise an error that says so."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from world import reserved_port

import paceline as dist

_POOR = 1
_ENOUGH = 40
_SPARE = (_ENOUGH, 1, 3, 5, 6, 8, 12, 14, _ENOUGH)  # the first entry is for imports on first use
_LIMIT_S = 20


@contextmanager
def _spare(number: int) -> Iterator[None]:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held = [os.dup(0)]
    while held[-1] < highest:
        held.append(os.dup(0))  # until no lower number is free
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + number, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        for descriptor in held:
            os.close(descriptor)


def _use_a_group(port: int) -> str:
    try:
        dist.init_process_group(
            init_method=f"tcp://127.0.0.1:{port}",
            rank=int(os.environ["RANK"]),
            world_size=2,
            timeout=timedelta(seconds=_LIMIT_S),
        )
        for _ in range(3):
            dist.all_reduce(dist.empty_shared(300_000))
        dist.barrier()
    except dist.PacelineError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "enough"


def _run_out(ports: list[int]) -> list[str]:
    poor = os.environ["RANK"] == str(_POOR)
    told = []
    for spare, port in zip(_SPARE, ports, strict=True):
        with _spare(spare if poor else 200):
            told.append(_use_a_group(port))
    return told


def test_a_rank_without_descriptors_is_not_called_dead(ranks):
    rich, poor = ranks(2)(_run_out, [reserved_port() for _ in _SPARE])
    assert (rich[-1], poor[-1]) == ("enough", "enough")
    failed = [(mine, theirs) for mine, theirs in zip(poor, rich, strict=True) if mine != "enough"]
    assert len(failed) > len(_SPARE) // 2
    for mine, theirs in failed:
        assert re.search(rf"Error: rank {_POOR} \(.*\): out of file descriptors \((\d+) of \1\)", mine), mine
        assert "ulimit -n" in mine
        assert "died" not in theirs and "did not reach the call" not in theirs, theirs
        if "left the group" not in theirs:  # because it lacked a descriptor for its own tensor
            assert f"rank {_POOR} (" in theirs and "out of file descriptors" in theirs, theirs
