"""Calls that are prepared once and made many times, as MPI's persistent requests are."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch.autograd import profiler

from paceline import _core
from paceline.durations import Timeout, to_nanoseconds
from paceline.engine.channel import Outcome
from paceline.group.buffers import Tensors, as_list, memory_layout
from paceline.group.eager import eager
from paceline.group.planning import Plan
from paceline.group.profiling import Recording
from paceline.group.running import RunningGroup
from paceline.group.work import Work
from paceline.group.writes import count_writes


class PersistentCall(_core.QuickCall):
    """A call that was prepared once, by `all_reduce_init` for example, and can be made any number of times.

    `call()` makes it, and returns when it is complete. `call.start()` starts it, and `call.wait()` waits until it is
    over, or `call.test()` asks; until then the tensors must not be touched, and it cannot be started again. The other
    ranks may make the same call in any form: each start counts as one call of the group, and all ranks make the calls
    of a group in the same order. Preparing one is not a call: it needs no other rank, and no order.

    The tensors must stay where and how they are in memory; their values may change between two calls. A persistent call
    belongs to its group, and ends with it. In an elastic job, each view has a group of its own.

    Raises:
        ValueError: a tensor is no longer where it was, or has another shape, strides or type; the call is started and
            not over, or has not been started; or its group has ended.
        CollectiveError: as the plain call does.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self._memory = [(tensor, memory_layout(tensor)) for tensor in dense]
        self._work: Work | None = None  # of the latest start, until `wait`
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        return f"PersistentCall({self._name}, {'started' if self.is_started else 'not started'})"

    @abstractmethod
    def _call_with_care(self) -> None:
        """Makes the call; the core calls this unless a shorter way will do."""

    @abstractmethod
    def _submit(self) -> Work:
        """Starts the call in the background."""

    def _who(self) -> str:
        """Returns the words for this rank at the beginning of a message."""
        return ""

    @eager
    def start(self) -> None:
        """Starts the call, and returns at once."""
        self._require_memory()
        with self._starting:
            self._require_idle()
            self._work = self._submit()
            self.is_started = True

    @eager
    def wait(self, timeout: Timeout | None = None) -> None:
        """Waits until the started call is over and its tensors are ready.

        Args:
            timeout: how long to wait, as a timedelta or in seconds; the call itself continues and can be waited for
                again. If None, only the call's own time-out applies.
        """
        work = self._started_work()
        try:
            work.wait(timeout)
        finally:
            if work.is_completed():
                self.is_started, self._work = False, None

    @eager
    def test(self) -> bool:
        """Returns whether the started call is over, and raises its error if it failed. Does not wait.

        Once it has returned True the call can be started again; `wait` is not needed, but does no harm.
        """
        work = self._started_work()
        if not work.is_completed():
            return False
        self.is_started = False
        return work.wait()

    def _require_idle(self) -> None:
        if self.is_started:
            raise ValueError(
                f"{self._who()}{self._name}: this persistent call is started and not over; call wait(), or test() "
                "until it returns True, before the next start"
            )

    def _started_work(self) -> Work:
        work = self._work
        if work is None:
            raise ValueError(
                f"{self._who()}{self._name}: this persistent call has not been started since the last wait(); call "
                "start() first, or the object itself, which starts and waits"
            )
        return work

    def _require_memory(self) -> None:
        for tensor, layout in self._memory:
            if memory_layout(tensor) != layout:
                raise self._moved()

    def _moved(self) -> ValueError:
        return ValueError(
            f"{self._who()}{self._name}: a tensor of this persistent call is no longer where {self._name}_init found "
            "it, or has another shape, strides or type; resize_, set_ or an assignment to .data has changed that. "
            "Prepare the call again, or write new values into the old memory with copy_"
        )


class _Limits(NamedTuple):
    timeout_ns: int


class EngineCall(PersistentCall):
    """A persistent call that the engine has prepared.

    Args:
        name: the plain call's name.
        group: the group of the call.
        plan: the call and its buffers, none of which is a copy.
        prepared: the call as the engine has prepared it.
        tensors: the tensors that the program passed.
        timeout: how long each call waits; the group's at the time if None.
    """

    def __init__(
        self,
        name: str,
        group: RunningGroup,
        plan: Plan,
        prepared: _core.PreparedCall,
        tensors: Sequence[torch.Tensor],
        timeout: Timeout | None,
    ) -> None:
        super().__init__(name, tensors)
        self._group = group
        self._plan = plan
        # Other tensors on the same memory, which keep it even if the program gives its own tensors another.
        plan[1].kept = [each.detach() for each in plan[1].kept]
        self._prepared = prepared
        self._limits: RunningGroup | _Limits = group if timeout is None else _Limits(to_nanoseconds(timeout))
        self._written = group.written_by(plan)
        self.arm(
            prepared,
            self._memory,
            memory_layout,
            self._limits,
            profiler.__dict__,
            "_is_profiler_enabled",
            count_writes,
            tuple(self._written),
        )

    def _call_with_care(self) -> None:
        self._require_memory()
        self._require_idle()
        recording = self._recording() if profiler._is_profiler_enabled else None
        count_writes(self._written)
        try:
            outcome = self._prepared.run(self._limits.timeout_ns)
        except ValueError as error:
            raise self._refused(error) from None
        finally:
            if recording is not None:
                recording.end()
        if outcome is not None:
            self._fail(outcome)

    def _fail(self, outcome: Outcome) -> NoReturn:
        raise self._group.abandon(outcome, self._plan)

    def _submit(self) -> Work:
        recording = self._recording() if profiler._is_profiler_enabled else None
        try:
            pending = self._prepared.submit(self._limits.timeout_ns)
        except ValueError as error:
            raise self._refused(error) from None
        work = self._group.work_of(pending, self._plan)
        if recording is not None:
            recording.end_with(work)
        return work

    def _recording(self) -> Recording:
        return self._group.recording(str(self._plan[0].operation), self._plan[1].kept)

    def _who(self) -> str:
        return f"rank {self._group.me.rank}: "

    def _refused(self, error: ValueError) -> ValueError:
        """Returns the error of a call that the engine has refused to make; `error` is the engine's."""
        if not self._group.is_closed:
            return ValueError(f"{self._who()}{self._name}: {error}")
        return ValueError(
            f"{self._group.closed_error()}. {self._name}_init prepared this call for the group that has ended; prepare "
            "it again"
        )


class RepeatedCall(PersistentCall):
    """A persistent call that makes a plain call each time.

    Engines that cannot prepare calls, and tensors that go through a copy, leave no more to do.

    Args:
        name: the plain call's name.
        make: makes the plain call; the argument is its `async_op`.
        tensors: the tensors that the program passed.
    """

    def __init__(self, name: str, make: Callable[[bool], Work | None], tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(name, tensors)
        self._make = make

    @eager
    def _call_with_care(self) -> None:
        self._require_memory()
        self._require_idle()
        self._make(False)

    def _submit(self) -> Work:
        work = self._make(True)
        return Work(None, self._name) if work is None else work


def prepared_call(
    name: str,
    group: RunningGroup,
    plan: Plan,
    make: Callable[[bool], Work | None],
    tensors: Sequence[torch.Tensor],
    timeout: Timeout | None,
) -> PersistentCall:
    """Returns the planned call prepared by the group's engine if it can, and else one that `make` makes each time."""
    prepared = None if plan[1].has_copies else group.prepare(plan)
    if prepared is None:
        return RepeatedCall(name, make, tensors)
    return EngineCall(name, group, plan, prepared, tensors, timeout)


def nothing(name: str) -> PersistentCall:
    """Returns what stands for a call on a rank that is not in its group; it does nothing."""
    return RepeatedCall(name, lambda async_op: None)


def all_tensors(many: Iterable[Tensors]) -> list[torch.Tensor]:
    """Returns the tensors, and those of the lists of tensors, in `many`."""
    return [tensor for each in many for tensor in as_list(each, "tensors")]
