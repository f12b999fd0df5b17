"""A check for the programs that a Slurm cluster requires."""

from __future__ import annotations

import os
import shutil

SYSTEM = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "unshare")


def missing_of_slurm() -> str:
    """Returns a message about the required programs that are not installed, or "" if all of them are."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=SYSTEM) is None]
    return f"there is no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)" if absent else ""
