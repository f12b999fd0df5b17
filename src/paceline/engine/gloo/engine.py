"""The gloo engine: torch's own ProcessGroupGloo, made directly, without torch.distributed's groups.

What gloo lacks (reduce-scatter, all-to-all, and reductions of some types) goes by schedule over its messages.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

from paceline import _core
from paceline.engine.adapters.diagnosis import FailureDiagnosis
from paceline.engine.adapters.executor import PythonExecutor, Transfer
from paceline.engine.adapters.flat_buffer import FlatBuffer, tensor_at
from paceline.engine.adapters.members import announce_death, announce_leave, await_members, by_host
from paceline.engine.adapters.serial_channel import Call, CallTimeout, LibraryError, SerialChannel
from paceline.engine.adapters.waited_message import Envelope, WaitedMessage
from paceline.engine.api import EngineContext
from paceline.engine.channel import Outcome, Pieces
from paceline.engine.codes import DTYPES, Operation, ReduceCode
from paceline.engine.failures import Member
from paceline.engine.native.addresses import VARIABLE, own_address
from paceline.engine.native.scheduled import known_algorithm
from paceline.errors import RendezvousTimeoutError
from paceline.store.base import Store

_COLLECTIVES_TAG = 0  # the users' are one higher
_SHORTEST = timedelta(milliseconds=1)
_THREADS = 2
_OPS = {
    ReduceCode.SUM: c10d.ReduceOp.SUM,
    ReduceCode.AVG: c10d.ReduceOp.SUM,
    ReduceCode.PREMUL_SUM: c10d.ReduceOp.SUM,
    ReduceCode.PRODUCT: c10d.ReduceOp.PRODUCT,
    ReduceCode.MIN: c10d.ReduceOp.MIN,
    ReduceCode.MAX: c10d.ReduceOp.MAX,
}
_REDUCED = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


def missing_piece() -> str | None:
    """Gloo is part of torch, nearly always."""
    if c10d.is_gloo_available():
        return None
    return "this torch was built without gloo; install one from PyPI or pytorch.org"


def start(context: EngineContext) -> GlooEngine:
    """Connects nobody yet: groups do."""
    announce_death(context)
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


@dataclass(frozen=True)
class GlooGroup:
    """A group's ProcessGroupGloo."""

    channel: GlooChannel
    messages: GlooMessages

    def close(self) -> None:
        """Ends it; idempotent."""
        self.channel.close()


class GlooEngine:
    """Groups over gloo; see `engine.Engine`."""

    name = "gloo"

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._groups: list[GlooGroup] = []
        self._algorithm = known_algorithm(context.algorithm)

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks of the default group."""
        return self._context.members

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> GlooGroup:
        """See `engine.Engine`."""
        context = self._context
        members = [self.members[rank] for rank in ranks]
        group_rank = list(ranks).index(context.rank)
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address(context))]
        options._threads = _THREADS
        deadline = time.monotonic() + timeout_s
        await_members(context, f"gloo/{identity}", members, group_rank, timeout_s)
        options._timeout = max(_SHORTEST, timedelta(seconds=deadline - time.monotonic()))
        store = _TorchStore(context.store, f"gloo/{identity}/")
        try:
            group = c10d.ProcessGroupGloo(store, group_rank, len(ranks), options)
        except RuntimeError as error:
            raise RendezvousTimeoutError(
                f"{members[group_rank]}: gloo did not connect the ranks {list(ranks)} within {timeout_s:.0f} s "
                f"({error}); check the route and the firewall between the hosts, or choose an interface with {VARIABLE}"
            ) from error
        diagnosis = FailureDiagnosis(context.store, identity, members, group_rank)
        hosts = by_host(members)
        opened = GlooGroup(
            GlooChannel(group, store, diagnosis, group_rank, hosts, known_algorithm(algorithm) or self._algorithm),
            GlooMessages(group, diagnosis, group_rank),
        )
        self._groups.append(opened)
        return opened

    def close(self) -> None:
        """Ends every group; idempotent."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        announce_leave(self._context)


class GlooChannel(SerialChannel):
    """A group's collectives over gloo.

    Args:
        group: torch's.
        store: what it was made with, and does not keep.
    """

    def __init__(
        self,
        group: c10d.ProcessGroupGloo,
        store: _TorchStore,
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
        self._schedules = PythonExecutor(_GlooWire(group), rank, hosts, algorithm)
        self._by_schedule = algorithm is not None

    def perform(self, call: Call) -> None:
        """Runs a call to its end."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        if call.operation != Operation.BARRIER and (self._by_schedule or not _has(call)):
            self._schedules.run(call, deadline_ns)
            return
        timeout = max(_SHORTEST, timedelta(microseconds=call.timeout_ns / 1000))
        with _translated(deadline_ns):
            _CALLS[Operation(call.operation)](self, call, timeout)

    def _barrier(self, call: Call, timeout: timedelta) -> None:
        options = c10d.BarrierOptions()
        options.timeout = timeout
        self._group.barrier(options).wait()

    def _broadcast(self, call: Call, timeout: timedelta) -> None:
        options = c10d.BroadcastOptions()
        options.timeout, options.rootRank = timeout, call.root
        tensor = FlatBuffer(call.outputs).copy_in()
        self._group.broadcast([tensor.tensor()], options).wait()
        tensor.copy_out()

    def _all_reduce(self, call: Call, timeout: timedelta) -> None:
        options = c10d.AllreduceOptions()
        options.timeout, options.reduceOp = timeout, _OPS[ReduceCode(call.reduce_op)]
        tensor = FlatBuffer(call.outputs).copy_in()
        self._group.allreduce([tensor.tensor(DTYPES[call.dtype])], options).wait()
        self._divide(tensor.address, call)
        tensor.copy_out()

    def _reduce(self, call: Call, timeout: timedelta) -> None:
        options = c10d.ReduceOptions()
        options.timeout, options.reduceOp, options.rootRank = timeout, _OPS[ReduceCode(call.reduce_op)], call.root
        tensor = FlatBuffer(call.outputs).copy_in()
        values = tensor.tensor(DTYPES[call.dtype])
        if self._rank == call.root:
            self._group.reduce([values], options).wait()
            self._divide(tensor.address, call)
            tensor.copy_out()
        else:
            self._group.reduce([values.clone()], options).wait()  # gloo leaves partial sums there

    def _all_gather(self, call: Call, timeout: timedelta) -> None:
        options = c10d.AllgatherOptions()
        options.timeout = timeout
        outputs = [FlatBuffer([each]) for each in call.outputs]
        tensor = FlatBuffer(call.inputs).copy_in().tensor()
        self._group.allgather([[each.tensor() for each in outputs]], [tensor], options).wait()
        for each in outputs:
            each.copy_out()

    def _gather(self, call: Call, timeout: timedelta) -> None:
        options = c10d.GatherOptions()
        options.timeout, options.rootRank = timeout, call.root
        outputs = [FlatBuffer([each]) for each in call.outputs]
        written = [[each.tensor() for each in outputs]] if outputs else []
        self._group.gather(written, [FlatBuffer(call.inputs).copy_in().tensor()], options).wait()
        for each in outputs:
            each.copy_out()

    def _scatter(self, call: Call, timeout: timedelta) -> None:
        options = c10d.ScatterOptions()
        options.timeout, options.rootRank = timeout, call.root
        inputs = [FlatBuffer([each]).copy_in() for each in call.inputs]
        output = FlatBuffer(call.outputs)
        read = [[each.tensor() for each in inputs]] if inputs else []
        self._group.scatter([output.tensor()], read, options).wait()
        output.copy_out()

    def _divide(self, address: int, call: Call) -> None:
        if call.reduce_op == ReduceCode.AVG and call.count:
            _core.reduce(address, [address], call.count, call.dtype, ReduceCode.AVG, self._size)


_CALLS: dict[Operation, Callable[[GlooChannel, Call, timedelta], None]] = {
    Operation.BARRIER: GlooChannel._barrier,
    Operation.BROADCAST: GlooChannel._broadcast,
    Operation.ALL_REDUCE: GlooChannel._all_reduce,
    Operation.REDUCE: GlooChannel._reduce,
    Operation.ALL_GATHER: GlooChannel._all_gather,
    Operation.GATHER: GlooChannel._gather,
    Operation.SCATTER: GlooChannel._scatter,
}


def _has(call: Call) -> bool:
    """Whether gloo has the operation, and the reduction for the type."""
    if call.operation not in _CALLS or not call.count:
        return False
    if call.reduce_op == ReduceCode.NONE:
        return True
    return call.reduce_op in _OPS and DTYPES[call.dtype] in _REDUCED


class GlooMessages:
    """Messages over gloo, each with its type and length in front."""

    def __init__(self, group: c10d.ProcessGroupGloo, diagnosis: FailureDiagnosis, rank: int) -> None:
        self._group = group
        self._diagnosis = diagnosis
        self._rank = rank

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """To a group rank."""
        envelope = Envelope(dtype, tensor).fill()
        work = self._group.send([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, Outcome | None]:
            return peer, self._wait(work, peer, timeout_ns)

        return WaitedMessage(finish, background)

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> WaitedMessage:
        """From a group rank, or with -1 from any."""
        envelope = Envelope(dtype, tensor)
        if peer < 0:
            work = self._group.recv_anysource([envelope.tensor], tag + 1)
        else:
            work = self._group.recv([envelope.tensor], peer, tag + 1)

        def finish() -> tuple[int, Outcome | None]:
            failure = self._wait(work, peer, timeout_ns)
            source = peer if failure is not None or peer >= 0 else work._source_rank()
            return source, failure or envelope.open(source, self._rank)

        return WaitedMessage(finish, background)

    def _wait(self, work: c10d.Work, peer: int, timeout_ns: int) -> Outcome | None:
        started_ns = time.monotonic_ns()
        try:
            _GlooTransfer(work).wait(started_ns + timeout_ns)
            return None
        except (CallTimeout, LibraryError) as error:
            said = "" if isinstance(error, CallTimeout) else str(error)
            return self._diagnosis.about_message(peer, said, time.monotonic_ns() - started_ns)


class _GlooTransfer:
    def __init__(self, work: c10d.Work) -> None:
        self._work = work

    def wait(self, deadline_ns: int) -> None:
        left = timedelta(microseconds=(deadline_ns - time.monotonic_ns()) / 1000)
        with _translated(deadline_ns):
            self._work.wait(max(_SHORTEST, left))


class _GlooWire:
    def __init__(self, group: c10d.ProcessGroupGloo) -> None:
        self._group = group

    def send(self, peer: int, address: int, nbytes: int) -> Transfer:
        return _GlooTransfer(self._group.send([tensor_at(address, nbytes)], peer, _COLLECTIVES_TAG))

    def receive(self, peer: int, address: int, nbytes: int) -> Transfer:
        return _GlooTransfer(self._group.recv([tensor_at(address, nbytes)], peer, _COLLECTIVES_TAG))


@contextlib.contextmanager
def _translated(deadline_ns: int) -> Iterator[None]:
    """Gloo's errors are all RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        if time.monotonic_ns() >= deadline_ns:
            raise CallTimeout from error
        raise LibraryError(str(error)) from error


def _address(context: EngineContext) -> str:
    """Gloo's connections are open to all who reach them, so on one host they stay on its loopback."""
    one_host = len({member.host for member in context.members}) == 1
    if one_host and not context.interface and _is_loopback(context.peer):
        return "127.0.0.1"
    return own_address(context.peer, context.interface)


def _is_loopback(peer: str | None) -> bool:
    if peer is None:
        return True
    address = socket.getaddrinfo(peer, None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address)).is_loopback
