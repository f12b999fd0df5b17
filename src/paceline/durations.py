"""Time-outs as numbers that can be counted with: `timedelta.max` is one, and stands for ever."""

from __future__ import annotations

from datetime import timedelta

LONGEST_S = 100 * 365.25 * 86_400  # the core counts nanoseconds in 64 bits, which end after 292 years
_LONGEST_OF_SOCKET_S = 1e6  # the system counts milliseconds in 32 bits


def to_seconds(timeout: timedelta) -> float:
    """`timeout` in seconds: at least 0, at most a hundred years.

    >>> to_seconds(timedelta(minutes=-1)), to_seconds(timedelta.max)
    (0.0, 3155760000.0)
    """
    return min(max(0.0, timeout.total_seconds()), LONGEST_S)


def to_nanoseconds(timeout: timedelta) -> int:
    """The same in nanoseconds."""
    return int(to_seconds(timeout) * 1e9)


def for_socket(left_s: float) -> float:
    """What a socket's time-out can be set to when `left_s` are left, if need be nothing."""
    return min(max(0.1, left_s), _LONGEST_OF_SOCKET_S)
