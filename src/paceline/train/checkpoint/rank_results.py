"""The ranks' results or errors, encoded as bytes, and the protocol of the channels that exchange them.

This module does not import torch, because launchers import it through `peer_memory`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Protocol

from paceline.errors import CheckpointDamagedError, CheckpointError

_THIS_PROCESS = "this process"
_SUCCESS, _FAILURE, _DAMAGE = b"+", b"-", b"!"


class RankChannel(Protocol):
    """Exchanges bytes between ranks. All ranks must call the methods in the same order.

    Attributes:
        rank: the number of this rank.
        size: the number of ranks.
        me: this rank's name in error messages.
    """

    rank: int
    size: int
    me: str

    def gather(self, mine: bytes) -> list[bytes]:
        """Gathers the bytes of all ranks on rank 0; returns an empty list on the other ranks."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Sends the bytes of rank 0 to all ranks, and returns them."""
        ...


def encode_result(work: Callable[[], bytes], me: str) -> bytes:
    """Calls `work` and encodes its result or its error for other ranks; `decode_result` is the inverse.

    Prepends `me`, the name of this rank, to an error message that does not begin with the name of a rank.
    """
    try:
        return _SUCCESS + work()
    except CheckpointDamagedError as error:
        return _DAMAGE + _prefixed(me, str(error))
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        return _FAILURE + _prefixed(me, str(error))
    except Exception as error:  # the user's code may raise any error, and other ranks must receive it
        return _FAILURE + _prefixed(me, f"{error!r}\n{traceback.format_exc()}")


def decode_result(answer: bytes) -> bytes:
    """Returns the result of a rank's work.

    Raises:
        CheckpointDamagedError, CheckpointError: the work failed.
    """
    if is_success(answer):
        return answer[1:]
    error = CheckpointDamagedError if answer[:1] == _DAMAGE else CheckpointError
    raise error(answer[1:].decode())


def require_success(answers: list[bytes]) -> bytes:
    """Raises the first error in the encoded results; returns b"" if all ranks succeeded."""
    for answer in answers:
        decode_result(answer)
    return b""


def is_success(answer: bytes) -> bool:
    """Returns True if a rank's work succeeded."""
    return answer[:1] == _SUCCESS


def fault_of(answer: bytes) -> str | None:
    """Returns the error message of a rank's work, or None if the work succeeded."""
    return None if is_success(answer) else answer[1:].decode()


def _prefixed(me: str, text: str) -> bytes:
    if text.startswith(_THIS_PROCESS):
        return (me + text[len(_THIS_PROCESS) :]).encode()
    return (text if me == _THIS_PROCESS or text.startswith("rank ") else f"{me}: {text}").encode()
