"""The gloo engine, which uses torch's ProcessGroupGloo for CPU tensors and runs calls one at a time.

Operations that gloo lacks (reduce-scatter, all-to-all, and reductions of some dtypes) run as schedules over gloo's
messages. A message between two ranks begins with its dtype and length.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine.adapters.group_recorder import GroupRecorder, HasRecorder
from paceline.comm.engine.adapters.library_engine import FailureDiagnosis, LibraryEngine, by_host
from paceline.comm.engine.adapters.schedule_executor import PythonExecutor, divide_average, tensor_at
from paceline.comm.engine.adapters.serial_channel import (
    CallTimeout,
    Envelope,
    LibraryError,
    SerialChannel,
    WaitedMessage,
)
from paceline.comm.engine.api import EngineContext, OpenGroup
from paceline.comm.engine.channel import DTYPES, NO_REDUCTION, CallOutcome, CollectiveCall, Pieces, ReduceOp
from paceline.comm.engine.network_settings import IFACE_VARIABLE, own_address
from paceline.comm.engine.torch_backend.collectives import CallSettings, TorchReduction, start_barrier, start_call
from paceline.comm.engine.torch_backend.process_groups import TorchStore
from paceline.comm.one_port.dialer import resolver_name
from paceline.comm.schedule.steps import Operation
from paceline.errors import RendezvousTimeoutError, and_more

SHORTEST = timedelta(milliseconds=1)  # gloo's timeouts have a resolution of 1 ms
_ROUNDED_NS = 1_000_000  # gloo rounds the time to wait, so a wait may end this much before the deadline
_COLLECTIVES_TAG = 0  # the program's messages use tags >= 1


class GlooTransfer:
    """A message in progress; see `adapters.schedule_executor.BlockTransfer`."""

    def __init__(self, work: c10d.Work) -> None:
        self._work = work

    def wait(self, deadline_ns: int) -> None:
        """Waits for the message to complete, at most until the deadline (on the monotonic clock)."""
        remaining = timedelta(microseconds=(deadline_ns - time.monotonic_ns()) / 1000)
        with translated(deadline_ns):
            self._work.wait(max(SHORTEST, remaining))


class GlooTransport:
    """Messages used by schedules; see `adapters.schedule_executor.BlockTransport`."""

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
    """Converts gloo's errors, which are all RuntimeErrors, to `CallTimeout` or `LibraryError`."""
    try:
        yield
    except RuntimeError as error:
        if time.monotonic_ns() >= deadline_ns - _ROUNDED_NS:
            raise CallTimeout from error
        raise LibraryError(str(error)) from error


_OPS = {
    ReduceOp.SUM: c10d.ReduceOp.SUM,
    ReduceOp.AVG: c10d.ReduceOp.SUM,  # gloo has no average, so the sum is divided afterward
    ReduceOp.PREMUL_SUM: c10d.ReduceOp.SUM,
    ReduceOp.PRODUCT: c10d.ReduceOp.PRODUCT,
    ReduceOp.MIN: c10d.ReduceOp.MIN,
    ReduceOp.MAX: c10d.ReduceOp.MAX,
}
_REDUCED = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
_SCHEDULED = (Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL)
_CPU = torch.device("cpu")


class GlooChannel(SerialChannel):
    """Runs a group's collectives with gloo.

    Args:
        store: the group's store, kept alive because the group does not hold a reference to it.
        algorithm: the algorithm to force for all collectives, which then run as schedules; None uses gloo's own
            collectives where possible.
    """

    def __init__(
        self, group: c10d.ProcessGroupGloo, store: c10d.Store, diagnosis: FailureDiagnosis, algorithm: str | None
    ) -> None:
        super().__init__(diagnosis)
        self._group = group
        self._store = store
        self._schedules = PythonExecutor(GlooTransport(group), self._rank, by_host(diagnosis.members), algorithm)
        self._by_schedule = algorithm is not None

    def perform(self, call: CollectiveCall) -> None:
        """Runs a call to completion."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        if call.operation != Operation.BARRIER and (self._by_schedule or not _is_supported(call)):
            self._schedules.run(call, deadline_ns)
            return
        timeout = max(SHORTEST, timedelta(microseconds=call.timeout_ns / 1000))
        with translated(deadline_ns):
            if call.operation == Operation.BARRIER:
                start_barrier(self._group, timeout).wait()
                return
            reduction = None
            if call.reduce_op != NO_REDUCTION:
                reduction = TorchReduction(DTYPES[call.dtype], _OPS[ReduceOp(call.reduce_op)])
            started = start_call(self._group, call, CallSettings(self._rank, _CPU, timeout, reduction))
            assert started.work is not None
            started.work.wait()
        for result in started.written:
            if reduction is not None:
                divide_average(result.tensor().data_ptr(), call, self._size)
            result.copy_out()


def _is_supported(call: CollectiveCall) -> bool:
    """Returns True if gloo supports the operation and, for this dtype, the reduction."""
    if call.operation in _SCHEDULED or not call.count:
        return False
    if call.reduce_op == NO_REDUCTION:
        return True
    return call.reduce_op in _OPS and DTYPES[call.dtype] in _REDUCED


class GlooMessages(HasRecorder):
    """Messages over gloo; each begins with its dtype and length."""

    def __init__(self, group: c10d.ProcessGroupGloo, diagnosis: FailureDiagnosis) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._rank = diagnosis.rank
        self._recorder = GroupRecorder(diagnosis.members, diagnosis.rank)

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """Starts a send to a group rank."""
        recorded = self._recorder.send(peer, tag, dtype, tensor)
        envelope = Envelope(dtype, tensor).fill()
        work = self._group.send([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, CallOutcome | None]:
            return peer, self._wait(work, peer, timeout_ns)

        return WaitedMessage(finish, recorded, background)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """Starts a receive from a group rank, or from any rank if `peer` is -1."""
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
            detail = "" if isinstance(error, CallTimeout) else str(error)
            return self._diagnosis.about_message(peer, detail, time.monotonic_ns() - started_ns)


_MOST_NAMED = 8  # maximum number of ranks in an error message
_THREADS = 2


def missing_piece(name: str) -> str | None:
    """Describes the fix if this build of torch lacks gloo (which is rare); returns None otherwise."""
    if c10d.is_gloo_available():
        return None
    return "this torch was built without gloo; install one from PyPI or pytorch.org"


def start(name: str, context: EngineContext) -> GlooEngine:
    """Starts the engine. The ranks are not connected at this point; each group opens its own connections."""
    return GlooEngine(context)


class GlooEngine(LibraryEngine):
    """Opens groups, each with its own ProcessGroupGloo."""

    name = "gloo"

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> OpenGroup:
        """Opens a group; see `engine.api.Engine`."""
        context = self._context
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address(context))]
        options._threads = _THREADS
        deadline = time.monotonic() + timeout_s
        diagnosis, algorithm = self._gather(ranks, timeout_s, identity, algorithm)
        options._timeout = max(SHORTEST, timedelta(seconds=deadline - time.monotonic()))
        store = TorchStore(context.store, f"gloo/{identity}/")
        try:
            group = c10d.ProcessGroupGloo(store, diagnosis.rank, len(ranks), options)
        except RuntimeError as error:
            raise RendezvousTimeoutError(
                f"{diagnosis.members[diagnosis.rank]}: gloo did not connect the ranks "
                f"[{and_more(ranks, _MOST_NAMED)}] within {timeout_s:.0f} s ({error}); check the route and "
                f"the firewall between the hosts, or choose an interface with {IFACE_VARIABLE}"
            ) from error
        return self._keep(GlooChannel(group, store, diagnosis, algorithm), GlooMessages(group, diagnosis))


def _address(context: EngineContext) -> str:
    """Returns the address to bind; on a single host, this is loopback, because gloo does not authenticate peers."""
    one_host = len({member.host for member in context.members}) == 1
    if one_host and not context.interface and _is_loopback(context.peer):
        return "127.0.0.1"
    return own_address(context.peer, context.interface)


def _is_loopback(peer: str | None) -> bool:
    if peer is None:
        return True
    address = socket.getaddrinfo(resolver_name(peer), None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address)).is_loopback
