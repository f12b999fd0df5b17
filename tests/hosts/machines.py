"""Runs `paceline run` on hosts: each launcher is a process in a network namespace, as on a separate machine.

The launchers are forks of a process that has imported torch, unless their clock is shifted.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

from forked_launcher import ForkedLauncher
from launching import ENVIRONMENT, kill, processes_in, wait_until

from hosts.fixture import skip_where_not_permitted
from hosts.namespaces import Host, enter
from hosts.network import Network, ipv4
from hosts.shifting import shifted
from hosts.wire import Conditions

Launcher: TypeAlias = "ForkedLauncher | subprocess.Popen[bytes]"

# A worker that logs its environment and runs until it is told to end. Without torch, a generation starts within 0.1 s.
WORKER = """
import os, sys, time
directory = sys.argv[1]
names = ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR")
with open(os.path.join(directory, "log"), "a") as log:
    log.write(" ".join([str(time.time()), os.uname().nodename, *(os.environ[name] for name in names)]) + "\\n")
while not os.path.exists(os.path.join(directory, "end")):
    if os.path.exists(os.path.join(directory, "fail" + os.environ["RANK"])):
        os.rename(os.path.join(directory, "fail" + os.environ["RANK"]), os.path.join(directory, "failed"))
        raise ValueError("told to fail")
    time.sleep(0.02)
"""


class Machines:
    """Hosts and the launchers on them; `close` stops the launchers."""

    def __init__(self, hosts: int, bridged: bool = False, rate: str | None = None) -> None:
        self.network = Network(hosts, 1, 1500, rate, Conditions(0.0, 0.0, 0) if bridged else None)
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-machines-"))
        self.script = self.directory / "worker.py"
        self.script.write_text(WORKER)
        self.secret = secrets.token_hex(16)
        self._started: list[Launcher] = []

    def start(
        self,
        host: int,
        *arguments: str,
        secret: str | None = "",
        verb: str = "run",
        more: Mapping[str, str] | None = None,
        shift_s: int = 0,
        says: str | None = None,
    ) -> Launcher:
        """Starts a launcher on a host. `said` returns its output.

        Args:
            shift_s: The number of seconds by which the launcher's clock is ahead.
            says: A line for the launcher's stdin.
        """
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0", **(more or {})}
        if secret is not None:
            environment["PACELINE_SECRET"] = secret or self.secret
        here, number = self.network.hosts[host], len(self._started)
        out, err = self.directory / f"out-{number}", self.directory / f"err-{number}"
        launcher: Launcher
        if shift_s:
            command = shifted(shift_s, sys.executable, "-m", "paceline", verb, *arguments)
            launcher = self._in_new_interpreter(here, command, environment, out, err)
        else:
            said = "" if says is None else f"{says}\n"
            launcher = ForkedLauncher([verb, *arguments], environment, out, err, said, here, str(self.directory))
        self._started.append(launcher)
        return launcher

    def _in_new_interpreter(
        self, host: Host, command: list[str], env: Mapping[str, str], out: Path, err: Path
    ) -> subprocess.Popen[bytes]:
        def inside() -> subprocess.Popen[bytes]:
            enter(host)
            with out.open("w") as stdout, err.open("w") as stderr:
                return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env, cwd=self.directory)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(inside).result()

    def elastic(self, host: int, nnodes: str, *arguments: str) -> Launcher:
        endpoint = f"{ipv4(0)}:29400"
        flags = ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *arguments)
        return self.start(host, *flags, str(self.script), str(self.directory))

    def said(self, launcher: Launcher, stream: str = "err") -> str:
        return (self.directory / f"{stream}-{self._started.index(launcher)}").read_text()

    def log(self) -> list[list[str]]:
        """Returns the workers' records: time, host, restart count, rank, world size, local rank, group rank, master."""
        with contextlib.suppress(OSError):
            return [line.split() for line in (self.directory / "log").read_text().splitlines()]
        return []

    def notes(self, name: str) -> list[str]:
        """Returns the lines that workers have written to the file with this name."""
        with contextlib.suppress(OSError):
            return (self.directory / name).read_text().splitlines()
        return []

    def runs(self, world_size: int, generations: int = 1) -> bool:
        """Returns True if `generations` generations of `world_size` workers have started."""
        ranks = sorted(int(line[3]) for line in self.log() if line[4] == str(world_size))
        return ranks == sorted(list(range(world_size)) * generations)

    def wait_for(self, world_size: int, generations: int = 1, timeout_s: float = 60) -> float:
        """Waits until the workers have started; returns the time at which the last worker started."""
        self.wait(lambda: self.runs(world_size, generations), timeout_s)
        return max(float(line[0]) for line in self.log() if line[4] == str(world_size))

    def wait(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        try:
            wait_until(condition, timeout_s)
        except AssertionError:
            told = "\n".join(f"--- {n}:\n{self.said(each)}" for n, each in enumerate(self._started))
            raise AssertionError(f"it did not happen in time; workers: {self.log()}\n{told}") from None

    def say(self, word: str) -> float:
        (self.directory / word).touch()
        return time.time()

    def expect(self, launcher: Launcher, code: int, timeout_s: float = 60) -> None:
        self.wait(lambda: launcher.poll() is not None, timeout_s)
        assert launcher.returncode == code, self.said(launcher)

    def expect_line(self, launcher: Launcher, words: str, timeout_s: float = 60) -> None:
        self.wait(lambda: words in self.said(launcher), timeout_s)

    def close(self) -> None:
        for launcher in self._started:
            launcher.kill()
            launcher.wait()
        kill(processes_in(self.directory))
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Kind = TypeVar("Kind", bound=Machines)


def lent(kind: type[Kind]) -> Iterator[Callable[..., Kind]]:
    """Yields a function that creates machines of this class. They are closed at the end of the test."""
    skip_where_not_permitted()
    made: list[Kind] = []

    def make(hosts: int, bridged: bool = False) -> Kind:
        made.append(kind(hosts, bridged))
        return made[-1]

    yield make
    for each in made:
        each.close()
