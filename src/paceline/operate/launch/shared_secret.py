"""Distribution of a job's secret to its launchers: with a join token, or with a file under Slurm.

A join token encodes the rendezvous address and the secret as one word, and must be protected like a key:

    pl1-<base32 of: length of the address, address, port, secret, CRC-32 of the preceding fields>

Slurm does not provide a common secret for the tasks of a step, but the tasks share the user's files: the directory from
which the job was submitted, and the home directory. Launcher 0 creates the secret and writes it to both directories,
because either directory may be local to its machine. Only the user can read the file (mode 0600), and readers reject a
file with a different owner. The file's name contains all variables by which Slurm distinguishes steps, including the
steps of requeued jobs and of jobs whose IDs are reused.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import secrets
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from paceline.comm.security.own_files import write_own
from paceline.comm.security.secret import MIN_SECRET_BYTES, chosen_level, job_secret
from paceline.errors import RendezvousTimeoutError
from paceline.linux import interrupts_raised
from paceline.operate.launch.job import Job

_PREFIX = "pl1-"
_PORT = struct.Struct(">H")
_CHECK = struct.Struct(">I")
_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_START_TIME", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
_DIRECTORIES = ("SLURM_SUBMIT_DIR", "HOME")
_SECRET_BYTES = 32
_LOOK_S = 0.1
_PATIENCE_S = 3.0
_ADVICE = "set PACELINE_SECRET to the same value on all machines instead, as `paceline launch-script slurm` does"
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")  # a host name, or an address with an optional interface


class TokenError(ValueError):
    """Raised for a word that is not a complete token."""


@dataclass(frozen=True)
class JoinToken:
    """An address and a secret."""

    host: str
    port: int
    secret: bytes = field(repr=False)

    def encode(self) -> str:
        """Encodes the token as one word.

        >>> JoinToken.decode(JoinToken("10.0.0.1", 29400, b"s" * 32).encode()).port
        29400
        """
        host = self.host.encode()
        body = bytes([len(host)]) + host + _PORT.pack(self.port) + self.secret
        return _PREFIX + base64.b32encode(body + _CHECK.pack(crc32(body))).decode().rstrip("=").lower()

    @classmethod
    def decode(cls, word: str) -> JoinToken:
        """Parses a token; raises TokenError if the word is not a token, is incomplete or contains a typo."""
        word = word.strip()
        if not word.startswith(_PREFIX):
            raise TokenError(
                f"a join token begins with {_PREFIX}; copy the one that `paceline run --print-token` printed"
            )
        text = word.removeprefix(_PREFIX).upper()
        try:
            raw = base64.b32decode(text + "=" * (-len(text) % 8))
            body, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
            if _CHECK.unpack(check)[0] != crc32(body):
                raise TokenError("the join token is damaged or truncated; copy all of it")
            end = 1 + body[0]
            return cls(body[1:end].decode(), _PORT.unpack_from(body, end)[0], body[end + _PORT.size :])
        except (binascii.Error, struct.error, IndexError, UnicodeDecodeError):
            raise TokenError("the join token is damaged or truncated; copy all of it") from None

    def require_printed(self) -> JoinToken:
        """Returns the token; raises TokenError if it lacks an address or a secret, which every printed token has."""
        if not _HOST.fullmatch(self.host) or not self.port or len(self.secret) < MIN_SECRET_BYTES:
            raise TokenError(
                "the join token has no valid address or no secret, so `paceline run --print-token` did not print it"
            )
        return self


def read_token() -> str:
    """Reads the first line from stdin; on a terminal, prompts for it without echo."""
    if not sys.stdin.isatty():
        return sys.stdin.readline()
    shown = termios.tcgetattr(sys.stdin)
    hidden = [*shown[:3], shown[3] & ~termios.ECHO, *shown[4:]]
    print("join token: ", end="", file=sys.stderr, flush=True)
    # TCSADRAIN keeps a line that was pasted together with the command
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, hidden)
    try:
        with interrupts_raised():  # the terminal must be restored
            return sys.stdin.readline()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, shown)
        print(file=sys.stderr)


class SlurmSecret:
    """The secret of a Slurm step. On launcher 0, `close` removes the files."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        step = "-".join(environment.get(name, "0") for name in _STEP)
        self._name = f".paceline-secret-{re.sub(r'[^A-Za-z0-9.-]', '_', step)}"
        named = [environment[name] for name in _DIRECTORIES if os.path.isabs(environment.get(name, ""))]
        self._directories = list(dict.fromkeys(map(os.path.normpath, named)))
        self._written: list[str] = []

    def make(self) -> bytes:
        """Creates a secret and writes it to files for the other launchers; replaces files left by an earlier step.

        Raises:
            OSError: no directory is writable.
        """
        secret = secrets.token_bytes(_SECRET_BYTES)
        refusals = []
        for directory in self._directories:
            path = os.path.join(directory, self._name)
            try:
                write_own(path, secret)  # atomically: readers see either no file or the complete file
                self._written.append(path)
            except OSError as error:
                refusals.append(f"{directory} ({error.strerror})")
        if not self._written:
            tried = " and ".join(refusals) or f"{' and '.join(_DIRECTORIES)}, which are not set to absolute paths"
            raise OSError(f"the job's secret cannot be stored for the other machines in {tried}; {_ADVICE}")
        return secret

    def await_from(self, host: str, timeout_s: float, print_line: Callable[[str], None]) -> bytes:
        """Waits for launcher 0, on `host`, to write the secret; returns the secret.

        Raises:
            RendezvousTimeoutError: the secret did not appear within `timeout_s` seconds.
            ValueError: the file belongs to another user, or other users can read it.
        """
        begun_s = time.monotonic()
        places = " or ".join(self._directories) or "no directory"
        is_reported = False
        while True:
            for directory in self._directories:
                if (secret := self._read(directory)) is not None:
                    return secret
            waited_s = time.monotonic() - begun_s
            if waited_s >= timeout_s:
                raise RendezvousTimeoutError(
                    f"launcher 0, on {host}, stored no secret within {timeout_s:.0f} s: expected {self._name} in "
                    f"{places}. Look at its output; if the machines share neither directory, {_ADVICE}"
                )
            if waited_s >= _PATIENCE_S and not is_reported:
                is_reported = True
                print_line(f"waiting for the job's secret from launcher 0 on {host}, in {places}")
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Removes the files written by `make`; idempotent."""
        for path in self._written:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._written.clear()

    def _read(self, directory: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            # NFS caches the absence of names until the directory is reopened.
            within = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return self._read_checked(within, os.path.join(directory, self._name))
            finally:
                os.close(within)
        return None

    def _read_checked(self, within: int, path: str) -> bytes:
        try:
            fd = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=within)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError as error:
            raise ValueError(f"{path} is not a regular file ({error.strerror}); remove it, or {_ADVICE}") from error
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ValueError(
                    f"{path} is not restricted to this user (owner {status.st_uid}, mode "
                    f"{stat.S_IMODE(status.st_mode):o}; expected owner {os.geteuid()}, mode 600), so it is not used as "
                    f"the job's secret; remove it, or {_ADVICE}"
                )
            return file.read(_SECRET_BYTES)


def secret_of(job: Job, shared: SlurmSecret, print_line: Callable[[str], None]) -> bytes | None:
    """Returns the secret for the rendezvous between a job's machines, or None; errors as in `SlurmSecret`."""
    rendezvous, scheduler = job.rendezvous, job.scheduler
    if chosen_level() == "none":
        print_line("security level none: connections are neither authenticated nor encrypted")
        return None
    if rendezvous.address is None:
        return secrets.token_bytes(_SECRET_BYTES)
    if (secret := job_secret()) is not None or scheduler is None or not scheduler.is_slurm:
        return secret
    if scheduler.node_rank == 0:
        return shared.make()
    return shared.await_from(scheduler.address or "another machine", rendezvous.join_timeout_s, print_line)
