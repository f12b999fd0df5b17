"""Checkpoints in the course of a training: when to save, what to keep, from where to go on.

Signals that ask a process to end, which is to save a checkpoint first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from types import FrameType, TracebackType

import torch

from paceline.comm.engine.codes import ReduceOp
from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CheckpointError, CollectiveError, StoreError
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import some
from paceline.train.checkpoint.host_disks import Disks, found_disks
from paceline.train.checkpoint.load import load_newest, newest_sequence, report_skipped
from paceline.train.checkpoint.peer_copies import PeerCopies
from paceline.train.checkpoint.rank_channel import GroupChannel, SingleRank, channel_of
from paceline.train.checkpoint.save import BACKGROUND, staged, write, write_later, write_staged
from paceline.train.checkpoint.save_plan import SavePlan, plan_save
from paceline.train.checkpoint.training_state import TrainingState, elastic_of, unsaved_gradients
from paceline.train.elastic.worker.elastic_state import ElasticState
from paceline.train.gradient_use import GRADIENT_USE


class EndingSignals:
    """Notes a SIGTERM, so that the loop ends at a place of its own choice; a second one ends the process at once."""

    def __init__(self) -> None:
        self.came = False
        self._before: signal._HANDLER = None
        # Elsewhere, signals cannot be handled, and whoever runs the loop in a thread must pass them on.
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._before = signal.signal(signal.SIGTERM, self._note)

    @property
    def exit_code(self) -> int:
        """The exit code of a process that was asked to end and did, as shells give it."""
        return 128 + signal.SIGTERM

    def close(self) -> None:
        """Puts the handler back that was there before, unless another one has taken its place; idempotent."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._is_installed = False

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.came:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.came = True


# What an unfinished checkpoint raises in an elastic job, whose workers may die; it was printed when it happened.
_OF_LOST_WORKERS = (CheckpointError, CollectiveError, StoreError)


class CheckpointManager:
    """Saves the state of a training regularly, and restores the newest whole checkpoint when the script starts again.

    The same script goes on after a crash, a time limit or pre-emption, with another number of ranks too, with
    `paceline run --max-restarts`, and in an elastic job. On SIGTERM, to any rank, all ranks save the step that they are
    in and end with exit code 143.

    Gradients are not saved, except those of an `ElasticState` in the middle of an accumulation. A RuntimeWarning says
    once which parameters have some that no optimizer has used yet.

    Args:
        path: the directory.
        every: save in each step that this number divides, or after this time; in each step if None.
        keep: how many checkpoints to keep.
        asynchronous: whether training goes on while a checkpoint is written.
        group: the ranks; the default group if None.
        shared: whether all ranks share the disk. With False each host has the parts of its own ranks, and ranks whose
            disk lacks parts get them from the others; not in elastic jobs.
        peer_copies: on how many other hosts launchers keep a copy of each part in memory, beside the one that the own
            host's launcher keeps; none is kept with 0. `restore` takes the newest whole checkpoint, whether it is in
            memory or on the disk. All ranks must be started by `paceline run`.

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
        peer_copies: int = 0,
    ) -> None:
        if (isinstance(every, int) and every < 1) or (isinstance(every, timedelta) and every <= timedelta(0)):
            raise ValueError(f"every is {every}; it must be a positive number of steps or a positive timedelta")
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1")
        if peer_copies < 0:
            raise ValueError(f"peer_copies is {peer_copies}; it must be a number of hosts, 0 for no copies in memory")
        self._root = Root(path)
        self._copies = PeerCopies(self._root.place.describe(), peer_copies) if peer_copies else None
        self._every, self._keep, self._asynchronous, self._group = every, keep, asynchronous, group
        self._shared = shared
        self._disks: Disks | None = None  # of the hosts, once they are known, if they do not share one
        self._saved: int | None = None  # the step that was saved last
        self._saved_s = time.monotonic()
        self._latest: tuple[int, TrainingState] = 0, {}  # what an elastic job has made last
        self._signals = EndingSignals()
        self._is_elastic = False
        self._has_warned = False
        GRADIENT_USE.follow()

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

    def save(self, step: int, state: TrainingState, *, force: bool = False) -> bool:
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
        elastic = elastic_of(state)
        if elastic is not None and elastic.rounds is not None:
            return self._save_elastic(elastic, step, state, force)
        talk = channel_of(self._group)
        is_due, ends = self._agreed(step, talk)
        is_saved = (is_due or force or ends) and self._saved != step
        if is_saved:
            BACKGROUND.finish()
            self._write(step, state, talk, self._asynchronous and not ends)
        if ends:
            if not is_saved:
                BACKGROUND.finish()
            if talk.rank == 0:  # copies may not be finished, and are waited for next
                sys.stderr.write(f"paceline: asked to end; the checkpoint of step {step} is in {self._where()}\n")
            self.close()
            raise SystemExit(self._signals.exit_code)
        return is_saved

    def restore(self, state: TrainingState) -> int | None:
        """Loads the newest whole checkpoint into `state`, as `paceline.load` does; every rank calls this.

        Says on stderr which newer ones it skipped, and why; with `peer_copies` also whether it took one in memory.

        Returns:
            The step of the checkpoint, None if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints and none is whole, or the newest whole one is one of other objects.
        """
        BACKGROUND.finish()
        talk = channel_of(self._group)
        if self._copies is not None:
            disks = self._own_disks(talk)
            copied = self._copies.restore(state, talk, lambda: newest_sequence(self._root, disks, talk))
            if copied is not None:
                self._saved = copied.step
                return copied.step
        newest = load_newest(state, self._root, self._own_disks(talk), talk)
        if newest is None:
            return None
        report_skipped(newest.skipped, talk)
        if self._copies is not None:
            self._copies.report_disk_restore(newest.step, talk)
        self._saved = newest.step
        return newest.step

    def _own_disks(self, talk: GroupChannel | SingleRank) -> Disks | None:
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

    def _agreed(self, step: int, talk: GroupChannel | SingleRank) -> tuple[bool, bool]:
        """Returns whether it is time to save, and whether the ranks are to end: the same on every rank."""
        mine = torch.tensor([self.should_save(step), self._signals.came], dtype=torch.int32, device="cpu")
        if isinstance(talk, GroupChannel) and talk.size > 1:
            talk.group.all_reduce(mine, ReduceOp.MAX)
        is_due, ends = mine.tolist()
        return bool(is_due), bool(ends)

    def _write(
        self,
        step: int,
        state: TrainingState,
        talk: GroupChannel | SingleRank,
        asynchronous: bool,
        may_copy: bool = True,
    ) -> None:
        """Writes a checkpoint; without `may_copy`, none is kept in memory."""
        self._warn_of_gradients(step, state, talk)
        least_sequence = 0 if self._copies is None else self._copies.least_sequence()
        prepared = plan_save(state, self._root, step, talk, self._own_disks(talk), least_sequence)
        if self._copies is not None and may_copy:
            self._write_and_copy(prepared, talk, asynchronous, self._copies)
        elif asynchronous:
            write_later(self._root, prepared, self._keep, talk)
        else:
            write(self._root, prepared, self._keep, talk)
        self._saved, self._saved_s = step, time.monotonic()

    def _warn_of_gradients(self, step: int, state: TrainingState, talk: GroupChannel | SingleRank) -> None:
        """Warns once that an accumulation has begun whose gradients the checkpoint does not have."""
        if self._has_warned or talk.rank > 0:
            return
        if names := unsaved_gradients(state):
            self._has_warned = True
            warnings.warn(
                f"{talk.me}: the checkpoint of step {step} is saved while the parameters {some(names)} have gradients "
                "that no optimizer.step() has used, and a checkpoint does not hold gradients: a training that goes on "
                "from it does without them. Save after optimizer.step() and before the next backward, or train with "
                "an ElasticState, whose checkpoints hold them. If the loop clears them anyway, nothing is lost",
                RuntimeWarning,
                stacklevel=4,
            )

    def _write_and_copy(
        self, prepared: SavePlan, talk: GroupChannel | SingleRank, asynchronous: bool, copies: PeerCopies
    ) -> None:
        """Writes and copies what is at this moment; the copies are always made beside the training."""
        still = staged(self._root, prepared, talk)
        sender = copies.sender(still, talk)
        if asynchronous:
            write_staged(self._root, still, self._keep, talk, sender)
        else:
            BACKGROUND.start(sender, prepared.draft.name)
            write(self._root, still, self._keep, talk)

    def _save_elastic(self, elastic: ElasticState, step: int, state: TrainingState, force: bool) -> bool:
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
            self._write(step, state, GroupChannel(group), self._asynchronous)
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
            self._write(step, state, SingleRank(), asynchronous=False, may_copy=False)
            sys.stderr.write(f"paceline: the job is to end; the checkpoint of step {step} is in {self._where()}\n")

    def _write_again(self) -> None:
        """Writes the step that was to be saved last, if that is the state's; each worker has all of it."""
        step, state = self._latest
        if self._saved == step and not self._is_saved(step):
            self._write(step, state, SingleRank(), asynchronous=False, may_copy=False)

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint of a step is there, or another worker is writing one."""
        place, name = self._root.place, f"step_{step:010d}"
        return any(each.startswith(name) or (name in each and place.is_held(each)) for each in place.names())

    def _where(self) -> str:
        return self._root.place.describe()
