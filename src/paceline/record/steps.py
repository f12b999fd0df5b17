"""Numbers the training steps of this process, by which everything else that it records is sorted.

A step of `DistributedDataParallel` lasts from its first forward in training to the first one after the gradients were
averaged; forwards under `no_sync` belong to one step. A step of an elastic job is a round, and one of `LogicalShards` a
`backward`. If a program has several of them, the first one makes the steps; the elastic rounds take over.
"""

from __future__ import annotations

import weakref

from paceline import _core
from paceline.record.names import EventKind
from paceline.record.recorder import begin_once
from paceline.record.spans import begin_event

_STEP = int(EventKind.STEP)


class Steps:
    """The steps of this process so far."""

    def __init__(self) -> None:
        self.number = 0
        self._stamp = 0
        self._maker: weakref.ref[object] | None = None
        self._rank = 0

    def begin(self, maker: object, name: str, precedence: int = 0) -> None:
        """Ends the step before and begins the next, if the steps of this process are those of `maker`.

        Args:
            maker: the object whose steps they are, while it lives.
            name: what makes the steps, such as "ddp".
            precedence: a maker of a higher one takes over.
        """
        if self._current() is not maker:
            if self._current() is not None and precedence <= self._rank:
                return
            self._maker, self._rank = weakref.ref(maker), precedence
        begin_once()
        self.end(maker)
        self.number += 1
        _core.record_step(self.number)
        self._stamp = begin_event(_STEP, name, self.number)

    def end(self, maker: object) -> None:
        """Ends the step, if there is one of `maker`."""
        if self._stamp and self._current() is maker:
            _core.record_end(self._stamp)
            self._stamp = 0

    def _current(self) -> object | None:
        return None if self._maker is None else self._maker()


STEPS = Steps()
