"""Where the members of a view meet: the process group of a view is made, and the one before it ends."""

from __future__ import annotations

import os
from datetime import timedelta

import msgspec

from paceline.elastic.agreement import Status
from paceline.elastic.connection import LauncherConnection
from paceline.elastic.messages import View
from paceline.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError, RendezvousError, StoreError
from paceline.group.default import default_group, leave, stand_beside
from paceline.group.init import init_process_group
from paceline.group.process_group import ProcessGroup
from paceline.rendezvous.environment import open_store
from paceline.store.base import Store
from paceline.store.prefix import PrefixStore

# What a member sees when another one is lost, or has left for a later view.
LOST = (PeerLostError, GroupAbortedError, CollectiveTimeoutError, RendezvousError, StoreError)
_FORMING_S = 60.0
_NO_COLLECTIVES = (
    "this worker came late and runs the loop on results of the others, who are not in this call. For a loop with "
    "collectives of its own, make the state with ElasticState(..., replays=False)"
)
_CALL_S = 3600.0


class Meeting:
    """Holds the default process group of the current view."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self._store: Store | None = None

    def enter(self, view: View) -> ProcessGroup:
        """Makes the process group of `view` the default group; ends the one before.

        Raises:
            PeerLostError, GroupAbortedError, RendezvousError, StoreError: a member was lost, or a later view came.
        """
        self.leave()
        rank = view.members.index(self._connection.name)
        if view.store:  # the one of this worker's environment may be gone, with the launcher that served it
            os.environ["PACELINE_STORE"] = view.store
        store = self._store = open_store(rank, len(view.members), timedelta(seconds=_FORMING_S))
        formed: list[ProcessGroup] = []

        def superseded(later: View) -> None:
            # Nobody may come to this view any more: what waits for others in it, while it forms or later, ends.
            if later.generation > view.generation and not later.is_planned:
                store.close()
                for group in formed:
                    group.abort()

        self._connection.when_told(superseded)
        init_process_group(
            "paceline",
            store=PrefixStore(f"view/{view.generation}", store),
            rank=rank,
            world_size=len(view.members),
            timeout=_FORMING_S,
        )
        group = default_group()
        group.set_timeout(timedelta(seconds=_CALL_S))
        formed.append(group)
        self._connection.when_told(superseded)
        return group

    def watch_only(self, workers: int) -> None:
        """Lets the script see itself as one more rank than so many workers, until it enters a view.

        It runs on results of the others, and must not think that it is the first rank, which prints and saves.
        """
        stand_beside(workers, _NO_COLLECTIVES)

    def leave(self) -> None:
        """Ends the default process group; idempotent."""
        self._connection.when_told(None)
        leave()
        if self._store is not None:
            self._store.close()
            self._store = None


def exchange_statuses(group: ProcessGroup, mine: Status) -> list[Status]:
    """Returns the statuses of all members, by rank."""
    return [msgspec.json.decode(each, type=Status) for each in group.all_gather_bytes(msgspec.json.encode(mine))]
