"""Conversion of timeouts without overflow, and of text to numbers; the timeout `timedelta.max` means no limit."""

from __future__ import annotations

import math
from datetime import timedelta

from paceline.errors import short_repr

Timeout = timedelta | float  # numbers are in seconds

LONGEST_S = 100 * 365.25 * 86_400  # the core counts nanoseconds in 64 bits, which overflow after 292 years
_LONGEST_OF_SOCKET_S = 1e6  # the system counts milliseconds in 32 bits
_LARGEST = 10**18 - 1  # fits in 64 bits


def whole_number(text: str, least: int = 0, most: int = _LARGEST) -> int | None:
    """Returns the number in `text`, or None if `text` is not a whole number from `least` to `most`.

    Only ASCII digits count as digits. `int` also accepts other alphabets' digits, signs, spaces and underscores, which
    other programs that read the same flags and environment variables might reject.

    >>> whole_number("12"), whole_number("-1"), whole_number("1_0"), whole_number("\u0663"), whole_number("0", least=1)
    (12, None, None, None, None)
    """
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_LARGEST)):
        return None
    return number if least <= (number := int(text)) <= most else None


def to_seconds(timeout: Timeout) -> float:
    """Returns `timeout` in seconds, clamped to the range from 0 to a hundred years.

    Raises:
        TypeError: `timeout` is neither a timedelta nor a number.
        ValueError: `timeout` is NaN.

    >>> to_seconds(timedelta(minutes=-1)), to_seconds(timedelta.max), to_seconds(0.5)
    (0.0, 3155760000.0, 0.5)
    """
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    else:
        try:
            seconds = float(timeout)
        except (TypeError, ValueError):
            raise TypeError(
                f"timeout is {short_repr(timeout)}; it must be a datetime.timedelta or a number of seconds"
            ) from None
        if math.isnan(seconds):
            raise ValueError("timeout is nan; it must be a number of seconds or a datetime.timedelta")
    return min(max(0.0, seconds), LONGEST_S)


def to_nanoseconds(timeout: Timeout) -> int:
    """Returns `timeout` in nanoseconds, clamped to the same range as in `to_seconds`."""
    return int(to_seconds(timeout) * 1e9)


def event_timeout_s(left_ns: int) -> float:
    """Returns the timeout in seconds for a `threading.Event` when `left_ns` nanoseconds are left (may be negative)."""
    return min(max(0.0, left_ns / 1e9), LONGEST_S)


def socket_timeout_s(left_s: float) -> float:
    """Returns the timeout in seconds for a socket when `left_s` seconds are left (may be negative)."""
    return min(max(0.1, left_s), _LONGEST_OF_SOCKET_S)
