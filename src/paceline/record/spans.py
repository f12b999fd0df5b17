"""What a program, and every layer of Paceline, says of what it is doing: spans and numbers."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, SupportsFloat, TypeVar, cast

from paceline import _core
from paceline.record.names import EventKind
from paceline.record.recorder import begin_once

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SPAN = int(EventKind.SPAN)

_numbers: dict[str, int] = {}
listeners: list[Callable[[Mapping[str, float]], None]] = []
"""Called with the numbers of each `log`; `sinks.py` adds to them."""


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


def log(**values: SupportsFloat) -> None:
    """Records numbers by their names, such as the loss and the learning rate, with the current step.

    Numbers and tensors of one element are converted to a double at once. For a tensor on a GPU that waits until the GPU
    has computed it; a loop that must not wait logs such values every few steps.

        paceline.log(loss=loss, lr=scheduler.get_last_lr()[0])

    Raises:
        TypeError: a value is no number and no tensor of one element.
    """
    passed_on: dict[str, float] = {}
    for name, value in values.items():
        detach = getattr(value, "detach", None)
        try:
            number = float(value if detach is None else detach())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"paceline.log: {name} is a {type(value).__name__} that cannot be one number ({error}); pass a number "
                "or a tensor of one element"
            ) from None
        _core.record_value(number_of(name), number)
        passed_on[name] = number
    for listener in listeners:
        listener(passed_on)


class Recorded:
    """A span of Paceline's own, of another kind than the user's; it is used by one thread at a time."""

    __slots__ = ("_first", "_kind", "_name", "_second", "_stamp")

    def __init__(self, kind: EventKind, name: str = "", first: int = 0, second: int = 0) -> None:
        self._kind = int(kind)
        self._name = name
        self._first = first
        self._second = second
        self._stamp = 0

    def __enter__(self) -> Recorded:
        self._stamp = begin_event(self._kind, self._name, self._first, self._second)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _core.record_end(self._stamp)


def begin_event(kind: int, name: str = "", first: int = 0, second: int = 0) -> int:
    """Begins an event, which `_core.record_end` ends by the stamp that this returns."""
    return _core.record_begin(kind, number_of(name) if name else 0, first, second)


os.register_at_fork(after_in_child=_numbers.clear)
