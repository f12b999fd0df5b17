"""Time-outs as numbers that can be counted with: `timedelta.max` is one, and stands for ever."""

from __future__ import annotations

import math
from datetime import timedelta

Timeout = timedelta | float  # a number is in seconds

LONGEST_S = 100 * 365.25 * 86_400  # the core counts nanoseconds in 64 bits, which end after 292 years
_LONGEST_OF_SOCKET_S = 1e6  # the system counts milliseconds in 32 bits


def to_seconds(timeout: Timeout) -> float:
    """`timeout` in seconds: at least 0, at most a hundred years.

    Raises:
        TypeError: it is neither a timedelta nor a number.
        ValueError: it is not a number (nan).

    >>> to_seconds(timedelta(minutes=-1)), to_seconds(timedelta.max), to_seconds(0.5)
    (0.0, 3155760000.0, 0.5)
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    else:
        try:
            seconds = float(timeout)
        except (TypeError, ValueError):
            raise TypeError(f"timeout is {timeout!r}; it must be a datetime.timedelta or a number of seconds") from None
        if math.isnan(seconds):
            raise ValueError("timeout is nan; it must be a number of seconds or a datetime.timedelta")
    return min(max(0.0, seconds), LONGEST_S)


def to_timedelta(timeout: Timeout) -> timedelta:
    """The same as a timedelta."""
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=to_seconds(timeout))


def to_nanoseconds(timeout: Timeout) -> int:
    """The same in nanoseconds."""
    return int(to_seconds(timeout) * 1e9)


def for_socket(left_s: float) -> float:
    """What a socket's time-out can be set to when `left_s` are left, if need be nothing."""
    return min(max(0.1, left_s), _LONGEST_OF_SOCKET_S)
