"""Functions of the program that run before a group is given up, so that they can record what it was doing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable


class AbortHooks:
    """Runs its functions once for each failure; whoever comes second waits until they have run."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[[], None]] = {}
        self._running = threading.RLock()  # a function may itself abort the group
        self._ran = False

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Adds `hook`, in place of an earlier one with the same number."""
        self._hooks[hook_id] = hook

    def remove(self, hook_id: int) -> None:
        """Removes the function with that number, if there is one."""
        self._hooks.pop(hook_id, None)

    def run(self) -> None:
        """Runs the functions, unless they have run since `rearm`; an error in one is logged."""
        with self._running:
            if self._ran or not self._hooks:
                return
            self._ran = True
            for hook_id, hook in list(self._hooks.items()):
                try:
                    hook()
                except Exception:  # whatever it is, the group must be given up
                    logging.getLogger(__name__).exception("the abort hook %d failed", hook_id)

    def rearm(self) -> None:
        """Makes the next failure run the functions again."""
        self._ran = False
