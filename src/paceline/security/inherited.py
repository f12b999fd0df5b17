"""A secret that a process inherits as a sealed memory file, whose descriptor PACELINE_SECRET_FD names.

The variable outlives the descriptor: `subprocess` closes it in the child and leaves the environment as it is, and the
number may then belong to any other file. So the variable also says which file it was (its inode) and which process made
it. A process that no longer has the descriptor opens the file by way of its maker's /proc/PID/fd, which the kernel
grants to processes of the same user only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from paceline import system_calls
from paceline.system_calls import F_ADD_SEALS, F_GET_SEALS

VARIABLE = "PACELINE_SECRET_FD"

_NAME = "paceline-secret"
_SEALS = system_calls.F_SEAL_SEAL | system_calls.F_SEAL_SHRINK | system_calls.F_SEAL_GROW | system_calls.F_SEAL_WRITE
_LONGEST = 1024


class SecretFile:  # no dataclass: every worker imports this, and would pay for the import of dataclasses
    """The place of a secret: its maker's descriptor, the file's inode, its maker's process id."""

    def __init__(self, fd: int, inode: int, maker: int) -> None:
        self.fd = fd
        self.inode = inode
        self.maker = maker

    @classmethod
    def create(cls, secret: bytes) -> SecretFile:
        """Writes `secret` into a new memory file and seals it against changes; the caller closes `fd`."""
        fd = system_calls.memfd_create(_NAME, system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING)
        try:
            os.write(fd, secret)
            fcntl.fcntl(fd, F_ADD_SEALS, _SEALS)
            return cls(fd, os.fstat(fd).st_ino, os.getpid())
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def parse(cls, text: str) -> SecretFile:
        """Parses what `str` returned for a secret file.

        Raises:
            ValueError: `text` is something else.
        """
        try:
            fd, inode, maker = map(int, text.split(":"))
        except ValueError:
            raise ValueError(
                f"{VARIABLE} is {text!r}; it must be DESCRIPTOR:INODE:PID, as `paceline run` sets it for its workers. "
                "Remove it from the environment; PACELINE_SECRET holds a secret of your own"
            ) from None
        return cls(fd, inode, maker)

    def __str__(self) -> str:
        return f"{self.fd}:{self.inode}:{self.maker}"

    def read_own(self) -> bytes | None:
        """Returns the secret if this process still has the descriptor, otherwise None."""
        return self._read(self.fd)

    def read_makers(self) -> bytes:
        """Returns the secret from the process that made the file.

        Raises:
            ValueError: neither that process nor this one has the file; the message says what was seen and what to do.
        """
        path = f"/proc/{self.maker}/fd/{self.fd}"
        seen = "is another file by now"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            seen = f"cannot be opened ({error.strerror})"
        else:
            try:
                if (secret := self._read(fd)) is not None:
                    return secret
            finally:
                os.close(fd)
        raise ValueError(
            f"this process ({os.getpid()}) was to inherit the job's secret as descriptor {self.fd}, which here is "
            f"{_described(self.fd)}; and {path}, the file in the launcher that made it, {seen}. To join the job, start "
            f"this process with pass_fds=[{self.fd}]; for a job of its own, set PACELINE_SECRET in its environment or "
            f"remove {VARIABLE} from it"
        )

    def _read(self, fd: int) -> bytes | None:
        """Returns the content of descriptor `fd` if it is this file, otherwise None."""
        with contextlib.suppress(OSError):  # it is closed, or a kind of file that has no seals
            is_ours = (
                os.fstat(fd).st_ino == self.inode
                and os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME} ")
                and fcntl.fcntl(fd, F_GET_SEALS) == _SEALS
            )
            return os.pread(fd, _LONGEST, 0) if is_ours else None
        return None


def _described(fd: int) -> str:
    try:
        return f"another file, {os.readlink(f'/proc/self/fd/{fd}')}"
    except OSError:
        return "closed"
