"""Loads a checkpoint into the objects of a training loop, on any number of ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.captured_state import TrainingState, takes_state_and_path
from paceline.train.checkpoint.foreign.foreign_file import open_foreign
from paceline.train.checkpoint.format.checkpoint import Checkpoint
from paceline.train.checkpoint.format.root import Root, open_checkpoint
from paceline.train.checkpoint.host_disks import (
    AbsentCheckpoint,
    Disks,
    SpreadCheckpoint,
    found_disks,
    newest_spread,
    open_spread,
)
from paceline.train.checkpoint.rank_channel import CollectiveChannel, channel_of, result_of_first, results_of_all
from paceline.train.checkpoint.read import LoadPlan, fetch, fill
from paceline.train.checkpoint.save import BACKGROUND
from paceline.train.checkpoint.save_plan import agreed_numberings
from paceline.train.checkpoint.state_restorer import StateRestorer, load_foreign

_FOREIGN = "foreign:"  # prefix that is added to the path of a checkpoint from another library


@dataclass(frozen=True)
class LoadResult:
    """The step with which a checkpoint was saved, or None, and the number of bytes that this rank has read."""

    step: int | None
    nbytes_read: int


@takes_state_and_path
def load(
    state: TrainingState,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    group: ProcessGroup | None = None,
    shared: bool = True,
) -> int | None:
    """Loads a checkpoint into `state`; every rank must call this. Any number of ranks may have saved it.

    Modules, optimizers, tensors and all other objects with `load_state_dict` are restored in place, and plain values
    are replaced in the dict. Data that all ranks need is read once, by one of the ranks, and sent to the others. If
    state is divided among the ranks, for example by ZeRO, each rank reads only its own part.

    Args:
        state: the objects, by the names under which they were saved; not all saved names need to be included. A value
            of None is replaced with the saved value. The saved value of an object is the result of its `state_dict`
            method.
        path: the directory that was passed to `save`, whose newest complete checkpoint is loaded; a single checkpoint
            in that directory; or a checkpoint from another library (a file written by `torch.save`, a directory written
            by `torch.distributed.checkpoint`, or a safetensors file).
        strict: whether everything in the state must be in the checkpoint, and whether modules must have the same
            parameters. A module without parameters, buffers or extra state may be missing. Default: True.
        group: the ranks that load, or None for the default group. A process without a group loads alone. Default: None.
        shared: whether all ranks share the disk. If False, each rank reads the files on its own disk, and fetches all
            other files from ranks that can read them. A checkpoint is complete if each of its files is on the disk of
            at least one rank. Default: True.

    Returns:
        The step that was passed to `save`, or None if there was none.

    Raises:
        CheckpointError: there is no complete checkpoint, or the checkpoint does not match `state`; raised on every
            rank.
        CheckpointDamagedError: the contents of a file have changed since it was written. State that was loaded before
            the error is not rolled back.

    Example::

        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        paceline.load(state, "checkpoints")
        epoch = state["epoch"]
    """
    BACKGROUND.finish()
    channel = channel_of(group)
    if not shared:
        root = Root(path)
        spread, _ = newest_spread(root, found_disks(root, channel), channel, {})
        if spread is None:
            raise CheckpointError(f"{root.storage.describe()} has no checkpoint on the disks of these ranks")
        return load_spread(state, root, spread, channel, strict=strict).step
    where = os.fsdecode(result_of_first(lambda: os.fsencode(_found(path)), channel))
    if where.startswith(_FOREIGN):
        foreign = open_foreign(where[len(_FOREIGN) :])
        assert foreign is not None
        load_foreign(state, foreign, agreed_numberings(state, channel), strict=strict)
        return None
    return load_from(state, where, channel, strict=strict).step


def _found(where: str | os.PathLike[str]) -> str:
    """Returns the path of the checkpoint at `where`, or of the newest complete checkpoint if `where` is a root."""
    if os.path.exists(where) and (foreign := open_foreign(where)) is not None:
        return _FOREIGN + foreign.path
    with open_checkpoint(where) as checkpoint:
        return checkpoint.describe()


def load_from(state: TrainingState, where: str, channel: CollectiveChannel, *, strict: bool = True) -> LoadResult:
    """Loads the checkpoint at the path or address `where`, which must be the same on every rank."""
    return load_by(state, lambda: open_checkpoint(where), channel, strict=strict)


def load_by(
    state: TrainingState, opener: Callable[[], Checkpoint], channel: CollectiveChannel, *, strict: bool = True
) -> LoadResult:
    """Loads the checkpoint that `opener` opens; every rank must open the same checkpoint."""
    with ExitStack() as closing:
        opened: list[Checkpoint] = []
        results_of_all(lambda: opened.append(closing.enter_context(opener())), channel)
        return _load_opened(state, opened[0], channel, strict, fill)


def load_spread(
    state: TrainingState, root: Root, spread: SpreadCheckpoint, channel: CollectiveChannel, *, strict: bool = True
) -> LoadResult:
    """Loads a checkpoint whose files are on the disks of several hosts."""
    with open_spread(root, spread, channel) as checkpoint:
        return _load_opened(
            state, checkpoint, channel, strict, lambda plan, channel: fetch(plan, spread.holders, channel)
        )


def _load_opened(
    state: TrainingState,
    checkpoint: Checkpoint | AbsentCheckpoint,
    channel: CollectiveChannel,
    strict: bool,
    read: Callable[[LoadPlan, CollectiveChannel], None],
) -> LoadResult:
    numberings = agreed_numberings(state, channel)
    plan = LoadPlan(checkpoint, channel.rank)
    with ExitStack() as contexts:
        results_of_all(lambda: StateRestorer(plan, strict, contexts, numberings).request(state), channel)
        read(plan, channel)
        plan.finish()
    return LoadResult(checkpoint.manifest.step, checkpoint.nbytes_read)


def load_newest(
    state: TrainingState, root: Root, disks: Disks | None, channel: CollectiveChannel
) -> tuple[LoadResult, Mapping[str, str]] | None:
    """Loads the newest undamaged checkpoint into `state`; returns None if there is no checkpoint.

    Also returns the faults of the newer checkpoints that were skipped, by name, or by token if `disks` is given. Raises
    CheckpointError if there are checkpoints but none is complete, or the newest complete one does not match `state`.
    """
    damaged: dict[str, str] = {}
    if disks is None:
        while (name := _newest_undamaged(root, channel, damaged)) is not None:
            try:
                return load_from(state, root.storage.describe(name), channel), damaged
            except CheckpointDamagedError as error:
                damaged[name] = str(error)
        return None
    while True:
        spread, skipped = newest_spread(root, disks, channel, damaged)
        if spread is None:
            return None
        try:
            return load_spread(state, root, spread, channel), skipped
        except CheckpointDamagedError as error:
            damaged[spread.token] = str(error)


def _newest_undamaged(root: Root, channel: CollectiveChannel, damaged: dict[str, str]) -> str | None:
    """Returns the name of the newest checkpoint that is not in `damaged`, or None if there are no checkpoints.

    Rank 0 adds the faults that it finds to `damaged`, by name.
    """

    def choose() -> bytes:
        for entry in root.listing():
            if entry.name not in damaged and entry.fault is None:
                return os.fsencode(entry.name)
            damaged.setdefault(entry.name, entry.fault or "")
        if not damaged:
            return b""
        faults = "; ".join(map(": ".join, damaged.items()))
        raise CheckpointError(
            f"{root.storage.describe()} contains no complete checkpoint: {faults}. Remove its contents to start over"
        )

    return os.fsdecode(result_of_first(choose, channel)) or None


def newest_sequence(root: Root, disks: Disks | None, channel: CollectiveChannel) -> int:
    """Returns the sequence number of the newest complete checkpoint on disk, or 0 if none can be read."""

    def look() -> bytes:
        return str(next((entry.sequence or 0 for entry in root.listing() if entry.fault is None), 0)).encode()

    with contextlib.suppress(CheckpointError):
        if disks is None:
            return int(result_of_first(look, channel))
        spread, _ = newest_spread(root, disks, channel, {})
        return 0 if spread is None else spread.sequence
    return 0
