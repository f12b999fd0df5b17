"""Memory that the ranks of a group on one host map for longer than a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline import _core


@dataclass(frozen=True)
class HostRanks:
    """The ranks of a group that are on this host, connected by a mesh.

    Attributes:
        mesh: the connections between them.
        places: the rank in the mesh of each group rank, -1 if it is on another host.
        rank: this process's group rank.
    """

    mesh: _core.Mesh
    places: Sequence[int]
    rank: int

    @property
    def here(self) -> list[int]:
        """The group ranks on this host."""
        return [rank for rank, place in enumerate(self.places) if place >= 0]

    def share(self, nbytes: int) -> tuple[_core.SharedMemory, int]:
        """Creates memory of zeros for the ranks of this host; returns it, and the number by which they find it.

        Raises:
            OSError: no memory or descriptors are left.
        """
        return _core.share_memory(self.mesh, nbytes)

    def find(self, owner: int, number: int, nbytes: int, timeout_s: float) -> _core.SharedMemory | None:
        """Returns the memory that group rank `owner` created, None if it did not come or its owner has gone.

        Raises:
            OSError: no memory or descriptors are left.
        """
        return _core.find_memory(self.mesh, self.places[owner], number, nbytes, timeout_s)

    def withdraw(self, number: int) -> None:
        """Makes the others forget the number of memory that this rank created, once all have found it."""
        _core.withdraw_memory(self.mesh, number)
