"""A process group: its ranks, and the collectives on lists of tensors which the public calls use.

What `explain` prints: the algorithm that a group uses for a call.

A group that is open: it runs collectives on the engine of their device, and reports why one failed.

Sends and receives of lists of tensors.

Sums in the order of the pairwise tree over ranks.

The shortest way of a call: synchronous, on plain tensors on the CPU.

Most calls are of that kind, and where tensors are small, checking and describing them takes longer than moving them. So
what every call must check is checked here without functions of Python for each tensor, and the engine gets addresses.
Whatever is unusual about a call, and whatever is wrong with it, is left to `planning.py` and `RunningGroup._run`.

The methods of torch.distributed's ProcessGroup, through which hooks and programs for torch call a group.

They take torch's option objects, or the arguments that stand for them, and return a `Work` at once. Tensors come in
lists; those in one list are reduced or sent as if they were one tensor. Methods whose names `ProcessGroup` has anyway,
such as `broadcast`, accept both forms of arguments.

A group that rounds what its sums send between hosts, unless a call says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import is_
from typing import Literal

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.comm.engine.api import OpenGroup
from paceline.comm.engine.channel import CallOutcome, CollectiveCall, EngineChannel, HeaderFields, Pending
from paceline.comm.engine.codes import DTYPE_CODES, ITEM_SIZES, NO_REDUCTION, ReduceOp, Reduction, dtype_name
from paceline.comm.engine.failures import GROUP_LOST, MESSAGES_LOST, OutcomeCode, RankIdentity, describe_call, to_error
from paceline.comm.engine.native.scheduled_channel import ScheduledChannel
from paceline.comm.engine.network_settings import ALGORITHM_VARIABLE
from paceline.comm.group.buffers import (
    Buffers,
    Tensors,
    address_of,
    as_list,
    count_elements,
    count_writes,
    counting_writes,
    dtype_code,
    is_plain,
)
from paceline.comm.group.call_plan import (
    QUICK_CODES,
    BaseGroup,
    CallPlan,
    TorchOptions,
    are_options,
    checked_tag,
    one_list,
    parts_by_rank,
    plan_all_gather,
    plan_all_reduce,
    plan_all_to_all,
    plan_barrier,
    plan_broadcast,
    plan_gather,
    plan_reduce,
    plan_reduce_scatter,
    plan_scatter,
    reduction_of,
    require_peer,
    require_root,
    rows_by_rank,
    time_limit,
)
from paceline.comm.group.compression import Wire, WireKind, WireLike, is_quantisable, with_wire
from paceline.comm.group.engines import Devices, Opener
from paceline.comm.group.variable_size import all_gather_pieces, all_reduce_sparse, as_memory, as_tensor, empty_buffers
from paceline.comm.group.work import ProfiledCall, Work, ended
from paceline.comm.record import recorder
from paceline.comm.schedule.cost import explain_text
from paceline.comm.schedule.quantised import WIRES
from paceline.comm.schedule.steps import Operation
from paceline.durations import Timeout, to_nanoseconds, to_seconds
from paceline.errors import CollectiveError, CollectiveTimeoutError


def explain_choice(channel: EngineChannel, backend: str, size: int, name: str, nbytes: int) -> str:
    """Returns which algorithm a group of `size` ranks on `channel` uses for a call of `nbytes`, and why.

    Raises:
        ValueError: there is no operation of that name.
    """
    try:
        operation = Operation.named(name)
    except ValueError as error:
        raise ValueError(f"explain: {error}") from None
    if isinstance(channel, ScheduledChannel):
        return explain_text(channel.choose(operation, nbytes))
    call = f"{operation} of {nbytes:,} bytes on {size} ranks"
    if not backend.endswith("paceline"):
        return f"{call}: the library of {backend!r} chooses\n"
    return (
        f"{call}, 1 host\n\n"
        "-> direct: every rank reads the others' parts out of shared memory, so nothing is passed on.\n\n"
        f"An algorithm runs here only when it is forced (algorithm=, or {ALGORITHM_VARIABLE}).\n"
    )


class RunningGroup(BaseGroup):
    """A group's ranks and its engines for each type of device, on which all collectives run.

    Args:
        opened: the group for CPU tensors.
        members: the ranks of the group with their hosts and processes, in the order of their group ranks.
        group_rank: this process's rank among them.
        timeout: how long calls wait for the other ranks.
        name: the group's name in messages.
        backend: what `get_backend` returns.
        openers: functions that open the group for other devices, by the device's type.
        advice: what errors advise about a tensor on a device without an opener; by default they name an engine.
        everybody: the members of the group's engine, not all of whom need be in the group; by default the group's.
        identity: the same on all members, for the recording; 0 if they share none.
    """

    def __init__(
        self,
        opened: OpenGroup,
        members: Sequence[RankIdentity],
        group_rank: int,
        timeout: Timeout,
        name: str,
        backend: str = "paceline",
        openers: Mapping[str, Opener] | None = None,
        advice: str = "",
        everybody: Sequence[RankIdentity] = (),
        identity: int = 0,
    ) -> None:
        self.ranks = [member.rank for member in members]
        self.name = name
        self.backend = backend
        self.profiled_as = "paceline"  # a profile's events are named `paceline:all_reduce` and so on
        recorder.begin()
        recorder.identify_once(self.ranks[group_rank], len(everybody or members))
        ranks = self.ranks

        def record(on_device: OpenGroup, device_type: str) -> int:
            serial = recorder.open_group(name, f"{backend} on {device_type}", identity, group_rank, ranks)
            on_device.record_as(serial)
            return serial

        self._devices = Devices(opened, openers or {}, backend, record, advice)
        self._channel = opened.channel
        self._members = list(members)
        self._everybody = everybody
        self._rank = group_rank
        self._closed = False
        self._closed_why = (
            "this process group was destroyed (destroy_process_group); "
            "make a new one with init_process_group or new_group"
        )
        self._abandoned: list[Buffers] = []
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name or 'default'}, rank {self._rank} of {len(self.ranks)})"

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return len(self.ranks)

    @property
    def me(self) -> RankIdentity:
        """Returns this rank with its host and process, which messages show as "rank 3 (host, pid 4711)"."""
        return self._members[self._rank]

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """Returns the ranks with their hosts and processes, in the order of their group ranks."""
        return tuple(self._members)

    @property
    def device_types(self) -> frozenset[str]:
        """Returns the types of the devices whose tensors the group's calls take, such as "cpu" and "cuda"."""
        return self._devices.types

    @property
    def on_cpu(self) -> OpenGroup:
        """Returns the engine's group for CPU tensors."""
        return self._devices.of([], "")

    @property
    def timeout(self) -> timedelta:
        """Returns how long a call waits for the other ranks."""
        return timedelta(microseconds=self.timeout_ns / 1000)

    @property
    def is_closed(self) -> bool:
        """Returns whether this rank has ended the group."""
        return self._closed

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets `timeout` for later calls."""
        self.timeout_ns = to_nanoseconds(timeout)

    def abort(self) -> None:
        """Ends every call of the group on all its ranks, now and later, with a `GroupAbortedError`.

        Any thread may call this while others wait in calls of the group; it does not wait for the other ranks. It is
        meant for a thread that learns that the group cannot go on, for instance because a rank has to be replaced.
        `close` must still follow. With the engines "gloo", "mpi" and "nccl" it ends calls of this rank only, and with
        the first two not before the call's time-out.
        """
        self._devices.abort()

    def failure(self) -> OutcomeCode:
        """Returns why the group can no longer be used, as far as this rank knows without a call; OK while it can."""
        return OutcomeCode(self._devices.failure())

    def close_with_reason(self, why: str) -> None:
        """Ends the group for this rank; later calls fail with an error that says why."""
        self._closed_why = why
        self.close()

    def close(self) -> None:
        """Ends the group for this rank; idempotent."""
        self._closed = True
        self._devices.close()

    def _run(self, plan: CallPlan, async_op: bool | None) -> Work | None:
        """Makes a planned call on the engine of the device of its tensors.

        Args:
            plan: the call and its buffers.
            async_op: if None, the call waits as with False, and returns a finished `Work` as torch's methods do.
        """
        if self._closed:
            raise self.closed_error()
        call, buffers = plan
        recording = self.recording(str(call.operation), _shown(plan)) if profiler._is_profiler_enabled else None
        channel = self._channel_of(call, buffers)
        if async_op:
            work = self.work_of(channel.submit(call), plan)
            if recording is not None:
                recording.end_with(work)
            return work
        count_writes(self.written_by(plan))
        outcome = channel.run(call)
        if recording is not None:
            recording.end()
        if outcome is not None:
            raise self.abandon(outcome, plan)
        if buffers.finish is not None:
            buffers.finish()
        return Work(None, str(call.operation), buffers.kept, results=buffers.written) if async_op is None else None

    def prepare(self, plan: CallPlan) -> _core.PreparedCall | None:
        """Returns the planned call for being made many times; None if the engine gains nothing by that.

        The call reads and writes the buffers where they are now, and nothing is copied back.
        """
        if self._closed:
            raise self.closed_error()
        call, buffers = plan
        return self._channel_of(call, buffers).prepare(call)

    def recording(self, call: str, tensors: Sequence[torch.Tensor]) -> ProfiledCall:
        """Begins the event of a call in the profile that is being recorded."""
        return ProfiledCall(f"{self.profiled_as}:{call}", tensors)

    def _channel_of(self, call: CollectiveCall, buffers: Buffers) -> EngineChannel:
        channel = self._devices.of(buffers.kept, call.operation).channel
        if call.wire and not channel.quantises:
            raise ValueError(self._no_wire(WIRES[call.wire - 1]))
        return channel

    def _no_wire(self, wire: str) -> str:
        return (
            f"rank {self.me.rank}: wire={wire!r} needs CPU tensors and the engine 'paceline', also between the hosts; "
            f"this group's backend is {self.backend!r}. Leave wire out, or make the group with backend='paceline' and "
            "without between_hosts"
        )

    def work_of(self, pending: Pending, plan: CallPlan) -> Work:
        """Returns the `Work` of a planned call that has been submitted."""
        call, buffers = plan
        written = self.written_by(plan)
        count_writes(written)  # when it begins, and also when it ends: the program may have kept a tensor in between
        return Work(
            pending,
            str(call.operation),
            buffers.kept,
            counting_writes(written, buffers.finish),
            lambda outcome: self.abandon(outcome, plan),
            buffers.written,
        )

    def written_by(self, plan: CallPlan) -> Sequence[torch.Tensor]:
        """Returns the tensors that a call writes to."""
        call, buffers = plan
        return () if call.operation is Operation.BROADCAST and call.root == self._rank else buffers.written

    def limit_ns(self, timeout: Timeout | None) -> int:
        """Returns how long a call with this argument waits, in nanoseconds."""
        return self.timeout_ns if timeout is None else to_nanoseconds(timeout)

    def abandon(self, outcome: CallOutcome, plan: CallPlan) -> CollectiveError:
        """Returns the error of a call; keeps its buffers alive if a library may write to them after a time-out."""
        call, buffers = plan
        if outcome.code == OutcomeCode.TIMED_OUT and not self._abandoned:
            self._abandoned.append(buffers)
        count = call.count
        if call.operation is Operation.ALL_TO_ALL:  # the ranks' numbers of elements differ
            count = sum(sum(pieces[1::2]) for pieces in call.inputs) // ITEM_SIZES[call.dtype]
        return self._error(outcome, (0, call.operation, call.dtype, call.reduce_op, call.root, count))

    def _error(self, outcome: CallOutcome, header: HeaderFields) -> CollectiveError:
        return self._failed(outcome, describe_call(header).rsplit(" as call", 1)[0])

    def _failed(self, outcome: CallOutcome, call: str, lost: str = GROUP_LOST) -> CollectiveError:
        error = to_error(outcome, self._members, self._rank, call, lost, self._everybody)
        if isinstance(error, CollectiveTimeoutError):
            # All ranks receive the same verdict, so on a rank that was late `outcome.missing` lists that rank too.
            error.missing = tuple(self.ranks[at] for at in outcome.missing if at != self._rank)
        return error

    def closed_error(self) -> ValueError:
        """Returns the error of a call that is made after the group's end."""
        return ValueError(f"rank {self.me.rank}: {self._closed_why}")


def _shown(plan: CallPlan) -> list[torch.Tensor]:
    """Returns the tensors that a profile shows: the inputs, or the tensors that the call changes in place."""
    call, buffers = plan
    return buffers.kept[: sum(len(flat) // 2 for flat in call.inputs)] or buffers.kept


ANY_SOURCE = -1


class MessagingGroup(RunningGroup):
    """A group with messages between two of its ranks."""

    def send(
        self, tensors: Tensors, dst: int, tag: int = 0, async_op: bool = True, timeout: Timeout | None = None
    ) -> Work | None:
        """Sends `tensors` to group rank `dst`, whose `recv` of the same tag, type and number of elements takes them."""
        work = self._pass("send", as_list(tensors, "send"), dst, tag, async_op, timeout)
        return work if async_op else None

    def recv(
        self,
        tensors: Tensors,
        src: int = ANY_SOURCE,
        tag: int = 0,
        async_op: bool = True,
        timeout: Timeout | None = None,
    ) -> Work:
        """Receives into `tensors` what group rank `src`, or with -1 any rank, sends with the same tag.

        The work's `source_rank()` is the sender's group rank.
        """
        return self._pass("recv", as_list(tensors, "recv"), src, tag, async_op, timeout)

    def _pass(
        self,
        name: Literal["send", "recv"],
        tensors: list[torch.Tensor],
        peer: int,
        tag: int,
        background: bool,
        timeout: Timeout | None,
    ) -> Work:
        """Starts a message, and without `background` waits for it."""
        if self._closed:
            raise self.closed_error()
        if name == "send" or peer != ANY_SOURCE:
            require_peer(self, peer, name, "dst" if name == "send" else "src")
        checked_tag(tag, name)
        code = dtype_code(tensors, name)
        buffers = Buffers()
        pieces = buffers.read(tensors) if name == "send" else buffers.write(tensors)
        shown = "recvAnySource" if peer < 0 else name
        recording = self.recording(shown, tensors) if profiler._is_profiler_enabled else None
        opened = self._devices.of(tensors, name)
        messages = opened.messages
        lost = MESSAGES_LOST if isinstance(opened.channel, _core.HostGroup) else GROUP_LOST
        start = messages.send if name == "send" else messages.receive
        count_writes(buffers.written)
        message = start(peer, tag, code, pieces, self.limit_ns(timeout), background)
        other_end = _other_end(self._members, name, peer)
        call = f"{name}({dtype_name(code)}, {count_elements(tensors)} elements, {other_end}, tag {tag})"

        work = Work(
            message,
            name,
            buffers.kept,
            counting_writes(buffers.written, buffers.finish),
            lambda outcome: self._failed(outcome, call, lost),
            results=tensors,
        )
        if background:
            if recording is not None:
                recording.end_with(work)
            return work
        try:
            work.wait()
        finally:
            if recording is not None:
                recording.end()
        return work


def _other_end(members: Sequence[RankIdentity], name: str, peer: int) -> str:
    if peer < 0:
        return "from any rank"
    return f"{'to' if name == 'send' else 'from'} rank {members[peer].rank}"


_ROUNDED_ONCE = (torch.float16, torch.bfloat16)  # the core adds them in float32


class TreeSummingGroup(MessagingGroup):
    """A group that can add its ranks' tensors in an order which does not depend on the engine."""

    def sums_as_tree(self, tensor: torch.Tensor) -> bool:
        """Returns whether `sum_as_tree` takes a tensor like this one; the same on all ranks."""
        # The core follows the tree on one host. Schedules add in their own order, and so do the other engines.
        return isinstance(self._channel, _core.HostGroup) and tensor.is_cpu and tensor.dtype not in _ROUNDED_ONCE

    def sum_as_tree(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """Adds up the ranks' `inputs` into `outputs` in the order ((0 1) (2 3)) ((4 5) ...); every sum is rounded.

        Args:
            outputs: tensors with the shapes and the dtype of the inputs: the same tensors, or others in memory of their
                own.
            inputs: tensors of one dtype that `sums_as_tree`, which otherwise do not change.
        """
        code = dtype_code([*inputs, *outputs], "sum_as_tree")
        buffers = Buffers()
        in_place = all(map(is_, inputs, outputs))
        read = [] if in_place else [buffers.read(inputs)]
        written = [buffers.write(outputs)]
        count = count_elements(inputs)
        call = CollectiveCall(Operation.ALL_REDUCE, code, ReduceOp.SUM, -1, count, self.timeout_ns, read, written)
        self._run((call, buffers), False)


_STRIDED = torch.strided
_NONE = object()  # stands for the reduction of an operation that has none


class PlainCallsGroup(TreeSummingGroup):
    """A group that makes calls on plain tensors by the shortest way."""

    def fast_all_reduce(self, tensor: object, op: object) -> CallOutcome | Literal[False] | None:
        """Does what a channel's `all_reduce_tensor` does, for all channels and with every version of PyTorch."""
        if not isinstance(tensor, torch.Tensor) or not isinstance(op, ReduceOp):
            return False
        quick = QUICK_CODES.get(tensor.dtype)
        if quick is None or not tensor.is_cpu or tensor.layout is not _STRIDED:
            return False
        code, reduce_code = quick[0], quick[1][op]
        if reduce_code < 0 or not tensor.is_contiguous() or tensor.is_neg():
            return False
        if self._closed:
            raise self.closed_error()
        count_writes((tensor,))
        return self._channel.all_reduce(address_of(tensor), tensor.numel(), code, reduce_code, self.timeout_ns)

    def try_fast_call(
        self,
        operation: Operation,
        dtype: torch.dtype,
        count: int,
        inputs: Sequence[object],
        outputs: Sequence[object],
        parts: tuple[int, int],
        *,
        op: object = _NONE,
        root: int = -1,
        are_whole: bool = False,
    ) -> bool:
        """Makes the call and returns True if its tensors are plain; otherwise does nothing and returns False.

        Args:
            operation: any but all_reduce and broadcast, whose ways are shorter still.
            dtype: the type of all tensors.
            count: the number of elements of a part.
            inputs, outputs: the tensors.
            parts: how many parts there must be among the inputs, and among the outputs.
            op: the reduction, if the operation has one.
            root: the group rank of the root, if the operation has one.
            are_whole: all parts of the inputs are in one tensor, and so are those of the outputs; otherwise each part
                is a tensor.
        """
        quick = None if profiler._is_profiler_enabled else QUICK_CODES.get(dtype)
        if quick is None:
            return False
        reduce_code = NO_REDUCTION
        if op is not _NONE:
            reduce_code = quick[1][op] if isinstance(op, ReduceOp) else -1
            if reduce_code < 0:
                return False
        nbytes = count * ITEM_SIZES[quick[0]]
        read = _addresses(inputs, dtype, nbytes, parts[0], are_whole)
        written = _addresses(outputs, dtype, nbytes, parts[1], are_whole)
        if read is None or written is None:
            return False
        if operation is not Operation.REDUCE or root == self._rank:
            count_writes(outputs)
        self._run_equal(operation, quick[0], reduce_code, root, count, nbytes, read, written, (*inputs, *outputs))
        return True

    def try_fast_all_gather(self, whole: torch.Tensor, part: torch.Tensor) -> bool:
        """Makes an all_gather into one tensor; see `try_fast_call`."""
        parts = (1, self.size())
        operation = Operation.ALL_GATHER
        return self.try_fast_call(operation, part.dtype, part.numel(), (part,), (whole,), parts, are_whole=True)

    def try_fast_reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, op: object) -> bool:
        """Makes a reduce_scatter of one tensor; see `try_fast_call`."""
        parts = (self.size(), 1)
        operation = Operation.REDUCE_SCATTER
        return self.try_fast_call(operation, part.dtype, part.numel(), (whole,), (part,), parts, op=op, are_whole=True)

    def try_fast_all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Makes an all_to_all of equal parts of two tensors; see `try_fast_call`."""
        ranks = self.size()
        if input.dim() == 0 or output.dim() == 0 or input.shape[0] % ranks or output.shape[0] % ranks:
            return False
        count = input.numel() // ranks
        operation = Operation.ALL_TO_ALL
        return self.try_fast_call(operation, input.dtype, count, (input,), (output,), (ranks, ranks), are_whole=True)

    def try_fast_barrier(self) -> bool:
        """Waits for all ranks and returns True unless a profiler watches; then does nothing and returns False."""
        if profiler._is_profiler_enabled:
            return False
        self._run_equal(Operation.BARRIER, 0, NO_REDUCTION, -1, 0, 0, [], [], ())
        return True

    def _run_equal(
        self,
        operation: Operation,
        code: int,
        reduce_code: int,
        root: int,
        count: int,
        nbytes: int,
        read: list[int],
        written: list[int],
        kept: Sequence[object],
    ) -> None:
        if self._closed:
            raise self.closed_error()
        limit_ns = self.timeout_ns
        outcome = self._channel.run_equal(operation, code, reduce_code, root, count, limit_ns, read, written)
        if outcome is not None:
            inputs, outputs = ([[address, nbytes] for address in addresses] for addresses in (read, written))
            call = CollectiveCall(operation, code, reduce_code, root, count, limit_ns, inputs, outputs)
            raise self._abandon(outcome, call, kept)

    def run_on_cpu(self, call: CollectiveCall, kept: Sequence[torch.Tensor]) -> None:
        """Makes a call that writes to `kept`, tensors on the CPU that its caller has checked; no profiler may watch."""
        if self._closed:
            raise self.closed_error()
        count_writes(kept)
        outcome = self._channel.run(call)
        if outcome is not None:
            raise self._abandon(outcome, call, kept)

    def _abandon(self, outcome: CallOutcome, call: CollectiveCall, kept: Sequence[object]) -> CollectiveError:
        buffers = Buffers()
        buffers.kept += [each for each in kept if isinstance(each, torch.Tensor)]
        return self.abandon(outcome, (call, buffers))


def _addresses(
    tensors: Sequence[object], dtype: torch.dtype, nbytes: int, parts: int, are_whole: bool
) -> list[int] | None:
    """Returns the addresses of the parts, each of which has `nbytes` bytes; None if one is not plain or does not fit.

    The dtype is not complex, so that no tensor is a conjugate view.
    """
    if not isinstance(tensors, (list, tuple)) or len(tensors) != (1 if are_whole else parts):
        return None
    found: list[int] = []
    wanted = nbytes * parts if are_whole else nbytes
    for tensor in tensors:
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.dtype is not dtype
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or tensor.nbytes != wanted
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        found.append(address_of(tensor))
    return [found[0] + part * nbytes for part in range(parts)] if are_whole else found


class TorchMethods(BaseGroup):
    """The base class from which `ProcessGroup` inherits these methods."""

    @property
    def group_name(self) -> str:
        """The name that the group was created with, for messages."""
        return self.name

    group_desc = group_name

    def shutdown(self) -> None:
        """Ends the group for this rank, as `destroy_process_group(group)` does."""
        self.close()

    def monitored_barrier(self, timeout: Timeout | None = None, wait_all_ranks: bool = False) -> None:
        """Does what `paceline.monitored_barrier` does."""
        try:
            self.barrier(False, timeout)
        except CollectiveTimeoutError as error:
            missing = error.missing
            if not missing:
                raise
            waited_s = to_seconds(self.timeout if timeout is None else timeout)
            named = f"ranks {list(missing)}" if wait_all_ranks and len(missing) > 1 else f"rank {missing[0]}"
            if not wait_all_ranks and len(missing) > 1:
                named += f" and {len(missing) - 1} more (wait_all_ranks=True names them)"
            told = CollectiveTimeoutError(f"monitored_barrier: {named} did not come within {waited_s:g} s. {error}")
            told.missing = missing
            raise told from None

    def allreduce(
        self,
        tensors: Tensors,
        opts: Reduction | TorchOptions | None = None,
        timeout: Timeout | None = None,
        *,
        op: Reduction | None = None,
    ) -> Work:
        """Reduces the tensors over all ranks, in place."""
        reduction, limit = reduction_of(opts if op is None else op), time_limit(opts, timeout)
        return _running(self.all_reduce(_only(tensors), reduction, True, limit))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: TorchOptions | None = None) -> Work:
        """Reduces tensors of several types over all ranks, in place."""
        reduction, limit = reduction_of(opts), time_limit(opts)
        works = [self.all_reduce(each, reduction, True, limit) for each in tensors]
        return _running(ended(works, "allreduce_coalesced", tensors))

    def allgather(
        self,
        output_tensors: Sequence[Tensors],
        input_tensors: Tensors,
        opts: TorchOptions | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copies every rank's tensor to all ranks, into the entries of the only list in `output_tensors`."""
        outputs = one_list(output_tensors, "allgather")
        return _running(self.all_gather(outputs, _only(input_tensors), True, time_limit(opts, timeout)))

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[torch.Tensor]],
        input_list: Sequence[torch.Tensor],
        opts: TorchOptions | None = None,
    ) -> Work:
        """Copies every rank's tensors to all ranks: `output_lists[r]` receives those of rank r."""
        written = [output for outputs in output_lists for output in outputs]
        columns = zip(*output_lists, strict=True)
        works = [
            self.all_gather(list(column), tensor, True, time_limit(opts))
            for column, tensor in zip(columns, input_list, strict=True)
        ]
        return _running(ended(works, "allgather_coalesced", written))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: TorchOptions | None = None) -> Work:
        """Copies every rank's tensor into one tensor on all ranks, concatenated in rank order."""
        parts = parts_by_rank(output, input.numel(), self, "all_gather_single", "output")
        work = self.all_gather(parts, input, True, time_limit(opts))
        return _running(ended([work], "all_gather_single", [output]))

    def all_gather_single_coalesced(
        self, output_list: Sequence[torch.Tensor], input_list: Sequence[torch.Tensor], opts: TorchOptions | None = None
    ) -> Work:
        """Does what `all_gather_single` does, for several tensors."""
        pairs = zip(output_list, input_list, strict=True)
        works = [self.all_gather_single(output, tensor, opts) for output, tensor in pairs]
        return _running(ended(works, "all_gather_single_coalesced", output_list))

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: TorchOptions | None = None
    ) -> Work:
        """Reduces the ranks' tensors and gives each rank its part; the parts are concatenated in rank order."""
        parts = parts_by_rank(input, output.numel(), self, "reduce_scatter_single", "input")
        return _running(self.reduce_scatter(output, parts, reduction_of(opts), True, time_limit(opts)))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: TorchOptions | None = None
    ) -> Work:
        """Does what `reduce_scatter_single` does, for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, tensor, opts) for output, tensor in pairs]
        return _running(ended(works, "reduce_scatter_single_coalesced", outputs))

    def alltoall(
        self,
        output_tensors: Sequence[torch.Tensor],
        input_tensors: Sequence[torch.Tensor],
        opts: TorchOptions | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copies `input_tensors[r]` to rank r."""
        return _running(self.all_to_all(output_tensors, input_tensors, True, time_limit(opts, timeout)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: TorchOptions | None = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Copies rows of `input` to each rank: as many as the split sizes say, or equal parts without split sizes."""
        outputs = rows_by_rank(output, output_split_sizes or None, self, "all_to_all_single", "output")
        inputs = rows_by_rank(input, input_split_sizes or None, self, "all_to_all_single", "input")
        work = self.all_to_all(outputs, inputs, True, time_limit(opts, timeout))
        return _running(ended([work], "all_to_all_single", [output]))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> Work:
        """Receives from the rank whose message arrives first; the work's `source_rank()` returns that rank."""
        return self.recv(_only(tensors), -1, tag, True)

    # The names of these methods in other releases of torch.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _running(work: Work | None) -> Work:
    """Returns `work`, or a finished one for a call without tensors, which has nothing to do."""
    return Work(None, "a call of no tensors") if work is None else work


def _only(tensors: Tensors) -> Tensors:
    """Returns the tensor of a list of one by itself, which takes the fastest path."""
    return tensors[0] if not isinstance(tensors, torch.Tensor) and len(tensors) == 1 else tensors


class ProcessGroup(PlainCallsGroup, TorchMethods):
    """The ranks that take part in a collective. `init_process_group` and `new_group` make groups.

    Ranks are numbered 0 to size - 1 within the group; `ranks[r]` is rank r's rank in the default group. Methods that
    torch.distributed's groups also have accept torch's option objects. Called without `async_op` they return a `Work`,
    as torch's do: sends and receives return it at once, all others when the call is complete.

    Attributes:
        wire: what sums of floats are rounded to between hosts if a call does not say so itself; None if they are exact.
    """

    wire: WireKind | None = None

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; the argument `any_order` is that of `Buffers`."""
        if timeout is None and wire is None and not async_op and not profiler._is_profiler_enabled:
            # The path of most calls, on which each line counts.
            try:
                outcome = self._channel.all_reduce_tensor(tensors, op, self.timeout_ns)
            except TypeError:  # the core takes no None
                as_list(tensors, "all_reduce")
                raise
            if outcome is False:
                outcome = self.fast_all_reduce(tensors, op)
            if outcome is None:
                return None
            if outcome is not False:
                assert isinstance(tensors, torch.Tensor) and isinstance(op, ReduceOp)
                code = DTYPE_CODES[tensors.dtype]
                raise self._error(outcome, (0, Operation.ALL_REDUCE, code, op, -1, tensors.numel()))
        listed = as_list(tensors, "all_reduce")
        if wire is None and len(listed) == 1 and listed[0].layout is torch.sparse_coo:
            return all_reduce_sparse(self, listed[0], reduction_of(op), async_op, timeout)
        plan = plan_all_reduce(listed, op, self.limit_ns(timeout), any_order)
        return self._run(plan if wire is None else with_wire(plan, wire, self.size()), async_op)

    def all_reduce_memory(
        self,
        pieces: list[int],
        kept: Sequence[torch.Tensor],
        dtype: int,
        count: int,
        op: ReduceOp,
        async_op: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Does what `all_reduce` does, for `count` elements at the addresses and numbers of bytes in `pieces`.

        It is for callers that make the same call many times and have checked their tensors, which are in `kept` and on
        one device, once.
        """
        call = CollectiveCall(Operation.ALL_REDUCE, dtype, op, -1, count, self.timeout_ns, [], [pieces])
        if wire is None and not async_op and kept and kept[0].is_cpu and not profiler._is_profiler_enabled:
            self.run_on_cpu(call, kept)
            return None
        buffers = Buffers()
        buffers.kept += kept
        buffers.written += kept
        return self._run(with_wire((call, buffers), wire, self.size()), async_op)

    def reduce_scatter_memory(
        self,
        inputs: list[list[int]],
        outputs: list[list[int]],
        kept: list[torch.Tensor],
        dtype: int,
        count: int,
        op: ReduceOp,
        update: _core.Update | None = None,
    ) -> None:
        """Is to `reduce_scatter` what `all_reduce_memory` is to `all_reduce`; each rank receives `count` elements.

        A group that `applies_updates` may be given an `update`, and then needs no output.
        """
        buffers = Buffers()
        buffers.kept += kept
        call = CollectiveCall(
            Operation.REDUCE_SCATTER, dtype, op, -1, count, self.timeout_ns, inputs, outputs, update=update
        )
        self._run((call, buffers), False)

    def broadcast(
        self,
        tensors: Tensors,
        root: int | TorchOptions = 0,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        any_order: bool = False,
    ) -> Work | None:
        """Copies the root's `tensors` to all ranks."""
        if are_options(root):
            return self.broadcast(tensors, root.rootRank, True, time_limit(root))
        require_root(self, root, "broadcast")
        if async_op is False and timeout is None and isinstance(tensors, torch.Tensor):
            code = None if profiler._is_profiler_enabled else DTYPE_CODES.get(tensors.dtype)
            if code is not None and tensors.is_cpu and tensors.layout is _STRIDED and is_plain(tensors):
                if self._closed:
                    raise self.closed_error()
                count = tensors.numel()
                if root != self._rank:
                    count_writes((tensors,))
                outcome = self._channel.broadcast(address_of(tensors), count, code, root, self.timeout_ns)
                if outcome is not None:
                    raise self._error(outcome, (0, Operation.BROADCAST, code, NO_REDUCTION, root, count))
                return None
        return self._run(plan_broadcast(tensors, root, self.limit_ns(timeout), any_order), async_op)

    def reduce(
        self,
        tensors: Tensors,
        root: int | TorchOptions = 0,
        op: Reduction = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks into those of the root; the tensors of other ranks do not change."""
        if are_options(root):
            return self.reduce(tensors, root.rootRank, reduction_of(root), True, time_limit(root))
        require_root(self, root, "reduce")
        if (
            async_op is False
            and timeout is None
            and isinstance(tensors, torch.Tensor)
            and self.try_fast_call(
                Operation.REDUCE, tensors.dtype, tensors.numel(), (), (tensors,), (0, 1), op=op, root=root
            )
        ):
            return None
        return self._run(plan_reduce(self, tensors, root, op, self.limit_ns(timeout)), async_op)

    def all_gather(
        self,
        outputs: Sequence[Tensors],
        tensors: Tensors,
        async_op: bool = False,
        timeout: Timeout | None = None,
        wire: WireLike = None,
    ) -> Work | None:
        """Copies every rank's `tensors` to all ranks; `outputs[r]` receives those of rank r."""
        if (
            async_op is False
            and timeout is None
            and wire is None
            and isinstance(tensors, torch.Tensor)
            and self.try_fast_call(
                Operation.ALL_GATHER, tensors.dtype, tensors.numel(), (tensors,), outputs, (1, self.size())
            )
        ):
            return None
        plan = plan_all_gather(self, outputs, tensors, self.limit_ns(timeout))
        return self._run(with_wire(plan, wire, self.size()), async_op)

    def gather(
        self,
        outputs: Sequence[Tensors] | None,
        tensors: Tensors,
        root: int | TorchOptions,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies every rank's `tensors` to the root; `outputs` is None or empty on other ranks."""
        if are_options(root):
            outputs = one_list(outputs, "gather") if outputs else None
            return self.gather(outputs, tensors, root.rootRank, True, time_limit(root))
        require_root(self, root, "gather")
        if async_op is False and timeout is None and isinstance(tensors, torch.Tensor):
            parts = (1, self.size() if self._rank == root else 0)
            if self.try_fast_call(
                Operation.GATHER, tensors.dtype, tensors.numel(), (tensors,), outputs or (), parts, root=root
            ):
                return None
        return self._run(plan_gather(self, outputs, tensors, root, self.limit_ns(timeout)), async_op)

    def reduce_scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors],
        op: Reduction | TorchOptions = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces the ranks' `inputs[r]` into the `output` of rank r."""
        if are_options(op):
            inputs = one_list(inputs, "reduce_scatter")
            return self.reduce_scatter(output, inputs, reduction_of(op), True, time_limit(op))
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) and self.size() > 1:
            inputs = one_list(inputs, "reduce_scatter")  # torch's form, without options
        if (
            async_op is False
            and timeout is None
            and wire is None
            and isinstance(output, torch.Tensor)
            and self.try_fast_call(
                Operation.REDUCE_SCATTER, output.dtype, output.numel(), inputs, (output,), (self.size(), 1), op=op
            )
        ):
            return None
        plan = plan_reduce_scatter(self, output, inputs, op, self.limit_ns(timeout))
        return self._run(with_wire(plan, wire, self.size()), async_op)

    def scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors] | None,
        root: int | TorchOptions,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies the root's `inputs[r]` to the `output` of rank r; `inputs` is None or empty on other ranks."""
        if are_options(root):
            inputs = one_list(inputs, "scatter") if inputs else None
            return self.scatter(output, inputs, root.rootRank, True, time_limit(root))
        require_root(self, root, "scatter")
        if async_op is False and timeout is None and isinstance(output, torch.Tensor):
            parts = (self.size() if self._rank == root else 0, 1)
            if self.try_fast_call(
                Operation.SCATTER, output.dtype, output.numel(), inputs or (), (output,), parts, root=root
            ):
                return None
        return self._run(plan_scatter(self, output, inputs, root, self.limit_ns(timeout)), async_op)

    def all_to_all(
        self,
        outputs: Sequence[Tensors],
        inputs: Sequence[Tensors],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies `inputs[r]` to rank r, which receives it in its `outputs[this rank]`; each pair has its own size."""
        if async_op is False and timeout is None and inputs and isinstance(inputs[0], torch.Tensor):
            first, parts = inputs[0], (self.size(), self.size())
            if self.try_fast_call(Operation.ALL_TO_ALL, first.dtype, first.numel(), inputs, outputs, parts):
                return None
        return self._run(plan_all_to_all(self, outputs, inputs, self.limit_ns(timeout)), async_op)

    def barrier(self, async_op: bool | TorchOptions | None = None, timeout: Timeout | None = None) -> Work | None:
        """Waits until every rank has called it."""
        if are_options(async_op):
            async_op, timeout = True, time_limit(async_op)
        if async_op is False and timeout is None and self.try_fast_barrier():
            return None
        return self._run(plan_barrier(self.limit_ns(timeout)), async_op)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data` in rank order; the lengths may differ."""
        lengths = torch.empty(self.size(), dtype=torch.int64, device="cpu")
        self.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device="cpu"))
        rooms = [empty_buffers([length]) for length in lengths.tolist()]
        all_gather_pieces(self, [as_tensor(data)], rooms, None)
        return [bytes(as_memory(room)) for (room,) in rooms]

    def explain(self, operation: str, nbytes: int) -> str:
        """Returns which algorithm the group uses for a call of that size, and why."""
        return explain_choice(self._channel, self.backend, self.size(), operation, nbytes)


LEAST_ELEMENTS = 1024
"""Shorter tensors travel as they are: norms and counts are among them, and rounding them would save no time."""

_ROUNDED = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)


class QuantisingGroup(ProcessGroup):
    """A group with a `wire` of its own, for all_reduce and reduce_scatter of floats.

    all_gather stays exact: it moves parameters, which nobody would see drift.
    """

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
        wire: WireLike = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; as `ProcessGroup.all_reduce`."""
        # With a time-out the call is not made by the shortest way, which passes `_run` by.
        return super().all_reduce(tensors, op, async_op, timeout or self.timeout, any_order, wire)

    def _run(self, plan: CallPlan, async_op: bool | None) -> Work | None:
        return super()._run(self._with(self.wire, plan), async_op)

    def prepare(self, plan: CallPlan) -> _core.PreparedCall | None:
        """Returns the planned call for being made many times, with error feedback of its own."""
        return super().prepare(self._with(self.wire and Wire(self.wire), plan))

    def _with(self, wire: WireLike, plan: CallPlan) -> CallPlan:
        call, buffers = plan
        is_rounded = (
            not call.wire
            and call.operation in _ROUNDED
            and call.count >= LEAST_ELEMENTS
            and is_quantisable(call)
            and all(tensor.is_cpu for tensor in buffers.kept)
        )
        return with_wire(plan, wire, self.size()) if is_rounded else plan
