"""`Engine`, the interface of an engine, which connects ranks and moves and reduces their tensors.

An engine serves one type of device. It must

- open groups of the ranks (`Engine.open_group`), each with a channel for its collectives and with messages between its
  ranks (`channel.py` defines both), and close them;
- enforce a deadline on every wait, and report the result of a call as an `OutcomeCode`: TIMED_OUT, PEER_LOST or
  MISMATCH if it can detect these, REFUSED with the library's message in all other cases (`failures.CallFailure`);
- run the calls of a group in the order in which they are made, synchronous or not.

An engine need not handle

- tensors (views, copies, dtypes, checks of arguments), for which `group/` is responsible;
- PREMUL_SUM's factors, and collectives on objects, coalesced tensors and several GPUs, which become ordinary calls of a
  channel;
- the order of calls and a thread for asynchronous calls, which `adapters/serial_channel.py` provides;
- operations, dtypes and reductions that its library lacks, because `adapters/schedule_executor.py` can run schedules
  over plain sends and receives.

An engine's module implements the two functions of `EngineModule` and is listed in `registry.py`; `tests/engines` checks
the behavior of engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.comm.engine.channel import EngineChannel, Messages
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import Formation
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.store.store import Store


@dataclass
class KnownCosts:
    """Link costs measured by earlier engines; see `native/cost_measurement.py`.

    Attributes:
        models: the cost models, by the hosts on which they were measured.
        pairs: the costs of a message between two hosts, by the two host names in alphabetical order.
    """

    models: dict[tuple[str, ...], CostModel] = field(default_factory=dict)
    pairs: dict[tuple[str, str], LinkCost] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineContext:
    """The context in which an engine starts.

    Args:
        store: the store that the ranks share; it must outlive the engine.
        rank, world_size: this rank and the number of ranks.
        timeout_s: the time to wait for the other ranks, in seconds.
        formation: the formation of the default group; later groups create their own.
        members: the ranks, or () if the engine discovers them itself, like the native engine.
        peer: the host of the rendezvous, if it is known.
        interface: the interface or address to which other hosts connect; see `network_settings.own_address`.
        algorithm: the algorithm to force for every collective that implements it; these collectives then run as
            schedules.
        costs: the link costs measured by earlier engines, or None.
    """

    store: Store
    rank: int
    world_size: int
    timeout_s: float
    formation: Formation | None = None
    members: tuple[RankIdentity, ...] = ()
    peer: str | None = None
    interface: str | None = None
    algorithm: str | None = None
    costs: KnownCosts | None = None

    def forming(self, what: str) -> contextlib.AbstractContextManager[Formation]:
        """Returns the default group's formation while it is open, or else a new formation identified by `what`."""
        if self.formation is not None and self.formation.is_open:
            return contextlib.nullcontext(self.formation)
        return Formation(self.store, self.rank, self.world_size, what)


class OpenGroup(Protocol):
    """A group's connections. `channel` runs the collectives, and `messages` transfers messages between two ranks."""

    @property
    def channel(self) -> EngineChannel:
        """The channel that runs the group's collectives."""
        ...

    @property
    def messages(self) -> Messages:
        """The interface for messages to and from single ranks of the group."""
        ...

    def record_as(self, group: int, /) -> None:
        """Records later calls and messages under the group's serial number; see `EngineChannel.record_as`."""

    def abort(self) -> None:
        """Aborts calls and messages; see `EngineChannel.abort`."""

    def failure(self) -> int:
        """Returns the `OutcomeCode` of a failure of calls or messages, or OK."""
        ...

    def close(self) -> None:
        """Closes the channel and the messages; idempotent."""


class Engine(Protocol):
    """Connects the ranks in the default group and in all other groups, until `close` is called."""

    @property
    def name(self) -> str:
        """The engine's name in `backend=`."""
        ...

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The members of the default group."""
        ...

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> OpenGroup:
        """Connects the group of `ranks`; only its members call this.

        Args:
            ranks: the members' ranks in the default group, in the order of their group ranks, including this rank.
            timeout_s: the time to wait for the other members, in seconds.
            identity: a number below 2^63 that is the same on all members. No other group of this engine may use it,
                except the same group on another device.
            algorithm: the algorithm to force; None leaves the choice to the engine.
            device: the device of the tensors, to which all addresses in calls refer; the CPU if None.

        Raises:
            ValueError: the engine does not have `algorithm`.
            RendezvousTimeoutError: a member did not open the group in time.
        """
        ...

    def close(self) -> None:
        """Closes every group and reports to the other ranks that this rank has left; idempotent."""


class EngineModule(Protocol):
    """The functions in an engine's module, which is imported when the engine is chosen."""

    def missing_piece(self, name: str) -> str | None:
        """Returns the first prerequisite that this machine lacks, with the fix, or None if the engine can be used.

        `name` is the engine's name, since one module may implement several engines.
        """

    def start(self, name: str, context: EngineContext) -> Engine:
        """Starts the engine with this name; every rank calls this."""
        ...
