"""What every engine over a library does: it gathers a group's members, and tells the other ranks when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.adapters.diagnosis import FailureDiagnosis
from paceline.engine.adapters.members import announce_death, announce_leave, await_members, by_host
from paceline.engine.algorithms import known_algorithm
from paceline.engine.api import EngineContext
from paceline.engine.channel import Channel, Messages
from paceline.engine.failures import Member


@dataclass(frozen=True)
class Gathering:
    """The members of a group, all of whom have come to open it.

    Args:
        members: by group rank.
        group_rank: the group rank of this process.
        hosts: the group ranks of each host.
        algorithm: the algorithm for every collective that it has; None leaves the choice to the engine.
        diagnosis: finds out why a call failed.
    """

    members: tuple[Member, ...]
    group_rank: int
    hosts: list[list[int]]
    algorithm: str | None
    diagnosis: FailureDiagnosis


@dataclass(frozen=True)
class LibraryGroup:
    """A group's connections over a library; see `engine.api.OpenGroup`."""

    channel: Channel
    messages: Messages

    def record_as(self, group: int) -> None:
        """Records calls and messages; see `engine.channel.Channel`."""
        self.channel.record_as(group)
        self.messages.record_messages_as(group)

    def abort(self) -> None:
        """Ends the group's collectives; see `SerialChannel.abort`."""
        self.channel.abort()

    def failure(self) -> int:
        """Returns the code of the collectives' failure; OK without one."""
        return self.channel.failure()

    def close(self) -> None:
        """Closes the group; idempotent."""
        self.channel.close()


class LibraryEngine:
    """The base of an engine over a library, which adds its `name` and `open_group`; see `engine.api.Engine`.

    Args:
        context: the ranks, their store and this rank.
    """

    name: str

    def __init__(self, context: EngineContext) -> None:
        announce_death(context)
        self._context = context
        self._algorithm = known_algorithm(context.algorithm)
        self._groups: list[LibraryGroup] = []

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks of the default group and their processes."""
        return self._context.members

    def close(self) -> None:
        """Closes every group and tells the other ranks that this one has left; idempotent."""
        for group in self._groups:
            group.close()
        self._groups.clear()
        announce_leave(self._context)

    def _gather(self, ranks: Sequence[int], timeout_s: float, identity: int, algorithm: str | None) -> Gathering:
        """Waits until all members of a group have come to open it; the arguments are those of `open_group`.

        Raises:
            ValueError: there is no such algorithm.
            RendezvousError: a member gave up, died or left.
            RendezvousTimeoutError: a member did not come in time.
        """
        context = self._context
        members = tuple(context.members[rank] for rank in ranks)
        group_rank = list(ranks).index(context.rank)
        algorithm = known_algorithm(algorithm) or self._algorithm
        await_members(context, f"{self.name}/{identity}", members, group_rank, timeout_s)
        diagnosis = FailureDiagnosis(context.store, identity, members, group_rank)
        return Gathering(members, group_rank, by_host(members), algorithm, diagnosis)

    def _keep(self, channel: Channel, messages: Messages) -> LibraryGroup:
        """Returns the group of a channel and its messages, which `close` will close."""
        group = LibraryGroup(channel, messages)
        self._groups.append(group)
        return group
