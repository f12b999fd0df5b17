"""Runs several programs on the ranks of one world, with a test for each program; failures are reported separately.

Starting a world takes about a second, and a program takes a few milliseconds, so the programs of a file share a world.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from hosts.fixture import Hosts
from world import RankFailed, Ranks

Program = Callable[[], object]


def name_of(program: Program) -> str:
    """Returns the name of a program, with its arguments if it is a `functools.partial`."""
    given = getattr(program, "args", ())
    return f"{getattr(program, 'func', program).__name__}{given}" if given else program.__name__


def run_in_turn(programs: Mapping[str, Program]) -> dict[str, str]:
    """Runs on a rank. Returns the failure of each program by name, or "" for programs that succeeded.

    After a failure the ranks are no longer synchronized, so the remaining programs are not run.
    """
    reports: dict[str, str] = {}
    for name, program in programs.items():
        try:
            program()
        except BaseException:
            reports[name] = f"rank {os.environ['RANK']}:\n{traceback.format_exc()}"
            break
        reports[name] = ""
    return reports


def merged(answers: Iterable[object]) -> dict[str, str]:
    """Combines the reports of all ranks, by program."""
    together: dict[str, str] = {}
    for answer in answers:
        assert isinstance(answer, dict)
        for name, report in answer.items():
            together[name] = together.get(name, "") + report
    return together


def require(reports: Mapping[str, str], name: str) -> None:
    """Fails the test for the program `name` if the program failed on any rank."""
    assert name in reports, f"not reached: {list(reports)[-1]} failed before"
    assert not reports[name], reports[name]


def run_in_forks(modules: Iterable[str], size: int, fn: Callable[..., object], *arguments: object) -> None:
    """Runs a function on `size` ranks, which are forked from the calling rank after it has imported slow modules."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    running = set()
    for rank in range(size):
        if (child := os.fork()) == 0:
            _run_fork(rank, size, fn, arguments)
        running.add(child)
    while running:
        child, status = os.wait()
        running.discard(child)
        assert status == 0, f"a rank has failed; its traceback is above (status {status})"


def _run_fork(rank: int, size: int, fn: Callable[..., object], arguments: tuple[object, ...]) -> NoReturn:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)})
    code = 1
    try:
        fn(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


Layout = int | tuple[int, ...]


class OneWorld:
    """Programs that share a world for each layout. The first test of a layout runs all programs.

    A layout is a number of ranks on this machine, or the numbers of ranks on each of several hosts.
    """

    def __init__(self, *programs: Program, timeout_s: float = 110) -> None:
        self.programs = {name_of(program): program for program in programs}
        self.timeout_s = timeout_s

    def require(self, layout: Layout, name: str) -> None:
        require(_reports(self, layout), name)

    def run(self, layout: Layout) -> dict[str, str]:
        """Returns the reports of all ranks, by program."""
        ranks = Ranks(layout) if isinstance(layout, int) else Hosts(layout)
        return merged(ranks(_in_a_group, self.programs, timeout_s=self.timeout_s))


@functools.cache
def _reports(world: OneWorld, layout: Layout) -> dict[str, str]:
    try:
        return world.run(layout)
    except RankFailed as error:  # also stored, because each test would otherwise wait for the timeout again
        return dict.fromkeys(world.programs, str(error))


def _in_a_group(programs: Mapping[str, Program]) -> dict[str, str]:
    import paceline as dist

    dist.init_process_group()
    return run_in_turn(programs)
