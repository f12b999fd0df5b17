"""Spans, events and training steps, recorded by the program and by every layer of Paceline.

The calls, spans and events in a recording are assigned to training steps. A step of `DistributedDataParallel` lasts
from its first forward pass in training mode to the first forward pass after the gradients were averaged; forward passes
under `no_sync` belong to the same step. In an elastic job a step is a round, and with `LogicalShards` it is a call to
`backward`. If a program uses several of these, the first one determines the steps; elastic rounds always take
precedence.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from paceline import _core
from paceline.comm.record.layout import EventKind
from paceline.comm.record.recorder import begin_once
from paceline.errors import is_user_file, short_repr

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Batch = TypeVar("_Batch")

_SPAN, _STEP, _DATA_WAIT = int(EventKind.SPAN), int(EventKind.STEP), int(EventKind.DATA_WAIT)

_numbers: dict[str, int] = {}
os.register_at_fork(after_in_child=_numbers.clear)


def number_of(name: str) -> int:
    """Returns the number that identifies a name in the recording, or 0 if recording is disabled."""
    number = _numbers.get(name)
    if number is None:
        if not isinstance(name, str):
            raise TypeError(f'a span is named {short_repr(name)}; its name must be a string: paceline.span("load")')
        begin_once()
        number = _core.record_name(name)
        if number:
            _numbers[name] = number
    return number


class span:  # noqa: N801  # used like a function of contextlib
    """Records the duration of a part of the program under the given name.

    `span` can be used as a context manager and as a decorator. It can be nested and used on several threads, and costs
    less than a microsecond. The recording keeps the latest 16,384 spans and events. Diagnoses include spans that are
    still open; see docs/observe.md.

        with paceline.span("augment"):
            images = augment(images)

    Args:
        name: a short description; a recording can hold 500 different names of up to 63 bytes each.
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
        """Returns a function that records each call of `function`."""
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
    """Span with one of Paceline's own event kinds, for use by one thread at a time."""

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
    """Begins an event; returns the stamp to pass to `_core.record_end` at its end."""
    return _core.record_begin(kind, number_of(name) if name else 0, first, second)


def note_event(kind: int, name: str = "", first: int = 0, second: int = 0) -> None:
    """Records an event that has no duration."""
    _core.record_end(begin_event(kind, name, first, second))


_STORES = ("/contextlib.py", "/paceline/comm/store/", "/paceline/interop/torch_backend/")
_NAME_NBYTES = 63
_MOST_STORE_WAITS = 64  # the maximum number of names for waits, because a recording holds few names
_store_waits: set[str] = set()
os.register_at_fork(after_in_child=_store_waits.clear)


def begin_store_wait(method: str, keys: Sequence[str], since_s: float) -> int:
    """Begins the event for a wait for keys in a store; returns the stamp to pass to `_core.record_end` at its end.

    Args:
        method: the name of the store's method, such as "get".
        keys: the keys that are not known to exist.
        since_s: the time on the monotonic clock at which the wait began.
    """
    text = f"{method} {', '.join(map(repr, keys))}"
    if len(text.encode(errors="replace")) > _NAME_NBYTES:
        text = text.encode(errors="replace")[: _NAME_NBYTES - 3].decode(errors="ignore") + "..."
    if text not in _store_waits and len(_store_waits) == _MOST_STORE_WAITS:
        text = method
    else:
        _store_waits.add(text)
    tick = _core.record_tick_at(int(since_s * 1e9))
    return _core.record_begin_at(EventKind.STORE_WAIT, number_of(text), len(keys), 0, tick) if tick else 0


def is_called_by_main_program() -> bool:
    """Returns True if the user's program called a store on the main thread, directly and not through a library."""
    if threading.current_thread() is not threading.main_thread():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _STORES):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


class StepCounter:
    """Counter for this process's training steps. One object, the *maker*, determines where steps begin and end."""

    def __init__(self) -> None:
        self.number = 0
        self._stamp = 0
        self._maker: weakref.ref[object] | None = None
        self._precedence = 0

    def begin(self, maker: object, name: str, precedence: int = 0) -> None:
        """Ends the current step and begins the next one. Does nothing if another object determines the steps.

        Args:
            maker: the object that reports the step. It becomes the maker if there is none yet.
            name: the name of the steps' source, such as "ddp".
            precedence: the maker's precedence; a maker with a higher precedence replaces the current one.
        """
        if self._current() is not maker:
            if self._current() is not None and precedence <= self._precedence:
                return
            self._maker, self._precedence = weakref.ref(maker), precedence
        begin_once()
        self.end(maker)
        self.number += 1
        _core.record_step(self.number)
        self._stamp = begin_event(_STEP, name, self.number)

    def end(self, maker: object) -> None:
        """Ends the current step if `maker` began it."""
        if self._stamp and self._current() is maker:
            _core.record_end(self._stamp)
            self._stamp = 0

    def _current(self) -> object | None:
        return None if self._maker is None else self._maker()


STEPS = StepCounter()


def recorded_waits(batches: Iterator[_Batch], name: str) -> Iterator[_Batch]:
    """Yields the items of `batches` and records the time spent waiting for each of them.

    Args:
        batches: the iterator over batches.
        name: the name of the loader's class.
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
