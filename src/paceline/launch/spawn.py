"""Runs a function on several processes of this machine, from a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import cast

from paceline.errors import WorkerError
from paceline.launch.environment import allowed_cores, free_port, threads_per_worker, worker_environment
from paceline.parent import die_with_parent
from paceline.store.server import StoreServer

_GRACE_S = 5.0


class Spawned:
    """The processes that `spawn(..., join=False)` started."""

    def __init__(self, processes: list[BaseProcess], failures: list[Connection], store: StoreServer, directory: str):
        self._processes = processes
        self._failures = failures
        self._release = weakref.finalize(self, _release, store, directory)

    def pids(self) -> list[int]:
        """Returns their process ids, by rank."""
        return [process.pid or 0 for process in self._processes]

    def join(self, timeout: float | None = None) -> bool:
        """Waits for all processes to end; returns False if some still run after `timeout` seconds.

        Raises:
            WorkerError: a process failed; the message has the first failure's traceback, and the others were ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            for rank, process in enumerate(self._processes):
                if process.exitcode not in (None, 0):
                    self._fail(rank)
            running = [process.sentinel for process in self._processes if process.exitcode is None]
            if not running:
                self._release()
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            wait(running, left)

    def end(self) -> None:
        """Ends the processes that still run."""
        for process in self._processes:
            if process.exitcode is None:
                process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._release()

    def _fail(self, seen: int) -> None:
        time.sleep(0.1)  # lets the failure that caused this one arrive
        self.end()
        reports: list[tuple[float, int, str]] = []
        for rank, failure in enumerate(self._failures):
            if failure.poll():
                try:
                    reports.append(_received(failure, rank))
                except EOFError:
                    continue
        host = socket.gethostname()
        first = min(reports)[1] if reports else seen
        code = self._processes[first].exitcode
        text = min(reports)[2] if reports else "it left no traceback, look at its output"
        raise WorkerError(
            f"rank {first} ({host}, pid {self._processes[first].pid}, exit code {code}) failed first; "
            f"the other ranks were ended:\n{text}",
            rank=first,
            exit_code=code,
        )


def spawn(
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Spawned | None:
    """Calls `fn(rank, *args)` on `nprocs` processes, in each of which `init_process_group()` needs no arguments.

    Args:
        fn: a function of a module, since the processes import it; with start_method="fork" any function.
        join: wait for the processes; without, return a `Spawned` to wait on.
        daemon: whether they end with this process even when it ends well (they always do when it is killed).
        start_method: "spawn", "forkserver" or "fork".

    Raises:
        ValueError: `nprocs` is less than 1, or `fn` cannot be imported by the processes.
        WorkerError: a process failed (with `join`); its message ends with the traceback.
    """
    if nprocs < 1:
        raise ValueError(f"nprocs is {nprocs}; it must be at least 1")
    if start_method != "fork" and fn.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"{fn.__qualname__} is defined in an interactive session, which new processes cannot import; "
            'pass start_method="fork", or put it into a module'
        )
    context = cast(SpawnContext, multiprocessing.get_context(start_method))  # all have what it has
    directory = tempfile.mkdtemp(prefix="paceline-")
    secret = secrets.token_hex(32)
    store = StoreServer.on_unix_path(os.path.join(directory, "store"), secret.encode())
    port, run_id = free_port(), secrets.token_hex(8)
    threads = threads_per_worker(allowed_cores(), nprocs, os.environ)
    processes: list[BaseProcess] = []
    failures: list[Connection] = []
    for rank in range(nprocs):
        environment = {
            **worker_environment(rank, nprocs, port, run_id),
            "PACELINE_STORE": f"unix:{directory}/store",
            "PACELINE_SECRET": secret,
        }
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(
            target=_work, args=(fn, rank, args, environment, threads, sending, os.getpid(), start_method), daemon=daemon
        )
        process.start()
        sending.close()
        processes.append(process)
        failures.append(receiving)
    spawned = Spawned(processes, failures, store, directory)
    if not join:
        return spawned
    spawned.join()
    return None


def notebook_launch(
    fn: Callable[..., object], nprocs: int, args: tuple[object, ...] = (), start_method: str | None = None
) -> None:
    """Calls `fn(rank, *args)` on `nprocs` processes from a notebook cell, as `spawn` does from a script.

    A function of the notebook itself is reached by forking the notebook's process; one of a module is imported by new
    processes, which is safe in every case.

    >>> import paceline
    >>> paceline.notebook_launch(print, nprocs=1)  # doctest: +SKIP

    Args:
        fn: a function of the notebook or of a module.
        nprocs: how many processes.
        args: further arguments.
        start_method: "fork", "spawn" or "forkserver"; by default "fork" for a function of the notebook, else "spawn".

    Raises:
        RuntimeError: the processes would be forks of one that has used CUDA, where they could not.
        WorkerError: a process failed; its message ends with the traceback.
    """
    if start_method is None:
        start_method = "fork" if fn.__module__ == "__main__" else "spawn"
    torch = sys.modules.get("torch")
    if start_method == "fork" and torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(
            f"{fn.__qualname__} is to run in forks of this notebook (pid {os.getpid()}), but a cell has already used "
            "CUDA here, and a fork of such a process cannot. Restart the notebook and do not touch a GPU before this "
            "call, or put the function into a module"
        )
    sys.stdout.flush()
    spawned = spawn(fn, args, nprocs, join=False, start_method=start_method)
    assert spawned is not None
    try:
        spawned.join()
    except KeyboardInterrupt:  # the notebook's stop button
        spawned.end()
        raise


def _work(
    fn: Callable[..., object],
    rank: int,
    args: tuple[object, ...],
    environment: dict[str, str],
    threads: int | None,
    failure: Connection,
    parent: int,
    start_method: str,
) -> None:
    if start_method != "forkserver":  # there the parent is the server, which ends with the launching process
        die_with_parent(parent)
    os.environ.update(environment)
    os.environ.pop("PACELINE_SECRET_FD", None)
    if threads is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    try:
        fn(rank, *args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception:
        failure.send((time.time(), traceback.format_exc()))
        raise SystemExit(1) from None


def _received(failure: Connection, rank: int) -> tuple[float, int, str]:
    time_s, text = failure.recv()
    return time_s, rank, text


def _release(store: StoreServer, directory: str) -> None:
    store.close()
    shutil.rmtree(directory, ignore_errors=True)
