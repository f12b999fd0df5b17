"""Loads a checkpoint into the objects of a training loop, on any number of ranks.

`load` loads a given checkpoint, a checkpoint of another library, or the newest one in a directory. `load_newest`, which
`CheckpointManager` uses, skips checkpoints that turn out to be damaged. Both read from a disk that all ranks share, or
from the disks of the hosts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.train.checkpoint.foreign.foreign_file import open_foreign
from paceline.train.checkpoint.format.checkpoint import Checkpoint, open_checkpoint
from paceline.train.checkpoint.format.root import Root
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
from paceline.train.checkpoint.training_state import TrainingState

_FOREIGN = "foreign:"  # the prefix of the path of a checkpoint of another library


@dataclass(frozen=True)
class Loaded:
    """The result of loading a checkpoint.

    Attributes:
        step: the step with which the checkpoint was saved, or None.
        nbytes_read: the bytes that this rank has read.
    """

    step: int | None
    nbytes_read: int


def load(
    state: TrainingState,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    group: ProcessGroup | None = None,
    shared: bool = True,
) -> int | None:
    """Loads a checkpoint into `state`; every rank calls this. A different number of ranks may have saved it.

    Modules, optimizers, tensors and everything with `load_state_dict` are filled in place, and plain values are
    replaced in the dict. Each byte that all ranks need is read by one rank and sent to the others. Each rank reads its
    own part of state that is divided among the ranks, such as ZeRO's.

    Args:
        state: the objects, by the names with which they were saved; some names may be missing. None is replaced with
            the saved value, which for an object is the result of its `state_dict`.
        path: the directory that was given to `save`, whose newest complete checkpoint is loaded, or one of its
            checkpoints; or a checkpoint of another library: a file of `torch.save`, a directory of
            `torch.distributed.checkpoint`, or a safetensors file.
        strict: whether everything in the state must be in the checkpoint, and modules must have the same parameters.
            A module without parameters, buffers and extra state may be missing.
        group: the ranks; the default group if None. A process without a group loads alone.
        shared: whether all ranks share the disk. With False each rank reads the files on its own disk, and fetches the
            others from ranks that see them. A checkpoint counts if all its files are on the disks of these ranks.

    Returns:
        The step with which the checkpoint was saved; None if it was saved without one.

    Raises:
        CheckpointError: there is no complete checkpoint, or it contains other objects; raised on every rank.
        CheckpointDamagedError: a file does not hold the bytes that were written. State that was already loaded stays
            loaded.

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
    where = result_of_first(lambda: _found(path).encode(), channel).decode()
    if where.startswith(_FOREIGN):
        foreign = open_foreign(where[len(_FOREIGN) :])
        assert foreign is not None
        load_foreign(state, foreign, agreed_numberings(state, channel), strict=strict)
        return None
    return load_from(state, where, channel, strict=strict).step


def _found(where: str | os.PathLike[str]) -> str:
    """Returns the path of a checkpoint, given that path or the path of its directory."""
    if os.path.exists(where) and (foreign := open_foreign(where)) is not None:
        return _FOREIGN + foreign.path
    with open_checkpoint(where) as checkpoint:
        return checkpoint.describe()


def load_from(state: TrainingState, where: str, channel: CollectiveChannel, *, strict: bool = True) -> Loaded:
    """Loads the checkpoint whose path or address is `where`, the same on every rank."""
    return load_by(state, lambda: open_checkpoint(where), channel, strict=strict)


def load_by(
    state: TrainingState, opener: Callable[[], Checkpoint], channel: CollectiveChannel, *, strict: bool = True
) -> Loaded:
    """Loads the checkpoint that `opener` opens, the same on every rank."""
    with ExitStack() as closing:
        opened: list[Checkpoint] = []

        def open_it() -> bytes:
            opened.append(closing.enter_context(opener()))
            return b""

        results_of_all(open_it, channel)
        return _load_opened(state, opened[0], channel, strict, fill)


def load_spread(
    state: TrainingState, root: Root, spread: SpreadCheckpoint, channel: CollectiveChannel, *, strict: bool = True
) -> Loaded:
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
) -> Loaded:
    numberings = agreed_numberings(state, channel)
    plan = LoadPlan(checkpoint, channel.rank)
    with ExitStack() as contexts:

        def request() -> bytes:
            StateRestorer(plan, strict, contexts, numberings).request(state)
            return b""

        results_of_all(request, channel)
        read(plan, channel)
        plan.finish()
    return Loaded(checkpoint.manifest.step, checkpoint.nbytes_read)


def load_newest(
    state: TrainingState, root: Root, disks: Disks | None, channel: CollectiveChannel
) -> tuple[Loaded, Mapping[str, str]] | None:
    """Loads the newest undamaged checkpoint into `state`.

    Args:
        disks: the disks of the hosts; None if all ranks share one.

    Returns:
        The result of loading, and the faults of newer checkpoints that were skipped, by name; None if there is no
        checkpoint.

    Raises:
        CheckpointError: there are checkpoints but none is complete, or the newest complete one contains other objects.
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
    """Returns the newest checkpoint that is not known to be damaged; None if there are no checkpoints at all.

    Args:
        damaged: the faults of damaged checkpoints, by name; rank 0 adds those that it finds.

    Raises:
        CheckpointError: there are checkpoints but none is complete; raised on every rank.
    """

    def choose() -> bytes:
        for entry in root.listing():
            if entry.name not in damaged and entry.fault is None:
                return entry.name.encode()
            damaged.setdefault(entry.name, entry.fault or "")
        if not damaged:
            return b""
        faults = "; ".join(map(": ".join, damaged.items()))
        raise CheckpointError(
            f"{root.storage.describe()} has no whole checkpoint: {faults}. Remove what is there to begin anew"
        )

    return result_of_first(choose, channel).decode() or None


def newest_sequence(root: Root, disks: Disks | None, channel: CollectiveChannel) -> int:
    """Returns the sequence of the newest complete checkpoint on disk; 0 if there is none or the disk cannot be read.

    Args:
        disks: the disks of the hosts; None if all ranks share one.
    """

    def look() -> bytes:
        newest, _ = root.newest_whole()
        return b"0" if newest is None else str(newest.sequence).encode()

    with contextlib.suppress(CheckpointError):
        if disks is None:
            return int(result_of_first(look, channel))
        spread, _ = newest_spread(root, disks, channel, {})
        return 0 if spread is None else spread.sequence
    return 0
