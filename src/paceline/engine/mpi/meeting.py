"""The rendezvous of ranks that mpirun started: an MPI broadcast tells them all the address of rank 0's store."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from datetime import timedelta

from paceline.engine.adapters.serial_channel import CallTimeout
from paceline.engine.addresses import own_address
from paceline.engine.mpi.library import initialised
from paceline.engine.mpi.requests import complete
from paceline.errors import RendezvousTimeoutError
from paceline.rendezvous.rendezvous import RendezvousResult, rendezvous
from paceline.security.secret import job_secret
from paceline.store.tcp import TCPStore

_SECRET_VARIABLE = "PACELINE_SECRET"
_LETTER_BYTES = 512
_LOOPBACK = "127.0.0.1"


def meet(timeout_s: float) -> RendezvousResult:
    """Meets all ranks of MPI's world and returns this rank's place among them.

    A job without a secret is given one, in PACELINE_SECRET.

    Args:
        timeout_s: how long to wait for the other ranks, in seconds.

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
