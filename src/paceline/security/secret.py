"""The job's secret: 32 bytes or more that every process of a job holds and nobody else."""

from __future__ import annotations

import hmac
import os
import stat

from paceline.security import inherited

MIN_SECRET_BYTES = 16


def job_secret() -> bytes | None:
    """The secret this process was given, or None.

    Looked for in the descriptor that `paceline run` lets its workers inherit (PACELINE_SECRET_FD), in PACELINE_SECRET,
    in the file that PACELINE_SECRET_FILE names, and, in a child of a worker that has not got the descriptor, in the
    launcher's own, in this order.

    Raises:
        ValueError: the secret is too short, its file is readable by others, or the inherited one cannot be had.
    """
    text = os.environ.get(inherited.VARIABLE)
    file = inherited.SecretFile.parse(text) if text else None
    if file is not None and (secret := file.read_own()) is not None:
        return secret
    return _own_secret() or (file.read_makers() if file is not None else None)


def _own_secret() -> bytes | None:
    if text := os.environ.get("PACELINE_SECRET"):
        return _checked(text.encode(), "PACELINE_SECRET")
    if path := os.environ.get("PACELINE_SECRET_FILE"):
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError(
                    f"{path} (PACELINE_SECRET_FILE) can be read by other users (mode {stat.S_IMODE(mode):o}); "
                    f"a secret must be its owner's alone: chmod 600 {path}"
                )
            return _checked(file.read().strip(), path)
    return None


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the job's secret in {source} has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES}, "
            'for example from: python -c "import secrets; print(secrets.token_hex(32))"'
        )
    return secret


def derive_key(secret: bytes | None, context: str) -> bytes:
    """HKDF-SHA256 (RFC 5869, one block) of the secret, bound to what it is used for.

    Without a secret the key is a public constant: it keeps jobs apart by accident, not by intent, and is accepted on
    loopback only (see `require_secret`).
    """
    extracted = hmac.digest(b"paceline/1", secret if secret is not None else b"no secret", "sha256")
    return hmac.digest(extracted, context.encode() + b"\x01", "sha256")


def is_loopback(address: str) -> bool:
    """Whether a numeric address can be reached from this machine only."""
    from ipaddress import ip_address

    return ip_address(address.split("%")[0]).is_loopback


def require_secret(address: str, secret: bytes | None) -> None:
    """Refuses to use `address` without a secret unless it is loopback.

    Raises:
        ValueError: with the way to set one.
    """
    if secret is None and not is_loopback(address):
        raise ValueError(
            f"{address} can be reached from other machines and this job has no secret, so anybody could join it. "
            "Start the job with `paceline run`, or set PACELINE_SECRET (or PACELINE_SECRET_FILE) to the same value on "
            'every rank, for example from: python -c "import secrets; print(secrets.token_hex(32))"'
        )
