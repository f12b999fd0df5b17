"""`LibraryEngine`, the base class for engines that wrap a library; it opens groups and reports this rank's exit.

A library does not report which process each rank runs in, whether these processes are running, or why a call failed.
The ranks therefore publish their process ids, their exits and, after a failure, their latest calls in the store, where
`FailureDiagnosis` compares them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from paceline.comm.engine.api import EngineContext, OpenGroup
from paceline.comm.engine.channel import CallFailure, EngineChannel, HeaderFields, Messages, OutcomeCode
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import describe_rank, read_ranks
from paceline.comm.engine.network_settings import known_algorithm
from paceline.comm.store.store import Store
from paceline.errors import RendezvousTimeoutError, StoreError, and_more

_MOST_NAMED = 4


class MemberExit(Enum):
    """The way in which a rank exited; the value is stored under the rank's key in the store."""

    DIED = "died"
    LEFT = "left"


def exchange_members(context: EngineContext) -> tuple[RankIdentity, ...]:
    """Publishes this rank's host and process, and returns those of all ranks in rank order.

    Raises:
        RendezvousError: a rank gave up or died, or the ranks run different versions.
        RendezvousTimeoutError: a rank did not publish its host and process in time; the message identifies the rank.
    """
    keys = {f"members/{rank}": rank for rank in range(context.world_size)}
    context.store.set(f"members/{context.rank}", describe_rank())
    with context.forming("members") as formation:
        absent = formation.absent(list(keys), time.monotonic() + context.timeout_s)
    if absent:
        raise RendezvousTimeoutError(
            f"rank {context.rank}: waited {context.timeout_s:.0f} s for {context.world_size} ranks; "
            f"{and_more([keys[key] for key in absent], _MOST_NAMED)} did not arrive. Look at their output, or "
            "raise timeout="
        )
    return read_ranks(context.store.multi_get(list(keys)), context.rank)[0]


def announce_death(context: EngineContext) -> None:
    """Registers a last will, so that the store's server reports this rank's death to ranks on other hosts."""
    will = _key(context.rank), MemberExit.DIED.value
    if context.formation is not None and context.formation.is_open:
        context.formation.publish_on_exit(*will)
    else:
        context.store.set_last_will(*will)


def announce_leave(context: EngineContext) -> None:
    """Reports to the other ranks that this rank has left, if the store is still available."""
    with contextlib.suppress(StoreError):
        context.store.set(_key(context.rank), MemberExit.LEFT.value)
        context.store.set_last_will("", "")


def exit_of(store: Store | None, member: RankIdentity) -> MemberExit | None:
    """Returns how a rank exited, or None if it is running or its state is unknown.

    If there is no store, or the store has no entry for the rank, the rank counts as dead if its process has exited.

    Raises:
        StoreError: the store does not answer.
    """
    if store is not None and store.check([_key(member.rank)]):
        return MemberExit(store.get(_key(member.rank)).decode())
    return MemberExit.DIED if member.process is not None and member.process.has_ended() else None


def await_members(
    context: EngineContext, name: str, members: Sequence[RankIdentity], group_rank: int, timeout_s: float
) -> None:
    """Waits until all members of a group have opened it.

    An engine calls this before its library waits for the members, because the library has no timeout or cannot report
    which rank is missing. `name` is the group's name in the store.

    Raises:
        RendezvousError: a member gave up, died or left.
        RendezvousTimeoutError: a member did not open the group in time; the message identifies the member.
    """
    store, others = context.store, [member for rank, member in enumerate(members) if rank != group_rank]
    keys = {f"{name}/here/{rank}": member for rank, member in enumerate(members)}
    store.set(list(keys)[group_rank], b"")
    with context.forming(name) as formation:
        formation.watch(lambda: next((member for member in others if exit_of(store, member)), None))
        absent = formation.absent(list(keys), time.monotonic() + timeout_s)
        if absent:
            raise RendezvousTimeoutError(
                f"{members[group_rank]}: {and_more([keys[key] for key in absent], _MOST_NAMED)} did not open this "
                f"group within {timeout_s:.0f} s. All ranks, members or not, call new_group with the same arguments "
                "and in the same order"
            )


def by_host(members: Sequence[RankIdentity]) -> list[list[int]]:
    """Returns the group ranks on each host."""
    hosts: dict[str, list[int]] = {}
    for group_rank, member in enumerate(members):
        hosts.setdefault(member.host, []).append(group_rank)
    return list(hosts.values())


def _key(rank: int) -> str:
    return f"fate/{rank}"


_PATIENCE_S = 2.0
_MESSAGE_PATIENCE_S = 0.5
_PAUSE_S = 0.02
_LEFT = "left"
_ENDED = "ended (it died or left; the store that recorded the reason is no longer available)"
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class _WaitChain:
    """The waits between ranks in all groups, as published by ranks whose calls have timed out.

    A rank publishes the ranks that it is waiting for only while it diagnoses its own timeout. Ranks that wait for each
    other are therefore detected only if their calls time out at about the same time.

    All ranks are ranks in the default group.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._key = f"waiting/{rank}"
        self._seen: dict[int, dict[str, str]] = {}

    @contextlib.contextmanager
    def published(self, awaited: Mapping[int, str]) -> Iterator[None]:
        """Publishes the ranks that this rank is waiting for, if any, for the duration of the block.

        Args:
            awaited: a mapping from each of these ranks to the key that the rank sets when it arrives, or to "".
        """
        if not awaited:
            yield
            return
        self._set(json.dumps(awaited))
        try:
            yield
        finally:
            self._set("")  # a deleted key would block a rank that is currently reading it

    def _set(self, entry: str) -> None:
        with contextlib.suppress(StoreError):
            self._store.set(self._key, entry)

    def follow(self, ranks: Sequence[int]) -> tuple[set[int], set[int]]:
        """Follows the chain of waits that begins at `ranks`.

        Returns:
            The ranks reached, including `ranks`, as two sets: those that wait for other ranks, and those that do not.

        Raises:
            StoreError: the store does not answer.
        """
        waiting, others, pending = set[int](), set[int](), list(ranks)
        while pending:
            rank = pending.pop()
            if rank in waiting or rank in others:
                continue
            key = f"waiting/{rank}"
            if self._store.check([key]) and (entry := self._store.get(key)):
                self._seen[rank] = json.loads(entry)
            if rank not in self._seen:
                others.add(rank)
                continue
            waiting.add(rank)
            awaited = self._seen[rank].items()
            pending += [int(rank) for rank, key in awaited if not key or not self._store.check([key])]
        return waiting, others


class FailureDiagnosis:
    """Determines why a call failed, by comparing this rank's latest calls with those published by the other ranks.

    Attributes:
        members: the group's members, in the order of their group ranks.
        rank: the group rank of this process.
    """

    def __init__(self, store: Store, identity: int, members: Sequence[RankIdentity], group_rank: int) -> None:
        self.members = members
        self.rank = group_rank
        self._store = store
        self._keys = [f"inquiry/{identity}/{rank}" for rank in range(len(members))]

    def diagnose(self, history: Sequence[HeaderFields], detail: str, waited_ns: int) -> CallFailure:
        """Returns the reason why the latest call failed, as far as it can be determined.

        Args:
            history: this rank's latest calls; the last one is the call that failed.
            detail: the library's message, or "" if the call timed out.
            waited_ns: the time spent waiting in the call, in nanoseconds.
        """
        waits = _WaitChain(self._store, self.members[self.rank].rank)
        awaited = {rank: key for rank, key in enumerate(self._keys) if rank != self.rank and not detail}
        with waits.published(self._by_member(awaited)):
            return self._diagnose(history, detail, waited_ns, waits)

    def _diagnose(self, history: Sequence[HeaderFields], detail: str, waited_ns: int, waits: _WaitChain) -> CallFailure:
        answers, is_store_there = self._request(history, waits)
        silent = [rank for rank in range(len(self.members)) if rank not in answers]
        lost = self._lost(silent, [rank for rank, answer in answers.items() if answer == _LEFT], detail, is_store_there)
        if lost is not None:
            return lost
        if calls := _first_difference([_calls(answers.get(rank)) for rank in range(len(self.members))]):
            return CallFailure(
                OutcomeCode.MISMATCH, detail, reporter=self.rank, calls=calls, algorithms=[0] * len(calls)
            )
        if not detail:
            return self._timed_out(silent if is_store_there else (), waited_ns, waits, patience_s=0.0)
        if silent:
            seen = f"did not answer for {_PATIENCE_S:g} s, after the library reported {detail!r}"
            return CallFailure(OutcomeCode.PEER_LOST, detail, gone=silent, seen=seen)
        return CallFailure(OutcomeCode.REFUSED, detail)

    def about_message(self, peer: int, detail: str, waited_ns: int) -> CallFailure:
        """Returns the reason why a message to or from `peer` (-1: from any rank) failed; see also `diagnose`."""
        others = [rank for rank in range(len(self.members)) if rank != self.rank] if peer < 0 else [peer]
        try:
            left = [rank for rank in others if self._has_left(rank)]
            is_store_there = True
        except StoreError:
            left, is_store_there = [], False
        lost = self._lost([rank for rank in others if rank not in left], left, detail, is_store_there)
        if lost is not None:
            return lost
        if detail:
            return CallFailure(OutcomeCode.REFUSED, detail)
        waits = _WaitChain(self._store, self.members[self.rank].rank)
        with waits.published(self._by_member(dict.fromkeys(others, ""))):
            return self._timed_out(others, waited_ns, waits, _MESSAGE_PATIENCE_S)

    def _by_member(self, entries: Mapping[int, str]) -> dict[int, str]:
        return {self.members[rank].rank: entry for rank, entry in entries.items()}

    def _timed_out(self, missing: Sequence[int], waited_ns: int, waits: _WaitChain, patience_s: float) -> CallFailure:
        """Returns the failure for a timeout; it identifies the missing ranks that are waiting in other calls."""
        absent = [self.members[rank].rank for rank in missing]
        until_s = time.monotonic() + patience_s
        waiting, others = set[int](), set[int]()
        with contextlib.suppress(StoreError):
            waiting, others = waits.follow(absent)
            while others and time.monotonic() < until_s:
                time.sleep(_PAUSE_S)
                waiting, others = waits.follow(absent)
        return CallFailure(
            OutcomeCode.TIMED_OUT,
            missing=missing,
            waited_ns=waited_ns,
            waiting=[rank for rank in missing if self.members[rank].rank in waiting],
            blocked_by=sorted(others - {member.rank for member in self.members}),
        )

    def leave(self) -> None:
        """Reports to the other ranks that this rank has left the group."""
        with contextlib.suppress(StoreError):
            self._store.set(self._keys[self.rank], _LEFT)

    def _lost(
        self, silent: Sequence[int], left: Sequence[int], detail: str, is_store_there: bool
    ) -> CallFailure | None:
        """Returns the failure if any rank is lost, otherwise None.

        If any rank died, the failure contains only the dead ranks, because all other lost ranks left as a consequence.
        """
        store = self._store if is_store_there else None
        fates = {rank: exit_of(store, self.members[rank]) for rank in silent}
        died = [rank for rank, fate in fates.items() if fate is MemberExit.DIED]
        if died:
            return CallFailure(OutcomeCode.PEER_LOST, detail, gone=died, seen="" if is_store_there else _ENDED)
        left = sorted({*left, *(rank for rank, fate in fates.items() if fate is MemberExit.LEFT)})
        return CallFailure(OutcomeCode.PEER_LOST, detail, gone=left, left=left) if left else None

    def _request(self, history: Sequence[HeaderFields], waits: _WaitChain) -> tuple[dict[int, str], bool]:
        """Returns the answers from all ranks, including this one, and whether the store is still available.

        Waits, for at most `_PATIENCE_S`, until every rank has answered or is known to have exited.
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
                if all(exit_of(self._store, self.members[rank]) for rank in silent) or time.monotonic() > deadline:
                    return answers, True
                waits.follow([self.members[rank].rank for rank in silent])  # entries are withdrawn later
                time.sleep(_PAUSE_S)
        except StoreError:
            return answers, False

    def _has_left(self, rank: int) -> bool:
        return self._store.check([self._keys[rank]]) and self._store.get(self._keys[rank]) == _LEFT.encode()


def _calls(answer: str | None) -> dict[int, HeaderFields]:
    """Returns a rank's latest calls, by sequence number."""
    if answer is None or answer == _LEFT:
        return {}
    return {int(call[0]): (call[0], call[1], call[2], call[3], call[4], call[5]) for call in json.loads(answer)}


def _first_difference(histories: Sequence[Mapping[int, HeaderFields]]) -> list[HeaderFields]:
    """Returns each rank's call at the first sequence number at which calls differ, or [] if no calls differ."""
    for number in sorted({number for history in histories for number in history}):
        calls = [history.get(number, _NO_CALL) for history in histories]
        if len({call for call in calls if call != _NO_CALL}) > 1:
            return calls
    return []


class LibraryEngine:
    """Base class for engines that wrap a library; subclasses add `name` and `open_group`. See `engine.api.Engine`."""

    name: str

    def __init__(self, context: EngineContext) -> None:
        announce_death(context)
        self._context = context
        self._algorithm = known_algorithm(context.algorithm)
        self._groups: list[OpenGroup] = []

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The ranks in the default group and their processes."""
        return self._context.members

    def close(self) -> None:
        """Closes every group and reports to the other ranks that this rank has left; idempotent."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        announce_leave(self._context)

    def _gather(
        self, ranks: Sequence[int], timeout_s: float, identity: int, algorithm: str | None
    ) -> tuple[FailureDiagnosis, str | None]:
        """Waits until all members of a group are opening it; takes the arguments of `open_group`.

        Returns:
            The object that determines why a call failed, and the algorithm to force, or None.

        Raises:
            ValueError: there is no such algorithm.
            RendezvousError, RendezvousTimeoutError: see `await_members`.
        """
        context = self._context
        members = tuple(context.members[rank] for rank in ranks)
        group_rank = list(ranks).index(context.rank)
        algorithm = known_algorithm(algorithm) or self._algorithm
        await_members(context, f"{self.name}/{identity}", members, group_rank, timeout_s)
        return FailureDiagnosis(context.store, identity, members, group_rank), algorithm

    def _keep(self, channel: EngineChannel, messages: Messages) -> OpenGroup:
        """Creates a group from its channel and its messages, and registers it, so that `close` closes it."""
        group = OpenGroup(channel, messages)
        self._groups.append(group)
        return group
