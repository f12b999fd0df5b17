"""One worker process: how it is started, and what is known of it when it has ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, BinaryIO

from paceline.launch import bootstrap
from paceline.launch.job import Command, Kind
from paceline.launch.lifeline import kill_group
from paceline.launch.placement import Cores

_FLAG = {Kind.SCRIPT: [], Kind.MODULE: ["-m"], Kind.PATH: ["--path"], Kind.PROGRAM: ["--exec"]}


def command_line(command: Command, local_rank: int, parent: int) -> list[str]:
    """What starts a worker: the bootstrap, which ties it to process `parent`, and the command."""
    program, *arguments = command.words
    if command.passes_local_rank:
        arguments = [f"--local_rank={local_rank}", *arguments]
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return [python, bootstrap.__file__, str(parent), *_FLAG[command.kind], program, *arguments]


@dataclass
class Worker:
    """A running worker; `exit_code` as of subprocess once it has ended."""

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    error_file: str
    pidfd: int
    log: str | None = None
    exit_code: int | None = None
    peak_bytes: int | None = None
    pipes: list[IO[bytes]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Its process id, and its process group's."""
        return self.process.pid

    def collect(self) -> int:
        """Takes the exit code of the ended worker, and the memory it had used at most."""
        os.close(self.pidfd)
        try:
            _, status, usage = os.wait4(self.pid, 0)
            self.exit_code = os.waitstatus_to_exitcode(status)
            self.peak_bytes = usage.ru_maxrss * 1024
        except ChildProcessError:  # somebody else in this process waited for it
            self.exit_code = self.process.poll() or 0
        self.process.returncode = self.exit_code
        return self.exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to the worker and what it started in its process group."""
        kill_group(self.pid, number)


def start_worker(
    words: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[BinaryIO | int, BinaryIO | int],
    pass_fds: Sequence[int],
    cores: Cores | None,
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a process in a session of its own, on its cores; with a descriptor that becomes readable at its end."""
    process = subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=outputs[0],
        stderr=outputs[1],
        pass_fds=pass_fds,
        start_new_session=True,
    )
    if cores is not None:
        with contextlib.suppress(OSError):  # it has ended already, or the cores were taken away
            os.sched_setaffinity(process.pid, cores)
    return process, os.pidfd_open(process.pid)
