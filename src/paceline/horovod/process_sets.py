"""Process sets: Horovod's name for groups of some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import util

from paceline.group.default import default_group
from paceline.group.init import new_group
from paceline.group.process_group import ProcessGroup
from paceline.horovod.negotiation import CallQueue


class ProcessSet:
    """Some of the ranks, between which collectives can be made once `init` or `add_process_set` has taken it.

    Args:
        ranks: the ranks; all of them if None.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._given = None if ranks is None else sorted(ranks)
        self._queue: CallQueue | None = None
        self._world: ProcessGroup | None = None
        self.process_set_id: int | None = 0 if ranks is None else None

    def __repr__(self) -> str:
        return f"ProcessSet({'all' if self._given is None else self._given}, process_set_id={self.process_set_id})"

    @property
    def ranks(self) -> list[int]:
        """Returns the ranks of the set, in order."""
        return list(range(default_group().size())) if self._given is None else list(self._given)

    def included(self) -> bool:
        """Returns whether this rank is in the set."""
        return default_group().rank() in self.ranks

    def size(self) -> int:
        """Returns the number of ranks in the set."""
        return len(self.ranks)

    def rank(self) -> int:
        """Returns this rank's number within the set.

        Raises:
            ValueError: this rank is not in the set.
        """
        return self.ranks.index(default_group().rank())

    def calls(self) -> CallQueue:
        """Returns the queue of the set's calls.

        Raises:
            ValueError: the set has not been added, or this rank is not in it.
        """
        if self._queue is None:
            me = default_group().rank()
            if self._given is None:
                raise ValueError(f"rank {me} made a call before init(); all ranks call paceline.horovod.init() first")
            why = "is not in it" if self.process_set_id is not None else "has not added it; call add_process_set on all"
            raise ValueError(f"rank {me} made a call on {self!r} and {why}")
        return self._queue

    def is_of(self, world: ProcessGroup) -> bool:
        """Returns whether the set is open, and of ranks of this default group."""
        return self._world is world

    def open(self, number: int) -> None:
        """Makes the group; every rank of the job calls this, in the same order."""
        self._world = default_group()
        made = new_group(self._given, group_desc=f"paceline.horovod's calls of ranks {self.ranks}")
        self._queue = CallQueue(made) if isinstance(made, ProcessGroup) else None
        self.process_set_id = number
        _opened.append(self)

    def close(self) -> None:
        """Ends the group; idempotent."""
        if self._queue is not None:
            self._queue.close()
            self._queue.group.close()
        self._queue = self._world = None
        self.process_set_id = 0 if self._given is None else None
        if self in _opened:
            _opened.remove(self)


global_process_set = ProcessSet()
_opened: list[ProcessSet] = []
_added = 0


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Makes the group of a process set, or of some ranks, and returns the set. Every rank of the job calls this."""
    global _added
    _added += 1
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    chosen.open(_added)
    return chosen


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a process set, and returns whether it was one that had been added. Every rank of the job calls this."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    process_set.close()
    return True


def begin() -> None:
    """Makes the group of all ranks, unless it is there; every rank of the job calls this."""
    if global_process_set.is_of(default_group()):
        return
    end()
    global_process_set.open(0)
    # Before the groups end with the process: their calls on threads end first.
    util.Finalize(None, end, exitpriority=1)


def end() -> None:
    """Ends all process sets, the global one included."""
    for each in list(_opened):
        each.close()
