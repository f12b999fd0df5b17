"""Programs for torch.distributed, each run with gloo and with Paceline on the same ranks; the results must agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as torch_dist

import paceline.plugin

# A gloo group that ends on one of its own threads, in whose callback the last reference was, ends the process.
_kept: list[object] = []


@contextmanager
def torch_group(backend: str, directory: str, timeout_s: float = 60) -> Iterator[None]:
    """The default group of torch.distributed, of all ranks of the test."""
    paceline.plugin.register()  # as the entry point does where the package is installed
    torch.manual_seed(0)
    torch_dist.init_process_group(
        backend,
        init_method=f"file://{directory}/{backend}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
    if backend == "gloo":
        _kept.append(torch_dist.group.WORLD)
    try:
        yield
    finally:
        if torch_dist.is_initialized():
            torch_dist.destroy_process_group()


def agree(programs: Sequence[Callable[[], object]], directory: str, tolerance: float = 0.0) -> None:
    """Runs on a rank: each program returns the same with either backend, whose default group they share."""
    results: dict[str, list[object]] = {}
    os.makedirs(directory, exist_ok=True)
    for backend in ("gloo", "paceline"):
        with torch_group(backend, directory):
            results[backend] = [_run(program, backend) for program in programs]
    for program, ours, theirs in zip(programs, results["paceline"], results["gloo"], strict=True):
        require_equal(ours, theirs, tolerance, _name(program))


def agree_closely(programs: Sequence[Callable[[], object]], directory: str) -> None:
    """`agree` for programs that train: sums of another order differ in their last bits."""
    agree(programs, directory, tolerance=1e-5)


def _run(program: Callable[[], object], backend: str) -> object:
    torch.manual_seed(0)
    try:
        return program()
    except Exception as error:
        raise AssertionError(f"{_name(program)} over {backend} raised") from error


def _name(program: Callable[[], object]) -> str:
    """With its arguments, where it is a `functools.partial`."""
    given = getattr(program, "args", ())
    return f"{getattr(program, 'func', program).__name__}{given}" if given else program.__name__


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
