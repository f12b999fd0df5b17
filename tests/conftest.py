"""`ranks(4)(fn, *args)` runs a function on four real processes."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "paceline.group.collectives", "paceline.parallel.ddp"])


class RankFailed(AssertionError):
    """A rank raised; the message has its number and traceback."""


def _run(answer: Connection, env: dict[str, str], fn: Callable[..., object], args: tuple[object, ...]) -> None:
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    try:
        result = ("ok", fn(*args))
    except BaseException:
        result = ("failed", traceback.format_exc())
    answer.send(result)
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
            process = _context.Process(target=_run, args=(sender, env, fn, args), daemon=True)
            process.start()
            sender.close()
            self.processes.append(process)
            self.answers.append(receiver)

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def join(self, timeout_s: float = 60, expect_dead: frozenset[int] = frozenset()) -> list[object]:
        """The ranks' return values; None for those that were expected to die."""
        deadline = time.monotonic() + timeout_s
        results: list[object] = [None] * len(self.processes)
        waiting = {self.answers[rank]: rank for rank in range(len(self.processes)) if rank not in expect_dead}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(waiting.values())} did not finish within {timeout_s} s")
            for answer in ready:
                rank = waiting.pop(answer)
                try:
                    kind, value = answer.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    raise RankFailed(f"rank {rank} died with exit code {code}") from None
                if kind == "failed":
                    raise RankFailed(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return results

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.join(0.5)
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()


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
def ranks() -> type[Ranks]:
    return Ranks
