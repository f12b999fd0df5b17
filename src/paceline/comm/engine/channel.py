"""`EngineChannel` and `Messages`, the interfaces through which an engine runs a group's collectives and messages.

Tensors are passed as addresses and numbers of bytes (`Pieces`) on the device for which the group was opened. Dtypes,
reductions and wire formats are passed as codes, which Python and the core share (native/reduce/reduce.hpp); the codes
of the operations are in `comm/schedule/steps.py`. A call returns its outcome and never raises an exception, because no
caller could catch it if the call ran on another thread; `failures.to_error` converts an outcome to an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from paceline import _core
from paceline.comm.record.layout import DTYPES as _DTYPE_NAMES
from paceline.comm.schedule.quantized import WIRES as WIRES
from paceline.comm.schedule.steps import Operation


class ReduceOp(IntEnum):
    """A reduction. On booleans, SUM, MAX and BOR mean "or", and PRODUCT, MIN and BAND mean "and".

    AVG is the sum divided by the group's size. Sums of integers wrap around at the limits of their type; AVG of
    integers divides the wrapped sum and truncates toward zero (-7 / 2 = -3), like NCCL. AVG is not defined for
    booleans.
    """

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    PREMUL_SUM = 8

    def __str__(self) -> str:
        return f"ReduceOp.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


NO_REDUCTION = 9  # in the header of a call without a reduction


DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ITEM_SIZES = [getattr(torch, name).itemsize if hasattr(torch, name) else 1 for name in _DTYPE_NAMES]


WIRE_CODES: dict[str, int] = {name: code for code, name in enumerate(WIRES, 1)}
"""Codes for the formats to which tensors sent between hosts are rounded (native/wire/wire.hpp); 0 means no rounding."""

QUANTIZED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that the core can round."""


def dtype_name(code: int) -> str:
    """Returns PyTorch's name for a dtype, without "torch."."""
    return _DTYPE_NAMES[code]


# torch programs also use the nested class RedOpType and the former name `reduce_op`.
setattr(ReduceOp, "RedOpType", ReduceOp)  # noqa: B010 (an assignment would look like another reduction to mypy)
reduce_op = ReduceOp


@dataclass(frozen=True)
class PremulSum:
    """The sum of the ranks' values, each multiplied by its rank's `factor`.

    >>> PremulSum(0.5)
    PremulSum(factor=0.5)
    """

    factor: float | torch.Tensor


Reduction = ReduceOp | PremulSum


Pieces = Sequence[int]
"""A tensor in one or more pieces: address, number of bytes, address, number of bytes, ..."""


class DevicePieces(list[int]):
    """`Pieces` on a device other than the CPU, for engines that pass tensors to a library.

    Args:
        tensors: the dense tensors that own the memory, one for each piece.
        numbers: the address and the number of bytes of each tensor, if the caller has already determined them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], numbers: Iterable[int] | None = None) -> None:
        if numbers is None:
            numbers = (number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes))
        super().__init__(numbers)
        self.tensors = tuple(tensors)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat uint8 view of a dense tensor, in memory order.

    `Tensor.view(dtype)` requires that the last stride be 1. A tensor with a single element, such as `values[::4]` for
    four values, counts as contiguous with any stride, and flattening it keeps the stride.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


HeaderFields = tuple[int, int, int, int, int, int]
"""A call as described in failure reports: sequence number, operation, dtype, reduction, root, number of elements."""


class OutcomeCode(IntEnum):
    """The result of a call; the values are the codes in native/call/call.hpp."""

    OK = 0
    MISMATCH = 1
    TIMED_OUT = 2
    PEER_LOST = 3
    INTERRUPTED = 4
    SCHEDULE_UNFIT = 5
    REFUSED = 6  # the engine's library rejected the call
    STARVED = 7
    TOO_MANY_OFFERS = 8
    ABORTED = 9  # a rank called `abort` on the group


@dataclass(frozen=True)
class CallFailure:
    """The reason why a call failed in an engine written in Python.

    Ranks are group ranks unless stated otherwise; unknown lists are empty, and unknown numbers are -1.

    Attributes:
        detail: the library's own message about the failure.
        missing: the ranks that did not make the call or, if `has_begun` is true, began but did not complete it.
        gone: the ranks that died or left.
        left: the ranks among `gone` that left cleanly.
        cause: the rank that caused the ranks in `gone` to leave, as an index into the engine's `members`. It left
            cleanly (`cause_left`), delayed a call until the call timed out (`cause_hung`), or died.
        reporter: the rank that first detected the failure and aborted the group on all ranks.
        waited_ns: the time spent waiting in the call, in nanoseconds.
        step: the index of the schedule's first step that does not fit the call (SCHEDULE_UNFIT only).
        split_from, split_to: the sender and the receiver of a part of the wrong size.
        split_sent, split_expected: the size in bytes of the part that was sent, and the size that was expected.
        calls: each rank's latest call.
        algorithms: the algorithm for each of `calls`: 1 plus the index in the registry, or 0 if the call has none.
        seen: a statement about the ranks in `gone`, used if it is unknown whether they died or left.
        waiting: the ranks among `missing` that are waiting in other calls, for ranks in `blocked_by`, for other missing
            ranks or, if there are neither, for each other.
        blocked_by: ranks outside the group that delayed a call until it timed out, as indices into the engine's
            `members`.
    """

    code: OutcomeCode
    detail: str = ""
    missing: Sequence[int] = ()
    gone: Sequence[int] = ()
    left: Sequence[int] = ()
    cause: int = -1
    cause_left: bool = False
    reporter: int = -1
    waited_ns: int = 0
    step: int = -1
    split_from: int = -1
    split_to: int = -1
    split_sent: int = -1
    split_expected: int = -1
    calls: Sequence[HeaderFields] = ()
    algorithms: Sequence[int] = ()
    seen: str = ""
    has_begun: bool = False
    waiting: Sequence[int] = ()
    blocked_by: Sequence[int] = ()
    cause_hung: bool = False

    @staticmethod
    def of(outcome: CallOutcome, **changes: Any) -> CallFailure:
        """Returns a copy of an outcome with the given fields changed."""
        if isinstance(outcome, CallFailure):
            return replace(outcome, **changes)
        shared = {
            field.name: getattr(outcome, field.name) for field in fields(CallFailure) if hasattr(outcome, field.name)
        }
        return CallFailure(**shared | {"code": OutcomeCode(outcome.code)} | changes)


CallOutcome: TypeAlias = CallFailure | _core.Outcome
"""The reason why a call failed. The core's outcomes lack the attributes `detail` and `seen`."""


def code_of(outcome: CallOutcome | None) -> int:
    """Returns the outcome's code, or OK if the call succeeded."""
    return OutcomeCode.OK if outcome is None else outcome.code


class PendingCall(Protocol):
    """A call in progress; thread-safe."""

    def done(self) -> bool:
        """Returns True if the call is complete, successfully or not."""

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits, without holding the interpreter lock, until the tensors can be used; returns False on timeout.

        On a device with streams, `wait` returns once the calling thread's current stream has been made to wait for the
        call. It may be called by several threads, or by one thread with several streams.
        """

    def outcome(self) -> CallOutcome | None:
        """Returns the reason why the call failed, or None if it succeeded; valid after `wait` has returned True."""


@runtime_checkable
class StreamCall(PendingCall, Protocol):
    """A call on a device where streams, rather than threads, wait for the result."""

    def is_enqueued(self) -> bool:
        """Returns True if `wait` without a timeout would block only the current stream, and not the thread."""
        ...


class PendingMessage(PendingCall, Protocol):
    """A send or a receive in progress."""

    def source(self) -> int:
        """Returns the group rank of the sender; valid after a receive is complete."""
        ...


class CollectiveCall(NamedTuple):  # native/bindings/calls.cpp reads the fields by name
    """A collective call. The numbers of `inputs` and `outputs` depend on the operation; n is the number of ranks:

    | operation | inputs | outputs |
    | --- | --- | --- |
    | all_reduce, broadcast | | 1, in place |
    | all_reduce, only in the core's groups on one host | 1, not changed | 1 |
    | reduce | | 1, in place; not written on ranks other than the root |
    | all_gather | 1 | n |
    | gather | 1 | n on the root, else none |
    | scatter | n on the root, else none | 1 |
    | reduce_scatter | n | 1 |
    | all_to_all | n, each with its own size | n, each with its own size |
    | barrier | | |

    Each entry is a list of pieces that form one tensor. `count` is the number of elements in one tensor (0 for
    all_to_all), and `root` is -1 if the operation has none. With PREMUL_SUM the tensors have already been multiplied by
    their factors, and the engine only sums them.

    If `wire` is not 0, data sent between hosts is rounded to that format (`WIRES`). This requires a channel for which
    `quantizes` is true, a sum or an all_gather, and a dtype in `QUANTIZED_TYPES`. `residual` is the memory for error
    feedback, one float32 per element of the longest buffer, or () without error feedback.

    A reduce_scatter in one of the core's groups on a single host may contain an `update`, which is applied to the
    results; the call then needs no output.
    """

    operation: Operation
    dtype: int
    reduce_op: int
    root: int
    count: int  # type: ignore[assignment]  # `tuple` has a method `count`
    timeout_ns: int
    inputs: Sequence[Pieces]
    outputs: Sequence[Pieces]
    wire: int = 0
    residual: Pieces = ()
    update: _core.Update | None = None


class EngineChannel(Protocol):
    """Runs the collectives of one group in the order in which they are called; thread-safe."""

    @property
    def quantizes(self) -> bool:
        """Whether calls may specify a `wire`."""
        return False

    def all_reduce(
        self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /
    ) -> CallOutcome | None:
        """Reduces one dense tensor in place; returns None on success. Small tensors can take a faster path."""
        outputs = [[address, count * ITEM_SIZES[dtype]]]
        return self.run(CollectiveCall(Operation.ALL_REDUCE, dtype, reduce_op, -1, count, timeout_ns, [], outputs))

    def all_reduce_tensor(self, tensor: object, op: object, timeout_ns: int, /) -> CallOutcome | Literal[False] | None:
        """Reduces a tensor like `all_reduce`, or returns False if Python must check the tensor first."""
        return False

    def broadcast(self, address: int, count: int, dtype: int, root: int, timeout_ns: int, /) -> CallOutcome | None:
        """Copies one dense tensor from the root to all ranks; returns None on success."""
        outputs = [[address, count * ITEM_SIZES[dtype]]]
        return self.run(CollectiveCall(Operation.BROADCAST, dtype, NO_REDUCTION, root, count, timeout_ns, [], outputs))

    def run_equal(
        self,
        operation: int,
        dtype: int,
        reduce_op: int,
        root: int,
        count: int,
        timeout_ns: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        /,
    ) -> CallOutcome | None:
        """Runs a call on dense tensors of `count` elements, given by their addresses; see `run`."""
        nbytes = count * ITEM_SIZES[dtype]
        total = 0 if operation == Operation.ALL_TO_ALL else count
        read, written = ([[address, nbytes] for address in addresses] for addresses in (inputs, outputs))
        return self.run(CollectiveCall(Operation(operation), dtype, reduce_op, root, total, timeout_ns, read, written))

    def run(self, call: CollectiveCall, /) -> CallOutcome | None:
        """Runs a call to completion; returns None on success."""

    def submit(self, call: CollectiveCall, /) -> PendingCall:
        """Queues a call after the earlier ones and returns immediately."""
        ...

    def prepare(self, call: CollectiveCall, /) -> _core.PreparedCall | None:
        """Prepares a call for repetition; returns None if the engine is not part of the core."""
        return None

    def record_as(self, group: int, /) -> None:
        """Records later calls under the group's serial number (`record.recorder.open_group`)."""

    def abort(self) -> None:
        """Aborts current and later calls with the code ABORTED, at least on this rank; does not block.

        Any thread may call this while other threads are in a call. The native engine also aborts the calls on other
        ranks.
        """

    def failure(self) -> int:
        """Returns the `OutcomeCode` of the failure that broke the channel, or OK if no failure has been detected."""
        ...

    def close(self) -> None:
        """Closes the channel; calls in progress fail shortly afterward. Idempotent."""


class Messages(Protocol):
    """Interface for messages to and from single ranks in a group; no method waits for the other rank."""

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> PendingMessage:
        """Starts a send to a group rank; the send proceeds without a call to `wait` if `background` is true."""
        ...

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> PendingMessage:
        """Starts a receive from a group rank, or from any rank if `peer` is -1."""
        ...

    def record_messages_as(self, group: int, /) -> None:
        """Records later messages under the group's serial number; see `EngineChannel.record_as`."""
