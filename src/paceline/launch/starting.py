"""Starts workers in one of two ways: a new interpreter each, or forks of a template that has finished its imports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from paceline.launch import bootstrap, template
from paceline.launch.placement import Cores
from paceline.launch.worker import place

_ANSWER_S = 60.0


class Starter(Protocol):
    """Starts workers of one generation; the end of its `with` block releases all that it holds."""

    def start(
        self, argv: Sequence[str], variables: Mapping[str, str], streams: tuple[int, int, int], cores: Cores | None
    ) -> int:
        """Starts a worker in a session of its own, as a child of this process, on its cores; returns its process id.

        `streams` are the descriptors that become its stdin, stdout and stderr.
        """

    def __enter__(self) -> Starter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...


def python() -> str:
    """Returns the interpreter that workers run in."""
    return os.environ.get("PYTHON_EXEC", sys.executable)


class Interpreters:
    """Starts a new interpreter for each worker."""

    def __init__(
        self, environment: Mapping[str, str], pass_fds: Sequence[int], descriptors: tuple[int, int] | None
    ) -> None:
        self._environment = environment
        self._pass_fds = pass_fds
        self._descriptors = descriptors

    def start(
        self, argv: Sequence[str], variables: Mapping[str, str], streams: tuple[int, int, int], cores: Cores | None
    ) -> int:
        """Starts a worker."""
        process = subprocess.Popen(
            [python(), bootstrap.__file__, str(os.getpid()), *argv],
            env={**self._environment, **variables},
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=self._pass_fds,
            start_new_session=True,
        )
        process.returncode = 0  # the launcher waits for it by its pid
        place(process.pid, cores, self._descriptors)
        return process.pid

    def __enter__(self) -> Interpreters:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def request_of(argv: Sequence[str], variables: Mapping[str, str], cores: Cores | None) -> bytes:
    """Returns what a template process is sent, with the descriptors of the streams, to fork a worker."""
    return json.dumps({"argv": argv, "variables": dict(variables), "cores": cores}).encode()


class Template:
    """Forks each worker from one template process; the launcher must adopt orphans."""

    def __init__(
        self, environment: Mapping[str, str], pass_fds: Sequence[int], descriptors: tuple[int, int] | None
    ) -> None:
        self._descriptors = descriptors
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [python(), template.__file__, str(os.getpid()), str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *pass_fds],
                start_new_session=True,
            )

    def start(
        self, argv: Sequence[str], variables: Mapping[str, str], streams: tuple[int, int, int], cores: Cores | None
    ) -> int:
        """Starts a worker.

        Raises:
            OSError: the template ended or does not answer.
        """
        place(self._process.pid, None, self._descriptors)  # a fork inherits the limit from its start
        request = request_of(argv, variables, cores)
        socket.send_fds(self._connection, [request], list(streams))
        answer = self._connection.recv(4)
        if len(answer) != 4:
            raise OSError(
                f"the process that workers are forked from (pid {self._process.pid}) has ended; look at its output, or "
                "use --start-method spawn"
            )
        return int.from_bytes(answer, "little")

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.wait()
