"""Opens files whose names or contents are not trusted: regular ones only, and without waiting for anybody."""

from __future__ import annotations

import os
import stat

from paceline.errors import CheckpointDamagedError

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def status_of(path: str | os.PathLike[str], *, follows: bool = False) -> os.stat_result:
    """Returns what the system knows of a regular file.

    Args:
        follows: whether it may be a symbolic link to one, as where a person named it.

    Raises:
        CheckpointDamagedError: it is something else.
        OSError: it is not there, or out of reach.
    """
    return _required(path, os.stat(path, follow_symlinks=follows))


def open_regular(path: str | os.PathLike[str], *, follows: bool = False) -> int:
    """Opens a regular file for reading; returns its descriptor. Raises what `status_of` raises."""
    status_of(path, follows=follows)  # to open a device may already do something
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _required(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _required(path: str | os.PathLike[str], found: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise CheckpointDamagedError(
            f"{os.fspath(path)} is {kind}, and a checkpoint consists of regular files; put the file itself there"
        )
    return found
