"""The programs of Slurm, and those that are not installed on this machine."""

from __future__ import annotations

import os
import shutil

SYSTEM = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "unshare")


def missing_of_slurm() -> str:
    """Returns the requirements of a cluster that this machine lacks, or ""."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=SYSTEM) is None]
    return f"there is no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)" if absent else ""
