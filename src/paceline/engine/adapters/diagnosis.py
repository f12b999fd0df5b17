"""Finds out why a call failed from what the other ranks publish in the store and from their processes on this host."""

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
    """Publishes this rank's latest calls when a call fails, reads the other ranks', and compares them.

    Args:
        store: the store that the ranks share.
        identity: the group's number, which is the same on all its members.
        members: the group's members, by group rank.
        group_rank: the group rank of this process.
    """

    def __init__(self, store: Store, identity: int, members: Sequence[Member], group_rank: int) -> None:
        self.members = members
        self.rank = group_rank
        self._store = store
        self._keys = [f"inquiry/{identity}/{rank}" for rank in range(len(members))]

    def diagnose(self, history: Sequence[HeaderFields], said: str, waited_ns: int) -> Failure:
        """Returns why the latest call failed, as far as that can be known.

        Args:
            history: this rank's latest calls; the last one is the call that failed.
            said: the library's message; empty if the call timed out.
            waited_ns: how long the call waited, in nanoseconds.
        """
        answers, is_store_there = self._ask(history)
        silent = [rank for rank in range(len(self.members)) if rank not in answers]
        lost = self._lost(silent, [rank for rank, answer in answers.items() if answer == _LEFT], said, is_store_there)
        if lost is not None:
            return lost
        if calls := _first_difference([_calls(answers.get(rank)) for rank in range(len(self.members))]):
            return Failure(Code.MISMATCH, said, reporter=self.rank, calls=calls, algorithms=[0] * len(calls))
        if not said:
            return Failure(Code.TIMED_OUT, missing=silent if is_store_there else (), waited_ns=waited_ns)
        if silent:
            return Failure(Code.PEER_LOST, said, gone=silent, seen=_silence(said))
        return Failure(Code.REFUSED, said)

    def about_message(self, peer: int, said: str, waited_ns: int) -> Failure:
        """Returns why a message to or from `peer` (-1: from any rank) failed; the rest is as for `diagnose`."""
        others = [rank for rank in range(len(self.members)) if rank != self.rank] if peer < 0 else [peer]
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
        """Tells the other ranks that this one has left the group."""
        with contextlib.suppress(StoreError):
            self._store.set(self._keys[self.rank], _LEFT)

    def _lost(self, silent: Sequence[int], left: Sequence[int], said: str, is_store_there: bool) -> Failure | None:
        """Returns the failure if ranks are lost, otherwise None.

        If any rank died, the failure names only the dead, since the others left because of them.
        """
        store = self._store if is_store_there else None
        fates = {rank: fate_of(store, self.members[rank]) for rank in silent}
        died = [rank for rank, fate in fates.items() if fate is Fate.DIED]
        if died:
            return Failure(Code.PEER_LOST, said, gone=died, seen="" if is_store_there else _ENDED)
        left = sorted({*left, *(rank for rank, fate in fates.items() if fate is Fate.LEFT)})
        return Failure(Code.PEER_LOST, said, gone=left, left=left) if left else None

    def _ask(self, history: Sequence[HeaderFields]) -> tuple[dict[int, str], bool]:
        """Returns the answers of the ranks, this one's included, and whether the store is still there.

        Waits until every rank has answered or is known to have ended, but for no longer than `_PATIENCE_S`.
        """
        answers = {self.rank: json.dumps(list(history))}
        deadline = time.monotonic() + _PATIENCE_S
        try:
            self._store.set(self._keys[self.rank], answers[self.rank])
            while True:
                for rank, key in enumerate(self._keys):
                    if rank not in answers and self._store.check([key]):
                        answers[rank] = self._store.get(key).decode()
                silent = [rank for rank in range(len(self._keys)) if rank not in answers]
                if all(fate_of(self._store, self.members[rank]) for rank in silent) or time.monotonic() > deadline:
                    return answers, True
                time.sleep(_PAUSE_S)
        except StoreError:
            return answers, False

    def _has_left(self, rank: int) -> bool:
        return self._store.check([self._keys[rank]]) and self._store.get(self._keys[rank]) == _LEFT.encode()


def _silence(said: str) -> str:
    return f"did not answer for {_PATIENCE_S:g} s, after the library said {said!r}"


def _calls(answer: str | None) -> dict[int, HeaderFields]:
    """Returns a rank's latest calls by their sequence number."""
    if answer is None or answer == _LEFT:
        return {}
    return {int(call[0]): (call[0], call[1], call[2], call[3], call[4], call[5]) for call in json.loads(answer)}


def _first_difference(histories: Sequence[Mapping[int, HeaderFields]]) -> list[HeaderFields]:
    """Returns each rank's call at the first sequence number at which they differ; an empty list if none differ."""
    for number in sorted({number for history in histories for number in history}):
        calls = [history.get(number, _NO_CALL) for history in histories]
        if len({call for call in calls if call != _NO_CALL}) > 1:
            return calls
    return []
