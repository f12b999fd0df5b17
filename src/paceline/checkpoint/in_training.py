"""Checkpoints in the course of a training: when to save, what to keep, from where to go on."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import torch

from paceline.checkpoint.background import BACKGROUND
from paceline.checkpoint.disks import Disks, found_disks
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.loading import load_from, load_spread
from paceline.checkpoint.objects import State
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.preparing import prepare
from paceline.checkpoint.saving import write, write_later
from paceline.checkpoint.signals import EndingSignals
from paceline.checkpoint.sources import newest_spread
from paceline.checkpoint.talking import Alone, GroupTalk, talk_of
from paceline.elastic.state import ElasticState
from paceline.errors import CheckpointDamagedError, CheckpointError, CollectiveError, StoreError
from paceline.group.process_group import ProcessGroup
from paceline.group.reduce_op import ReduceOp

# What an unfinished checkpoint raises in an elastic job, whose workers may die; it was printed when it happened.
_OF_LOST_WORKERS = (CheckpointError, CollectiveError, StoreError)


class CheckpointManager:
    """Saves the state of a training regularly, and restores the newest whole checkpoint when the script starts again.

    The same script goes on after a crash, a time limit or pre-emption, with another number of ranks too, with
    `paceline run --max-restarts`, and in an elastic job. On SIGTERM, to any rank, all ranks save the step that they are
    in and end with exit code 143.

    Args:
        path: the directory.
        every: save in each step that this number divides, or after this time; in each step if None.
        keep: how many checkpoints to keep.
        asynchronous: whether training goes on while a checkpoint is written.
        group: the ranks; the default group if None.
        shared: whether all ranks share the disk. With False each host has the parts of its own ranks, and ranks whose
            disk lacks parts get them from the others; not in elastic jobs.

    Example::

        manager = paceline.CheckpointManager("checkpoints", every=100)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        first = manager.restore(state) or 0
        for step in range(first + 1, steps + 1):
            train(step)
            manager.save(step, state)
        manager.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | timedelta | None = None,
        keep: int = 3,
        asynchronous: bool = True,
        group: ProcessGroup | None = None,
        shared: bool = True,
    ) -> None:
        if (isinstance(every, int) and every < 1) or (isinstance(every, timedelta) and every <= timedelta(0)):
            raise ValueError(f"every is {every}; it must be a positive number of steps or a positive timedelta")
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        self._root = Root(path)
        self._every, self._keep, self._asynchronous, self._group = every, keep, asynchronous, group
        self._shared = shared
        self._disks: Disks | None = None  # of the hosts, once they are known, if they do not share one
        self._saved: int | None = None  # the step that was saved last
        self._saved_s = time.monotonic()
        self._latest: tuple[int, State] = 0, {}  # what an elastic job has made last
        self._signals = EndingSignals()
        self._is_elastic = False

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(CheckpointError):  # it was printed, and the error that ends the block counts more
                self.close()

    def should_save(self, step: int) -> bool:
        """Returns whether `save` would save this step, as far as this rank knows without asking the others."""
        if self._saved == step:
            return False
        if isinstance(self._every, timedelta):
            return time.monotonic() - self._saved_s >= self._every.total_seconds()
        return self._every is None or step % self._every == 0

    def save(self, step: int, state: State, *, force: bool = False) -> bool:
        """Saves `state` if it is time to; every rank calls this in each step.

        Args:
            step: the number of the step that has just been made.
            state: as for `paceline.save`.
            force: save in any case.

        Returns:
            Whether a checkpoint was written, or has begun to be.

        Raises:
            CheckpointError: this checkpoint or the one before could not be written; raised on every rank.
            SystemExit: SIGTERM has come to a rank, and the checkpoint is on the disk.
        """
        elastic = _elastic_of(state)
        if elastic is not None and elastic.rounds is not None:
            return self._save_elastic(elastic, step, state, force)
        talk = talk_of(self._group)
        is_due, ends = self._agreed(step, talk)
        is_saved = (is_due or force or ends) and self._saved != step
        if is_saved:
            BACKGROUND.finish()
            self._write(step, state, talk, self._asynchronous and not ends)
        if ends:
            self.close()
            if talk.rank == 0:
                sys.stderr.write(f"paceline: asked to end; the checkpoint of step {step} is in {self._where()}\n")
            raise SystemExit(self._signals.exit_code)
        return is_saved

    def restore(self, state: State) -> int | None:
        """Loads the newest whole checkpoint into `state`, as `paceline.load` does; every rank calls this.

        Says on stderr which newer ones it skipped, and why.

        Returns:
            The step of the checkpoint, None if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints and none is whole, or the newest whole one is one of other objects.
        """
        BACKGROUND.finish()
        talk = talk_of(self._group)
        damaged: dict[str, str] = {}
        if not self._shared:
            return self._restore_spread(state, talk)
        while (name := self._choose(talk, damaged)) is not None:
            try:
                loaded = load_from(state, self._root.place.describe(name), talk)
            except CheckpointDamagedError as error:
                damaged[name] = str(error)
                continue
            self._say_skipped(damaged, talk)
            self._saved = loaded.step
            return loaded.step
        return None

    def _restore_spread(self, state: State, talk: GroupTalk | Alone) -> int | None:
        disks = self._own_disks(talk)
        assert disks is not None
        damaged: dict[str, str] = {}
        while True:
            spread, skipped = newest_spread(self._root, disks, talk, damaged)
            if spread is None:
                return None
            try:
                loaded = load_spread(state, self._root, spread, talk)
            except CheckpointDamagedError as error:
                damaged[spread.token] = str(error)
                continue
            self._say_skipped(skipped, talk)
            self._saved = loaded.step
            return loaded.step

    def _own_disks(self, talk: GroupTalk | Alone) -> Disks | None:
        if self._disks is None and not self._shared:
            self._disks = found_disks(self._root, talk)
        return self._disks

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and stops heeding signals; may be called again.

        In an elastic job workers may die, come or leave while the last one is written. Then a worker that is left
        writes it alone; if it cannot either, the checkpoint before is the newest, as was printed.

        Raises:
            CheckpointError: it could not be written, in a job that is not elastic.
        """
        self._signals.close()
        if not self._is_elastic:
            BACKGROUND.finish()
            return
        try:
            BACKGROUND.finish()
        except _OF_LOST_WORKERS:
            with contextlib.suppress(*_OF_LOST_WORKERS):
                self._write_again()

    def _agreed(self, step: int, talk: GroupTalk | Alone) -> tuple[bool, bool]:
        """Returns whether it is time to save, and whether the ranks are to end: the same on every rank."""
        mine = torch.tensor([self.should_save(step), self._signals.came], dtype=torch.int32, device="cpu")
        if isinstance(talk, GroupTalk) and talk.size > 1:
            talk.group.all_reduce(mine, ReduceOp.MAX)
        is_due, ends = mine.tolist()
        return bool(is_due), bool(ends)

    def _write(self, step: int, state: State, talk: GroupTalk | Alone, asynchronous: bool) -> None:
        prepared = prepare(state, self._root, step, talk, self._own_disks(talk))
        if asynchronous:
            write_later(self._root, prepared, self._keep, talk)
        else:
            write(self._root, prepared, self._keep, talk)
        self._saved, self._saved_s = step, time.monotonic()

    def _save_elastic(self, elastic: ElasticState, step: int, state: State, force: bool) -> bool:
        """Saves in a round of its own, which is done again with those that are left when a worker dies in it."""
        if isinstance(self._every, timedelta):
            raise ValueError(
                "every is a timedelta, but the workers of an elastic job have no clock in common; give steps"
            )
        if not self._shared:
            raise ValueError("shared is False, but workers of an elastic job come and go with their disks; share one")
        rounds = elastic.rounds
        assert rounds is not None
        self._is_elastic = True
        self._latest = step, state
        rounds.on_dismissed = self._save_alone
        if not (force or (self._saved != step and self.should_save(step))):
            return False

        def attempt(group: ProcessGroup) -> list[torch.Tensor]:
            with contextlib.suppress(*_OF_LOST_WORKERS):
                BACKGROUND.finish()
            self._write(step, state, GroupTalk(group), self._asynchronous)
            return [torch.tensor([step])]

        rounds.agree_on(attempt)
        self._saved = step
        return True

    def _save_alone(self) -> None:
        """Saves the step that was made last, when all workers of an elastic job end; each of them has all of it."""
        with contextlib.suppress(*_OF_LOST_WORKERS):
            BACKGROUND.finish()
        step, state = self._latest
        if not self._is_saved(step):
            self._write(step, state, Alone(), asynchronous=False)
            sys.stderr.write(f"paceline: the job is to end; the checkpoint of step {step} is in {self._where()}\n")

    def _write_again(self) -> None:
        """Writes the step that was to be saved last, if that is the state's; each worker has all of it."""
        step, state = self._latest
        if self._saved == step and not self._is_saved(step):
            self._write(step, state, Alone(), asynchronous=False)

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint of a step is there, or another worker is writing one."""
        place, name = self._root.place, f"step_{step:010d}"
        return any(each.startswith(name) or (name in each and place.is_held(each)) for each in place.names())

    def _choose(self, talk: GroupTalk | Alone, damaged: dict[str, str]) -> str | None:
        """Returns the newest checkpoint that is not known to be damaged, None if there are no checkpoints at all."""

        def choose() -> bytes:
            for each in self._root.listing():
                if each.name not in damaged and each.fault is None:
                    return each.name.encode()
                damaged.setdefault(each.name, each.fault or "")
            if not damaged:
                return b""
            faults = "; ".join(map(": ".join, damaged.items()))
            raise CheckpointError(
                f"{self._where()} has no whole checkpoint: {faults}. Remove what is there to begin anew"
            )

        name = heard(talk.announce(told(choose, talk.me) if talk.rank == 0 else b""))
        return name.decode() or None

    def _say_skipped(self, damaged: dict[str, str], talk: GroupTalk | Alone) -> None:
        if talk.rank == 0:
            for name, fault in damaged.items():
                sys.stderr.write(f"paceline: skipped the checkpoint {name}: {fault}\n")

    def _where(self) -> str:
        return self._root.place.describe()


def _elastic_of(state: State) -> ElasticState | None:
    return next(_elastic_states(state), None)


def _elastic_states(state: State) -> Iterator[ElasticState]:
    for value in state.values():
        if isinstance(value, ElasticState):
            yield value
        elif isinstance(value, dict):
            yield from _elastic_states(value)
