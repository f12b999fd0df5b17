"""Loads and initialises the MPI library of this process, on which everything else in this folder rests."""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

MOST_BYTES = 1 << 30
"""The most bytes that one call of MPI moves; longer tensors are cut, since MPI before version 4 counts in 32 bits."""


@functools.cache
def library() -> Any:
    """Returns mpi4py's `MPI`, loaded but not initialised unless the program has imported it before.

    Raises:
        ImportError, RuntimeError: there is no mpi4py, or it finds no MPI library.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def initialised() -> Any:
    """Returns `library()`, initialised.

    MPI is finalised at exit unless the program failed; mpirun then ends the other ranks.

    Raises:
        ValueError: the library may be called from one thread only.
    """
    mpi = library()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(_finalize)
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ValueError(
            "backend 'mpi' needs an MPI library that several threads may call: initialise it with "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE), or let init_process_group do so"
        )
    return mpi


def _finalize() -> None:
    failed = hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    mpi = library()
    if not failed and not mpi.Is_finalized():
        mpi.Finalize()
