"""The native engine: one mesh a process, one channel a group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from paceline import _core
from paceline.engine.bootstrap import HostMesh, join_host
from paceline.engine.failures import Member
from paceline.errors import RendezvousTimeoutError
from paceline.store.base import Store

# Four slots of this many bytes a rank and group: a part of a tensor passes through the second-level cache.
SLOT_BYTES = 128 << 10


class NativeEngine:
    """Connects the ranks of one host through shared memory; closed by `close`."""

    name = "paceline"

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._host: HostMesh = join_host(store, rank, world_size, timeout_s)
        self._channels: list[_core.HostGroup] = []
        self._opened = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks of the default group."""
        return self._host.members

    def skip_channel(self) -> None:
        """Counts a group that this rank is not in, so that all ranks number their groups alike."""
        self._opened += 1

    def open_channel(
        self, ranks: Sequence[int], timeout_s: float, agreed_identity: int | None = None
    ) -> _core.HostGroup:
        """The channel of the group of `ranks`; every member calls this, and the same number of times before.

        Args:
            agreed_identity: below 2^62; what the members have agreed to call the channel, if not all ranks call this.
                No other channel is called so, and the call does not count.

        Raises:
            RendezvousTimeoutError: a member did not.
        """
        if agreed_identity is None:
            self._opened += 1
            identity = self._opened << 32 | zlib.crc32(repr(list(ranks)).encode())
        else:
            identity = 1 << 62 | agreed_identity
        channel = _core.HostGroup.create(self._host.mesh, list(ranks), identity, SLOT_BYTES, timeout_s)
        if channel is None:
            raise RendezvousTimeoutError(
                f"not every rank of {list(ranks)} opened this group within {timeout_s:.0f} s, or memory for "
                f"{4 * SLOT_BYTES >> 10} KiB of shared segment is short. All ranks, members or not, call new_group "
                "with the same ranks and in the same order"
            )
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        """Ends every channel and takes leave of the other ranks; idempotent."""
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._host.mesh.close()
