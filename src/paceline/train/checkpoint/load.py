"""Loads a checkpoint into the objects of a training loop, on any number of ranks.

Which checkpoint on the disk ranks restore: the newest that is not known to be damaged.

Loads the newest whole checkpoint that is on the disk; damaged ones are skipped.
"""

from __future__ import annotations

import contextlib
import os
import sys
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
from paceline.train.checkpoint.rank_channel import GroupChannel, SingleRank, channel_of, decode_result, encode_result
from paceline.train.checkpoint.read import LoadPlan, fetch, fill
from paceline.train.checkpoint.save import BACKGROUND
from paceline.train.checkpoint.save_plan import agreed_numberings
from paceline.train.checkpoint.state_restorer import StateRestorer, load_foreign
from paceline.train.checkpoint.training_state import TrainingState


def newest_undamaged(root: Root, talk: GroupChannel | SingleRank, damaged: dict[str, str]) -> str | None:
    """Returns the newest checkpoint that is not known to be damaged, None if there are no checkpoints at all.

    Args:
        damaged: those that are known to be, and why; rank 0 adds those that it finds.

    Raises:
        CheckpointError: there are checkpoints and none is whole; raised on every rank.
    """

    def choose() -> bytes:
        for each in root.listing():
            if each.name not in damaged and each.fault is None:
                return each.name.encode()
            damaged.setdefault(each.name, each.fault or "")
        if not damaged:
            return b""
        faults = "; ".join(map(": ".join, damaged.items()))
        raise CheckpointError(
            f"{root.place.describe()} has no whole checkpoint: {faults}. Remove what is there to begin anew"
        )

    name = decode_result(talk.announce(encode_result(choose, talk.me) if talk.rank == 0 else b""))
    return name.decode() or None


def newest_sequence(root: Root, disks: Disks | None, talk: GroupChannel | SingleRank) -> int:
    """Returns the sequence of the newest whole checkpoint on the disk, 0 if there is none or the disk cannot be read.

    Args:
        disks: those of the hosts; None if all ranks share one.
    """
    with contextlib.suppress(CheckpointError):
        if disks is not None:
            spread, _ = newest_spread(root, disks, talk, {})
            return 0 if spread is None else spread.sequence

        def look() -> bytes:
            newest, _ = root.newest_whole()
            return b"0" if newest is None else str(newest.sequence).encode()

        return int(decode_result(talk.announce(encode_result(look, talk.me) if talk.rank == 0 else b"")))
    return 0


def report_skipped(damaged: Mapping[str, str], talk: GroupChannel | SingleRank) -> None:
    """Says on stderr which checkpoints were skipped and why, on rank 0."""
    if talk.rank == 0:
        for name, fault in damaged.items():
            sys.stderr.write(f"paceline: skipped the checkpoint {name}: {fault}\n")


_FOREIGN = "foreign:"


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the step that the checkpoint was saved with, and how many bytes this rank has read."""

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
    """Loads a checkpoint into `state`; every rank calls this, and their number need not be that which saved it.

    Modules, optimizers, tensors and everything with `load_state_dict` are filled in place, and plain values are
    replaced in the dict. Each byte that all ranks need is read by one of them and sent to the others; of what is
    divided among the ranks, such as ZeRO's state, each reads its own part.

    Args:
        state: by the names with which it was saved; it may have fewer of them. None is replaced by what was saved: of
            an object by what its `state_dict` returned.
        path: the directory that was given to `save`, whose newest whole checkpoint is taken, or one of its checkpoints;
            or what another library saved: a file of `torch.save`, a directory of `torch.distributed.checkpoint`, or a
            safetensors file.
        strict: whether everything in the state must be in the checkpoint, and modules must have the same parameters.
            A module without parameters, buffers and extra state need not be there.
        group: the ranks; the default group if None. A process without a group loads alone.
        shared: whether all ranks share the disk. With False each rank reads what its own disk has, and gets the rest
            from ranks that see it. A checkpoint counts if all its files are on the disks of these ranks.

    Returns:
        The step that the checkpoint was saved with, None if it was saved without one.

    Raises:
        CheckpointError: there is no whole checkpoint, or it is one of other objects; raised on every rank.
        CheckpointDamagedError: a file does not hold what was written. What was loaded until then stays.

    Example::

        state = {"model": model, "optimizer": optimizer, "epoch": 0}
        paceline.load(state, "checkpoints")
        epoch = state["epoch"]
    """
    BACKGROUND.finish()
    talk = channel_of(group)
    if not shared:
        root = Root(path)
        spread, _ = newest_spread(root, found_disks(root, talk), talk, {})
        if spread is None:
            raise CheckpointError(f"{root.place.describe()} has no checkpoint on the disks of these ranks")
        return load_spread(state, root, spread, talk, strict=strict).step
    answer = encode_result(lambda: _found(path).encode(), talk.me) if talk.rank == 0 else b""
    where = decode_result(talk.announce(answer)).decode()
    if where.startswith(_FOREIGN):
        foreign = open_foreign(where[len(_FOREIGN) :])
        assert foreign is not None
        load_foreign(state, foreign, agreed_numberings(state, talk), strict=strict)
        return None
    return load_from(state, where, talk, strict=strict).step


def load_from(state: TrainingState, where: str, talk: GroupChannel | SingleRank, *, strict: bool = True) -> Loaded:
    """Loads the checkpoint whose path or address is `where`, the same on every rank."""
    return load_by(state, lambda: open_checkpoint(where), talk, strict=strict)


def load_by(
    state: TrainingState, opening: Callable[[], Checkpoint], talk: GroupChannel | SingleRank, *, strict: bool = True
) -> Loaded:
    """Loads the checkpoint that `opening` opens, the same on every rank."""
    with ExitStack() as closing:
        here: list[Checkpoint] = []

        def open_it() -> bytes:
            here.append(closing.enter_context(opening()))
            return b""

        _all_well(encode_result(open_it, talk.me), talk)
        return _load_opened(state, here[0], talk, strict, fill)


def load_spread(
    state: TrainingState, root: Root, spread: SpreadCheckpoint, talk: GroupChannel | SingleRank, *, strict: bool = True
) -> Loaded:
    """Loads a checkpoint whose files are on the disks of several hosts."""
    with open_spread(root, spread, talk) as checkpoint:
        return _load_opened(state, checkpoint, talk, strict, lambda filling, talk: fetch(filling, spread.holders, talk))


def _load_opened(
    state: TrainingState,
    checkpoint: Checkpoint | AbsentCheckpoint,
    talk: GroupChannel | SingleRank,
    strict: bool,
    read: Callable[[LoadPlan, GroupChannel | SingleRank], None],
) -> Loaded:
    numberings = agreed_numberings(state, talk)
    filling = LoadPlan(checkpoint, talk.rank)
    with ExitStack() as contexts:

        def want() -> bytes:
            StateRestorer(filling, strict, contexts, numberings).request(state)
            return b""

        _all_well(encode_result(want, talk.me), talk)
        read(filling, talk)
        filling.finish()
    return Loaded(checkpoint.manifest.step, checkpoint.nbytes_read)


def _found(where: str | os.PathLike[str]) -> str:
    """Returns the path of a checkpoint, given it or that of the directory it is in."""
    if os.path.exists(where) and (foreign := open_foreign(where)) is not None:
        return _FOREIGN + foreign.path
    with open_checkpoint(where) as checkpoint:
        return checkpoint.describe()


def _all_well(outcome: bytes, talk: GroupChannel | SingleRank) -> None:
    for each in talk.exchange(outcome):
        decode_result(each)


@dataclass(frozen=True)
class Newest:
    """The checkpoint that was loaded.

    Attributes:
        step: its step, None if it was saved without one.
        skipped: why each newer one was not loaded, by its name.
    """

    step: int | None
    skipped: Mapping[str, str]


def load_newest(
    state: TrainingState, root: Root, disks: Disks | None, talk: GroupChannel | SingleRank
) -> Newest | None:
    """Loads into `state` from the disk that all ranks share or, if there are `disks`, from those of the hosts.

    Returns:
        What was loaded; None if there is no checkpoint.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or the newest whole one is one of other objects.
    """
    return _load_shared(state, root, talk) if disks is None else _load_spread(state, root, disks, talk)


def _load_shared(state: TrainingState, root: Root, talk: GroupChannel | SingleRank) -> Newest | None:
    damaged: dict[str, str] = {}
    while (name := newest_undamaged(root, talk, damaged)) is not None:
        try:
            return Newest(load_from(state, root.place.describe(name), talk).step, damaged)
        except CheckpointDamagedError as error:
            damaged[name] = str(error)
    return None


def _load_spread(state: TrainingState, root: Root, disks: Disks, talk: GroupChannel | SingleRank) -> Newest | None:
    damaged: dict[str, str] = {}
    while True:
        spread, skipped = newest_spread(root, disks, talk, damaged)
        if spread is None:
            return None
        try:
            return Newest(load_spread(state, root, spread, talk).step, skipped)
        except CheckpointDamagedError as error:
            damaged[spread.token] = str(error)
