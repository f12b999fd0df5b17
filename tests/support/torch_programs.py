"""Programs for torch.distributed that run with gloo and with Paceline on the same ranks; the results must be equal."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as torch_dist
from one_world import OneWorld, Program, merged, name_of, run_in_turn
from world import Ranks

import paceline.interop.torch_backend

# A gloo group whose last reference is released in a callback on one of its own threads aborts the process.
_kept: list[object] = []


def keep(group: torch_dist.ProcessGroup) -> torch_dist.ProcessGroup:
    """Keeps a reference to a gloo group until the process exits."""
    _kept.append(group)
    return group


@contextmanager
def torch_group(backend: str, directory: str, timeout_s: float = 60) -> Iterator[None]:
    """Initializes the default group of torch.distributed with all ranks of the test."""
    paceline.interop.torch_backend.register()  # as the entry point does if the package is installed
    torch.manual_seed(0)
    torch_dist.init_process_group(
        backend,
        init_method=f"file://{directory}/{backend}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    if backend == "gloo":
        keep(torch_dist.group.WORLD)
    try:
        yield
    finally:
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()


# Sums computed in a different order differ in their last bits.
TRAINING = 1e-5


def compare(programs: Sequence[Program], directory: str, tolerance: float = TRAINING) -> dict[str, str]:
    """Runs on a rank. Returns the differences between the backends' results by program name; see `one_world`."""
    results: dict[str, dict[str, object]] = {}
    reports: dict[str, str] = {}
    os.makedirs(directory, exist_ok=True)
    for backend in ("gloo", "paceline"):
        results[backend] = {}
        with torch_group(backend, directory):
            done = run_in_turn({name_of(each): partial(_keep, each, results[backend]) for each in programs})
        if backend == "gloo" and any(done.values()):
            return {name: f"over gloo: {report}" for name, report in done.items() if report}
        reports = done
    for name, theirs in results["gloo"].items():
        if not reports.get(name, "not reached"):
            ours = results["paceline"][name]
            reports.update(run_in_turn({name: partial(require_equal, ours, theirs, tolerance, name)}))
    return reports


def agree(programs: Sequence[Program], directory: str, tolerance: float = 0.0) -> None:
    """Runs on a rank. Asserts that each program has equal results with both backends, which share a default group."""
    for report in compare(programs, directory, tolerance).values():
        assert not report, report


def _keep(program: Program, results: dict[str, object]) -> None:
    torch.manual_seed(0)
    results[name_of(program)] = program()


class Comparison(OneWorld):
    """Programs that share a world, and whose results over Paceline must equal those over gloo."""

    def __init__(self, *programs: Program, tolerance: float = TRAINING, timeout_s: float = 180) -> None:
        super().__init__(*programs, timeout_s=timeout_s)
        self._tolerance = tolerance

    def run(self, size: int) -> dict[str, str]:
        with tempfile.TemporaryDirectory() as directory:
            arguments = (list(self.programs.values()), directory, self._tolerance)
            return merged(Ranks(size)(compare, *arguments, timeout_s=self.timeout_s))


def require_equal(ours: object, theirs: object, tolerance: float, at: str = "result") -> None:
    assert type(ours) is type(theirs), (at, ours, theirs)
    if isinstance(ours, torch.Tensor):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{at}: {text}"
        )
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), at
        for key, value in ours.items():
            require_equal(value, theirs[key], tolerance, f"{at}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), (at, ours, theirs)
        for i, value in enumerate(ours):
            require_equal(value, theirs[i], tolerance, f"{at}[{i}]")
    else:
        assert ours == theirs, (at, ours, theirs)
