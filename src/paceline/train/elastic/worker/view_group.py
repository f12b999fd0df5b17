"""The process groups of views. `ViewGroups` holds the current group and forms the next one.

The group of a planned view is formed on a separate thread while its members still train in the previous view. The
members enter the view when all of them have formed the group, so no member waits for a slow connection.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from datetime import timedelta

import msgspec
import torch

from paceline.comm.engine.api import KnownCosts
from paceline.comm.group.buffers import as_memory, as_tensor
from paceline.comm.group.default import World, become_observer, leave
from paceline.comm.group.engines import agreed_identity
from paceline.comm.group.init import GroupOptions, form_apart, make_default
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.rendezvous.environment import open_store, open_store_at
from paceline.comm.store.store import PrefixStore, Store
from paceline.errors import StoreConnectionError
from paceline.train.elastic.agreement import MemberStatus
from paceline.train.elastic.failpoints import failpoint
from paceline.train.elastic.launcher_connection import LauncherConnection
from paceline.train.elastic.protocol import View

_FORMING_S = 60.0
_HEAD_START_S = 5.0  # time for which members continue training while the next view's group is being formed


class ViewGroup:
    """The process group of one view. `costs` are the message costs measured by the groups of earlier views."""

    def __init__(self, view: View, name: str, costs: KnownCosts) -> None:
        self.view = view
        self._rank = view.members.index(name)
        self._costs = costs
        self._lock = threading.Lock()
        self._is_over = False
        self._is_unwanted = False
        self._store: Store | None = None
        self._world: World | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._began_s = 0.0

    def begin(self) -> None:
        """Starts forming the group in the background."""
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="paceline-view-group", daemon=True)
        self._thread.start()

    @property
    def is_due(self) -> bool:
        """Whether the formation has completed, has failed, or has taken longer than a fixed time.

        After that time, this worker is ready to enter the view regardless. If the other members are unreachable, the
        worker reports this when it enters.
        """
        is_over = self._thread is None or not self._thread.is_alive()
        return is_over or time.monotonic() - self._began_s > _HEAD_START_S

    def world(self) -> World:
        """Waits until all members have connected, and returns the group with its resources.

        Raises one of LOST_MEMBER_ERRORS if a member was lost or a later view arrived.
        """
        if self._thread is None:
            self._form()
        else:
            self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._world is not None
        return self._world

    def end(self) -> None:
        """Interrupts all waits for other members, during formation and in calls on the group.

        Idempotent and thread-safe.
        """
        with self._lock:
            self._is_over = True
            if self._store is not None:
                self._store.close()
            if self._world is not None:
                self._world.group.abort()

    def discard(self) -> None:
        """Shuts down a group that this worker does not enter, without waiting. Idempotent."""
        self.end()
        with self._lock:
            self._is_unwanted = True
            world = self._world
        if world is not None:
            world.close()

    def join(self, within_s: float) -> None:
        """Waits up to `within_s` seconds for a discarded group's thread to exit."""
        if self._thread is not None:
            self._thread.join(within_s)

    def close_store(self) -> None:
        """Closes the store of a group that has ended. Idempotent."""
        if self._store is not None:
            self._store.close()

    def _run(self) -> None:
        try:
            self._form()
        except BaseException as error:  # `world` raises the error when this worker enters the view
            self._error = error

    def _form(self) -> None:
        failpoint("view.forming")
        store = self._open_store()
        with self._lock:
            self._store = store
            is_over = self._is_over
        try:
            if is_over:
                raise StoreConnectionError(f"view {self.view.generation} has ended because a later one has started")
            rendezvous_store = PrefixStore(f"view/{self.view.generation}", store)
            options = GroupOptions(costs=self._costs, identity=agreed_identity(self.view.generation))
            world = form_apart(rendezvous_store, self._rank, len(self.view.members), _FORMING_S, options)
        except BaseException:
            store.close()
            raise
        with self._lock:
            self._world = world
            if self._is_over:
                world.group.abort()
            is_unwanted = self._is_unwanted
        if is_unwanted:
            world.close()

    def _open_store(self) -> Store:
        patience = timedelta(seconds=_FORMING_S)
        if self.view.store:  # the environment's store is closed if the launcher that served it has exited
            return open_store_at(self.view.store, patience)
        return open_store(self._rank, len(self.view.members), patience)


_NO_COLLECTIVES = (
    "this worker joined late and replays the loop with results from the others, which are not in this call. For a loop "
    "with its own collectives, create the state with ElasticState(..., replays=False)"
)
_CALL_S = 3600.0
_LENGTH = struct.Struct("<Q")
_ROOM, _ROOM_OF_NAME = 1024, 32  # bytes reserved for a status, and for each member's name in the status
_PARTING_S = 5.0  # time to wait for a discarded group's thread to exit


class ViewGroups:
    """Holds the default process group of the current view, and forms the group of a received planned view."""

    def __init__(self, connection: LauncherConnection) -> None:
        self._connection = connection
        self._costs = KnownCosts()
        self._lock = threading.Lock()  # lock order: the connection's lock first, then this lock
        self._current: ViewGroup | None = None
        self._next: ViewGroup | None = None  # the group of a planned view
        self._discarded: list[ViewGroup] = []
        self._latest_forced = 0
        self._prepares = True
        connection.set_view_handler(self._on_view)

    def enter(self, view: View) -> ProcessGroup:
        """Destroys the previous process group, and makes the process group of `view` the default group.

        Raises one of LOST_MEMBER_ERRORS if a member was lost or a later view arrived.
        """
        forming = self._take(view)
        # A later view may have arrived before this group could be aborted.
        self._connection.set_view_handler(self._on_view)
        if view.store:
            os.environ["PACELINE_STORE"] = view.store
        world = forming.world()
        make_default(world)
        world.group.set_timeout(timedelta(seconds=_CALL_S))
        return world.group

    def acts_up_to(self, received: int) -> int:
        """Returns the highest view or transfer number, up to `received`, on which this worker can act immediately.

        While the group of a planned view forms, the worker cannot act on anything that it received after it entered the
        current view.
        """
        with self._lock:
            current, coming = self._current, self._next
        if coming is None or coming.is_due:
            return received
        return 0 if current is None else current.view.generation

    def watch_only(self, workers: int) -> None:
        """Presents this process to the script as an additional rank beyond `workers`, until it enters a view.

        The process uses the others' results, and must not act as rank 0, which prints and saves.
        """
        become_observer(workers, _NO_COLLECTIVES)

    def prepare_no_more(self) -> None:
        """Stops forming groups in advance after the loop has completed. The current group remains."""
        with self._lock:
            self._prepares = False
            self._discard_next()
            discarded, self._discarded = self._discarded, []
        for group in discarded:
            group.join(_PARTING_S)

    def leave(self) -> None:
        """Destroys the default process group. Idempotent."""
        self._connection.set_view_handler(None)
        self.prepare_no_more()
        with self._lock:
            current, self._current = self._current, None
        leave()
        if current is not None:
            current.close_store()

    def _take(self, view: View) -> ViewGroup:
        """Destroys the current group, and returns the group for a view, which may already be forming."""
        with self._lock:
            before, forming = self._current, self._next
            if forming is not None and forming.view == view:
                self._next = None
            else:
                self._discard_next()
                forming = ViewGroup(view, self._connection.name, self._costs)
            self._current = forming
        leave()
        if before is not None:
            before.close_store()
        return forming

    def _on_view(self, view: View) -> None:
        """Interrupts waits in earlier views, or prepares a planned view. Runs on the receiving thread."""
        with self._lock:
            if view.is_planned:
                self._prepare(view)
                return
            self._latest_forced = max(self._latest_forced, view.generation)
            for group in (self._current, self._next):
                if group is not None and group.view.generation < view.generation:
                    group.end()

    def _prepare(self, view: View) -> None:
        known = [group.view.generation for group in (self._current, self._next) if group is not None]
        is_later = view.generation > max(known, default=0) and view.generation > self._latest_forced
        if self._prepares and is_later and self._connection.name in view.members:
            self._discard_next()
            self._next = ViewGroup(view, self._connection.name, self._costs)
            self._next.begin()

    def _discard_next(self) -> None:
        if self._next is not None:
            self._next.discard()
            self._discarded.append(self._next)
            self._next = None


def exchange_statuses(group: ProcessGroup, mine: MemberStatus) -> list[MemberStatus]:
    """Returns the statuses of all members, by rank. Uses a single collective unless a status is unusually long."""
    encoded = msgspec.json.encode(mine)
    room = _ROOM + _ROOM_OF_NAME * group.size()
    boxes = [torch.empty(_LENGTH.size + room, dtype=torch.uint8, device="cpu") for _ in range(group.size())]
    group.all_gather(boxes, as_tensor((_LENGTH.pack(len(encoded)) + encoded[:room]).ljust(_LENGTH.size + room)))
    received = [bytes(as_memory(box)) for box in boxes]
    lengths = [_LENGTH.unpack_from(data)[0] for data in received]
    if max(lengths) <= room:
        texts = [data[_LENGTH.size :][:length] for data, length in zip(received, lengths, strict=True)]
    else:
        texts = group.all_gather_bytes(encoded)
    return [msgspec.json.decode(text, type=MemberStatus) for text in texts]
