"""What a rank's work came to, as the other ranks learn of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from paceline.errors import CheckpointDamagedError, CheckpointError

_SOMEBODY = "this process"
_WELL, _FAILED, _DAMAGED = b"+", b"-", b"!"


def told(work: Callable[[], bytes], me: str) -> bytes:
    """Returns what `work` returns, or its error, so that other ranks can learn of either; `heard` takes it apart.

    An error that does not name a rank is made to name this one, `me`.
    """
    try:
        return _WELL + work()
    except CheckpointDamagedError as error:
        return _DAMAGED + _by(me, str(error))
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        return _FAILED + _by(me, str(error))
    except Exception as error:  # somebody's code, for which the other ranks must not wait
        return _FAILED + _by(me, f"{error!r}\n{traceback.format_exc()}")


def heard(answer: bytes) -> bytes:
    """Returns what a rank's work returned.

    Raises:
        CheckpointDamagedError, CheckpointError: it failed.
    """
    if answer[:1] == _WELL:
        return answer[1:]
    error = CheckpointDamagedError if answer[:1] == _DAMAGED else CheckpointError
    raise error(answer[1:].decode())


def fault_of(answer: bytes) -> str | None:
    """Returns what went wrong in a rank's work; None if nothing did."""
    return None if answer[:1] == _WELL else answer[1:].decode()


def _by(me: str, text: str) -> bytes:
    if text.startswith(_SOMEBODY):
        return (me + text[len(_SOMEBODY) :]).encode()
    return (text if me == _SOMEBODY or text.startswith("rank ") else f"{me}: {text}").encode()
