"""Makes a cgroup for the job's workers, if the kernel lets this user make one.

Every process that a worker starts is in its cgroup, whatever sessions it opens, parents it loses and variables it
clears. So killing the cgroup (`cgroup.kill`, Linux 5.14) kills all of them, and nothing else. This needs version 2 and
a cgroup that is delegated to the user: that of a systemd user manager, of a container that may write to it, or root's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from paceline import _core

VARIABLE = "PACELINE_CGROUP"  # the bootstrap joins it before anything else runs in a worker

_ROUNDS, _PAUSE_S = 200, 0.005  # how often, and for how long, to wait until the killed processes have ended


@dataclass(frozen=True)
class Cgroup:
    """A cgroup below this process's own, whether it has been made or not."""

    directory: Path

    @classmethod
    def planned(cls, root: Path = Path("/")) -> Cgroup | None:
        """Returns a cgroup with a new name that is not made yet; None if this user can make none."""
        own = own_directory(root)
        if own is None or not os.access(own, os.W_OK) or not os.access(own / "cgroup.procs", os.W_OK):
            return None
        return cls(own / f"paceline-{secrets.token_hex(8)}")

    def make(self) -> bool:
        """Makes the cgroup; returns False, and leaves none behind, if the kernel refuses or could not kill it."""
        try:
            self.directory.mkdir()
            if (self.directory / "cgroup.kill").exists():
                return True
            self.directory.rmdir()
        except OSError:
            pass
        return False

    def kill(self) -> None:
        """Kills every process in it and in the cgroups below, if it exists; it can be used again."""
        with contextlib.suppress(OSError):
            (self.directory / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Kills every process in it and removes it; idempotent."""
        for _ in range(_ROUNDS):
            self.kill()
            for directory, _, _ in os.walk(self.directory, topdown=False):
                with contextlib.suppress(OSError):  # still in use
                    os.rmdir(directory)
            if not self.directory.exists():
                return
            time.sleep(_PAUSE_S)


def own_directory(root: Path = Path("/")) -> Path | None:
    """Returns where this process's cgroup of version 2 is mounted; None if it is not."""
    directories, is_mounted_so = _core.cgroups("", str(root).rstrip("/"))
    return Path(directories[0]) if is_mounted_so else None
