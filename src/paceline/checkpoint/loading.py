"""Loads a checkpoint into the objects of a training loop, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from paceline.checkpoint.adopting import adopt
from paceline.checkpoint.background import BACKGROUND
from paceline.checkpoint.disks import found_disks
from paceline.checkpoint.fetching import fetch
from paceline.checkpoint.filling import Filling
from paceline.checkpoint.foreign.opening import open_foreign
from paceline.checkpoint.format.checkpoint import Checkpoint, open_checkpoint
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.objects import State
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.preparing import agreed_numberings
from paceline.checkpoint.reading import fill
from paceline.checkpoint.restoring import Restoring
from paceline.checkpoint.sources import Elsewhere, Spread, newest_spread, opened
from paceline.checkpoint.talking import Alone, GroupTalk, talk_of
from paceline.errors import CheckpointError
from paceline.group.process_group import ProcessGroup

_FOREIGN = "foreign:"


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the step that the checkpoint was saved with, and how many bytes this rank has read."""

    step: int | None
    nbytes_read: int


def load(
    state: State,
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
    talk = talk_of(group)
    if not shared:
        root = Root(path)
        spread, _ = newest_spread(root, found_disks(root, talk), talk, {})
        if spread is None:
            raise CheckpointError(f"{root.place.describe()} has no checkpoint on the disks of these ranks")
        return load_spread(state, root, spread, talk, strict=strict).step
    answer = told(lambda: _found(path).encode(), talk.me) if talk.rank == 0 else b""
    where = heard(talk.announce(answer)).decode()
    if where.startswith(_FOREIGN):
        foreign = open_foreign(where[len(_FOREIGN) :])
        assert foreign is not None
        adopt(state, foreign, agreed_numberings(state, talk), strict=strict)
        return None
    return load_from(state, where, talk, strict=strict).step


def load_from(state: State, where: str, talk: GroupTalk | Alone, *, strict: bool = True) -> Loaded:
    """Loads the checkpoint whose path or address is `where`, the same on every rank."""
    return load_by(state, lambda: open_checkpoint(where), talk, strict=strict)


def load_by(state: State, opening: Callable[[], Checkpoint], talk: GroupTalk | Alone, *, strict: bool = True) -> Loaded:
    """Loads the checkpoint that `opening` opens, the same on every rank."""
    with ExitStack() as closing:
        here: list[Checkpoint] = []

        def open_it() -> bytes:
            here.append(closing.enter_context(opening()))
            return b""

        _all_well(told(open_it, talk.me), talk)
        return _load_opened(state, here[0], talk, strict, fill)


def load_spread(state: State, root: Root, spread: Spread, talk: GroupTalk | Alone, *, strict: bool = True) -> Loaded:
    """Loads a checkpoint whose files are on the disks of several hosts."""
    with opened(root, spread, talk) as checkpoint:
        return _load_opened(state, checkpoint, talk, strict, lambda filling, talk: fetch(filling, spread.holders, talk))


def _load_opened(
    state: State,
    checkpoint: Checkpoint | Elsewhere,
    talk: GroupTalk | Alone,
    strict: bool,
    read: Callable[[Filling, GroupTalk | Alone], None],
) -> Loaded:
    numberings = agreed_numberings(state, talk)
    filling = Filling(checkpoint, talk.rank)
    with ExitStack() as contexts:

        def want() -> bytes:
            Restoring(filling, strict, contexts, numberings).want(state)
            return b""

        _all_well(told(want, talk.me), talk)
        read(filling, talk)
        filling.finish()
    return Loaded(checkpoint.manifest.step, checkpoint.nbytes_read)


def _found(where: str | os.PathLike[str]) -> str:
    """Returns the path of a checkpoint, given it or that of the directory it is in."""
    if os.path.exists(where) and (foreign := open_foreign(where)) is not None:
        return _FOREIGN + foreign.path
    with open_checkpoint(where) as checkpoint:
        return checkpoint.describe()


def _all_well(outcome: bytes, talk: GroupTalk | Alone) -> None:
    for each in talk.exchange(outcome):
        heard(each)
