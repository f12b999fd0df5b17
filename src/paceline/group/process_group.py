"""A process group: its ranks, and the collectives on lists of tensors that the public calls are made of."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal, TypeGuard

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.durations import Timeout, to_nanoseconds
from paceline.engine.api import OpenGroup
from paceline.engine.channel import HeaderFields, Outcome
from paceline.engine.codes import DTYPE_CODES, ITEM_SIZES, Operation, ReduceCode, dtype_name
from paceline.engine.failures import GROUP_LOST, MESSAGES_LOST, Code, Member, describe_call, to_error
from paceline.engine.native.scheduled import ALGORITHM_VARIABLE, ScheduledChannel
from paceline.errors import CollectiveError, CollectiveTimeoutError
from paceline.group.buffers import Buffers, Tensors, as_list, dtype_code, is_plain
from paceline.group.devices import Devices, Opener
from paceline.group.exchange import all_gather_pieces, as_memory, as_tensor, room_for
from paceline.group.options import Options, are_options, one_list, reduction_of, time_limit
from paceline.group.profiling import Recording
from paceline.group.reduce_op import PremulSum, ReduceOp, Reduction
from paceline.group.sparse import all_reduce_sparse
from paceline.group.torch_methods import TorchMethods
from paceline.group.work import Work
from paceline.schedule.cost import explain_text
from paceline.schedule.steps import Operation as OperationName

_PREMUL_SUM = ReduceOp.PREMUL_SUM


def _is_plain(op: Reduction) -> TypeGuard[ReduceOp]:
    return op.__class__ is ReduceOp and op is not _PREMUL_SUM


@functools.cache
def _reduces(dtype: int, reduce_op: int) -> bool:
    return _core.reduces(dtype, reduce_op)


class ProcessGroup(TorchMethods):
    """The ranks that take part in a collective. Made by `init_process_group` and `new_group`.

    Ranks are numbered 0 to size - 1 within the group; `ranks[r]` is the rank in the default group. Methods that
    torch.distributed's groups have as well take torch's option objects too. Called without `async_op` they return a
    `Work`, as torch's do: of a send or a receive at once, of others when the call is over.

    Args:
        opened: the group on CPU tensors.
        backend: what `get_backend` says of it.
        openers: what opens it on other devices, by the device's type.
        advice: what a user does about a tensor on a device that there is no opener for; by default an engine is named.
        everybody: the members of its engine, of whom some may not be in the group; the group's own if there are none.
    """

    def __init__(
        self,
        opened: OpenGroup,
        members: Sequence[Member],
        group_rank: int,
        timeout: Timeout,
        name: str,
        backend: str = "paceline",
        openers: Mapping[str, Opener] | None = None,
        advice: str = "",
        everybody: Sequence[Member] = (),
    ) -> None:
        self.ranks = [member.rank for member in members]
        self.name = name
        self.backend = backend
        self._devices = Devices(opened, openers or {}, backend, advice)
        self._channel = opened.channel
        self._members = list(members)
        self._everybody = everybody
        self._rank = group_rank
        self._closed = False
        self._abandoned: list[Buffers] = []
        self.set_timeout(timeout)

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name or 'default'}, rank {self._rank} of {len(self.ranks)})"

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def me(self) -> Member:
        """This rank with its host and process; in a message it reads "rank 3 (host, pid 4711)"."""
        return self._members[self._rank]

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks with their hosts and processes, by group rank."""
        return tuple(self._members)

    @property
    def device_types(self) -> frozenset[str]:
        """The types of device whose tensors the group's calls take, such as "cpu" and "cuda"."""
        return self._devices.types

    @property
    def timeout(self) -> timedelta:
        """How long a call waits for the other ranks."""
        return timedelta(microseconds=self._timeout_ns / 1000)

    def set_timeout(self, timeout: Timeout) -> None:
        """Sets `timeout` for later calls."""
        self._timeout_ns = to_nanoseconds(timeout)

    def close(self) -> None:
        """Ends the group for this rank; idempotent."""
        self._closed = True
        self._devices.close()

    def all_reduce(
        self,
        tensors: Tensors,
        op: Reduction = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout | None = None,
        any_order: bool = False,
    ) -> Work | None:
        """Reduces `tensors` over all ranks, in place; `any_order` as in `Buffers`."""
        if isinstance(tensors, torch.Tensor) and timeout is None and not async_op and _is_plain(op):
            code = None if profiler._is_profiler_enabled else DTYPE_CODES.get(tensors.dtype)
            if code is not None and tensors.is_cpu and is_plain_strided(tensors) and _reduces(code, op):
                if self._closed:
                    raise self._closed_error()
                outcome = self._channel.all_reduce(tensors.data_ptr(), tensors.numel(), code, op, self._timeout_ns)
                if outcome is not None:
                    raise self._error(outcome, (0, Operation.ALL_REDUCE, code, op, -1, tensors.numel()))
                return None
        listed = as_list(tensors, "all_reduce")
        if len(listed) == 1 and listed[0].layout is torch.sparse_coo:
            return all_reduce_sparse(self, listed[0], reduction_of(op), async_op, timeout)
        code, reduce_code, buffers = self._reduction(listed, op, "all_reduce", any_order)
        outputs = [buffers.write(listed)]
        return self._run(
            Operation.ALL_REDUCE, code, reduce_code, -1, _count(listed), [], outputs, buffers, async_op, timeout
        )

    def all_reduce_memory(
        self,
        pieces: list[int],
        kept: Sequence[torch.Tensor],
        dtype: int,
        count: int,
        op: ReduceOp,
        async_op: bool = False,
    ) -> Work | None:
        """Like `all_reduce`, of `count` elements at the addresses and numbers of bytes in `pieces`.

        For callers that make the same call again and again and have checked their tensors (`kept`) once.
        """
        buffers = Buffers()
        buffers.kept += kept
        buffers.written += kept
        return self._run(Operation.ALL_REDUCE, dtype, op, -1, count, [], [pieces], buffers, async_op, None)

    def broadcast(
        self,
        tensors: Tensors,
        root: int | Options = 0,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
        any_order: bool = False,
    ) -> Work | None:
        """Copies the root's `tensors` to all ranks."""
        if are_options(root):
            return self.broadcast(tensors, root.rootRank, True, time_limit(root))
        listed = as_list(tensors, "broadcast")
        code = dtype_code(listed, "broadcast")
        buffers = Buffers(any_order=any_order)
        outputs = [buffers.write(listed)]
        return self._run(
            Operation.BROADCAST, code, ReduceCode.NONE, root, _count(listed), [], outputs, buffers, async_op, timeout
        )

    def reduce(
        self,
        tensors: Tensors,
        root: int | Options = 0,
        op: Reduction = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces `tensors` over all ranks into the root's; the others' stay as they are."""
        if are_options(root):
            return self.reduce(tensors, root.rootRank, reduction_of(root), True, time_limit(root))
        listed = as_list(tensors, "reduce")
        code, reduce_code, buffers = self._reduction(listed, op, "reduce")
        root_or_copy = buffers.write if self._rank == root else buffers.read
        outputs = [root_or_copy(listed)]
        return self._run(
            Operation.REDUCE, code, reduce_code, root, _count(listed), [], outputs, buffers, async_op, timeout
        )

    def all_gather(
        self, outputs: Sequence[Tensors], tensors: Tensors, async_op: bool = False, timeout: Timeout | None = None
    ) -> Work | None:
        """Copies every rank's `tensors` to all ranks; `outputs[r]` takes rank r's."""
        return self._gather(Operation.ALL_GATHER, outputs, tensors, -1, async_op, timeout)

    def gather(
        self,
        outputs: Sequence[Tensors] | None,
        tensors: Tensors,
        root: int | Options,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies every rank's `tensors` to the root; `outputs` is None or empty elsewhere."""
        if are_options(root):
            outputs = one_list(outputs, "gather") if outputs else None
            return self.gather(outputs, tensors, root.rootRank, True, time_limit(root))
        if bool(outputs) != (self._rank == root):
            raise ValueError(
                f"rank {self.me.rank}: gather takes gather_list on the destination, rank {self.ranks[root]}, "
                "and on no other rank"
            )
        return self._gather(Operation.GATHER, outputs or [], tensors, root, async_op, timeout)

    def reduce_scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors],
        op: Reduction | Options = ReduceOp.SUM,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Reduces the ranks' `inputs[r]` into rank r's `output`."""
        if are_options(op):
            inputs = one_list(inputs, "reduce_scatter")
            return self.reduce_scatter(output, inputs, reduction_of(op), True, time_limit(op))
        if len(inputs) == 1 and isinstance(inputs[0], (list, tuple)) and self.size() > 1:
            inputs = one_list(inputs, "reduce_scatter")  # torch's form, without options
        written = as_list(output, "reduce_scatter")
        read = self._lists(inputs, "reduce_scatter", "input_list")
        code, reduce_code, buffers = self._reduction(
            [*written, *(t for each in read for t in each)], op, "reduce_scatter"
        )
        self._same_counts(read, _count(written), "reduce_scatter", "input_list")
        flat_inputs = [buffers.read(each) for each in read]
        plain = Buffers()
        flat_outputs = [plain.write(written)]
        plain.kept[:0] = buffers.kept
        return self._run(
            Operation.REDUCE_SCATTER,
            code,
            reduce_code,
            -1,
            _count(written),
            flat_inputs,
            flat_outputs,
            plain,
            async_op,
            timeout,
        )

    def scatter(
        self,
        output: Tensors,
        inputs: Sequence[Tensors] | None,
        root: int | Options,
        async_op: bool | None = None,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies the root's `inputs[r]` to rank r's `output`; `inputs` is None or empty elsewhere."""
        if are_options(root):
            inputs = one_list(inputs, "scatter") if inputs else None
            return self.scatter(output, inputs, root.rootRank, True, time_limit(root))
        if bool(inputs) != (self._rank == root):
            raise ValueError(
                f"rank {self.me.rank}: scatter takes scatter_list on the source, rank {self.ranks[root]}, "
                "and on no other rank"
            )
        written = as_list(output, "scatter")
        read = self._lists(inputs, "scatter", "scatter_list") if inputs else []
        code = dtype_code([*written, *(t for each in read for t in each)], "scatter")
        self._same_counts(read, _count(written), "scatter", "scatter_list")
        buffers = Buffers()
        flat_inputs = [buffers.read(each) for each in read]
        flat_outputs = [buffers.write(written)]
        return self._run(
            Operation.SCATTER,
            code,
            ReduceCode.NONE,
            root,
            _count(written),
            flat_inputs,
            flat_outputs,
            buffers,
            async_op,
            timeout,
        )

    def all_to_all(
        self,
        outputs: Sequence[Tensors],
        inputs: Sequence[Tensors],
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Work | None:
        """Copies `inputs[r]` to rank r, whose `outputs[this rank]` takes it; sizes may differ from pair to pair."""
        read = self._lists(inputs, "all_to_all", "input_tensor_list")
        written = self._lists(outputs, "all_to_all", "output_tensor_list")
        self._same_counts([written[self._rank]], _count(read[self._rank]), "all_to_all", "this rank's part for itself")
        code = dtype_code([t for each in (*read, *written) for t in each], "all_to_all")
        buffers = Buffers()
        flat_inputs = [buffers.read(each) for each in read]
        flat_outputs = [buffers.write(each) for each in written]
        return self._run(
            Operation.ALL_TO_ALL, code, ReduceCode.NONE, -1, 0, flat_inputs, flat_outputs, buffers, async_op, timeout
        )

    def barrier(self, async_op: bool | Options | None = None, timeout: Timeout | None = None) -> Work | None:
        """Returns when every rank has called it."""
        if are_options(async_op):
            async_op, timeout = True, time_limit(async_op)
        return self._run(Operation.BARRIER, 0, ReduceCode.NONE, -1, 0, [], [], Buffers(), async_op, timeout)

    def send(
        self, tensors: Tensors, dst: int, tag: int = 0, async_op: bool = True, timeout: Timeout | None = None
    ) -> Work | None:
        """Sends `tensors` to group rank `dst`, whose `recv` of the same tag, type and number of elements takes them."""
        work = self._pass("send", as_list(tensors, "send"), dst, tag, async_op, timeout)
        return work if async_op else None

    def recv(
        self, tensors: Tensors, src: int = -1, tag: int = 0, async_op: bool = True, timeout: Timeout | None = None
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
            raise self._closed_error()
        code = dtype_code(tensors, name)
        buffers = Buffers()
        pieces = buffers.read(tensors) if name == "send" else buffers.write(tensors)
        recording = Recording("recvAnySource" if peer < 0 else name, tensors) if profiler._is_profiler_enabled else None
        opened = self._devices.of(tensors, name)
        links = opened.links
        lost = MESSAGES_LOST if isinstance(opened.channel, _core.HostGroup) else GROUP_LOST
        start = links.send if name == "send" else links.receive
        message = start(peer, tag, code, pieces, self._limit_ns(timeout), background)
        other_end = _other_end(self._members, name, peer)
        call = f"{name}({dtype_name(code)}, {_count(tensors)} elements, {other_end}, tag {tag})"

        work = Work(
            message,
            name,
            buffers.kept,
            buffers.finish,
            lambda outcome: self._failed(outcome, call, lost),
            results=tensors,
        )
        if background:
            if recording is not None:
                work.when_over(recording.end)
            return work
        try:
            work.wait()
        finally:
            if recording is not None:
                recording.end()
        return work

    def explain(self, operation: OperationName, nbytes: int) -> str:
        """Which algorithm the group takes for a call of that size, and why."""
        if isinstance(self._channel, ScheduledChannel):
            return explain_text(self._channel.choose(operation, nbytes))
        if not self.backend.endswith("paceline"):
            return f"{operation} of {nbytes:,} bytes on {self.size()} ranks: the library of {self.backend!r} chooses\n"
        return (
            f"{operation} of {nbytes:,} bytes on {self.size()} ranks, 1 host\n\n"
            "-> direct: every rank reads the others' parts out of shared memory, so nothing is passed on.\n\n"
            f"An algorithm runs here only when it is forced (algorithm=, or {ALGORITHM_VARIABLE}).\n"
        )

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, by rank; of any lengths."""
        lengths = torch.empty(self.size(), dtype=torch.int64, device="cpu")
        self.all_gather(list(lengths.split(1)), torch.tensor([len(data)], device="cpu"))
        rooms = [room_for([length]) for length in lengths.tolist()]
        all_gather_pieces(self, [as_tensor(data)], rooms, None)
        return [bytes(as_memory(room)) for (room,) in rooms]

    def _gather(
        self,
        operation: Operation,
        outputs: Sequence[Tensors],
        tensors: Tensors,
        root: int,
        async_op: bool | None,
        timeout: Timeout | None,
    ) -> Work | None:
        name = operation.name.lower()
        here = operation is Operation.ALL_GATHER or self._rank == root
        read = as_list(tensors, name)
        written = self._lists(outputs, name, "the list of outputs") if here else []
        code = dtype_code([*read, *(t for each in written for t in each)], name)
        self._same_counts(written, _count(read), name, "the list of outputs")
        buffers = Buffers()
        flat_inputs = [buffers.read(read)]
        flat_outputs = [buffers.write(each) for each in written]
        return self._run(
            operation, code, ReduceCode.NONE, root, _count(read), flat_inputs, flat_outputs, buffers, async_op, timeout
        )

    def _run(
        self,
        operation: Operation,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        buffers: Buffers,
        async_op: bool | None,
        timeout: Timeout | None,
    ) -> Work | None:
        if self._closed:
            raise self._closed_error()
        timeout_ns = self._limit_ns(timeout)
        described = count
        if operation is Operation.ALL_TO_ALL:  # the ranks' numbers of elements differ
            described = sum(sum(pieces[1::2]) for pieces in inputs) // ITEM_SIZES[dtype]
        header = (0, operation, dtype, reduce_op, root, described)
        name = operation.name.lower()
        recording = Recording(name, _shown(buffers, inputs)) if profiler._is_profiler_enabled else None
        channel = self._devices.of(buffers.kept, name).channel
        if async_op:
            submitted = channel.submit(operation, dtype, reduce_op, root, count, timeout_ns, inputs, outputs)
            work = Work(
                submitted,
                name,
                buffers.kept,
                buffers.finish,
                lambda outcome: self._abandon(outcome, header, buffers),
                buffers.written,
            )
            if recording is not None:
                work.when_over(recording.end)
            return work
        outcome = channel.run(operation, dtype, reduce_op, root, count, timeout_ns, inputs, outputs)
        if recording is not None:
            recording.end()
        if outcome is not None:
            raise self._abandon(outcome, header, buffers)
        if buffers.finish is not None:
            buffers.finish()
        return Work(None, name, buffers.kept, results=buffers.written) if async_op is None else None

    def _limit_ns(self, timeout: Timeout | None) -> int:
        return self._timeout_ns if timeout is None else to_nanoseconds(timeout)

    def _abandon(self, outcome: Outcome, header: HeaderFields, buffers: Buffers) -> CollectiveError:
        """The error of a call. A library may still write to the tensors of one that it was not done with in time."""
        if outcome.code == Code.TIMED_OUT and not self._abandoned:
            self._abandoned.append(buffers)
        return self._error(outcome, header)

    def _error(self, outcome: Outcome, header: HeaderFields) -> CollectiveError:
        return self._failed(outcome, describe_call(header).rsplit(" as call", 1)[0])

    def _failed(self, outcome: Outcome, call: str, lost: str = GROUP_LOST) -> CollectiveError:
        error = to_error(outcome, self._members, self._rank, call, lost, self._everybody)
        if isinstance(error, CollectiveTimeoutError):
            error.missing = tuple(self.ranks[at] for at in outcome.missing)
        return error

    def _closed_error(self) -> ValueError:
        return ValueError(
            f"rank {self.me.rank}: this process group was destroyed (destroy_process_group); "
            "make a new one with init_process_group or new_group"
        )

    def _reduction(
        self, tensors: list[torch.Tensor], op: Reduction, call: str, any_order: bool = False
    ) -> tuple[int, int, Buffers]:
        code = dtype_code(tensors, call)
        op = reduction_of(op)
        scale = op.factor if isinstance(op, PremulSum) else None
        reduce_code = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
        if op is ReduceOp.PREMUL_SUM:
            raise TypeError(f"{call}: PREMUL_SUM needs a factor; pass paceline.PremulSum(factor)")
        # Engines for other devices than the CPU say for themselves what they do not reduce.
        if not _reduces(code, reduce_code) and all(tensor.is_cpu for tensor in tensors):
            dtype = tensors[0].dtype if tensors else torch.uint8
            raise TypeError(f"{call}: {reduce_code.name} is not defined for {dtype}; convert the tensor first")
        return code, reduce_code, Buffers(scale, any_order)

    def _lists(self, lists: Sequence[Tensors], call: str, argument: str) -> list[list[torch.Tensor]]:
        if isinstance(lists, torch.Tensor) or len(lists) != self.size():
            seen = type(lists).__name__ if isinstance(lists, torch.Tensor) else f"{len(lists)} entries"
            raise ValueError(f"{call}: {argument} needs one entry for each of the {self.size()} ranks, not {seen}")
        return [as_list(each, f"{call}: {argument}") for each in lists]

    def _same_counts(self, lists: list[list[torch.Tensor]], count: int, call: str, argument: str) -> None:
        for at, each in enumerate(lists):
            if _count(each) != count:
                raise ValueError(
                    f"rank {self.me.rank}: {call}: entry {at} of {argument} has {_count(each)} elements; "
                    f"all must have {count}"
                )


def is_plain_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any layout is dense and plain (see `is_plain`)."""
    return tensor.layout is torch.strided and is_plain(tensor)


def _other_end(members: Sequence[Member], name: str, peer: int) -> str:
    if peer < 0:
        return "from any rank"
    return f"{'to' if name == 'send' else 'from'} rank {members[peer].rank}"


def _shown(buffers: Buffers, inputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The tensors that a profile shows: the inputs, which a call reads first, or those that it works on in place."""
    return buffers.kept[: sum(len(flat) // 2 for flat in inputs)] or buffers.kept


def _count(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)
