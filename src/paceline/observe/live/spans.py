"""Writes lengths of time as people say them."""

from __future__ import annotations


def about(seconds: float) -> str:
    """Returns a length of time in one unit or two.

    >>> about(0.4), about(14), about(14 * 60), about(3 * 3600 + 5 * 60), about(50 * 3600)
    ('less than 1 s', '14 s', '14 min', '3 h 5 min', '2 d 2 h')
    """
    if seconds < 1:
        return "less than 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def milliseconds(value: float) -> str:
    """Returns milliseconds with three digits that count.

    >>> milliseconds(174.2), milliseconds(17.42), milliseconds(1.742), milliseconds(2500.0)
    ('174 ms', '17.4 ms', '1.74 ms', '2.5 s')
    """
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} ms"
