"""The process group of one view, from the first connection to its end.

The group of a planned view forms while its members still train in the view before, in a thread of its own. They enter
the view when all of them have it, so that nobody waits for a member that is slow to connect.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

from paceline.elastic.failpoints import reach
from paceline.elastic.messages import View
from paceline.engine.api import KnownCosts
from paceline.errors import StoreConnectionError
from paceline.group.default import World
from paceline.group.engines import agreed_identity
from paceline.group.forming import Options, form_apart
from paceline.rendezvous.environment import open_store, open_store_at
from paceline.store.base import Store
from paceline.store.prefix import PrefixStore

_FORMING_S = 60.0
_HEAD_START_S = 5.0  # how long members train on while the group of the next view forms


class Forming:
    """The process group of a view.

    Args:
        view: the view.
        name: this worker's.
        costs: what messages cost, as far as groups of earlier views have measured it.
    """

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
        """Begins to form the group in the background."""
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="paceline-meeting", daemon=True)
        self._thread.start()

    @property
    def is_due(self) -> bool:
        """Whether it is no use to wait longer before entering: all have met, or this worker cannot meet them.

        Some time after the beginning it is so in any case. A member that cannot reach the others notices that first,
        and says so when it enters the view, for which all have to be ready.
        """
        is_over = self._thread is None or not self._thread.is_alive()
        return is_over or time.monotonic() - self._began_s > _HEAD_START_S

    def world(self) -> World:
        """Returns the group with what belongs to it, when all members have met.

        Raises:
            PeerLostError, GroupAbortedError, RendezvousError, StoreError: a member was lost, or a later view came.
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
        """Ends what waits for other members, here or in calls on the group; idempotent, and for any thread."""
        with self._lock:
            self._is_over = True
            if self._store is not None:
                self._store.close()
            if self._world is not None:
                self._world.group.abort()

    def discard(self) -> None:
        """Ends a group that this worker does not enter, and waits for nothing; idempotent."""
        self.end()
        with self._lock:
            self._is_unwanted = True
            world = self._world
        if world is not None:
            world.close()

    def has_ended(self, within_s: float) -> bool:
        """Waits for the thread of a group that was discarded; returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(within_s)
        return self._thread is None or not self._thread.is_alive()

    def close_store(self) -> None:
        """Closes the store of a group that has ended; idempotent."""
        if self._store is not None:
            self._store.close()

    def settle(self) -> None:
        """Makes the view's store that of this worker's environment, since the worker enters the view."""
        if self.view.store:
            os.environ["PACELINE_STORE"] = self.view.store

    def _run(self) -> None:
        try:
            self._form()
        except BaseException as error:  # `world` raises it where the view is entered
            self._error = error

    def _form(self) -> None:
        reach("view.forming")
        store = self._open_store()
        with self._lock:
            self._store = store
            is_over = self._is_over
        try:
            if is_over:
                raise StoreConnectionError(f"view {self.view.generation} is over, since a later one has come")
            meeting_place = PrefixStore(f"view/{self.view.generation}", store)
            options = Options(costs=self._costs, identity=agreed_identity(self.view.generation))
            patience = timedelta(seconds=_FORMING_S)
            world = form_apart(meeting_place, self._rank, len(self.view.members), patience, options)
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
        if self.view.store:  # the one of this worker's environment may be gone, with the launcher that served it
            return open_store_at(self.view.store, patience)
        return open_store(self._rank, len(self.view.members), patience)
