"""`ranks(4)(fn, *args)` runs a function on four real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import pytest

from paceline.launch.lifeline import die_with_parent

# One server for the whole session has the slow imports behind it; a rank is a fork of it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "paceline.group.collectives", "paceline.parallel.ddp"])

_CONSEQUENCES_S = 0.05  # after a failure, for an earlier one of another rank to be read
_LEAVING_S = 0.5  # for ranks that have answered to end by themselves


class RankFailed(AssertionError):
    """A rank raised; the message has its number and traceback."""


def _run(answer: Connection, env: dict[str, str], fn: Callable[..., object], args: tuple[object, ...]) -> None:
    os.setsid()  # so that what the rank starts can be killed with it
    die_with_parent(os.getppid())
    for name in ("PACELINE_STORE", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE"):
        os.environ.pop(name, None)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    try:
        answer.send(("ok", time.monotonic(), fn(*args)))
    except BaseException:
        answer.send(("failed", time.monotonic(), traceback.format_exc()))
    answer.close()


class World:
    """Ranks that run; left as a context, none of them does."""

    def __init__(self, size: int, fn: Callable[..., object], args: tuple[object, ...]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        secret = secrets.token_hex(16)
        self.processes: list[ForkServerProcess] = []
        self.answers: list[Connection] = []
        _worlds.add(self)
        for rank in range(size):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PACELINE_SECRET": secret,
            }
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_run, args=(sender, env, fn, args))
            process.start()
            sender.close()
            self.processes.append(process)
            self.answers.append(receiver)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def join(self, timeout_s: float = 60, expect_dead: Collection[int] = ()) -> list[object]:
        """The ranks' return values; None for those that were expected to die."""
        deadline = time.monotonic() + timeout_s
        results: list[object] = [None] * len(self.processes)
        failures: list[tuple[float, str]] = []
        waiting = {answer: rank for rank, answer in enumerate(self.answers) if rank not in expect_dead}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not finish within {timeout_s} s")
            for answer in ready:
                rank = waiting.pop(answer)
                try:
                    kind, time_s, value = answer.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    failures.append((time.monotonic(), f"rank {rank} died with exit code {code}"))
                    continue
                if kind == "failed":
                    failures.append((time_s, f"rank {rank} failed:\n{value}"))
                results[rank] = value
            if failures:
                if not ready:
                    break
                deadline = min(deadline, time.monotonic() + _CONSEQUENCES_S)
        if failures:
            raise RankFailed(min(failures)[1])
        return results

    def close(self) -> None:
        """Kills what still runs, and what the ranks have started; idempotent."""
        deadline = time.monotonic() + _LEAVING_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or -1, signal.SIGKILL)
            if process.is_alive():
                process.kill()  # it may not have come to lead its group yet
        for process in self.processes:
            process.join()
        for answer in self.answers:
            answer.close()
        _worlds.discard(self)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


class Ranks:
    """Runs functions of a test module on `size` processes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self, fn: Callable[..., object], *args: object) -> World:
        return World(self.size, fn, args)

    def __call__(self, fn: Callable[..., object], *args: object, timeout_s: float = 60) -> list[object]:
        with self.start(fn, *args) as world:
            return world.join(timeout_s)


@pytest.fixture
def ranks() -> Iterator[type[Ranks]]:
    yield Ranks
    for world in list(_worlds):
        world.close()
