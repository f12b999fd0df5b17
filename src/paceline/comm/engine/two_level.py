"""The hierarchical algorithm with two engines: one within each host, and one between the hosts' leaders.

The leader of a host is the host's first rank in the group. Messages and operations without a step between leaders
(all-to-all and all kinds of gather and scatter) use the engine that connects all ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from paceline.comm.engine.adapters.library_engine import FailureDiagnosis
from paceline.comm.engine.adapters.schedule_executor import FlatBuffer, divide_average
from paceline.comm.engine.adapters.serial_channel import CallEnded, SerialChannel
from paceline.comm.engine.api import Engine, OpenGroup
from paceline.comm.engine.channel import (
    NO_REDUCTION,
    CallFailure,
    CallOutcome,
    CollectiveCall,
    EngineChannel,
    OutcomeCode,
    Pieces,
    ReduceOp,
)
from paceline.comm.schedule.steps import Operation
from paceline.comm.store.store import Store

_WITHIN = 1 << 61  # flag in the identity of a group's part on one host


class Subgroup(NamedTuple):
    """An open group for a subset of a group's ranks; `ranks` lists the group ranks of this subset."""

    opened: OpenGroup
    ranks: Sequence[int]


def open_two_levels(
    inside: Engine,
    outside: Engine,
    store: Store,
    rank: int,
    ranks: Sequence[int],
    hosts: Sequence[Sequence[int]],
    timeout_s: float,
    identity: int,
) -> OpenGroup:
    """Opens the group of `ranks`; see `Engine.open_group`. All ranks are ranks in the default group.

    Args:
        inside: the engine that connects all ranks and reduces within each host.
        outside: the engine that connects the hosts' leaders.
        hosts: the ranks on each host.
        timeout_s: the time that each engine waits for the other ranks, in seconds.
    """
    by_host = [[group_rank for group_rank, rank in enumerate(ranks) if rank in host] for host in hosts]
    by_host = [host for host in by_host if host]
    me = list(ranks).index(rank)
    with contextlib.ExitStack() as undo:
        whole = inside.open_group(ranks, timeout_s, identity)
        undo.callback(whole.close)
        if len(by_host) == 1:
            undo.pop_all()
            return whole
        local = next(host for host in by_host if me in host)
        leaders = [host[0] for host in by_host]
        within = inside.open_group([ranks[group_rank] for group_rank in local], timeout_s, identity | _WITHIN)
        undo.callback(within.close)
        between = None
        if me in leaders:
            leader_ranks = [ranks[group_rank] for group_rank in leaders]
            between = Subgroup(outside.open_group(leader_ranks, timeout_s, identity), leaders)
            undo.callback(between.opened.close)
        diagnosis = FailureDiagnosis(store, identity, [inside.members[member] for member in ranks], me)
        channel = TwoLevelChannel(diagnosis, whole.channel, by_host, Subgroup(within, local), between)
        undo.pop_all()
    parts = [within, whole] if between is None else [between.opened, within, whole]
    return OpenGroup(channel, whole.messages, parts)


class TwoLevelChannel(SerialChannel):
    """Reduces and broadcasts through the leaders.

    Args:
        whole: the channel that connects all ranks and runs all other operations.
        within: the group of this host's ranks.
        between: the leaders' group, or None if this rank is not a leader.
    """

    def __init__(
        self,
        diagnosis: FailureDiagnosis,
        whole: EngineChannel,
        hosts: Sequence[Sequence[int]],
        within: Subgroup,
        between: Subgroup | None,
    ) -> None:
        super().__init__(diagnosis)
        self._whole = whole
        self._hosts = hosts
        self._within = within
        self._between = between

    def perform(self, call: CollectiveCall) -> None:
        """Runs a call to completion."""
        deadline_ns = time.monotonic_ns() + call.timeout_ns
        if call.operation == Operation.BROADCAST:
            self._broadcast(call, call.outputs, call.root, deadline_ns)
        elif call.operation == Operation.ALL_REDUCE:
            self._all_reduce(call, call.outputs, deadline_ns)
        elif call.operation == Operation.REDUCE:
            self._reduce(call, deadline_ns)
        else:
            self._check(self._whole.run(call), range(self._size))

    def _all_reduce(self, call: CollectiveCall, tensor: Sequence[Pieces], deadline_ns: int) -> None:
        op = ReduceOp.SUM if call.reduce_op == ReduceOp.AVG else call.reduce_op
        self._run(self._within, Operation.REDUCE, call, op, 0, tensor, deadline_ns)
        if self._between is not None:
            self._run(self._between, Operation.ALL_REDUCE, call, op, -1, tensor, deadline_ns)
            if call.reduce_op == ReduceOp.AVG:
                whole = FlatBuffer(tensor).copy_in()
                divide_average(whole.address, call, self._size)
                whole.copy_out()
        self._run(self._within, Operation.BROADCAST, call, NO_REDUCTION, 0, tensor, deadline_ns)

    def _reduce(self, call: CollectiveCall, deadline_ns: int) -> None:
        tensor = FlatBuffer(call.outputs).copy_in()
        copy = tensor.tensor().clone()  # only the root's tensor may be modified
        self._all_reduce(call, [[copy.data_ptr(), copy.nbytes]], deadline_ns)
        if self._rank == call.root:
            tensor.tensor().copy_(copy)
            tensor.copy_out()

    def _broadcast(self, call: CollectiveCall, tensor: Sequence[Pieces], root: int, deadline_ns: int) -> None:
        is_root_host = root in self._within.ranks
        if is_root_host:
            source = list(self._within.ranks).index(root)
            self._run(self._within, Operation.BROADCAST, call, NO_REDUCTION, source, tensor, deadline_ns)
        if self._between is not None:
            source = next(index for index, host in enumerate(self._hosts) if root in host)
            self._run(self._between, Operation.BROADCAST, call, NO_REDUCTION, source, tensor, deadline_ns)
        if not is_root_host:
            self._run(self._within, Operation.BROADCAST, call, NO_REDUCTION, 0, tensor, deadline_ns)

    def _run(
        self,
        part: Subgroup,
        operation: Operation,
        call: CollectiveCall,
        reduce_op: int,
        root: int,
        tensor: Sequence[Pieces],
        deadline_ns: int,
    ) -> None:
        if len(part.ranks) > 1:
            remaining_ns = max(1, deadline_ns - time.monotonic_ns())
            own = CollectiveCall(operation, call.dtype, reduce_op, root, call.count, remaining_ns, [], tensor)
            self._check(part.opened.channel.run(own), part.ranks)

    def _check(self, outcome: CallOutcome | None, ranks: Sequence[int]) -> None:
        """Fails the call if a part of it failed; ranks in the outcome are translated to ranks in the whole group."""
        if outcome is None:
            return
        calls = [(0, 0, 0, 0, -1, 0)] * self._size
        for rank, header in zip(ranks, outcome.calls, strict=False):
            calls[rank] = header
        aborted = outcome.code == OutcomeCode.ABORTED and outcome.reporter >= 0
        lists = {
            name: [ranks[rank] for rank in getattr(outcome, name)] for name in ("missing", "gone", "left", "waiting")
        }
        raise CallEnded(
            CallFailure.of(
                outcome,
                **lists,
                reporter=ranks[outcome.reporter] if aborted else self._rank,
                calls=calls,
                algorithms=[0] * self._size,
            )
        )
