"""Runs a function on several processes of this machine, as `horovod.run` does."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.launch.spawn import spawn


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    **options: object,
) -> list[Any]:
    """Calls `func(*args, **kwargs)` on `np` processes of this machine, and returns their results by rank.

    Args:
        func: a function of a module, which calls `init`.
        args, kwargs: its arguments.
        np: the number of processes.
        hosts: this machine only, as in "localhost:4"; start a job on several with `paceline run`.
        options: Horovod's others (`use_gloo`, `verbose` and so on) are not used.

    Raises:
        ValueError: `hosts` names another machine.
        WorkerError: a process failed; its message ends with the traceback.
    """
    names = {part.partition(":")[0] for part in (hosts or "localhost").split(",")}
    if names - {"localhost", "127.0.0.1"}:
        raise ValueError(
            f"hosts is {hosts!r}, and run starts processes of this machine; for several machines use `paceline run "
            "--nnodes N --rdzv-endpoint HOST:PORT` on each"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
        spawn(_call, (directory, func, tuple(args), dict(kwargs or {})), nprocs=np)
        # Only processes of this user that were started above have written there.
        return [pickle.loads(Path(directory, str(rank)).read_bytes()) for rank in range(np)]


def _call(rank: int, directory: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    Path(directory, str(rank)).write_bytes(pickle.dumps(func(*args, **kwargs)))
