"""Process sets: Horovod's name for groups of some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.group.default import default_group
from paceline.group.init import destroy_process_group, new_group
from paceline.group.process_group import ProcessGroup


class ProcessSet:
    """Some of the ranks, between which collectives can be made once `init` or `add_process_set` has taken it.

    Args:
        ranks: the ranks; all of them if None.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._given = None if ranks is None else sorted(ranks)
        self._group: ProcessGroup | None = None
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

    def group(self) -> ProcessGroup:
        """Returns Paceline's group of these ranks.

        Raises:
            ValueError: the set has not been added, or this rank is not in it.
        """
        if self._given is None:
            return default_group()
        if self._group is None:
            me = default_group().rank()
            why = "is not in it" if self.process_set_id is not None else "has not added it; call add_process_set on all"
            raise ValueError(f"rank {me} made a call on {self!r} and {why}")
        return self._group

    def open(self, number: int) -> None:
        """Makes the group; every rank of the job calls this, in the same order."""
        made = new_group(self.ranks)
        self._group = made if isinstance(made, ProcessGroup) else None
        self.process_set_id = number

    def close(self) -> None:
        """Ends the group; idempotent."""
        if self._group is not None:
            destroy_process_group(self._group)
        self._group = None
        self.process_set_id = None


global_process_set = ProcessSet()
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
