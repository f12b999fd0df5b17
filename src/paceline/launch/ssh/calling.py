"""Starts one launcher, by ssh or on this machine, and carries what it says, prints and is told."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import socket
import subprocess
from collections.abc import Sequence

from paceline.launch.output import LinePrefixer, Write
from paceline.launch.ssh.hosts import Host
from paceline.launch.ssh.messages import Said, Sieve, Told, encode_told
from paceline.launch.ssh.refusals import Attempt

# The directory in which ssh begins must not hide a module, so it is taken off the path.
FAR_END = (
    "import sys; sys.path[:] = filter(None, sys.path); from paceline.launch.ssh.far_end import main; sys.exit(main())"
)
# Nobody is asked anything, since several machines would ask at once; a connection of its own, which ends with the
# launcher; and a network that is silent for 15 s ends it as well.
SSH_OPTIONS = (
    *("-T", "-a", "-x", "-S", "none", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
_TAIL_BYTES = 1 << 13


def command_for(attempt: Attempt, ssh: Sequence[str]) -> list[str]:
    """Returns what starts the launcher of a machine."""
    far_end = [attempt.python, "-c", FAR_END]
    return far_end if attempt.is_here else [*ssh, *SSH_OPTIONS, attempt.destination, f"exec {shlex.join(far_end)}"]


def is_here(host: Host) -> bool:
    """Returns whether a name leads to this machine, so that no ssh is needed; with a login name ssh is always used."""
    if host.user is not None:
        return False
    if host.name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host.name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # only ssh's configuration knows it
    return any(_is_mine(family, address) for family, _, _, _, address in found)


def _is_mine(family: int, address: object) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)  # type: ignore[arg-type]  # as getaddrinfo returned it
        return True
    return False


class Call:
    """A launcher that was started, as its process here.

    Args:
        command: starts it.
        prefixes: what its lines on stdout and stderr begin with.
        writes: where they go.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], prefixes: tuple[bytes, bytes], writes: tuple[Write, Write]) -> None:
        # Ctrl-C in the terminal is for the starter, which passes it on: so each has a session of its own.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._sieve = Sieve()
        self._lines = [LinePrefixer(prefix, write) for prefix, write in zip(prefixes, writes, strict=True)]
        assert self._process.stdin is not None and self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._pipes = [self._process.stdout, self._process.stderr]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._errors = b""

    @property
    def errors(self) -> str:
        """The end of what came on stderr."""
        return self._errors.decode(errors="replace")

    @property
    def descriptors(self) -> list[int]:
        """Returns what to read from, stdout first."""
        return [pipe.fileno() for pipe in self._pipes]

    def read(self, stream: int) -> tuple[list[Said], bool]:
        """Passes on what has come on stdout (0) or stderr (1); returns what the launcher said, and whether that is all.

        Raises:
            ValueError: it said something that is no message.
        """
        try:
            data = os.read(self._pipes[stream].fileno(), 1 << 16)
        except BlockingIOError:
            return [], False
        said: list[Said] = []
        printed = data
        if stream == 0:
            said, printed = self._sieve.feed(data)
        else:
            self._errors = (self._errors + data)[-_TAIL_BYTES:]
        self._lines[stream].feed(printed)
        return said, not data

    def tell(self, message: Told) -> None:
        """Tells the launcher something; nothing if it has ended."""
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._stdin.write(encode_told(message))
            self._stdin.flush()

    def exit_code(self) -> int | None:
        """Returns the exit code of the process here; None while it runs."""
        return self._process.poll()

    def cut(self) -> None:
        """Cuts the connection, which ends the launcher and its workers there."""
        self._close_stdin()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def rest(self) -> list[Said]:
        """Passes on what an ended process has left in its pipes; returns what the launcher said there."""
        said: list[Said] = []
        for stream in range(2):
            # Another process, such as one of ssh's, may hold the pipe open.
            while select.select([self._pipes[stream]], [], [], 0)[0]:
                more, is_all = self.read(stream)
                said += more
                if is_all:
                    break
        self._lines[0].feed(self._sieve.close())
        for lines in self._lines:
            lines.close()
        return said

    def close(self) -> None:
        """Ends the process if it still runs, and closes the pipes."""
        if self._process.poll() is None:
            self.cut()
            self._process.wait()
        self._close_stdin()
        for pipe in self._pipes:
            pipe.close()

    def _close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
