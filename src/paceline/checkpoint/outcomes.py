"""What a rank's work came to, as the other ranks learn of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from paceline.errors import CheckpointDamagedError, CheckpointError

_WELL, _FAILED, _DAMAGED = b"+", b"-", b"!"


def told(work: Callable[[], bytes]) -> bytes:
    """Returns what `work` returns, or its error, so that other ranks can learn of either; `heard` takes it apart."""
    try:
        return _WELL + work()
    except CheckpointDamagedError as error:
        return _DAMAGED + str(error).encode()
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        return _FAILED + str(error).encode()
    except Exception as error:  # somebody's code, for which the other ranks must not wait
        return _FAILED + f"{error!r}\n{traceback.format_exc()}".encode()


def heard(answer: bytes, me: str) -> bytes:
    """Returns what a rank's work returned.

    Raises:
        CheckpointDamagedError, CheckpointError: it failed.
    """
    if answer[:1] == _WELL:
        return answer[1:]
    text = answer[1:].decode()
    error = CheckpointDamagedError if answer[:1] == _DAMAGED else CheckpointError
    raise error(text if text.startswith(me) else f"{me}: {text}")
