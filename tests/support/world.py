"""A world: running ranks, each a process on a host. Shared by the fixtures `ranks` and `hosts`."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from forking import begin, context, start_server
from hosts.namespaces import Host, enter

from paceline.linux import die_with_parent

_CONSEQUENCES_S = 0.05  # how long to wait, after a failure, for other ranks' earlier failures
_LEAVING_S = 0.5  # time for ranks that have returned results to exit on their own


class RankFailed(AssertionError):
    """A rank raised an error; the message contains its number and traceback."""


@dataclass(frozen=True)
class Place:
    """The location of a rank: its host (None for the machine itself), and its number on the host."""

    rank: int
    local_rank: int
    local_world_size: int
    host: Host | None = None


def places(ranks_of_hosts: Sequence[int], hosts: Sequence[Host | None]) -> list[Place]:
    """Numbers the ranks consecutively, host by host."""
    places: list[Place] = []
    for host, size in zip(hosts, ranks_of_hosts, strict=True):
        places += [Place(len(places) + local, local, size, host) for local in range(size)]
    return places


def free_port(address: str) -> int:
    """Returns a port that is free now; on the machine itself, another process may take it."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


_held: list[socket.socket] = []


def reserved_port() -> int:
    """Returns a port on 127.0.0.1 that the system does not assign to other sockets until the last world is closed.

    A socket that does not listen is bound to the port. Linux still lets a server with SO_REUSEADDR, such as Paceline's,
    listen on the port, but does not choose the port for other sockets or connections.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]


def _release_ports() -> None:
    while _held:
        _held.pop().close()


def _run(
    answer: Connection, place: Place, env: dict[str, str], fn: Callable[..., object], args: tuple[object, ...]
) -> None:
    if place.host:
        enter(place.host)  # first, because sockets that are opened later belong to the host
    begin()
    faulthandler.enable()
    _let_the_server_end()
    multiprocessing.set_start_method("fork", force=True)  # a forked loader process need not import torch again
    os.setsid()  # so that the rank's child processes can be killed with it
    die_with_parent(os.getppid())
    for name in ("PACELINE_STORE", "PACELINE_SECRET_FD", "PACELINE_SECRET_FILE"):
        os.environ.pop(name, None)
    os.environ.update(env)
    try:
        answer.send(("ok", time.monotonic(), fn(*args)))
    except BaseException:
        answer.send(("failed", time.monotonic(), traceback.format_exc()))
    answer.close()


def _let_the_server_end() -> None:
    """Closes this process's end of the fork server's lifeline, so that the server and its ranks exit with pytest."""
    lifeline = forkserver._forkserver._forkserver_alive_fd
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), lifeline, inheritable=False)


class World:
    """Running ranks; leaving the context stops all of them."""

    def __init__(
        self, places: Sequence[Place], master: tuple[str, int], fn: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        secret = secrets.token_hex(16)
        self.processes: list[ForkServerProcess] = []
        self.answers: list[Connection] = []
        _worlds.add(self)
        start_server()
        try:
            for place in places:
                env = {
                    "RANK": str(place.rank),
                    "LOCAL_RANK": str(place.local_rank),
                    "WORLD_SIZE": str(len(places)),
                    "LOCAL_WORLD_SIZE": str(place.local_world_size),
                    "MASTER_ADDR": master[0],
                    "MASTER_PORT": str(master[1]),
                    "OMP_NUM_THREADS": "1",
                    "PACELINE_SECRET": secret,
                }
                receiver, sender = context.Pipe(duplex=False)
                self.answers.append(receiver)
                process = context.Process(target=_run, args=(sender, place, env, fn, args))
                process.start()
                sender.close()
                self.processes.append(process)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def join(self, timeout_s: float = 100, expect_dead: Collection[int] = ()) -> list[object]:
        """Returns the results of the ranks, with None for those that were expected to die."""
        deadline = time.monotonic() + timeout_s
        results: list[object] = [None] * len(self.processes)
        failures: list[tuple[float, str]] = []
        waiting = {answer: rank for rank, answer in enumerate(self.answers) if rank not in expect_dead}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                self._print_stacks(waiting.values())
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
            raise RankFailed("\n".join([min(failures)[1], *self._killed(waiting.values())]))
        return results

    def _print_stacks(self, ranks: Iterable[int]) -> None:
        """Aborts ranks that hang, one at a time; each writes the stacks of its threads to standard error."""
        for rank in ranks:
            self.kill(rank, signal.SIGABRT)
            self.processes[rank].join(_LEAVING_S)

    def _killed(self, ranks: Iterable[int]) -> list[str]:
        """Returns the exit codes of ranks that died without a result; no other rank's error contains these codes."""
        dead = {rank: code for rank in ranks if (code := self.processes[rank].exitcode) is not None}
        return [f"rank {rank} died with exit code {code}" for rank, code in dead.items()]

    def close(self) -> None:
        """Kills the ranks that are still running and their child processes; idempotent."""
        deadline = time.monotonic() + _LEAVING_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or -1, signal.SIGKILL)
            if process.is_alive():
                process.kill()  # the rank might not lead its own process group yet
        for process in self.processes:
            process.join()
        for answer in self.answers:
            answer.close()
        _worlds.discard(self)
        if not _worlds:
            _release_ports()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ranks:
    """Runs functions of a test module on `size` processes of this machine."""

    def __init__(self, size: int) -> None:
        self.size = size

    def start(self, fn: Callable[..., object], *args: object) -> World:
        return World(places([self.size], [None]), ("127.0.0.1", reserved_port()), fn, args)

    def __call__(self, fn: Callable[..., object], *args: object, timeout_s: float = 100) -> list[object]:
        with self.start(fn, *args) as world:
            return world.join(timeout_s)


_worlds: set[World] = set()


def close_worlds() -> None:
    """Closes all worlds that a test has left open."""
    for world in list(_worlds):
        world.close()
    _release_ports()
