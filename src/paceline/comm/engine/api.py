"""The Engine interface: what connects the ranks, and moves and reduces their tensors.

An engine serves one type of device. It must

- open groups of the ranks (`Engine.open_group`), each with a channel for its collectives and with messages between its
  ranks (`channel.py` defines both), and close them;
- give every wait a deadline, and report how a call ended as an `Outcome`: TIMED_OUT, PEER_LOST or MISMATCH if it can
  know, otherwise REFUSED with the library's words (`failures.Failure`);
- run the calls of a group in the order in which they are made, synchronous or not.

It may leave to others

- everything that concerns tensors (views, copies, types, checks of arguments): `group/` does that;
- PREMUL_SUM's factors, lists of objects, coalesced and multi-GPU forms: they arrive as ordinary calls of a channel;
- the order of calls, and a thread for those that run asynchronously: `adapters/serial_channel.py` has both;
- operations, types and reductions that its library lacks: `adapters/executor.py` runs schedules over bare sends and
  receives.

An engine's module has the two functions of `EngineModule` and a line in `registry.py`; `tests/engines` checks that it
behaves as an engine must.
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
    """What messages cost, as engines before have measured it; see `native/costs.py`.

    Attributes:
        models: by the hosts between and within which they were measured.
        pairs: what a message between two hosts costs, by their names in alphabetical order.
    """

    models: dict[tuple[str, ...], CostModel] = field(default_factory=dict)
    pairs: dict[tuple[str, str], LinkCost] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineContext:
    """What an engine starts from.

    Args:
        store: what the ranks share; for as long as the engine lives.
        rank, world_size: this rank, and how many there are.
        timeout_s: how long to wait for the others.
        formation: of the default group, with which the first engines start.
        members: the ranks; empty for the engine that is to find out (the native one does while it connects them).
        peer: the host at which the ranks met, if it is known.
        interface: the interface or address that other hosts connect to; see `addresses.own_address`.
        algorithm: for every collective that it has, by schedule.
        costs: what messages cost between ranks of several hosts, as far as it was measured before; None if nobody
            remembers that.
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
        """The default group's formation, or once that is over one of `what` the ranks start later."""
        if self.formation is not None and self.formation.is_open:
            return contextlib.nullcontext(self.formation)
        return Formation(self.store, self.rank, self.world_size, what)


class OpenGroup(Protocol):
    """A group's connections: `channel` for its collectives, `messages` for messages between two of its ranks."""

    @property
    def channel(self) -> EngineChannel:
        """Runs the group's collectives."""
        ...

    @property
    def messages(self) -> Messages:
        """Sends to and receives from single ranks of the group."""
        ...

    def record_as(self, group: int, /) -> None:
        """Records calls and messages from now on as those of the group with this serial; see `Channel.record_as`."""

    def abort(self) -> None:
        """Ends calls and messages as `Channel.abort` does."""

    def failure(self) -> int:
        """Returns the `failures.Code` of a failure of either; OK without one."""
        ...

    def close(self) -> None:
        """Closes both; idempotent."""


class Engine(Protocol):
    """Connects the ranks of the default group and of all others; closed by `close`."""

    @property
    def name(self) -> str:
        """The engine's name in `backend=`."""
        ...

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The ranks of the default group."""
        ...

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> OpenGroup:
        """Connects the group of `ranks`; every member calls this, and nobody else has to.

        Args:
            ranks: of the default group, in the order of their group ranks; this one is among them.
            timeout_s: how long to wait for the others.
            identity: below 2^63; the same on all members, and no other group of this engine has it but the same group
                on another device.
            algorithm: the engine's own if None.
            device: the tensors'; the addresses in all calls are on it. A CPU if None.

        Raises:
            ValueError: the engine does not have `algorithm`.
            RendezvousTimeoutError: a member did not come.
        """
        ...

    def close(self) -> None:
        """Closes every group and tells the other ranks that this one leaves; idempotent."""


class EngineModule(Protocol):
    """The functions of an engine's module, which is imported when the engine is chosen."""

    def missing_piece(self) -> str | None:
        """The first thing that the engine needs and this machine lacks, with the fix; None if it can be used."""

    def start(self, context: EngineContext) -> Engine:
        """Starts the engine; every rank calls this."""
        ...
