"""The part of DistributedDataParallel that copies and pickles a wrapped module."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from paceline.group.default import default_group
from paceline.group.process_group import ProcessGroup

_OF_THIS_PROCESS = (
    "process_group",
    "_reducer",
    "_replica",
    "_watched",
    "_delayed",
    "_steps",
    "_averages",
    "_checks",
    "_call_module",
)


class CopyableModule(nn.Module):
    """A wrapped module whose copies have a group and hooks of their own.

    A deep copy keeps the process group. An unpickled module has the default group of the process that loads it.
    """

    process_group: ProcessGroup

    def __getstate__(self) -> dict[str, object]:
        state: Callable[[], dict[str, object]] = super().__getstate__  # without what `compile()` has made
        return {name: value for name, value in state().items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.process_group = default_group()
        self._start()

    def __deepcopy__(self, memo: dict[int, object]) -> CopyableModule:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        copied.process_group = self.process_group
        copied._start()
        return copied

    def _start(self) -> None:
        """Creates what `__getstate__` leaves out, except for the group."""
        raise NotImplementedError
