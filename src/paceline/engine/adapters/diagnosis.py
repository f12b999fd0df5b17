"""Where the other ranks are when a call has failed: what the libraries cannot tell, the store and the host can."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence

from paceline.engine.adapters.members import Fate, fate_of
from paceline.engine.channel import HeaderFields
from paceline.engine.failures import Code, Failure, Member
from paceline.errors import StoreError
from paceline.store.base import Store

_PATIENCE_S = 2.0
_PAUSE_S = 0.02
_LEFT = "left"
_ENDED = "ended (it died or left; the store, which could tell, is gone)"
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class FailureDiagnosis:
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

    def diagnose(self, history: Sequence[HeaderFields], said: str, waited_ns: int) -> Failure:
        """Why the latest call failed, as far as it can be known.

        Args:
            history: the latest calls, the one that failed last.
            said: what the library said; nothing when the time was over.
        """
        answers, is_store_there = self._ask(history)
        silent = [rank for rank in range(len(self._members)) if rank not in answers]
        lost = self._lost(silent, [rank for rank, answer in answers.items() if answer == _LEFT], said, is_store_there)
        if lost is not None:
            return lost
        if calls := _first_difference([_calls(answers.get(rank)) for rank in range(len(self._members))]):
            return Failure(Code.MISMATCH, said, reporter=self._rank, calls=calls, algorithms=[0] * len(calls))
        if not said:
            return Failure(Code.TIMED_OUT, missing=silent if is_store_there else (), waited_ns=waited_ns)
        if silent:
            return Failure(Code.PEER_LOST, said, gone=silent, seen=_silence(said))
        return Failure(Code.REFUSED, said)

    def about_message(self, peer: int, said: str, waited_ns: int) -> Failure:
        """Why a message to or from `peer`, or with -1 from any rank, did not pass; arguments as for `diagnose`."""
        others = [rank for rank in range(len(self._members)) if rank != self._rank] if peer < 0 else [peer]
        try:
            left = [rank for rank in others if self._has_left(rank)]
            is_store_there = True
        except StoreError:
            left, is_store_there = [], False
        lost = self._lost([rank for rank in others if rank not in left], left, said, is_store_there)
        if lost is not None:
            return lost
        if said:
            return Failure(Code.REFUSED, said)
        return Failure(Code.TIMED_OUT, missing=others, waited_ns=waited_ns)

    def leave(self) -> None:
        """Lets the others know that this rank is no longer in the group."""
        with contextlib.suppress(StoreError):
            self._store.set(self._keys[self._rank], _LEFT)

    def _lost(self, silent: Sequence[int], left: Sequence[int], said: str, is_store_there: bool) -> Failure | None:
        """The loss of ranks; those that died are why others left, so they come first."""
        store = self._store if is_store_there else None
        fates = {rank: fate_of(store, self._members[rank]) for rank in silent}
        died = [rank for rank, fate in fates.items() if fate is Fate.DIED]
        if died:
            return Failure(Code.PEER_LOST, said, gone=died, seen="" if is_store_there else _ENDED)
        left = sorted({*left, *(rank for rank, fate in fates.items() if fate is Fate.LEFT)})
        return Failure(Code.PEER_LOST, said, gone=left, left=left) if left else None

    def _ask(self, history: Sequence[HeaderFields]) -> tuple[dict[int, str], bool]:
        """What the ranks have said by when nobody else is expected to, this one's word among it; and whether the store
        is still there.
        """
        answers = {self._rank: json.dumps(list(history))}
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._store.set(self._keys[self._rank], answers[self._rank])
            while True:
                for rank, key in enumerate(self._keys):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = self._store.get(key).decode()
                silent = [rank for rank in range(len(self._keys)) if rank not in answers]
                if all(fate_of(self._store, self._members[rank]) for rank in silent) or time.monotonic() > deadline:
                    return answers, True
                time.sleep(_PAUSE_S)
        except StoreError:
            return answers, False

    def _has_left(self, rank: int) -> bool:
        return self._store.check([self._keys[rank]]) and self._store.get(self._keys[rank]) == _LEFT.encode()


def _silence(said: str) -> str:
    return f"did not answer for {_PATIENCE_S:g} s, after the library said {said!r}"


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
