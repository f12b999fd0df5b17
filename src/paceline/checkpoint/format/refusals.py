"""What the errors of checkpoints say: the file, the rank, how far it got, and what to do."""

from __future__ import annotations

import errno
import os
import socket

from paceline.checkpoint.format.places import Described
from paceline.errors import CheckpointError

_ADVICE = {
    errno.ENOSPC: "Free some space there, keep fewer checkpoints (keep=), or save somewhere else",
    errno.EDQUOT: "Free some of your quota there, keep fewer checkpoints (keep=), or save somewhere else",
    errno.EROFS: "The file system is mounted read-only; save somewhere else, or have it mounted for writing",
    errno.EACCES: "Give this user the right to write there, or save somewhere else",
    errno.EPERM: "Give this user the right to write there, or save somewhere else",
    errno.EIO: "The disk or its connection fails; look into the kernel's log (dmesg), and save somewhere else",
    errno.ENOENT: "The ranks were given different directories, or something removed this one while it was used; see "
    "that all ranks name the same one, and that only one job saves there",
    errno.ESTALE: "The server of the file system no longer knows it; have it mounted anew",
    errno.ENOTDIR: "A file has the name that a directory should have; save somewhere else, or move the file",
    errno.EEXIST: "Something else has made that file; see that only one job saves there",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
}
_SHORT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


def who(rank: int | None = None) -> str:
    """Returns this process's name in messages."""
    place = f"{socket.gethostname()}, pid {os.getpid()}"
    return f"this process ({place})" if rank is None else f"rank {rank} ({place})"


def size(nbytes: int) -> str:
    """Returns a size as people read it."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def could_not(
    what: str, place: Described, name: str, error: OSError, *, rank: int | None = None, progress: str = ""
) -> CheckpointError:
    """Returns the error for an operation that the system refused.

    Args:
        what: the verb: "write", "make", "read".
        place: where it was.
        name: of the file or directory.
        error: what the system said.
        rank: that saw it, if it is known.
        progress: how far it had got.
    """
    code = error.errno or 0
    reason = os.strerror(code) if code else str(error)
    room = ""
    if code in _SHORT_OF_SPACE and (free := _free(place)) is not None:
        room = f" ({size(free)} are free)"
    advice = _ADVICE.get(code, "See that the place exists and can be used from this host")
    how_far = f", {progress}" if progress else ""
    return CheckpointError(
        f"{who(rank)} could not {what} {place.describe(name)}: {reason}{room}{how_far}. {advice}. Checkpoints that "
        "were complete before are untouched"
        if what != "read"
        else f"{who(rank)} could not read {place.describe(name)}: {reason}{how_far}. {advice}"
    )


def _free(place: Described) -> int | None:
    try:
        return place.free_nbytes()
    except OSError:
        return None


def check_room(place: Described, nbytes: int, rank: int | None = None) -> None:
    """Refuses to begin what does not fit.

    Raises:
        CheckpointError: fewer than `nbytes` may be written.
    """
    free = _free(place)
    if free is not None and free < nbytes:
        raise CheckpointError(
            f"{who(rank)} would need {size(nbytes)} for a checkpoint in {place.describe()}, where {size(free)} are "
            "free; a new one is complete before an old one is removed. Free some space there, keep fewer checkpoints "
            "(keep=), or save somewhere else"
        )
