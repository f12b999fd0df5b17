"""CheckpointManager: saves a training run at intervals, keeps the newest checkpoints, and restores the newest one.

On SIGTERM, it saves the current step and then ends the process.
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

from paceline.comm.engine.channel import ReduceOp
from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CheckpointError, CollectiveError, StoreError
from paceline.train.checkpoint.captured_state import (
    TrainingState,
    elastic_of,
    require_path,
    require_state,
    unsaved_gradients,
)
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.values import some
from paceline.train.checkpoint.host_disks import Disks, found_disks
from paceline.train.checkpoint.load import load_newest, newest_sequence
from paceline.train.checkpoint.peer_copies import PeerCopies
from paceline.train.checkpoint.rank_channel import CollectiveChannel, GroupChannel, SingleRank, channel_of
from paceline.train.checkpoint.save import BACKGROUND, staged, write, write_staged
from paceline.train.checkpoint.save_plan import plan_save
from paceline.train.elastic.worker.elastic_state import ElasticState
from paceline.train.gradient_use import GRADIENT_USE

# The errors raised for an unfinished checkpoint when workers of an elastic job die. They have already been printed.
_OF_LOST_WORKERS = (CheckpointError, CollectiveError, StoreError)


class CheckpointManager:
    """Saves the state of a training run at intervals, and restores the newest complete checkpoint after a restart.

    The same script continues after a crash, a time limit or preemption, even with a different number of ranks. This
    also works with `paceline run --max-restarts` and in elastic jobs. When any rank receives SIGTERM, all ranks save
    the current step and exit with code 143.

    Gradients are not saved, except for those of an `ElasticState` in the middle of gradient accumulation. If the state
    has other gradients that no optimizer has used yet, one RuntimeWarning lists their parameters.

    Args:
        path: the directory for the checkpoints.
        every: the interval between checkpoints, as a timedelta or as a number of steps. With a number, a step is saved
            if it is a multiple of that number. If None, every step is saved. Default: None.
        keep: the number of checkpoints to keep. Default: 3.
        asynchronous: whether training continues while a checkpoint is written. Default: True.
        group: the ranks that save, or None for the default group. Default: None.
        shared: whether all ranks share the disk. If False, each host stores the parts of its own ranks, and ranks fetch
            missing parts from other ranks. Must be True in elastic jobs. Default: True.
        peer_copies: the number of other hosts whose launchers keep a copy of each part in memory, in addition to the
            launcher on the rank's own host. If 0, no copies are kept. `restore` loads the newest complete checkpoint,
            whether in memory or on disk. Requires that all ranks were started by `paceline run`. Default: 0.

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
        require_path(path)
        self._root = Root(path)
        self._copies = PeerCopies(self._root.storage.describe(), peer_copies) if peer_copies else None
        self._every, self._keep, self._asynchronous, self._group = every, keep, asynchronous, group
        self._shared = shared
        self._disks: Disks | None = None  # determined at first use if the hosts do not share a disk
        self._saved: int | None = None  # the last saved step
        self._saved_s = time.monotonic()
        self._latest: tuple[int, TrainingState] = 0, {}  # the latest step and state of an elastic job
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
            # an error raised in the `with` block takes precedence over one from a save, which was already printed
            with contextlib.suppress(CheckpointError):
                self.close()

    def should_save(self, step: int) -> bool:
        """Returns True if a checkpoint of this step is due on this rank, regardless of the other ranks."""
        if self._saved == step:
            return False
        if isinstance(self._every, timedelta):
            return time.monotonic() - self._saved_s >= self._every.total_seconds()
        return self._every is None or step % self._every == 0

    def save(self, step: int, state: TrainingState, *, force: bool = False) -> bool:
        """Saves `state` if a checkpoint is due; every rank must call this in each step.

        Args:
            step: the index of the completed step.
            state: the objects, as for `paceline.save`.
            force: whether to save even if no checkpoint is due. Default: False.

        Returns:
            Whether a checkpoint was written or is being written.

        Raises:
            CheckpointError: this checkpoint or the previous one could not be written; raised on every rank.
            SystemExit: a rank has received SIGTERM. The checkpoint is on disk.
        """
        require_state("save", state, step)
        elastic = elastic_of(state)
        if elastic is not None and elastic.rounds is not None:
            return self._save_elastic(elastic, step, state, force)
        channel = channel_of(self._group)
        is_due, ends = self._agree(step, channel)
        is_saved = (is_due or force or ends) and self._saved != step
        if is_saved:
            BACKGROUND.finish()
            self._write(step, state, channel, self._asynchronous and not ends)
        if ends:
            if not is_saved:
                BACKGROUND.finish()
            if channel.rank == 0:  # printed before `close` waits for the copies in memory
                sys.stderr.write(
                    f"paceline: received a request to stop; the checkpoint of step {step} is in {self._where()}\n"
                )
            self.close()
            raise SystemExit(self._signals.exit_code)
        return is_saved

    def restore(self, state: TrainingState) -> int | None:
        """Loads the newest complete checkpoint into `state` (see `paceline.load`); every rank must call this.

        Reports on stderr which newer checkpoints were skipped, and why. With `peer_copies`, it also reports whether the
        checkpoint was loaded from memory.

        Returns:
            The step of the checkpoint, or None if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints but none is complete, or the newest complete one does not match
                `state`.
        """
        require_state("restore", state)
        BACKGROUND.finish()
        channel = channel_of(self._group)
        if self._copies is not None:
            disks = self._own_disks(channel)
            loaded = self._copies.restore(state, channel, lambda: newest_sequence(self._root, disks, channel))
            if loaded is not None:
                self._saved = loaded.step
                return loaded.step
        newest = load_newest(state, self._root, self._own_disks(channel), channel)
        if newest is None:
            return None
        loaded, skipped = newest
        if channel.rank == 0:
            for name, fault in skipped.items():
                sys.stderr.write(f"paceline: skipped the checkpoint {name}: {fault}\n")
        if self._copies is not None:
            self._copies.report_disk_restore(loaded.step, channel)
        self._saved = loaded.step
        return loaded.step

    def _own_disks(self, channel: CollectiveChannel) -> Disks | None:
        if self._disks is None and not self._shared:
            self._disks = found_disks(self._root, channel)
        return self._disks

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and restores the signal handler. Idempotent.

        In an elastic job, workers may die, join or leave while the last checkpoint is being written. A remaining worker
        then writes the checkpoint alone. If that also fails, the previous checkpoint remains the newest.

        Raises:
            CheckpointError: the checkpoint could not be written. Not raised in an elastic job.
        """
        self._signals.close()
        if not self._is_elastic:
            BACKGROUND.finish()
            return
        try:
            BACKGROUND.finish()
        except _OF_LOST_WORKERS:
            with contextlib.suppress(*_OF_LOST_WORKERS):
                if self._saved == self._latest[0]:  # the step should have been saved
                    self._write_missing()

    def _agree(self, step: int, channel: CollectiveChannel) -> tuple[bool, bool]:
        """Returns whether a checkpoint is due on any rank, and whether any rank has received SIGTERM."""
        mine = torch.tensor([self.should_save(step), self._signals.has_arrived], dtype=torch.int32, device="cpu")
        if isinstance(channel, GroupChannel) and channel.size > 1:
            channel.group.all_reduce(mine, ReduceOp.MAX)
        is_due, ends = mine.tolist()
        return bool(is_due), bool(ends)

    def _write(
        self,
        step: int,
        state: TrainingState,
        channel: CollectiveChannel,
        asynchronous: bool,
        may_copy: bool = True,
    ) -> None:
        """Writes a checkpoint. If `may_copy` is False, launchers do not keep a copy in memory."""
        least_sequence = 0 if self._copies is None else self._copies.least_sequence()
        plan = plan_save(state, self._root, step, channel, self._own_disks(channel), least_sequence)
        self._warn_of_gradients(step, state, channel)  # after planning, which reports faults in the state on every rank
        copies = self._copies if may_copy else None
        if copies is None and not asynchronous:
            write(self._root, plan, self._keep, channel)
        else:
            plan = staged(self._root, plan, channel)
            sender = None if copies is None else copies.sender(plan, channel)
            if asynchronous:
                write_staged(self._root, plan, self._keep, channel, sender)
            else:
                if sender is not None:  # the replication always runs in the background
                    BACKGROUND.start(sender, plan.draft.name)
                write(self._root, plan, self._keep, channel)
        self._saved, self._saved_s = step, time.monotonic()

    def _warn_of_gradients(self, step: int, state: TrainingState, channel: CollectiveChannel) -> None:
        """Warns once if the state has accumulated gradients, which are not saved."""
        if self._has_warned or channel.rank > 0:
            return
        if names := unsaved_gradients(state):
            self._has_warned = True
            warnings.warn(
                f"{channel.me}: the checkpoint of step {step} is saved while the parameters {some(names)} have "
                "gradients that no optimizer.step() has used, and a checkpoint does not contain gradients: training "
                "that resumes from it will not have them. Save after optimizer.step() and before the next backward, "
                "or train with an ElasticState, whose checkpoints hold them. If the loop clears them anyway, nothing "
                "is lost",
                RuntimeWarning,
                stacklevel=4,
            )

    def _save_elastic(self, elastic: ElasticState, step: int, state: TrainingState, force: bool) -> bool:
        """Saves in a separate round. If a worker dies during the round, the remaining workers repeat it."""
        if isinstance(self._every, timedelta):
            raise ValueError(
                "every is a timedelta, but the workers of an elastic job do not share a clock; pass a number of steps"
            )
        if not self._shared:
            raise ValueError(
                "shared is False, but workers of an elastic job join and leave with their disks; use a shared one"
            )
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
            return [torch.tensor([step], device="cpu")]

        rounds.agree_on(attempt)
        self._saved = step
        return True

    def _save_alone(self) -> None:
        """Saves the latest step on this worker alone before all workers exit. Every worker has the entire state."""
        with contextlib.suppress(*_OF_LOST_WORKERS):
            BACKGROUND.finish()
        step, _ = self._latest
        if self._write_missing():
            sys.stderr.write(f"paceline: the job is stopping; the checkpoint of step {step} is in {self._where()}\n")

    def _write_missing(self) -> bool:
        """Writes the latest step on this worker alone if it has no checkpoint; returns whether it had none."""
        step, state = self._latest
        is_missing = not self._is_saved(step)
        if is_missing:
            self._write(step, state, SingleRank(), asynchronous=False, may_copy=False)
        return is_missing

    def _is_saved(self, step: int) -> bool:
        """Returns True if a checkpoint of the step exists or another worker is writing one."""
        storage, stem = self._root.storage, f"step_{step:010d}"
        return any(name.startswith(stem) or (stem in name and storage.is_held(name)) for name in storage.names())

    def _where(self) -> str:
        return self._root.storage.describe()


class EndingSignals:
    """On the first SIGTERM, requests that the training loop stop after the current step.

    A second SIGTERM terminates the process immediately.
    """

    def __init__(self) -> None:
        self.has_arrived = False
        self._before: signal._HANDLER = None
        # Python allows handlers only in the main thread. A loop in another thread does not receive the signal.
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._before = signal.signal(signal.SIGTERM, self._note)

    @property
    def exit_code(self) -> int:
        """The exit code that shells report for a process terminated by SIGTERM."""
        return 128 + signal.SIGTERM

    def close(self) -> None:
        """Restores the previous handler, unless the script has installed another one in the meantime. Idempotent."""
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        self._is_installed = False

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.has_arrived:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.has_arrived = True
