"""Where the members of a view meet: the process group of a view is made, and the one before it ends."""

from __future__ import annotations

import struct
import threading
from datetime import timedelta

import msgspec
import torch

from paceline.elastic.agreement import Status
from paceline.elastic.connection import LauncherConnection
from paceline.elastic.forming import Forming
from paceline.elastic.messages import View
from paceline.engine.api import KnownCosts
from paceline.errors import CollectiveTimeoutError, GroupAbortedError, PeerLostError, RendezvousError, StoreError
from paceline.group.default import leave, stand_beside
from paceline.group.exchange import as_memory, as_tensor
from paceline.group.forming import make_default
from paceline.group.process_group import ProcessGroup

# What a member sees when another one is lost, or has left for a later view.
LOST = (PeerLostError, GroupAbortedError, CollectiveTimeoutError, RendezvousError, StoreError)
_NO_COLLECTIVES = (
    "this worker came late and runs the loop on results of the others, who are not in this call. For a loop with "
    "collectives of its own, make the state with ElasticState(..., replays=False)"
)
_CALL_S = 3600.0
_LENGTH = struct.Struct("<Q")
_ROOM, _ROOM_OF_NAME = 1024, 32  # bytes of a status, and more for each member, since it has their names
_PARTING_S = 5.0  # how long a group that nobody wants any more may take to notice that


class Meeting:
    """Holds the default process group of the current view, and forms that of a planned view as soon as it is told."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self._costs = KnownCosts()
        self._lock = threading.Lock()  # may be taken while the connection's is held, and not the other way round
        self._current: Forming | None = None
        self._next: Forming | None = None  # of a planned view
        self._discarded: list[Forming] = []
        self._latest_forced = 0
        self._prepares = True
        connection.when_told(self._told)

    def enter(self, view: View) -> ProcessGroup:
        """Makes the process group of `view` the default group; ends the one before.

        Raises:
            PeerLostError, GroupAbortedError, RendezvousError, StoreError: a member was lost, or a later view came.
        """
        forming = self._take(view)
        self._connection.when_told(self._told)  # a later view may have come before there was anything to end
        forming.settle()
        world = forming.world()
        make_default(world)
        world.group.set_timeout(timedelta(seconds=_CALL_S))
        return world.group

    def acts_up_to(self, heard: int) -> int:
        """Returns the largest number, of the views and lessons up to `heard`, that this worker can act on at once.

        It cannot enter a planned view at once while the view's group forms, and all that it has heard of since it
        entered the current one has to wait with that.
        """
        with self._lock:
            current, coming = self._current, self._next
        if coming is None or coming.is_due:
            return heard
        return 0 if current is None else current.view.generation

    def watch_only(self, workers: int) -> None:
        """Lets the script see itself as one more rank than so many workers, until it enters a view.

        It runs on results of the others, and must not think that it is the first rank, which prints and saves.
        """
        stand_beside(workers, _NO_COLLECTIVES)

    def prepare_no_more(self) -> None:
        """Forms no other group beforehand, since the loop is over; the current one stays."""
        with self._lock:
            self._prepares = False
            self._discard_next()
            discarded, self._discarded = self._discarded, []
        for each in discarded:
            each.has_ended(_PARTING_S)

    def leave(self) -> None:
        """Ends the default process group; idempotent."""
        self._connection.when_told(None)
        self.prepare_no_more()
        with self._lock:
            current, self._current = self._current, None
        leave()
        if current is not None:
            current.close_store()

    def _take(self, view: View) -> Forming:
        """Returns the group of a view, which may have begun to form; ends the current one."""
        with self._lock:
            before, forming = self._current, self._next
            if forming is not None and forming.view == view:
                self._next = None
            else:
                self._discard_next()
                forming = Forming(view, self._connection.name, self._costs)
            self._current = forming
        leave()
        if before is not None:
            before.close_store()
        return forming

    def _told(self, view: View) -> None:
        """Ends what waits for members of earlier views, or prepares a planned view; in the listening thread."""
        with self._lock:
            if view.is_planned:
                self._prepare(view)
                return
            self._latest_forced = max(self._latest_forced, view.generation)
            for each in (self._current, self._next):
                if each is not None and each.view.generation < view.generation:
                    each.end()

    def _prepare(self, view: View) -> None:
        known = [each.view.generation for each in (self._current, self._next) if each is not None]
        is_later = view.generation > max(known, default=0) and view.generation > self._latest_forced
        if self._prepares and is_later and self._connection.name in view.members:
            self._discard_next()
            self._next = Forming(view, self._connection.name, self._costs)
            self._next.begin()

    def _discard_next(self) -> None:
        if self._next is not None:
            self._next.discard()
            self._discarded.append(self._next)
            self._next = None


def exchange_statuses(group: ProcessGroup, mine: Status) -> list[Status]:
    """Returns the statuses of all members, by rank; in a single collective if none is unusually long."""
    encoded = msgspec.json.encode(mine)
    room = _ROOM + _ROOM_OF_NAME * group.size()
    boxes = [torch.empty(_LENGTH.size + room, dtype=torch.uint8, device="cpu") for _ in range(group.size())]
    group.all_gather(boxes, as_tensor((_LENGTH.pack(len(encoded)) + encoded[:room]).ljust(_LENGTH.size + room)))
    received = [bytes(as_memory(box)) for box in boxes]
    lengths = [_LENGTH.unpack_from(each)[0] for each in received]
    if max(lengths) <= room:
        texts = [each[_LENGTH.size :][:length] for each, length in zip(received, lengths, strict=True)]
    else:
        texts = group.all_gather_bytes(encoded)
    return [msgspec.json.decode(each, type=Status) for each in texts]
