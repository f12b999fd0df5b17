"""The native engine, which uses shared memory within a host and TCP between hosts.

Between hosts, `ScheduledChannel` runs each collective as a schedule, with the algorithm predicted to be the fastest.
The core detects calls whose times differ greatly from the prediction (native/call/prediction_monitor.hpp), and a
message about them is logged once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from paceline import _core
from paceline.comm.engine.api import EngineContext, KnownCosts, OpenGroup
from paceline.comm.engine.channel import ITEM_SIZES, WIRE_CODES, CollectiveCall, EngineChannel
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import Formation
from paceline.comm.engine.native.bootstrap import join
from paceline.comm.engine.native.connections import Connections, connect
from paceline.comm.engine.native.cost_measurement import agree_on_costs
from paceline.comm.engine.network_settings import (
    ALGORITHM_VARIABLE,
    ALL_TO_ALL_NBYTES,
    STREAMS_VARIABLE,
    UNMEASURED,
    known_algorithm,
    own_address,
    parse_streams,
)
from paceline.comm.record.layout import DTYPES, OPERATIONS
from paceline.comm.schedule.algorithms import (
    SYNTHESIZED,
    AlgorithmChoice,
    algorithms_offering,
    build,
    choose,
    format_seconds,
    name_of,
    number_of,
)
from paceline.comm.schedule.cost_model import CostModel
from paceline.comm.schedule.network import Network
from paceline.comm.schedule.quantized import WIRES
from paceline.comm.schedule.steps import Operation, flatten
from paceline.comm.schedule.synthesis import can_synthesize, choose_all_reduce, synthesize
from paceline.errors import RendezvousTimeoutError, and_more
from paceline.linux import is_out_of_descriptors


def describe_miss(
    operation: int, algorithm: int, dtype: int, elements: int, calls: int, min_ns: int, predicted_ns: int
) -> str:
    """Returns the log message about calls of one kind whose durations were mispredicted.

    The arguments are the fields of `_core.ScheduleGroup.prediction_miss`: codes for the operation, the algorithm and
    the dtype, the number of elements in each call, the number of calls, and the shortest and the predicted time of a
    call in nanoseconds.
    """
    least, predicted = format_seconds(min_ns / 1e9), format_seconds(predicted_ns / 1e9)
    return (
        f"{OPERATIONS[operation]} of {elements:,} {DTYPES[dtype]} by {name_of(algorithm)} took {least} or more in "
        f"{calls} calls, but was predicted to take {predicted}: another algorithm may be faster. PACELINE_COSTS and "
        "PACELINE_NETWORK set the cost of messages, and PACELINE_ALGORITHM forces an algorithm"
    )


_WHOLE = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.GATHER, Operation.SCATTER)


class ScheduledChannel(EngineChannel):
    """Runs one group's calls as schedules over the group's links.

    Args:
        links: the group's links; the native executor runs schedules over them.
        rank: the group rank of this process.
        hosts: the group ranks on each host.
        model: the link costs; they must be equal on all ranks, since all ranks must choose the same algorithm.
        forced: the algorithm to use for every operation that it implements; None leaves the choice to `model`.
        network: the group's network, if its links are unequal. The algorithm for an all-reduce is then chosen by
            simulation, and the candidates include schedules synthesized for this network.
    """

    def __init__(
        self,
        links: _core.ScheduleGroup,
        rank: int,
        hosts: Sequence[Sequence[int]],
        model: CostModel,
        forced: str | None,
        network: Network | None = None,
    ) -> None:
        self._links = links
        self._rank = rank
        self._hosts = [list(ranks) for ranks in hosts]
        self._size = sum(map(len, hosts))
        self._model = model
        self._forced = forced
        # Bounded caches are sufficient, because programs use only a few different sizes.
        self._uneven = network if network is not None and can_synthesize(network) else None
        self._synthesized = synthesize(self._uneven) if self._uneven is not None else []
        self._choice = functools.lru_cache(1024)(self.choose)
        self._schedule = functools.lru_cache(256)(self._build)

    def choose(self, operation: Operation, nbytes: int) -> AlgorithmChoice:
        """Returns the algorithm for a call on `nbytes` bytes, and the predicted time for each candidate."""
        forced = self._forced if self._forced in algorithms_offering(operation) else None
        if self._uneven is not None and operation is Operation.ALL_REDUCE:
            return choose_all_reduce(self._uneven, self._synthesized, nbytes, forced)
        return choose(self._model, operation, nbytes, self._size, self._hosts, forced)

    @property
    def quantizes(self) -> bool:
        """Returns True, because calls may specify a `wire`, which determines their schedule."""
        return True

    def run(self, call: CollectiveCall) -> _core.Outcome | None:
        """Runs a call to completion; returns None on success."""
        self._log_miss()
        return self._links.run(*self._planned(call))

    def submit(self, call: CollectiveCall) -> _core.Work:
        """Queues a call after the earlier ones and returns immediately."""
        self._log_miss()
        return self._links.submit(*self._planned(call))

    def prepare(self, call: CollectiveCall) -> _core.PreparedCall:
        """Chooses the call's schedule and prepares the call for repetition."""
        self._log_miss()
        return self._links.prepare(*self._planned(call))

    def record_as(self, group: int) -> None:
        """Records later calls under the group's serial number."""
        self._links.record_as(group)

    def abort(self) -> None:
        """Aborts calls and messages on all ranks. (Messages use the same links as calls.)"""
        self._links.abort()

    def failure(self) -> int:
        """Returns the `OutcomeCode` for a failure of the links, or OK."""
        return self._links.failure()

    def close(self) -> None:
        """Logs mispredicted calls unless already logged. Does not close the links, which belong to the group."""
        self._log_miss()

    def _log_miss(self) -> None:
        """Logs calls that took much more or much less time than predicted; only once, and only on rank 0."""
        if self._rank == 0 and (found := self._links.prediction_miss()) is not None:
            logging.getLogger(__name__).info(describe_miss(*found))

    def _planned(self, call: CollectiveCall) -> tuple[_core.Schedule, CollectiveCall, int]:
        """Returns the call's schedule, the call, and the predicted time in nanoseconds (0 without a prediction)."""
        if call.wire:
            return self._schedule(WIRES[call.wire - 1], call.operation, call.root), call, 0
        choice = self._choice(call.operation, self._nbytes(call))
        predicted_ns = 0 if call.operation == Operation.BARRIER else round(1e9 * choice.seconds)
        return self._schedule(choice.algorithm, call.operation, call.root), call, predicted_ns

    def _nbytes(self, call: CollectiveCall) -> int:
        """Returns the size in bytes of a rank's longest buffer, which determines the algorithm."""
        if call.operation == Operation.ALL_TO_ALL:
            return ALL_TO_ALL_NBYTES
        nbytes = call.count * ITEM_SIZES[call.dtype]
        return nbytes * self._size if call.operation in _WHOLE else nbytes

    def _build(self, algorithm: str, operation: Operation, root: int) -> _core.Schedule:
        if algorithm == SYNTHESIZED:
            schedule = self._synthesized[self._rank]
        else:
            schedule = build(algorithm, operation, self._rank, self._size, root, self._hosts)
        wire = WIRE_CODES.get(algorithm, 0)
        return _core.Schedule.make(
            number_of(algorithm), schedule.blocks, self._rank, self._size, flatten(schedule), wire
        )


@dataclass(frozen=True)
class HostRanks:
    """A group's ranks on this host, connected by a mesh, and the memory that they share for longer than a single call.

    Attributes:
        mesh: the mesh that connects the ranks.
        places: the mesh rank for each group rank, or -1 for ranks on other hosts.
        rank: this process's group rank.
    """

    mesh: _core.HostMesh
    places: Sequence[int]
    rank: int

    @property
    def here(self) -> list[int]:
        """The group ranks on this host."""
        return [rank for rank, place in enumerate(self.places) if place >= 0]

    def share(self, nbytes: int) -> tuple[_core.SharedMemory, int]:
        """Creates zeroed memory for the ranks on this host; returns the memory and the number to pass to `find`.

        Raises:
            OSError: no memory or descriptors are left.
        """
        return _core.share_memory(self.mesh, nbytes)

    def find(self, owner: int, number: int, nbytes: int, timeout_s: float) -> _core.SharedMemory | None:
        """Returns the memory created by group rank `owner`, or None on timeout or if the owner has died or left.

        Raises:
            OSError: no memory or descriptors are left.
        """
        return _core.find_memory(self.mesh, self.places[owner], number, nbytes, timeout_s)

    def withdraw(self, number: int) -> None:
        """Withdraws the number by which ranks find this rank's memory; to be called after all ranks have found it."""
        _core.withdraw_memory(self.mesh, number)


# The size of a slot; each rank has four slots in each group. Tensor parts of this size stay in the L2 cache.
SLOT_BYTES = 128 << 10
_MOST_NAMED = 8  # maximum number of ranks in an error message
_START = "native"  # the formation's name, if the engine starts after the default group has formed
_LINKS = 1 << 63  # flag that distinguishes the id of a group's rings from the id of its slots


@dataclass(eq=False)
class NativeGroup(OpenGroup):
    """A group's connections; `parts` contains the links.

    Attributes:
        links: the links between the ranks, which transfer the messages and, between hosts, run the collectives.
        host_ranks: the group's ranks on this host; set to None by `close` to release the memory of the connections.
    """

    _: KW_ONLY
    links: _core.ScheduleGroup
    host_ranks: HostRanks | None

    def close(self) -> None:
        """Closes the connections; idempotent."""
        super().close()
        self.host_ranks = None


class NativeEngine:
    """Connects the ranks in the default group and in all other groups, until `close` is called.

    Args:
        formation: the default group's formation; its store also serves the formation of later groups.
        context: the engine's context, whose algorithm applies even among ranks on one host.

    Raises:
        ValueError: the algorithm or the interface does not exist.
        RendezvousError, AuthenticationError: see `join` and `connect`.
    """

    name = "paceline"

    def __init__(self, formation: Formation, context: EngineContext) -> None:
        self._formation = formation
        self._store = formation.store
        self._algorithm = known_algorithm(context.algorithm or os.environ.get(ALGORITHM_VARIABLE) or None)
        self._streams = parse_streams(os.environ.get(STREAMS_VARIABLE, "1"))
        self._peer, self._interface = context.peer, context.interface
        self._groups: list[NativeGroup] = []
        self._closed: set[str] = set()  # addresses of machines that do not accept connections
        self._costs: CostModel | None = None
        self._network: Network | None = None
        self._known_costs = KnownCosts() if context.costs is None else context.costs
        settings = {"algorithm": self._algorithm, STREAMS_VARIABLE: self._streams}
        self._topology, self._mesh = join(formation, settings, context.timeout_s)
        formation.watch(self._gone)

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The ranks in the default group and their processes."""
        return self._topology.members

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in the default group on each host."""
        return self._topology.hosts

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> NativeGroup:
        """Opens a group; see `engine.api.Engine`. Also raises the errors of `connect`."""
        algorithm = known_algorithm(algorithm) or self._algorithm
        if self._formation.is_open:
            return self._open(self._formation, ranks, timeout_s, algorithm, identity)
        with Formation(self._store, self._topology.rank, len(ranks), identity) as formation:
            formation.watch(self._gone)
            return self._open(formation, ranks, timeout_s, algorithm, identity)

    def _open(
        self, formation: Formation, ranks: Sequence[int], timeout_s: float, algorithm: str | None, identity: int
    ) -> NativeGroup:
        deadline = time.monotonic() + timeout_s
        topology = self._topology
        group_rank = list(ranks).index(topology.rank)
        hosts = topology.hosts_of(ranks)
        local_indices = {r: local_index for local_index, r in enumerate(topology.local_ranks)}
        mesh_ranks = [local_indices.get(r, -1) for r in ranks]
        connections: Connections = [[] for _ in ranks]
        if len(hosts) > 1:
            address = own_address(self._peer, self._interface)
            connections = connect(formation, topology, ranks, identity, address, self._streams, timeout_s, self._closed)
        remaining_s = max(0.1, deadline - time.monotonic())
        # If ranks on one host have different algorithms, they get different ids, so opening the group fails. Between
        # hosts, calls detect the difference.
        local_id = identity ^ zlib.crc32(algorithm.encode()) if algorithm is not None else identity
        links = _core.ScheduleGroup.create(
            self._mesh, local_id | _LINKS, group_rank, mesh_ranks, connections, remaining_s, ranks
        )
        if links is None:
            raise self._not_opened(formation, ranks, timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(links.close)
            undo.push(lambda _, error, __: _announce(formation, error))  # called before the links close
            channel: EngineChannel | None
            if len(hosts) > 1 or algorithm is not None:
                if self._costs is None:
                    measurable = len(hosts) > 1 and len(ranks) == len(topology.members)
                    self._costs, self._network = (
                        agree_on_costs(formation, topology, links, self._known_costs, timeout_s)
                        if measurable
                        else (UNMEASURED, None)
                    )
                network = self._network.among(ranks) if self._network is not None and len(hosts) > 1 else None
                channel = ScheduledChannel(links, group_rank, hosts, self._costs, algorithm, network)
            else:
                threads = torch.get_num_threads()
                channel = _core.HostGroup.create(self._mesh, mesh_ranks, local_id, SLOT_BYTES, remaining_s, threads)
            if channel is None:
                raise self._not_opened(formation, ranks, timeout_s)
            undo.pop_all()
        host_ranks = HostRanks(self._mesh, mesh_ranks, group_rank)
        group = NativeGroup(channel, links, [links], links=links, host_ranks=host_ranks)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Closes every group and leaves the mesh; idempotent."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._mesh.close()

    def _gone(self) -> RankIdentity | None:
        """Returns a rank on this host or in the default group that is known to have died or left, or None."""
        lost = [self._topology.local_ranks[place] for place in self._mesh.lost()]
        gone = lost or (self._groups[0].links.gone() if self._groups else [])
        return self._topology.members[gone[0]] if gone else None

    def _not_opened(self, formation: Formation, ranks: Sequence[int], timeout_s: float) -> RendezvousTimeoutError:
        formation.await_progress()
        return RendezvousTimeoutError(
            f"not every rank of [{and_more(ranks, _MOST_NAMED)}] opened this group within {timeout_s:.0f} s. All "
            "ranks, members or not, call new_group with the same arguments and in the same order"
        )


def _announce(formation: Formation, error: BaseException | None) -> None:
    """Reports to the other ranks why this rank gives up; the formation itself reports a shortage of descriptors."""
    if error is not None and not is_out_of_descriptors(error):
        formation.announce(error)


def missing_piece(name: str) -> None:
    """Returns None, because this engine is part of Paceline and has no prerequisites."""


def start(name: str, context: EngineContext) -> NativeEngine:
    """Starts the engine, which connects this rank to the other ranks on its host; see `engine.api.EngineModule`."""
    with context.forming(_START) as formation:
        return NativeEngine(formation, context)
