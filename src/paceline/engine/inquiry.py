"""Where the other ranks are when a call has failed: what the libraries cannot tell, the store and the host can."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.engine.channel import HeaderFields
from paceline.engine.failures import Code, Failure, Member
from paceline.errors import StoreError
from paceline.store.base import Store

_PATIENCE_S = 2.0
_PAUSE_S = 0.02
_LEFT = "left"
_ENDED = ("Z", "X")
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class Inquiry:
    """Tells the others where this rank is when a call fails, and asks them.

    Args:
        store: what the ranks share.
        identity: of the group.
        members: its ranks.
        group_rank: this one.
    """

    def __init__(self, store: Store, identity: int, members: Sequence[Member], group_rank: int) -> None:
        self._store = store
        self._members = members
        self._rank = group_rank
        self._keys = [f"inquiry/{identity}/{rank}" for rank in range(len(members))]

    def find_out(self, history: Sequence[HeaderFields], said: str, waited_ns: int) -> Failure:
        """Why the latest call failed, as far as it can be known.

        Args:
            history: the latest calls, the one that failed last.
            said: what the library said; nothing when the time was over.
        """
        answers = self._ask(history)
        left = [rank for rank, answer in answers.items() if answer == _LEFT]
        gone = left or [rank for rank in range(len(self._members)) if rank not in answers and self._is_dead(rank)]
        if gone:
            return Failure(Code.PEER_LOST, said, gone=gone, left=left)
        if calls := _first_difference([_calls(answers.get(rank)) for rank in range(len(self._members))]):
            return Failure(Code.MISMATCH, said, reporter=self._rank, calls=calls, algorithms=[0] * len(calls))
        silent = [rank for rank in range(len(self._members)) if rank not in answers]
        if not said:
            return Failure(Code.TIMED_OUT, missing=silent, waited_ns=waited_ns)
        if silent:
            return Failure(Code.PEER_LOST, said, gone=silent)
        return Failure(Code.REFUSED, said)

    def about_message(self, peer: int, said: str, waited_ns: int) -> Failure:
        """Why a message to or from `peer`, or with -1 from any rank, did not pass; arguments as for `find_out`."""
        others = [rank for rank in range(len(self._members)) if rank != self._rank] if peer < 0 else [peer]
        left = [rank for rank in others if self._has_left(rank)]
        gone = left or [rank for rank in others if self._is_dead(rank)]
        if gone:
            return Failure(Code.PEER_LOST, said, gone=gone, left=left)
        if said:
            return Failure(Code.REFUSED, said)
        return Failure(Code.TIMED_OUT, missing=others, waited_ns=waited_ns)

    def leave(self) -> None:
        """Lets the others know that this rank is no longer in the group."""
        with contextlib.suppress(StoreError):
            self._store.set(self._keys[self._rank], _LEFT)

    def _ask(self, history: Sequence[HeaderFields]) -> dict[int, str]:
        answers: dict[int, str] = {}
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(StoreError):
            self._store.set(self._keys[self._rank], json.dumps(list(history)))
            while True:
                for rank, key in enumerate(self._keys):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = self._store.get(key).decode()
                silent = [rank for rank in range(len(self._keys)) if rank not in answers]
                if all(self._is_dead(rank) for rank in silent) or time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE_S)
        return answers

    def _has_left(self, rank: int) -> bool:
        with contextlib.suppress(StoreError):
            return self._store.check([self._keys[rank]]) and self._store.get(self._keys[rank]) == _LEFT.encode()
        return False

    def _is_dead(self, rank: int) -> bool:
        """Whether a process of this host has ended; of others it cannot be seen."""
        member = self._members[rank]
        if member.host != socket.gethostname() or rank == self._rank:
            return False
        try:
            state = Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in _ENDED


def _calls(answer: str | None) -> dict[int, HeaderFields]:
    """A rank's latest calls by their number."""
    if answer is None or answer == _LEFT:
        return {}
    return {int(call[0]): (call[0], call[1], call[2], call[3], call[4], call[5]) for call in json.loads(answer)}


def _first_difference(histories: Sequence[Mapping[int, HeaderFields]]) -> list[HeaderFields]:
    """Each rank's call of the first number at which they are not the same; nothing if they all are."""
    for number in sorted({number for history in histories for number in history}):
        calls = [history.get(number, _NO_CALL) for history in histories]
        if len({call for call in calls if call != _NO_CALL}) > 1:
            return calls
    return []
