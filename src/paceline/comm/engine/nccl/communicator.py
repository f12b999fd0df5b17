"""`Communicator`: an NCCL communicator that never blocks, with a deadline for every wait.

NCCL returns `IN_PROGRESS` and continues by itself; `get_async_error` returns its state. All waiting happens in this
file, and a communicator is aborted at the deadline.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

from paceline.comm.engine.nccl.library import Functions, NcclError, NcclResult, UniqueId, without_blocking
from paceline.comm.engine.nccl.plan import DataType, NcclCall, NcclFunction, NcclReduction, RedOp

# NCCL enqueues every group of calls on its own thread, which takes about 50 us if the ranks are connected.
_POLLING_S = 0.0005
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.01
_FINALIZING_S = 2.0  # the time for the other ranks to finalize as well

# Data that is only moved is passed as bytes.
_BYTES = NcclReduction(DataType.INT8, 1, RedOp.SUM)


class NcclTimeoutError(NcclError):
    """NCCL did not finish before the deadline; the communicator has been aborted."""


class Communicator:
    """Rank `rank` of `size`; every rank creates one with the same `unique_id`, with its device activated.

    Args:
        functions: the functions of the NCCL library.
        unique_id: the id from `Functions.new_id`, the same on all ranks.
        rank, size: this rank, and the number of ranks.
        deadline: the time of `time.monotonic` by which the other ranks must connect.
        stopped: a function that is called while waiting and returns whether to give up.

    Raises:
        NcclTimeoutError: the other ranks did not connect in time.
        NcclError: NCCL cannot connect the ranks; the message contains NCCL's description of the error.
    """

    def __init__(
        self,
        functions: Functions,
        unique_id: bytes,
        rank: int,
        size: int,
        deadline: float,
        stopped: Callable[[], bool],
    ) -> None:
        self._functions = functions
        self._stopped = stopped
        self._finalized: int | None = None  # the result of finalize, after it has been called
        handle = ctypes.c_void_p()
        result = functions.init_rank(
            ctypes.byref(handle), size, UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(without_blocking())
        )
        self._handle: int | None = handle.value
        self._settle("ncclCommInitRankConfig", result, deadline)
        self._require(size, functions.count, "ncclCommCount")
        self._require(rank, functions.user_rank, "ncclCommUserRank")

    def launch(self, calls: Sequence[NcclCall], reduction: NcclReduction | None, stream: int, deadline: float) -> None:
        """Enqueues `calls` on `stream` as one group.

        Args:
            calls: the calls, in order.
            reduction: the reduction of the calls that reduce.
            stream: the `cudaStream_t`.
            deadline: the time by which NCCL must have enqueued them, including the first connection of ranks.

        Raises:
            NcclTimeoutError, NcclError: as for the constructor; the communicator has been aborted.
        """
        functions = self._functions
        functions.group_start()
        refused: tuple[str, int] | None = None
        for call in calls:
            answer = self._call(call, reduction or _BYTES, stream)
            if answer not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
                refused = call.kind.value, answer
                break
        result = functions.group_end()
        if refused is not None:
            self._fail(*refused)
        self._settle("ncclGroupEnd", result, deadline)

    def error(self) -> str | None:
        """Returns NCCL's description of an asynchronous error, or None if there is none."""
        state = self._state()
        return None if state in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS) else self._functions.describe(state)

    def abort(self) -> None:
        """Aborts the communicator at once; calls on its streams end with undefined results. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._functions.abort(handle)

    def leave(self) -> None:
        """Starts to finalize the communicator, which accepts no more calls; returns at once. Idempotent."""
        if self._handle is not None and self._finalized is None:
            self._finalized = self._functions.finalize(self._handle)

    def close(self) -> None:
        """Destroys the communicator after its calls are complete, or aborts it after two seconds. Idempotent."""
        self.leave()
        if self._handle is None or self._finalized is None:
            return
        try:
            self._stopped = _never
            self._settle("ncclCommFinalize", self._finalized, time.monotonic() + _FINALIZING_S)
        except NcclError:
            self.abort()
            return
        handle, self._handle = self._handle, None
        self._functions.destroy(handle)

    def _call(self, call: NcclCall, reduction: NcclReduction, stream: int) -> int:
        functions, handle = self._functions, self._handle
        source, target, peer = call.source or None, call.target or None, call.peer
        data_type, item_size, op = reduction
        count = call.nbytes // item_size
        if call.kind is NcclFunction.ALL_REDUCE:
            return functions.all_reduce(source, target, count, data_type, op, handle, stream)
        if call.kind is NcclFunction.REDUCE:
            return functions.reduce(source, target, count, data_type, op, peer, handle, stream)
        if call.kind is NcclFunction.REDUCE_SCATTER:
            return functions.reduce_scatter(source, target, count, data_type, op, handle, stream)
        if call.kind is NcclFunction.BROADCAST:
            return functions.broadcast(source, target, call.nbytes, DataType.INT8, peer, handle, stream)
        if call.kind is NcclFunction.ALL_GATHER:
            return functions.all_gather(source, target, call.nbytes, DataType.INT8, handle, stream)
        if call.kind is NcclFunction.SEND:
            return functions.send(source, call.nbytes, DataType.INT8, peer, handle, stream)
        return functions.recv(target, call.nbytes, DataType.INT8, peer, handle, stream)

    def _settle(self, name: str, result: int, deadline: float) -> None:
        """Waits until NCCL has finished the function `name`, whose first answer was `result`."""
        started = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while result == NcclResult.IN_PROGRESS:
            now = time.monotonic()
            if now > deadline or self._stopped():
                self.abort()
                raise NcclTimeoutError(f"{name} was not done in time")
            if now - started < _POLLING_S:
                time.sleep(0)
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            result = self._state()
        if result != NcclResult.SUCCESS:
            self._fail(name, result)

    def _state(self) -> int:
        state = ctypes.c_int(NcclResult.SUCCESS)
        handle = self._handle
        if handle is None:
            return NcclResult.SUCCESS
        answer = self._functions.get_async_error(handle, ctypes.byref(state))
        return state.value if answer == NcclResult.SUCCESS else answer

    def _fail(self, name: str, result: int) -> None:
        said = self._functions.describe(result)
        self.abort()
        raise NcclError(f"{name}: {said}")

    def _require(self, expected: int, function: Callable[..., int], name: str) -> None:
        """Requires that the communicator has the requested rank or size; aborts it otherwise."""
        seen = ctypes.c_int(-1)
        result = function(self._handle, ctypes.byref(seen))
        if result != NcclResult.SUCCESS or seen.value != expected:
            self.abort()
            raise NcclError(f"{name} says {seen.value}, and it was asked for {expected}")


def _never() -> bool:
    return False
