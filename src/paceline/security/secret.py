"""The job's secret: random bytes (32 by default, 16 at least) that the processes of a job hold and nobody else."""

from __future__ import annotations

import hmac
import os
import stat

from paceline.security import inherited
from paceline.security.levels import chosen_level, is_insecure, is_loopback

MIN_SECRET_BYTES = 16
_LARGEST_FILE = 1 << 16


def job_secret() -> bytes | None:
    """Returns the secret that this process was given, or None.

    Its sources are, in this order, the descriptor that workers inherit from `paceline run` (PACELINE_SECRET_FD),
    PACELINE_SECRET, the file that PACELINE_SECRET_FILE names, and, in a child of a worker that lacks the descriptor,
    the launcher's own descriptor.

    With the security level `none` there is no secret.

    Raises:
        ValueError: the secret is too short, its file is readable by others, or the inherited one cannot be read.
    """
    if chosen_level() == "none":
        return None
    text = os.environ.get(inherited.VARIABLE)
    file = inherited.SecretFile.parse(text) if text else None
    if file is not None and (secret := file.read_own()) is not None:
        return secret
    return _own_secret() or (file.read_makers() if file is not None else None)


def _own_secret() -> bytes | None:
    if text := os.environ.get("PACELINE_SECRET"):
        return _checked(text.encode(), "PACELINE_SECRET")
    if path := os.environ.get("PACELINE_SECRET_FILE"):
        # Links are followed, since Kubernetes keeps secrets behind some; what they lead to is checked.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} (PACELINE_SECRET_FILE) is no plain file; a secret must be in one")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError(
                    f"{path} (PACELINE_SECRET_FILE) can be read by other users (mode {mode:o}); "
                    f"a secret must be its owner's alone: chmod 600 {path}"
                )
            if status.st_uid not in (os.geteuid(), 0):
                raise ValueError(
                    f"{path} (PACELINE_SECRET_FILE) belongs to user {status.st_uid}, who knows the secret; expected a "
                    f"file of user {os.geteuid()} or of root: copy it, or chown it"
                )
            return _checked(file.read(_LARGEST_FILE).strip(), path)
    return None


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the job's secret in {source} has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}, "
            'for example from: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


def derive_key(secret: bytes | None, context: str) -> bytes:
    """Returns HKDF-SHA256 (RFC 5869, one block) of the secret, bound to the purpose `context`.

    Without a secret the key is a public constant, which protects against nobody; it is accepted on loopback only (see
    `require_secret`).
    """
    extracted = hmac.digest(b"paceline/1", secret if secret is not None else b"no secret", "sha256")
    return hmac.digest(extracted, context.encode() + b"\x01", "sha256")


def require_secret(address: str, secret: bytes | None) -> None:
    """Refuses to use `address` without a secret unless it is loopback, or the user insists.

    Raises:
        ValueError: there is no secret; the message says how to set one.
    """
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
