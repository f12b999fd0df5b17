"""What a program, and every layer of Paceline, says of what it is doing: spans and events.

Numbers the training steps of this process, by which everything else that it records is sorted.

A step of `DistributedDataParallel` lasts from its first forward in training to the first one after the gradients were
averaged; forwards under `no_sync` belong to one step. A step of an elastic job is a round, and one of `LogicalShards` a
`backward`. If a program has several of them, the first one makes the steps; the elastic rounds take over.

How long a program waits for its data.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

from paceline import _core
from paceline.comm.record.layout import EventKind
from paceline.comm.record.recorder import begin_once

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SPAN = int(EventKind.SPAN)

_numbers: dict[str, int] = {}


def number_of(name: str) -> int:
    """Returns the number by which the recording knows a name; 0 where nothing is recorded."""
    number = _numbers.get(name)
    if number is None:
        begin_once()
        number = _core.record_name(name)
        if number:
            _numbers[name] = number
    return number


class span:  # noqa: N801  # it is used as a function, and in `with` statements, like those of contextlib
    """Records how long a part of the program takes, under a name.

    It can be used as a context manager and as a decorator, on several threads and one in another, and costs less than a
    microsecond. The recording keeps the latest 16,384 spans and events. A span that has not ended shows where a process
    is; see docs/observe.md.

        with paceline.span("augment"):
            images = augment(images)

    Args:
        name: a few words; a recording has room for 500 different names of up to 63 bytes.
    """

    __slots__ = ("_name", "_stamps")

    def __init__(self, name: str) -> None:
        self._name = name
        self._stamps: list[int] = []

    def __enter__(self) -> span:
        self._stamps.append(_core.record_begin(_SPAN, number_of(self._name), 0, 0))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _core.record_end(self._stamps.pop())

    def __call__(self, function: _Function) -> _Function:
        """Returns `function` with every call of it recorded."""
        name = self._name

        @functools.wraps(function)
        def record(*args: Any, **kwargs: Any) -> Any:
            stamp = _core.record_begin(_SPAN, number_of(name), 0, 0)
            try:
                return function(*args, **kwargs)
            finally:
                _core.record_end(stamp)

        @functools.wraps(function)
        async def record_coroutine(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return await function(*args, **kwargs)

        return cast(_Function, record_coroutine if inspect.iscoroutinefunction(function) else record)


class RecordedSpan:
    """A span of Paceline's own, of another kind than the user's; it is used by one thread at a time."""

    __slots__ = ("_first", "_kind", "_name", "_second", "_stamp")

    def __init__(self, kind: EventKind, name: str = "", first: int = 0, second: int = 0) -> None:
        self._kind = int(kind)
        self._name = name
        self._first = first
        self._second = second
        self._stamp = 0

    def __enter__(self) -> RecordedSpan:
        self._stamp = begin_event(self._kind, self._name, self._first, self._second)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _core.record_end(self._stamp)


def begin_event(kind: int, name: str = "", first: int = 0, second: int = 0) -> int:
    """Begins an event, which `_core.record_end` ends by the stamp that this returns."""
    return _core.record_begin(kind, number_of(name) if name else 0, first, second)


def note_event(kind: int, name: str = "", first: int = 0, second: int = 0) -> None:
    """Records something that has no duration."""
    _core.record_end(begin_event(kind, name, first, second))


os.register_at_fork(after_in_child=_numbers.clear)


_STEP = int(EventKind.STEP)


class StepCounter:
    """The steps of this process so far."""

    def __init__(self) -> None:
        self.number = 0
        self._stamp = 0
        self._maker: weakref.ref[object] | None = None
        self._rank = 0

    def begin(self, maker: object, name: str, precedence: int = 0) -> None:
        """Ends the step before and begins the next, if the steps of this process are those of `maker`.

        Args:
            maker: the object whose steps they are, while it lives.
            name: what makes the steps, such as "ddp".
            precedence: a maker of a higher one takes over.
        """
        if self._current() is not maker:
            if self._current() is not None and precedence <= self._rank:
                return
            self._maker, self._rank = weakref.ref(maker), precedence
        begin_once()
        self.end(maker)
        self.number += 1
        _core.record_step(self.number)
        self._stamp = begin_event(_STEP, name, self.number)

    def end(self, maker: object) -> None:
        """Ends the step, if there is one of `maker`."""
        if self._stamp and self._current() is maker:
            _core.record_end(self._stamp)
            self._stamp = 0

    def _current(self) -> object | None:
        return None if self._maker is None else self._maker()


STEPS = StepCounter()


_Batch = TypeVar("_Batch")

_DATA_WAIT = int(EventKind.DATA_WAIT)


def recorded_waits(batches: Iterator[_Batch], name: str) -> Iterator[_Batch]:
    """Yields what `batches` yields, and records how long each one takes to come.

    Args:
        batches: what is waited for.
        name: the loader's name.
    """
    count = 0
    while True:
        stamp = begin_event(_DATA_WAIT, name, count)
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            _core.record_end(stamp)
        yield batch
        count += 1
