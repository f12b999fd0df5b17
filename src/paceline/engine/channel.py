"""What an engine gives a group: something that runs its collectives, and messages between two of its ranks.

Tensors cross as addresses and numbers of bytes (`Pieces`), on whatever device the group was opened for; types,
operations and reductions as the numbers of `codes.py`. What comes back is how a call ended, never an exception: a call
that runs on another thread has nobody to raise to. `failures.to_error` makes an exception of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from paceline.engine.codes import ITEM_SIZES, Operation

# Addresses and numbers of bytes, in turns.
Pieces = Sequence[int]

HeaderFields = tuple[int, int, int, int, int, int]


class Outcome(Protocol):
    """Why a call failed. Ranks are group ranks; lists may be empty and numbers -1 where an engine cannot know."""

    @property
    def code(self) -> int:
        """Of `failures.Code`."""

    @property
    def missing(self) -> Sequence[int]:
        """Who did not come."""

    @property
    def gone(self) -> Sequence[int]:
        """Who died or left."""

    @property
    def left(self) -> Sequence[int]:
        """Who of those left in order."""

    @property
    def cause(self) -> int:
        """For whose sake those in `gone` went, if they said so: a rank as the engine counts its `members`."""

    @property
    def cause_left(self) -> bool:
        """Whether that one left in order."""

    @property
    def reporter(self) -> int:
        """Who saw it first and ended the group for all."""

    @property
    def waited_ns(self) -> int:
        """For how long."""

    @property
    def step(self) -> int:
        """Of the schedule, which does not fit the call."""

    @property
    def split_from(self) -> int:
        """Whose part does not fit what another expects."""

    @property
    def split_to(self) -> int:
        """Whom that part is for."""

    @property
    def split_sent(self) -> int:
        """Its bytes at the sender."""

    @property
    def split_expected(self) -> int:
        """Its bytes at the receiver."""

    @property
    def calls(self) -> Sequence[HeaderFields]:
        """Each rank's latest call: sequence, operation, dtype, reduce op, root, count."""

    @property
    def algorithms(self) -> Sequence[int]:
        """By which algorithm each made it, 0 for none."""


class Pending(Protocol):
    """A call in progress. It may be asked from several threads at once."""

    def done(self) -> bool:
        """Whether it is over, well or not."""

    def wait(self, timeout_ns: int, /) -> bool:
        """Waits without the interpreter lock until the tensors may be used; False when the time was over first.

        On a device with streams that is when the calling thread's current stream has been made to wait.
        """

    def outcome(self) -> Outcome | None:
        """Why it failed; None when it went well. For calls that `wait` has returned True for."""


class Message(Pending, Protocol):
    """A send or a receive in progress."""

    def source(self) -> int:
        """Of a receive that is over: the sender's group rank."""
        ...


class Call(NamedTuple):  # the core takes it apart by position (native/bindings/calls.cpp)
    """A collective call; what `inputs` and `outputs` hold follows from the operation, and n is the number of ranks.

    | operation | inputs | outputs |
    | --- | --- | --- |
    | all_reduce, broadcast | | 1, in place |
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
    """

    operation: int
    dtype: int
    reduce_op: int
    root: int
    count: int  # type: ignore[assignment]  # tuples have a method of that name, which nobody needs here
    timeout_ns: int
    inputs: Sequence[Pieces]
    outputs: Sequence[Pieces]


class Channel(Protocol):
    """Runs the collectives of one group, in the order in which they are called, from any thread."""

    def all_reduce(self, address: int, count: int, dtype: int, reduce_op: int, timeout_ns: int, /) -> Outcome | None:
        """Reduces one dense tensor in place; None when it went well. Small tensors may take a shorter way."""
        outputs = [[address, count * ITEM_SIZES[dtype]]]
        return self.run(Call(Operation.ALL_REDUCE, dtype, reduce_op, -1, count, timeout_ns, [], outputs))

    def run(self, call: Call, /) -> Outcome | None:
        """Runs a call to its end; None when it went well."""

    def submit(self, call: Call, /) -> Pending:
        """Queues a call behind those made before, and returns at once."""
        ...

    def close(self) -> None:
        """Ends it; calls that are under way fail soon. Idempotent."""


class Messages(Protocol):
    """Sends to and receives from single ranks of the group. None of them waits for the other end to return."""

    def send(self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /) -> Message:
        """To a group rank; goes on by itself if it is to run in the background."""
        ...

    def receive(self, peer: int, tag: int, dtype: int, tensor: Pieces, timeout_ns: int, background: bool, /) -> Message:
        """From a group rank, or with -1 from any."""
        ...
