"""Saves a checkpoint: every rank writes its part, and rank 0 makes it visible once all parts are on the disk."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.checkpoint.background import BACKGROUND, SaveHandle
from paceline.checkpoint.captured import Held
from paceline.checkpoint.disks import abandon, found_disks
from paceline.checkpoint.format.manifest_json import part_to_bytes
from paceline.checkpoint.format.parts import Outgoing, write_part
from paceline.checkpoint.format.root import Root
from paceline.checkpoint.memory import memory_with
from paceline.checkpoint.objects import State
from paceline.checkpoint.outcomes import heard, told
from paceline.checkpoint.preparing import Prepared, prepare
from paceline.checkpoint.publishing import publish_on_each, publish_on_one
from paceline.checkpoint.talking import Alone, GroupTalk, Talk, talk_beside, talk_of
from paceline.group.process_group import ProcessGroup

_SHOWN_EVERY_S = 5.0


def save(
    state: State,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int = 1,
    group: ProcessGroup | None = None,
    asynchronous: bool = False,
    shared: bool = True,
) -> SaveHandle | None:
    """Saves the state of a training loop as a checkpoint in the directory `path`; every rank calls this.

    Every rank writes its part: of what all have, such as a model's parameters, an equal share, and of what is divided
    among the ranks, such as ZeRO's state or the layers of a `Pipeline`, its own. The checkpoint becomes visible at once
    when all of it is on the disk, and only then are older ones removed, so there is always a whole one. Any number of
    ranks can load it.

    Buffers of modules and positions of loaders are those of the first rank. Everything else is kept for each rank if it
    differs between ranks.

    Args:
        state: by name: modules (plain, or in `DistributedDataParallel` or `LogicalShards`), optimizers, everything with
            `state_dict` and `load_state_dict`, tensors, plain values, and dicts of these.
        path: the directory. It is made if it does not exist.
        step: the number of the training step, for the checkpoint's name.
        keep: how many checkpoints of the directory to keep.
        group: the ranks; the default group if None. A process without a group saves alone.
        asynchronous: whether to return when a copy of the state has been taken. A thread then writes it, at a low
            priority; the next save waits for it.
        shared: whether all ranks share the disk. With False each host has the parts of its own ranks, and `load` with
            `shared=False` gets parts that a host lacks from the others.

    Returns:
        None, or with `asynchronous` a handle with `wait` and `done`.

    Raises:
        CheckpointError: the state cannot be saved, or a rank could not write its part; raised on every rank.

    Example::

        paceline.save({"model": model, "optimizer": optimizer, "epoch": epoch}, "checkpoints", step=step)
    """
    BACKGROUND.finish()
    talk = talk_of(group)
    root = Root(path)
    prepared = prepare(state, root, step, talk, None if shared else found_disks(root, talk))
    if asynchronous:
        return write_later(root, prepared, keep, talk)
    write(root, prepared, keep, talk)
    return None


def write_later(root: Root, prepared: Prepared, keep: int, talk: GroupTalk | Alone) -> SaveHandle:
    """Copies what this rank has to write, and returns while a thread writes it."""
    return write_staged(root, staged(root, prepared, talk), keep, talk)


def staged(root: Root, prepared: Prepared, talk: GroupTalk | Alone) -> Prepared:
    """Returns what is to be written as it is now, in memory that nobody changes; every rank calls this.

    Raises:
        CheckpointError: a rank has no memory for it; raised on every rank.
    """
    copies: list[Held] = []

    def copy() -> bytes:
        copies.extend(BACKGROUND.staging.copied(prepared.held))
        return b""

    try:
        # No rank goes on before all have their copies: ranks may share the memory that the next step changes.
        for outcome in talk.exchange(told(copy, talk.me)):
            heard(outcome)
    except BaseException:
        abandon(root, prepared.draft, prepared.disks, talk.rank)
        raise
    return replace(prepared, held=copies)


def write_staged(
    root: Root, prepared: Prepared, keep: int, talk: GroupTalk | Alone, beside: Callable[[], None] | None = None
) -> SaveHandle:
    """Returns while a thread writes what does not change meanwhile; every rank calls this.

    Args:
        beside: is called in another thread; it raises nothing.
    """
    talks: list[Talk] = [talk, talk]
    if isinstance(talk, GroupTalk):
        token = prepared.draft.token
        talks = [talk_beside(talk, each) for each in ([token] if prepared.disks is None else [token, f"{token}/seen"])]
    return BACKGROUND.start(lambda: _write(root, prepared, keep, talks), prepared.draft.name, beside)


def write(root: Root, prepared: Prepared, keep: int, talk: GroupTalk | Alone) -> None:
    """Writes this rank's part, and has the checkpoint made visible.

    Raises:
        CheckpointError: a rank failed; raised on every rank.
    """
    _write(root, prepared, keep, [talk, talk])


def _write(root: Root, prepared: Prepared, keep: int, talks: Sequence[Talk]) -> None:
    part = told(lambda: _written(root, prepared, talks[0]), talks[0].me)
    if prepared.disks is None:
        publish_on_one(root, prepared, part, keep, talks[0])
    else:
        publish_on_each(root, prepared, prepared.disks, part, keep, (talks[0], talks[1]))


def _written(root: Root, prepared: Prepared, talk: Talk) -> bytes:
    shown = _Progress(f"{talk.me}: checkpoint {prepared.draft.name}")
    outgoing = [outgoing_of(each) for each in prepared.held]
    part = write_part(root.place, prepared.draft, talk.rank, outgoing, progress=shown)
    return json.dumps([part_to_bytes(part).decode(), prepared.values]).encode()


def outgoing_of(held: Held) -> Outgoing:
    """Returns what is written of a part that this rank holds."""
    return Outgoing(held.name, held.dtype, held.shape, held.region, lambda: memory_with(held.elements().cpu()))


class _Progress:
    """Shows on stderr how far a long write is."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _SHOWN_EVERY_S:
            self._shown_s = now_s
            sys.stderr.write(f"paceline: {self._what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB are written\n")
