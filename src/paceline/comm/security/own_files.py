"""Files and directories that only this user can access, in directories where other users may also create files.

Another user can create a file with the expected name beforehand, or a link to a file that belongs to this user, and
later read or forge the content. Therefore new files are created exclusively, existing files are opened without
following links, and the checks apply to the opened file rather than to its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile

from paceline.errors import RendezvousError

_OPENING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a named pipe must not block
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class SharedFileError(PermissionError):
    """Other users have, or had, access to a file that must be private."""


def open_own(path: str, access: int = os.O_RDWR) -> int:
    """Opens this user's private file, or creates it with mode 600; the caller must close the returned descriptor.

    If the file is empty, belongs to this user and grants others at most read access (as after `touch`), its mode is set
    to 600. `access` contains the access mode and any additional flags. Raises a SharedFileError if the file is a link,
    is not a regular file, has another owner or several hard links, or is accessible to others.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, access | os.O_CREAT | os.O_EXCL | _OPENING, 0o600)
        with contextlib.suppress(FileNotFoundError):  # the file was removed in the meantime
            return _open_existing(path, access)


def _open_existing(path: str, access: int) -> int:
    try:
        fd = os.open(path, access | _OPENING)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, "is a symbolic link, which may lead to any file") from None
        if isinstance(error, PermissionError):
            raise _refusal(path, f"cannot be opened by user {os.geteuid()}") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal(path, "is not a regular file")
        if status.st_nlink > 1:
            raise _refusal(path, f"is one of {status.st_nlink} hard links to a file")
        if status.st_uid == os.geteuid() and not status.st_size and not status.st_mode & _OTHERS_WRITE:
            os.fchmod(fd, 0o600)
        elif not is_own(status) and not _is_usual_there(path, status):
            seen = f"belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}"
            raise _refusal(path, f"{seen} (expected user {os.geteuid()}, mode 600)")
    except BaseException:
        os.close(fd)
        raise
    os.set_blocking(fd, True)
    return fd


def write_own(path: str, content: bytes) -> None:
    """Atomically writes a file with mode 600, replacing any existing file of that name."""
    draft = f"{path}.{secrets.token_hex(4)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPENING, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def append_to(path: str) -> int:
    """Opens or creates a file for appending, without following links; the caller must close the returned descriptor.

    Raises an OSError if there is a link or anything else that is not a regular file.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _OPENING, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file")
    os.set_blocking(fd, True)
    return fd


def require_own_directory(path: str, may_be_roots: bool = False) -> None:
    """Raises a SharedFileError unless a directory belongs to this user, so that other users cannot replace files in it.

    If `may_be_roots` is true, the directory may also belong to root, and the last part of its path may be a link.
    """
    status = os.stat(path) if may_be_roots else os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise SharedFileError(f"{path} is not a directory; remove it, or choose another")
    if status.st_uid == os.geteuid() or (may_be_roots and status.st_uid == 0):
        return
    usual = _usual(os.path.join(path, "."))
    if usual is None or usual.st_uid != status.st_uid:
        raise SharedFileError(
            f"{path} belongs to user {status.st_uid}, who could replace its contents; choose a directory of user "
            f"{os.geteuid()}"
        )


def _refusal(path: str, seen: str) -> SharedFileError:
    return SharedFileError(
        f"{path} {seen}, so other users could read or change its contents; remove it, or choose a file in a directory "
        "that only you can write to"
    )


def is_own(status: os.stat_result) -> bool:
    """Returns True if a file belongs to this user and is inaccessible to others."""
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


def _is_usual_there(path: str, status: os.stat_result) -> bool:
    """Returns True if this user's new files in the file's directory get the same owner and mode as the file."""
    usual = _usual(path)
    return usual is not None and (usual.st_uid, usual.st_mode) == (status.st_uid, status.st_mode)


def _usual(path: str) -> os.stat_result | None:
    """Returns the status of a file created with mode 600 in the directory of `path`, or None if creating it fails.

    Some file systems do not store owners and modes, and NFS maps root to the user nobody.
    """
    probe = f"{path}.{secrets.token_hex(4)}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPENING, 0o600)
    except OSError:
        return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(probe)


def own_directory() -> str:
    """Returns this user's private directory for files, and creates it if necessary.

    Raises a RendezvousError if other users have access to the directory.
    """
    path = os.path.join(tempfile.gettempdir(), f"paceline-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode) or not is_own(state):
        raise RendezvousError(
            f"{path}, which ranks started without a Paceline launcher use for their rendezvous, is not a directory "
            f"that only user {os.getuid()} can access, so others could join the job; remove it, set TMPDIR to another "
            "directory, or start with `paceline run`"
        )
    return path
