"""Access to the MPI library: initialization, waiting for requests, and mapping of dtypes and reductions.

MPI requests have no deadline, so `complete` polls them. The core performs reductions that MPI lacks.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline import _core
from paceline.comm.engine.adapters.serial_channel import CallTimeout, LibraryError
from paceline.comm.engine.channel import DTYPES, ITEM_SIZES, ReduceOp

MOST_BYTES = 1 << 30
"""The maximum number of bytes per MPI call. Longer tensors are divided, as MPI before version 4 has 32-bit counts."""


@functools.cache
def library() -> Any:
    """Returns mpi4py's `MPI` module, imported without initializing MPI.

    Raises:
        ImportError, RuntimeError: mpi4py is not installed, or finds no MPI library.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def initialized() -> Any:
    """Initializes `library()` and returns it.

    MPI is finalized at exit, unless the program failed; in that case mpirun terminates the other ranks.

    Raises:
        ValueError: the library does not allow calls from several threads.
    """
    mpi = library()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        atexit.register(_finalize)
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise ValueError(
            "backend 'mpi' requires an MPI library that several threads may call: initialize it with "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE), or let init_process_group do so"
        )
    return mpi


def _finalize() -> None:
    failed = hasattr(sys, "last_value") or hasattr(sys, "last_exc")
    mpi = library()
    if not failed and not mpi.Is_finalized():
        mpi.Finalize()


_AWAKE = 50
_SPINS = 2000
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3


def complete(request: Any, lock: threading.Lock, deadline_ns: int, status: Any = None) -> None:
    """Waits for a request by polling, first without pauses and later with increasingly long sleeps.

    Args:
        request: the MPI request to wait for.
        lock: the lock to hold during every MPI call.
        deadline_ns: the time on the monotonic clock at which to give up, in nanoseconds.
        status: an MPI status for the library to fill on completion.

    Raises:
        CallTimeout: the request is still in progress at the deadline.
        LibraryError: the library reported an error.
    """
    test: Callable[[Any], bool] = request.Test
    turns = 0
    pause_s = _SHORTEST_PAUSE_S
    try:
        while True:
            with lock:
                if test(status):
                    return
            turns += 1
            if turns < _AWAKE:
                continue
            if turns > _SPINS:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            elif turns % 16 == 0:
                time.sleep(0)
            if time.monotonic_ns() > deadline_ns:
                raise CallTimeout
    except library().Exception as error:
        raise LibraryError(f"MPI: {error.Get_error_string()}") from error


_NAMES = {
    torch.bool: "C_BOOL",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.uint16: "UINT16_T",
    torch.int16: "INT16_T",
    torch.uint32: "UINT32_T",
    torch.int32: "INT32_T",
    torch.uint64: "UINT64_T",
    torch.int64: "INT64_T",
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PREMUL_SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
_OPS_OF_BOOLEANS = dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), "LOR")
_OPS_OF_BOOLEANS |= dict.fromkeys((ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.BAND), "LAND")
_OPS_OF_BOOLEANS[ReduceOp.BXOR] = "LXOR"


@functools.cache
def datatype(dtype: int) -> Any:
    """Returns MPI's datatype for a dtype code, or a type of the same size if there is none (float16, bfloat16)."""
    name = _NAMES.get(DTYPES[dtype])
    if name is not None:
        return getattr(library(), name)
    return library().BYTE.Create_contiguous(ITEM_SIZES[dtype]).Commit()


@functools.cache
def reduction(dtype: int, reduce_op: int) -> Any:
    """Returns MPI's reduction for a dtype code and a reduce op; for AVG, this is the sum."""
    op = ReduceOp(reduce_op)
    if DTYPES[dtype] is torch.bool:
        return getattr(library(), _OPS_OF_BOOLEANS[op])
    if DTYPES[dtype] in _NAMES:
        return getattr(library(), _OPS[op])
    by_core = ReduceOp.SUM if op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else op
    return _of_core(dtype, by_core)


@functools.cache
def _of_core(dtype: int, op: ReduceOp) -> Any:
    combine: Callable[[Any, Any, Any], None] = functools.partial(_combine, dtype, op)
    return library().Op.Create(combine, commute=True)


def _combine(dtype: int, op: ReduceOp, other: Any, result: Any, _: Any) -> None:
    count = result.nbytes // ITEM_SIZES[dtype]
    _core.reduce(result.address, [other.address, result.address], count, dtype, op, 1)
