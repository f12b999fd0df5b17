"""The gloo engine: torch's own ProcessGroupGloo, made directly, without torch.distributed's groups.

What gloo lacks (reduce-scatter, all-to-all, and reductions of some types) goes by schedule over its messages.

The engine over torch's gloo library, which needs nothing of torch.distributed's groups.

May use: the files of `engine` itself, `engine/adapters`, `store`, `_core`. Start reading at `engine.py`; `channel.py`
runs collectives, `messages.py` sends and receives, and `wire.py` carries the schedules for what gloo lacks.

Bare sends and receives over gloo, as schedules need them, and gloo's errors as the adapters know them.

A group's collectives over gloo; those that it lacks run by schedule over its messages.

Messages between two ranks over gloo, each with its type and length in front.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

from paceline import _core
from paceline.comm.engine.adapters.group_recorder import GroupRecorder
from paceline.comm.engine.adapters.library_engine import FailureDiagnosis, LibraryEngine, LibraryGroup
from paceline.comm.engine.adapters.schedule_executor import FlatBuffer, PythonExecutor, tensor_at
from paceline.comm.engine.adapters.serial_channel import (
    CallTimeout,
    Envelope,
    LibraryError,
    SerialChannel,
    WaitedMessage,
)
from paceline.comm.engine.api import EngineContext
from paceline.comm.engine.channel import CallOutcome, CollectiveCall, Pieces
from paceline.comm.engine.codes import DTYPES, NO_REDUCTION, ReduceOp
from paceline.comm.engine.network_settings import IFACE_VARIABLE, own_address
from paceline.comm.schedule.steps import Operation
from paceline.comm.store.store import Store
from paceline.errors import RendezvousTimeoutError, and_more
from paceline.routes import resolver_name

SHORTEST = timedelta(milliseconds=1)  # of gloo's time-outs, which count milliseconds
_ROUNDED_NS = 1_000_000  # by so much gloo's wait, in whole milliseconds, ends before its deadline
_COLLECTIVES_TAG = 0  # the program's messages have tags from 1 on


class GlooTransfer:
    """A message in progress; see `adapters.executor.Transfer`."""

    def __init__(self, work: c10d.Work) -> None:
        self._work = work

    def wait(self, deadline_ns: int) -> None:
        """Waits until the message has been sent or received, or the deadline of the monotonic clock has passed."""
        remaining = timedelta(microseconds=(deadline_ns - time.monotonic_ns()) / 1000)
        with translated(deadline_ns):
            self._work.wait(max(SHORTEST, remaining))


class GlooTransport:
    """The messages of schedules; see `adapters.executor.Wire`."""

    def __init__(self, group: c10d.ProcessGroupGloo) -> None:
        self._group = group

    def send(self, peer: int, address: int, nbytes: int) -> GlooTransfer:
        """Starts a send to a group rank."""
        return GlooTransfer(self._group.send([tensor_at(address, nbytes)], peer, _COLLECTIVES_TAG))

    def receive(self, peer: int, address: int, nbytes: int) -> GlooTransfer:
        """Starts a receive from a group rank."""
        return GlooTransfer(self._group.recv([tensor_at(address, nbytes)], peer, _COLLECTIVES_TAG))


@contextlib.contextmanager
def translated(deadline_ns: int) -> Iterator[None]:
    """Turns gloo's errors, which are all RuntimeErrors, into `CallTimeout` or `LibraryError`."""
    try:
        yield
    except RuntimeError as error:
        if time.monotonic_ns() >= deadline_ns - _ROUNDED_NS:
            raise CallTimeout from error
        raise LibraryError(str(error)) from error


_OPS = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.AVG: c10d.ReduceOp.SUM,
    ReduceOp.PREMUL_SUM: c10d.ReduceOp.SUM,
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
}
_REDUCED = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


class GlooChannel(SerialChannel):
    """A group's collectives over gloo.

    Args:
        group: torch's.
        store: what it was made with, and does not keep.
    """

    def __init__(
        self,
        group: c10d.ProcessGroupGloo,
        store: c10d.Store,
        diagnosis: FailureDiagnosis,
        rank: int,
        hosts: Sequence[Sequence[int]],
        algorithm: str | None,
    ) -> None:
        super().__init__(diagnosis)
        self._group = group
        self._store = store
        self._rank = rank
        self._size = sum(map(len, hosts))
        self._schedules = PythonExecutor(GlooTransport(group), rank, hosts, algorithm)
        self._by_schedule = algorithm is not None

    def perform(self, call: CollectiveCall) -> None:
        """Runs a call to its end."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        if call.operation != Operation.BARRIER and (self._by_schedule or not _has(call)):
            self._schedules.run(call, deadline_ns)
            return
        timeout = max(SHORTEST, timedelta(microseconds=call.timeout_ns / 1000))
        with translated(deadline_ns):
            _CALLS[call.operation](self, call, timeout)

    def _barrier(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.BarrierOptions()
        options.timeout = timeout
        self._group.barrier(options).wait()

    def _broadcast(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.BroadcastOptions()
        options.timeout, options.rootRank = timeout, call.root
        tensor = FlatBuffer(call.outputs).copy_in()
        self._group.broadcast([tensor.tensor()], options).wait()
        tensor.copy_out()

    def _all_reduce(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.AllreduceOptions()
        options.timeout, options.reduceOp = timeout, _OPS[ReduceOp(call.reduce_op)]
        tensor = FlatBuffer(call.outputs).copy_in()
        self._group.allreduce([tensor.tensor(DTYPES[call.dtype])], options).wait()
        self._divide(tensor.address, call)
        tensor.copy_out()

    def _reduce(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.ReduceOptions()
        options.timeout, options.reduceOp, options.rootRank = timeout, _OPS[ReduceOp(call.reduce_op)], call.root
        tensor = FlatBuffer(call.outputs).copy_in()
        values = tensor.tensor(DTYPES[call.dtype])
        if self._rank == call.root:
            self._group.reduce([values], options).wait()
            self._divide(tensor.address, call)
            tensor.copy_out()
        else:
            self._group.reduce([values.clone()], options).wait()  # gloo leaves partial sums there

    def _all_gather(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.AllgatherOptions()
        options.timeout = timeout
        outputs = [FlatBuffer([each]) for each in call.outputs]
        tensor = FlatBuffer(call.inputs).copy_in().tensor()
        self._group.allgather([[each.tensor() for each in outputs]], [tensor], options).wait()
        for each in outputs:
            each.copy_out()

    def _gather(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.GatherOptions()
        options.timeout, options.rootRank = timeout, call.root
        outputs = [FlatBuffer([each]) for each in call.outputs]
        written = [[each.tensor() for each in outputs]] if outputs else []
        self._group.gather(written, [FlatBuffer(call.inputs).copy_in().tensor()], options).wait()
        for each in outputs:
            each.copy_out()

    def _scatter(self, call: CollectiveCall, timeout: timedelta) -> None:
        options = c10d.ScatterOptions()
        options.timeout, options.rootRank = timeout, call.root
        inputs = [FlatBuffer([each]).copy_in() for each in call.inputs]
        output = FlatBuffer(call.outputs)
        read = [[each.tensor() for each in inputs]] if inputs else []
        self._group.scatter([output.tensor()], read, options).wait()
        output.copy_out()

    def _divide(self, address: int, call: CollectiveCall) -> None:
        if call.reduce_op == ReduceOp.AVG and call.count:
            _core.reduce(address, [address], call.count, call.dtype, ReduceOp.AVG, self._size)


_CALLS: dict[Operation, Callable[[GlooChannel, CollectiveCall, timedelta], None]] = {
    Operation.BARRIER: GlooChannel._barrier,
    Operation.BROADCAST: GlooChannel._broadcast,
    Operation.ALL_REDUCE: GlooChannel._all_reduce,
    Operation.REDUCE: GlooChannel._reduce,
    Operation.ALL_GATHER: GlooChannel._all_gather,
    Operation.GATHER: GlooChannel._gather,
    Operation.SCATTER: GlooChannel._scatter,
}


def _has(call: CollectiveCall) -> bool:
    """Whether gloo has the operation, and the reduction for the type."""
    if call.operation not in _CALLS or not call.count:
        return False
    if call.reduce_op == NO_REDUCTION:
        return True
    return call.reduce_op in _OPS and DTYPES[call.dtype] in _REDUCED


class GlooMessages:
    """Messages over gloo, each with its type and length in front."""

    def __init__(self, group: c10d.ProcessGroupGloo, diagnosis: FailureDiagnosis, rank: int) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._rank = rank
        self._recorder = GroupRecorder(diagnosis.members, rank)

    def record_messages_as(self, group: int, /) -> None:
        """Records the messages from now on as those of this group."""
        self._recorder.group = group

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """To a group rank."""
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        envelope = Envelope(dtype, tensor).fill()
        work = self._group.send([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, CallOutcome | None]:
            return peer, self._wait(work, peer, timeout_ns)

        return WaitedMessage(finish, recorded, background)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """From a group rank, or with -1 from any."""
        recorded = self._recorder.receive(peer, tag, dtype, tensor)
        envelope = Envelope(dtype, tensor)
        if peer < 0:
            work = self._group.recv_anysource([envelope.tensor], tag + 1)
        else:
            work = self._group.recv([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, CallOutcome | None]:
            failure = self._wait(work, peer, timeout_ns)
            source = peer if failure is not None or peer >= 0 else work._source_rank()
            return source, failure or envelope.open(source, self._rank)

        return WaitedMessage(finish, recorded, background)

    def _wait(self, work: c10d.Work, peer: int, timeout_ns: int) -> CallOutcome | None:
        started_ns = time.monotonic_ns()
        try:
            GlooTransfer(work).wait(started_ns + timeout_ns)
            return None
        except (CallTimeout, LibraryError) as error:
            said = "" if isinstance(error, CallTimeout) else str(error)
            return self._diagnosis.about_message(peer, said, time.monotonic_ns() - started_ns)


_MOST_NAMED = 8  # ranks in an error message

_THREADS = 2


def missing_piece() -> str | None:
    """Returns the fix if this torch lacks gloo, which nearly every torch has; None otherwise."""
    if c10d.is_gloo_available():
        return None
    return "this torch was built without gloo; install one from PyPI or pytorch.org"


def start(context: EngineContext) -> GlooEngine:
    """Starts the engine without any connection; each group opens its own."""
    return GlooEngine(context)


class _TorchStore(c10d.Store):
    """Paceline's store as gloo wants one."""

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key."""
        return self._store.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number."""
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all."""
        self._store.wait([self._prefix + key for key in keys], timeout)


class GlooEngine(LibraryEngine):
    """Opens groups over gloo, each with a ProcessGroupGloo of its own."""

    name = "gloo"

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> LibraryGroup:
        """Opens a group; see `engine.api.Engine`."""
        context = self._context
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address(context))]
        options._threads = _THREADS
        deadline = time.monotonic() + timeout_s
        gathering = self._gather(ranks, timeout_s, identity, algorithm)
        rank, diagnosis = gathering.group_rank, gathering.diagnosis
        options._timeout = max(SHORTEST, timedelta(seconds=deadline - time.monotonic()))
        store = _TorchStore(context.store, f"gloo/{identity}/")
        try:
            group = c10d.ProcessGroupGloo(store, rank, len(ranks), options)
        except RuntimeError as error:
            raise RendezvousTimeoutError(
                f"{gathering.members[rank]}: gloo did not connect the ranks [{and_more(ranks, _MOST_NAMED)}] within "
                f"{timeout_s:.0f} s ({error}); check the route and the firewall between the hosts, or choose an "
                f"interface with {IFACE_VARIABLE}"
            ) from error
        return self._keep(
            GlooChannel(group, store, diagnosis, rank, gathering.hosts, gathering.algorithm),
            GlooMessages(group, diagnosis, rank),
        )


def _address(context: EngineContext) -> str:
    """Gloo's connections are open to all who reach them, so on one host they stay on its loopback."""
    one_host = len({member.host for member in context.members}) == 1
    if one_host and not context.interface and _is_loopback(context.peer):
        return "127.0.0.1"
    return own_address(context.peer, context.interface)


def _is_loopback(peer: str | None) -> bool:
    if peer is None:
        return True
    address = socket.getaddrinfo(resolver_name(peer), None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address)).is_loopback
