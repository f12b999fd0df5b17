"""Where the page listens, and the lines that tell the user how to open it, here and over ssh."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from paceline.security.own_files import write_own

ADDRESS_FILE = "page.json"
"""The name of the file in a job's directory that holds the page's address and token."""

_SUGGESTED_PORT = 8080  # of the user's own machine, for a page on a Unix socket


class AddressError(ValueError):
    """The page cannot listen where it was told to."""


@dataclass(frozen=True)
class Place:
    """Where to listen: `port` on loopback (0 for a free one), or the Unix socket `path`."""

    port: int = 0
    path: str | None = None

    def listen(self) -> socket.socket:
        """Returns a listening socket.

        Raises:
            AddressError: somebody else listens there, or the socket's directory does not exist.
        """
        return _listen_on_path(self.path) if self.path is not None else _listen_on_port(self.port)


def lines(listener: socket.socket, token: str, prefix: str = "") -> list[str]:
    """Returns what to print: the address, and how to open it from another machine."""
    user, host = getpass.getuser(), socket.gethostname()
    name = listener.getsockname()
    query = f"{prefix}/?token={token}"
    if isinstance(name, str):
        ssh = f"ssh -L {_SUGGESTED_PORT}:{shlex.quote(name)} {user}@{host}"
        return [
            f"the page is on the Unix socket {name}; from your machine: {ssh}",
            f"then open http://localhost:{_SUGGESTED_PORT}{query}",
        ]
    port = name[1]
    return [
        f"the page is at http://localhost:{port}{query}",
        f"from another machine, first: ssh -L {port}:localhost:{port} {user}@{host}",
    ]


def write_address(path: Path, listener: socket.socket, token: str, prefix: str) -> None:
    """Writes the page's address into a file that only this user can read; nothing if that is impossible."""
    name = listener.getsockname()
    place = {"path": name} if isinstance(name, str) else {"port": name[1]}
    with contextlib.suppress(OSError):
        write_own(str(path), json.dumps({"token": token, "prefix": prefix, **place}).encode())


def _listen_on_port(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"--dash-port {port}: the page cannot listen on port {port} of loopback ({error.strerror}); without the "
            "flag it takes a free one"
        ) from error
    return listener


def _listen_on_path(path: str) -> socket.socket:
    """Listens on a socket that only this user can open, in place of one that nobody serves any more."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressError(f"--dash-socket {path}: there is a file of that name already, which is no socket")
        if _is_served(path):
            raise AddressError(f"--dash-socket {path}: another process serves that socket; choose another path")
        os.unlink(path)
    if not Path(path).parent.is_dir():
        raise AddressError(f"--dash-socket {path}: there is no directory {Path(path).parent}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # Linux takes over the mode of the socket's own inode in bind
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise AddressError(f"--dash-socket {path}: the page cannot listen there ({error.strerror})") from error
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
