"""Secret of a job, and the security level, which determines which connections are encrypted.

The secret consists of random bytes (32 by default, at least 16) that only the job's processes have. Workers inherit it
as a sealed memory file, whose descriptor is in PACELINE_SECRET_FD. The variable may outlive the descriptor:
`subprocess` closes the descriptor in a child but passes on the environment, and the same number may then refer to any
other file. The variable therefore also contains the file's inode and the id of the process that created the file. A
process that no longer has the descriptor opens the file through /proc/PID/fd of the creating process, which the kernel
permits only to processes of the same user.

PACELINE_SECURITY contains the security level. These connections are encrypted:

    auth      no connections; every new connection is authenticated, as at every level except `none`
    encrypt   all connections between machines
    none      no connections, and none is authenticated; allowed on loopback, elsewhere only if PACELINE_INSECURE is 1

Without a level, connections between machines are encrypted if either address is public. A connection within a machine
is never encrypted, because a user who can read it can also read the memory of the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import stat

from paceline import linux
from paceline.linux import F_ADD_SEALS, F_GET_SEALS

TYPE_CHECKING = False  # every worker imports this module, and importing typing takes time
if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

LEVEL_VARIABLE = "PACELINE_SECURITY"
INSECURE_VARIABLE = "PACELINE_INSECURE"
LEVELS = ("auth", "encrypt", "none")


def chosen_level() -> str | None:
    """Returns the level in PACELINE_SECURITY, or None if it is not set; raises a ValueError if it is not a level."""
    level = os.environ.get(LEVEL_VARIABLE) or None
    if level is not None and level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} is {level!r}; it must be one of {', '.join(LEVELS)}")
    return level


def choose_level(level: str) -> None:
    """Sets the level for this process and its children; raises a ValueError if the environment contains another one."""
    if level not in LEVELS:
        raise ValueError(f"the security level is {level!r}; it must be one of {', '.join(LEVELS)}")
    given = chosen_level()
    if given not in (None, level):
        raise ValueError(
            f"the security level is {level!r} here and {given!r} in {LEVEL_VARIABLE}; leave one of them out"
        )
    os.environ[LEVEL_VARIABLE] = level


def is_insecure() -> bool:
    """Returns True if the level `none` is allowed between machines."""
    return os.environ.get(INSECURE_VARIABLE) == "1"


def must_encrypt(own: str, peer: str, level: str | None) -> bool:
    """Returns True if a connection between two numeric addresses must be encrypted; both ends get the same result.

    >>> must_encrypt("10.0.0.1", "10.0.0.2", None), must_encrypt("10.0.0.1", "10.0.0.2", "encrypt")
    (False, True)
    >>> must_encrypt("10.0.0.1", "8.8.8.8", None), must_encrypt("10.0.0.1", "8.8.8.8", "auth")
    (True, False)
    >>> must_encrypt("10.0.0.1", "10.0.0.1", "encrypt"), must_encrypt("::1", "::1", "encrypt")
    (False, False)
    """
    if own == peer or level in ("auth", "none"):
        return False
    ends = [_address(own), _address(peer)]
    if any(end.is_loopback for end in ends):
        return False
    return level == "encrypt" or any(end.is_global for end in ends)


def is_loopback(address: str) -> bool:
    """Returns True if a numeric address is reachable only from this machine."""
    return _address(address).is_loopback


def _address(text: str) -> IPv4Address | IPv6Address:
    from ipaddress import IPv6Address, ip_address

    address = ip_address(text.split("%")[0])
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


SECRET_FD_VARIABLE = "PACELINE_SECRET_FD"
MIN_SECRET_BYTES = 16

_NAME = "paceline-secret"
_SEALS = linux.F_SEAL_SEAL | linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_WRITE
_LONGEST = 1024
_LARGEST_FILE = 1 << 16


class SecretFile:  # not a dataclass: every worker imports this module, and importing dataclasses takes time
    """Address of a secret's memory file: its descriptor in the process `maker`, which created it, and its inode."""

    def __init__(self, fd: int, inode: int, maker: int) -> None:
        self.fd = fd
        self.inode = inode
        self.maker = maker

    @classmethod
    def create(cls, secret: bytes) -> SecretFile:
        """Writes a secret into a new memory file and seals it against changes. The caller closes `fd`."""
        fd = linux.memfd_create(_NAME, linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
        try:
            os.write(fd, secret)
            fcntl.fcntl(fd, F_ADD_SEALS, _SEALS)
            return cls(fd, os.fstat(fd).st_ino, os.getpid())
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def parse(cls, text: str) -> SecretFile:
        """Parses the value of PACELINE_SECRET_FD, as written by `str`; raises a ValueError if it is malformed."""
        try:
            fd, inode, maker = map(int, text.split(":"))
        except ValueError:
            raise ValueError(
                f"{SECRET_FD_VARIABLE} is {text!r}; it must be DESCRIPTOR:INODE:PID, as `paceline run` sets it for "
                "its workers. Remove it from the environment; PACELINE_SECRET holds a secret of your own"
            ) from None
        return cls(fd, inode, maker)

    def __str__(self) -> str:
        return f"{self.fd}:{self.inode}:{self.maker}"

    def read_makers(self) -> bytes:
        """Reads the secret from the process that created the file; raises a ValueError if it has closed the file."""
        path = f"/proc/{self.maker}/fd/{self.fd}"
        seen = "is now a different file"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            seen = f"cannot be opened ({error.strerror})"
        else:
            try:
                if (secret := self.read(fd)) is not None:
                    return secret
            finally:
                os.close(fd)
        raise ValueError(
            f"this process ({os.getpid()}) should have inherited the job's secret as descriptor {self.fd}, but this "
            f"descriptor is {_described(self.fd)}; and {path}, the file in the launcher that made it, {seen}. To join "
            f"the job, start this process with pass_fds=[{self.fd}]; for a job of its own, set PACELINE_SECRET in its "
            f"environment or remove {SECRET_FD_VARIABLE} from it"
        )

    def read(self, fd: int) -> bytes | None:
        """Returns the secret if this process's descriptor `fd` refers to the file, and None if not."""
        with contextlib.suppress(OSError):  # the descriptor is closed, or refers to a file without seals
            is_ours = (
                os.fstat(fd).st_ino == self.inode
                and os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME} ")
                and fcntl.fcntl(fd, F_GET_SEALS) == _SEALS
            )
            return os.pread(fd, _LONGEST, 0) if is_ours else None
        return None


def _described(fd: int) -> str:
    try:
        return f"a different file, {os.readlink(f'/proc/self/fd/{fd}')}"
    except OSError:
        return "closed"


def job_secret() -> bytes | None:
    """Returns the job's secret, or None if there is none or the security level is `none`.

    Its sources are, in this order, the descriptor that workers inherit from `paceline run` (PACELINE_SECRET_FD),
    PACELINE_SECRET, the file at PACELINE_SECRET_FILE, and the launcher's own descriptor (in a worker's child that lacks
    the inherited one). Raises a ValueError if the secret is too short, if others can read its file, or if the inherited
    secret cannot be read.
    """
    if chosen_level() == "none":
        return None
    text = os.environ.get(SECRET_FD_VARIABLE)
    file = SecretFile.parse(text) if text else None
    if file is not None and (secret := file.read(file.fd)) is not None:
        return secret
    return _own_secret() or (file.read_makers() if file is not None else None)


def _own_secret() -> bytes | None:
    if text := os.environ.get("PACELINE_SECRET"):
        return _checked(text.strip().encode(errors="surrogateescape"), "PACELINE_SECRET")
    path = os.environ.get("PACELINE_SECRET_FILE")
    if not path:
        return None
    # Kubernetes uses links for secrets, so links are followed, and the target of a link is checked.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(
            f"{path} (PACELINE_SECRET_FILE) cannot be opened ({error.strerror}); it must be a file with the job's "
            "secret that this user can read"
        ) from None
    try:
        status, me = os.fstat(fd), os.geteuid()
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} (PACELINE_SECRET_FILE) is not a regular file; a secret must be in one")
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(
                f"{path} (PACELINE_SECRET_FILE) can be read by other users (mode {mode:o}); only its owner may "
                f"read a secret: chmod 600 {path}"
            )
        if status.st_uid not in (me, 0):
            raise ValueError(
                f"{path} (PACELINE_SECRET_FILE) belongs to user {status.st_uid}, who knows the secret; expected a "
                f"file of user {me} or of root: copy it, or chown it"
            )
        return _checked(os.read(fd, _LARGEST_FILE).strip(), path)
    finally:
        os.close(fd)


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the job's secret in {source} has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}, "
            'for example from: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


def derive_key(secret: bytes | None, context: str) -> bytes:
    """Derives a key for the purpose `context` from the secret with HKDF-SHA256 (RFC 5869, one block).

    Without a secret the key is a public constant, which provides no protection and is accepted only on loopback (see
    `require_secret`).
    """
    extracted = hmac.digest(b"paceline/1", secret if secret is not None else b"no secret", "sha256")
    return hmac.digest(extracted, context.encode() + b"\x01", "sha256")


def require_secret(address: str, secret: bytes | None) -> None:
    """Raises a ValueError if there is no secret, unless the address is loopback or the user permits the connection."""
    if secret is not None or is_loopback(address):
        return
    if chosen_level() == "none":
        if is_insecure():
            return
        raise ValueError(
            f"{address} can be reached from other machines, and with the security level none anybody could join this "
            "job there; choose --security auth or encrypt, or add --insecure (PACELINE_INSECURE=1) if the network is "
            "this job's alone"
        )
    raise ValueError(
        f"{address} can be reached from other machines and this job has no secret, so anybody could join it. "
        "Start the job with `paceline run`, or set PACELINE_SECRET (or PACELINE_SECRET_FILE) to the same value on "
        'every rank, for example from: python -c "import secrets; print(secrets.token_hex(32))"'
    )
