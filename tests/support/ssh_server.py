"""A private sshd on the loopback interface with its own keys; tests that use `ssh_server` are skipped without sshd.

sshd is Debian's, from the PATH or from the virtual environment, where the Makefile installs it. As root, sshd requires
a user and a directory that only an installation creates. A mount namespace provides both.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import wait_until

_INSTALLED = Path(sys.prefix) / "sshd"
ADDRESSES = ("127.0.0.2", "127.0.0.3")  # two different machines, as far as ssh and the launcher can tell
USER = pwd.getpwuid(os.geteuid()).pw_name
_FOR_ROOT = (
    'mount --bind "$0" /etc/passwd && mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$@"'  # $0: passwd
)


@dataclass(frozen=True)
class SshServer:
    """A running sshd, and the files that a client needs to connect to it."""

    directory: Path
    port: int

    def ssh(self, **changed: str) -> str:
        """Returns the ssh command for --ssh; arguments override lines of its configuration."""
        lines = {
            "Port": str(self.port),
            "IdentityFile": str(self.directory / "key"),
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": str(self.directory / "known_hosts"),
            "GlobalKnownHostsFile": "/dev/null",
            **changed,
        }
        text = "\n".join(f"{name} {value}" for name, value in lines.items())
        file = self.directory / f"config-{abs(hash(text))}"
        file.write_text(text + "\n")
        return f"ssh -F {file}"

    def hosts(self, *workers: int) -> str:
        """Returns the value of --hosts for machines with these numbers of workers."""
        return ",".join(f"{USER}@{address}:{count}" for address, count in zip(ADDRESSES, workers, strict=False))


def _program() -> str | None:
    found = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    own = _INSTALLED / "usr" / "sbin" / "sshd"
    return found or (str(own) if own.exists() else None)


def _environment() -> dict[str, str]:
    libraries = ":".join(map(str, sorted(_INSTALLED.glob("**/lib/*-linux-gnu"))))
    return {**os.environ, "LD_LIBRARY_PATH": libraries} if libraries else dict(os.environ)


def new_key(file: Path) -> str:
    """Generates a key pair; returns the public key as a line."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(file)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return Path(f"{file}.pub").read_text()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESSES[0], 0))
        port: int = probe.getsockname()[1]
        return port


def _configure(directory: Path, port: int) -> Path:
    config = directory / "sshd_config"
    config.write_text(
        f"Port {port}\n"
        + "".join(f"ListenAddress {address}\n" for address in ADDRESSES)
        + f"HostKey {directory}/host_key\nAuthorizedKeysFile {directory}/authorized_keys\nPidFile none\n"
        "StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
        "MaxStartups 50\n"
    )
    host_key = (directory / "host_key.pub").read_text()
    known = "".join(f"[{address}]:{port} {host_key}" for address in ADDRESSES)
    (directory / "known_hosts").write_text(known)
    return config


def _command(program: str, config: Path, directory: Path) -> list[str]:
    """Returns the command for sshd in the foreground, with messages on stderr; as root, in a mount namespace."""
    words = [program, "-D", "-e", "-f", str(config)]
    if os.geteuid() != 0:
        return words
    users = Path("/etc/passwd").read_text()
    if "\nsshd:" not in users:
        users += "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    (directory / "passwd").write_text(users)
    return ["unshare", "--mount", "sh", "-c", _FOR_ROOT, str(directory / "passwd"), *words]


def _start(program: str, directory: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(5):  # another process may have taken the port
        port = _free_port()
        config = _configure(directory, port)
        with log.open("wb") as errors:
            process = subprocess.Popen(
                _command(program, config, directory), stdin=subprocess.DEVNULL, stderr=errors, env=_environment()
            )
        wait_until(lambda process=process: process.poll() is not None or log.read_text().count("Server listening") == 2)
        if process.poll() is None:
            return process, port
        if "Address already in use" not in log.read_text():
            break
    pytest.skip(f"sshd does not start here: {log.read_text().strip()[-300:]}")


@pytest.fixture(scope="module")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    program = _program()
    if program is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no sshd, ssh or ssh-keygen (Debian packages openssh-server, openssh-client)")
    directory = tmp_path_factory.mktemp("sshd")
    new_key(directory / "host_key")
    (directory / "authorized_keys").write_text(new_key(directory / "key"))
    process, port = _start(program, directory, directory / "log")
    try:
        yield SshServer(directory, port)
    finally:
        process.terminate()
        process.wait(60)
