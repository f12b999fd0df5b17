"""What an engine gives a group: a channel that runs its collectives, and messages between two of its ranks.

Tensors are passed as addresses and numbers of bytes (`Pieces`) on the device that the group was opened for; types and
reductions are passed as the numbers of `codes.py`. A call returns how it ended and never raises, since
a call on another thread has nobody to raise to; `failures.to_error` turns the outcome into an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from paceline import _core
from paceline.comm.engine.codes import ITEM_SIZES, NO_REDUCTION
from paceline.comm.schedule.steps import Operation

# A tensor in one or more pieces: address, number of bytes, address, number of bytes, ...
Pieces = Sequence[int]

HeaderFields = tuple[int, int, int, int, int, int]


class CallOutcome(Protocol):
    """Why a call failed. Ranks are group ranks; lists may be empty and numbers -1 where an engine cannot know."""

    @property
    def code(self) -> int:
        """A `failures.Code`."""

    @property
    def missing(self) -> Sequence[int]:
        """Ranks that did not make the call or, if `came`, that began it but did not complete it."""

    @property
    def came(self) -> bool:
        """Whether the ranks in `missing` have begun the call."""

    @property
    def waiting(self) -> Sequence[int]:
        """The ranks among `missing` that wait in other calls: for those in `held_by`, for other missing ranks or, if
        there are none, for each other."""

    @property
    def held_by(self) -> Sequence[int]:
        """Ranks that hold up a call that has timed out, but are not in `missing`; they count as `cause` does."""

    @property
    def gone(self) -> Sequence[int]:
        """Ranks that died or left."""

    @property
    def left(self) -> Sequence[int]:
        """The ranks among `gone` that left cleanly rather than died."""

    @property
    def cause(self) -> int:
        """The rank because of which those in `gone` left, if they said so; it counts in the engine's `members`."""

    @property
    def cause_left(self) -> bool:
        """Whether `cause` left cleanly rather than died."""

    @property
    def cause_hung(self) -> bool:
        """Whether `cause` held up a call until its time was over, rather than died."""

    @property
    def reporter(self) -> int:
        """The rank that saw the failure first and ended the group for all."""

    @property
    def waited_ns(self) -> int:
        """How long the call waited."""

    @property
    def step(self) -> int:
        """The index of the first step of the schedule that does not fit the call (SCHEDULE_UNFIT only)."""

    @property
    def split_from(self) -> int:
        """The rank that sends a part of another size than its receiver expects."""

    @property
    def split_to(self) -> int:
        """The rank for which the part of `split_from` is meant."""

    @property
    def split_sent(self) -> int:
        """The bytes of that part at the sender."""

    @property
    def split_expected(self) -> int:
        """The bytes of that part that the receiver expects."""

    @property
    def calls(self) -> Sequence[HeaderFields]:
        """Each rank's latest call: sequence, operation, dtype, reduce op, root, count."""

    @property
    def algorithms(self) -> Sequence[int]:
        """The algorithm of each of these calls: one more than its place in the registry, or 0 without one."""


class Pending(Protocol):
    """A call in progress; several threads may use it at once."""

    def done(self) -> bool:
        """Whether the call is over, successfully or not."""

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits, without the interpreter lock, until the tensors may be used; returns False if the time was over first.

        On a device with streams the wait is over as soon as the calling thread's current stream has been made to wait.
        """

    def outcome(self) -> CallOutcome | None:
        """Why the call failed, or None if it succeeded; valid once `wait` has returned True."""


class PendingMessage(Pending, Protocol):
    """A send or a receive in progress."""

    def source(self) -> int:
        """The group rank of the sender, once a receive is over."""
        ...


class CollectiveCall(NamedTuple):  # the core takes it apart by position (native/bindings/calls.cpp)
    """A collective call; what `inputs` and `outputs` hold follows from the operation, and n is the number of ranks.

    | operation | inputs | outputs |
    | --- | --- | --- |
    | all_reduce, broadcast | | 1, in place |
    | all_reduce, by the core's groups of one host only | 1, not changed | 1 |
    | reduce | | 1, in place; only read on all ranks but the root |
    | all_gather | 1 | n |
    | gather | 1 | n on the root, else none |
    | scatter | n on the root, else none | 1 |
    | reduce_scatter | n | 1 |
    | all_to_all | n, each of its own size | n, each of its own size |
    | barrier | | |

    Each entry is a list of pieces that together are one tensor. `count` is the number of elements of one tensor (0 for
    all_to_all), and `root` is -1 if the operation has none. With PREMUL_SUM the tensors have been multiplied by their
    factors already, so that an engine only sums them.

    A `wire` other than 0 has what goes between hosts rounded to that type (`codes.WIRES`). It is only for channels that
    `quantises`, for sums and all_gathers, and for the types in `codes.QUANTISED_TYPES`. `residual` is then the memory
    for error feedback, one float32 for each element of the longest buffer, or nothing.

    A reduce_scatter by the core's groups of one host may have an `update`, which is applied to the results; it then
    needs no output.
    """

    operation: Operation
    dtype: int
    reduce_op: int
    root: int
    count: int  # type: ignore[assignment]  # tuples have a method of that name, which nobody needs here
    timeout_ns: int
    inputs: Sequence[Pieces]
    outputs: Sequence[Pieces]
    wire: int = 0
    residual: Pieces = ()
    update: _core.Update | None = None


class EngineChannel(Protocol):
    """Runs the collectives of one group, in the order in which they are called, from any thread."""

    @property
    def quantises(self) -> bool:
        """Whether a call may have a `wire`."""
        return False

    def all_reduce(
        self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /
    ) -> CallOutcome | None:
        """Reduces one dense tensor in place; None when it went well. Small tensors may take a shorter way."""
        outputs = [[address, count * ITEM_SIZES[dtype]]]
        return self.run(CollectiveCall(Operation.ALL_REDUCE, dtype, reduce_op, -1, count, timeout_ns, [], outputs))

    def all_reduce_tensor(self, tensor: object, op: object, timeout_ns: int, /) -> CallOutcome | Literal[False] | None:
        """Does what `all_reduce` does; False, and nothing is done, if Python must look at the tensor first."""
        return False

    def broadcast(self, address: int, count: int, dtype: int, root: int, timeout_ns: int, /) -> CallOutcome | None:
        """Copies one dense tensor of the root to all ranks; None when it went well."""
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
        """Runs a call whose inputs and outputs are dense, of `count` elements each, at these addresses; see `run`."""
        nbytes = count * ITEM_SIZES[dtype]
        total = 0 if operation == Operation.ALL_TO_ALL else count
        read, written = ([[address, nbytes] for address in addresses] for addresses in (inputs, outputs))
        return self.run(CollectiveCall(Operation(operation), dtype, reduce_op, root, total, timeout_ns, read, written))

    def run(self, call: CollectiveCall, /) -> CallOutcome | None:
        """Runs a call to its end; None when it went well."""

    def submit(self, call: CollectiveCall, /) -> Pending:
        """Queues a call behind those made before, and returns at once."""
        ...

    def prepare(self, call: CollectiveCall, /) -> _core.PreparedCall | None:
        """Returns the call prepared for being made many times; None if the engine is not in the core."""
        return None

    def record_as(self, group: int, /) -> None:
        """Records the calls from now on as those of the group with this serial (`record.recorder.open_group`)."""

    def abort(self) -> None:
        """Ends calls in progress and all later ones with the code ABORTED, on this rank at least; does not wait.

        Any thread may call this while others are in a call. The native engine ends the other ranks' calls as well.
        """

    def failure(self) -> int:
        """Returns the `failures.Code` for which the channel is broken, as far as this rank knows; OK if it is not."""
        ...

    def close(self) -> None:
        """Closes the channel; calls that are under way fail soon. Idempotent."""


class Messages(Protocol):
    """Sends to and receives from single ranks of the group. Neither waits for the other rank before it returns."""

    def send(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> PendingMessage:
        """Starts a send to a group rank, which goes on by itself if `background` is true."""
        ...

    def receive(
        self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /
    ) -> PendingMessage:
        """Starts a receive from a group rank, or with -1 from any rank."""
        ...

    def record_messages_as(self, group: int, /) -> None:
        """Records the messages from now on as those of this group; see `Channel.record_as`."""
