"""The directory for the files in which ranks of one machine and one user meet."""

from __future__ import annotations

import os
import stat
import tempfile

from paceline.errors import RendezvousError


def own_directory() -> str:
    """Makes or finds a directory that no other user can put files into.

    Raises:
        RendezvousError: other users have access to it.
    """
    path = os.path.join(tempfile.gettempdir(), f"paceline-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise RendezvousError(
            f"{path}, where ranks that no launcher of Paceline started meet, is not a directory of user {os.getuid()} "
            "alone, so others could join the job; remove it, set TMPDIR to another place, or start with `paceline run`"
        )
    return path
