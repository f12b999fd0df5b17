"""`paceline run` on hosts: each launcher a process inside a network namespace, as on a machine of its own."""

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
from typing import TypeVar

from launching import ENVIRONMENT, kill, processes_with, wait_until

from hosts.fixture import skip_where_not_permitted
from hosts.namespaces import enter
from hosts.network import Network, ipv4
from hosts.shifting import shifted
from hosts.wire import Conditions

# Says what it is and waits for the word to end; no torch, so that a generation stands in a tenth of a second.
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
    """Hosts with launchers; closed, none of them runs."""

    def __init__(self, hosts: int, bridged: bool = False, rate: str | None = None) -> None:
        self.network = Network(hosts, 1, 1500, rate, Conditions(0.0, 0.0, 0) if bridged else None)
        self.directory = Path(tempfile.mkdtemp(prefix="paceline-machines-"))
        self.script = self.directory / "worker.py"
        self.script.write_text(WORKER)
        self.secret = secrets.token_hex(16)
        self.mark = f"PACELINE_TEST_MARK={secrets.token_hex(8)}"
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self,
        host: int,
        *arguments: str,
        secret: str | None = "",
        verb: str = "run",
        more: Mapping[str, str] | None = None,
        shift_s: int = 0,
        says: str | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a launcher on a host, whose clock is ahead; its output goes to files that `said` reads.

        Args:
            says: a line for its stdin.
        """
        name, value = self.mark.split("=")
        environment = {**ENVIRONMENT, name: value, "GLOO_SOCKET_IFNAME": "eth0", **(more or {})}
        if secret is not None:
            environment["PACELINE_SECRET"] = secret or self.secret
        words = [sys.executable, "-m", "paceline", verb, *arguments]
        words = shifted(shift_s, *words) if shift_s else words
        number = len(self._started)

        def inside() -> subprocess.Popen[str]:
            enter(self.network.hosts[host])
            with open(self.directory / f"out-{number}", "w") as out, open(self.directory / f"err-{number}", "w") as err:
                stdin = None if says is None else subprocess.PIPE
                started = subprocess.Popen(words, stdin=stdin, stdout=out, stderr=err, text=True, env=environment)
            if started.stdin is not None:
                started.stdin.write(f"{says}\n")
                started.stdin.close()
            return started

        with ThreadPoolExecutor(1) as thread:
            self._started.append(thread.submit(inside).result())
        return self._started[-1]

    def elastic(self, host: int, nnodes: str, *arguments: str) -> subprocess.Popen[str]:
        endpoint = f"{ipv4(0)}:29400"
        flags = ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, *arguments)
        return self.start(host, *flags, str(self.script), str(self.directory))

    def said(self, launcher: subprocess.Popen[str], stream: str = "err") -> str:
        return (self.directory / f"{stream}-{self._started.index(launcher)}").read_text()

    def log(self) -> list[list[str]]:
        """What workers have written: time, host, restart count, rank, world size, local rank, group rank, master."""
        with contextlib.suppress(OSError):
            return [line.split() for line in (self.directory / "log").read_text().splitlines()]
        return []

    def notes(self, name: str) -> list[str]:
        """What workers have written to a file of that name."""
        with contextlib.suppress(OSError):
            return (self.directory / name).read_text().splitlines()
        return []

    def runs(self, world_size: int, generations: int = 1) -> bool:
        """Whether `world_size` workers of one size have come, `generations` times."""
        ranks = sorted(int(line[3]) for line in self.log() if line[4] == str(world_size))
        return ranks == sorted(list(range(world_size)) * generations)

    def wait_for(self, world_size: int, generations: int = 1, timeout_s: float = 60) -> float:
        """Waits until they have; the time at which the last of them started."""
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

    def expect(self, launcher: subprocess.Popen[str], code: int, timeout_s: float = 60) -> None:
        self.wait(lambda: launcher.poll() is not None, timeout_s)
        assert launcher.returncode == code, self.said(launcher)

    def expect_line(self, launcher: subprocess.Popen[str], words: str, timeout_s: float = 60) -> None:
        self.wait(lambda: words in self.said(launcher), timeout_s)

    def close(self) -> None:
        for launcher in self._started:
            launcher.kill()
            launcher.wait()
        kill(processes_with(self.mark))
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Kind = TypeVar("Kind", bound=Machines)


def lent(kind: type[Kind]) -> Iterator[Callable[..., Kind]]:
    """What a fixture yields: a function that makes machines of this kind, which are closed when the test is over."""
    skip_where_not_permitted()
    made: list[Kind] = []

    def make(hosts: int, bridged: bool = False) -> Kind:
        made.append(kind(hosts, bridged))
        return made[-1]

    yield make
    for each in made:
        each.close()
