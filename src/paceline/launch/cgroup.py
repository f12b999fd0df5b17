"""A cgroup for the job's workers, where the kernel lets this user make one.

What a process starts is in its cgroup, whatever sessions it opens, parents it loses and variables it clears. So to kill
the cgroup (`cgroup.kill`, Linux 5.14) is to kill all of it, and nothing else. It needs version 2 and a cgroup that has
been delegated to the user: that of a systemd user manager, of a container that may write to it, or root's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PACELINE_CGROUP"  # for the bootstrap, which joins it before anything else runs in a worker

_ROUNDS, _PAUSE_S = 200, 0.005  # until the killed have ended


@dataclass(frozen=True)
class Cgroup:
    """The directory of a cgroup below this process's own, whether it has been made or not."""

    directory: Path

    @classmethod
    def planned(cls, root: Path = Path("/")) -> Cgroup | None:
        """One with a new name, not made yet; None where this user can make none."""
        own = own_directory(root)
        if own is None or not os.access(own, os.W_OK) or not os.access(own / "cgroup.procs", os.W_OK):
            return None
        return cls(own / f"paceline-{secrets.token_hex(8)}")

    def make(self) -> bool:
        """Makes it; False, and there is none, where the kernel refuses or could not kill it."""
        try:
            self.directory.mkdir()
            if (self.directory / "cgroup.kill").exists():
                return True
            self.directory.rmdir()
        except OSError:
            pass
        return False

    def kill(self) -> None:
        """Kills every process in it and in those below; it can be used again. Nothing happens where there is none."""
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
    """Where this process's cgroup of version 2 is mounted; None if it is not."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    path = next((line.removeprefix("0::") for line in memberships if line.startswith("0::")), None)
    if path is None:
        return None
    for mount in mounts:
        fields, _, of_file_system = mount.partition(" - ")
        if of_file_system.split()[0] == "cgroup2":
            mounted, place = fields.split()[3:5]
            with contextlib.suppress(ValueError):  # another part of the tree is mounted there
                return root / place.lstrip("/") / Path(path).relative_to(mounted)
    return None
