"""Saves a checkpoint: every rank writes its part, and rank 0 makes it visible once all parts are on the disk.

Copies of what a checkpoint is to hold, taken at once, so that the training may go on while it is written.

The thread that writes a checkpoint while the training goes on, one at a time in a process.

Makes a checkpoint visible whose parts have been written: on the one disk, or on each host's.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from paceline import _core
from paceline.comm.group.process_group import ProcessGroup
from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import LocalRegion
from paceline.train.checkpoint.format.local_storage import ALIGNMENT
from paceline.train.checkpoint.format.manifest import RankPart
from paceline.train.checkpoint.format.manifest_json import part_from_bytes, part_to_bytes
from paceline.train.checkpoint.format.part_writer import WriteItem, in_files, write_part
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.host_disks import Disks, abandon, found_disks
from paceline.train.checkpoint.pytree import memory_with, type_of
from paceline.train.checkpoint.rank_channel import (
    GroupChannel,
    RankChannel,
    SingleRank,
    background_channel,
    channel_of,
    decode_result,
    encode_result,
)
from paceline.train.checkpoint.save_plan import SavePlan, plan_save
from paceline.train.checkpoint.training_state import TrainingState
from paceline.train.elastic.process_priority import lower_thread_priority

_CHUNK_NBYTES = 16 << 20  # that one thread copies at a time
_MOST_THREADS = 4  # more do not make memory faster


class Staging:
    """Memory for copies, which is used again for the next checkpoint: new memory costs more than the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copied(self, held: Sequence[LocalRegion]) -> list[LocalRegion]:
        """Returns what `held` is now, in this memory; earlier copies are overwritten.

        Raises:
            CheckpointError: there is no memory for the copies.
        """
        starts, total = _laid_out(held)
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old memory goes first
            self._memory = _memory_of(total)
        copies = [
            self._memory[start : start + each.nbytes].view(type_of(each.dtype))
            for each, start in zip(held, starts, strict=True)
        ]
        _copy_all([(copy, each) for copy, each in zip(copies, held, strict=True)])
        return [replace(each, elements=_returning(copy)) for each, copy in zip(held, copies, strict=True)]


def _memory_of(nbytes: int) -> torch.Tensor:
    """Returns aligned memory, of huge pages where the system has them: a disk takes these in much larger pieces.

    Raises:
        CheckpointError: there is not so much.
    """
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"there is no memory for a copy of the {nbytes:,} bytes that this rank writes ({error.strerror}); with "
            "asynchronous=False none is needed"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _laid_out(held: Sequence[LocalRegion]) -> tuple[list[int], int]:
    """Returns where each copy begins, and the bytes of all: as in the files, so that they can be written directly."""
    starts: dict[int, int] = {}
    at = 0
    for members in in_files(held):
        at = -(-at // ALIGNMENT) * ALIGNMENT
        for each in members:
            starts[id(each)] = at
            at += each.nbytes
    return [starts[id(each)] for each in held], at


def _returning(tensor: torch.Tensor):  # type: ignore[no-untyped-def]
    return lambda: tensor


def _copy_all(pairs: Sequence[tuple[torch.Tensor, LocalRegion]]) -> None:
    threads = min(_MOST_THREADS, _cores_to_spare())
    if threads < 2 or sum(each.nbytes for _, each in pairs) < _CHUNK_NBYTES:
        for copy, held in pairs:
            copy.copy_(held.elements())
        return
    with ThreadPoolExecutor(threads, "paceline-copying") as pool:
        works = []
        for copy, held in pairs:
            elements = held.elements()
            size = max(1, _CHUNK_NBYTES // max(1, elements.element_size()))
            works += [pool.submit(a.copy_, b) for a, b in zip(copy.split(size), elements.split(size), strict=True)]
        for work in works:
            work.result()


def _cores_to_spare() -> int:
    """Returns how many cores this rank may use while the others of its host do the same."""
    return _core.usable_cores() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


class SaveHandle:
    """A checkpoint that is being written.

    Args:
        work: writes it.
        name: of the checkpoint.
        beside: is called in another thread meanwhile, and waited for; it raises nothing.
    """

    def __init__(self, work: Callable[[], None], name: str, beside: Callable[[], None] | None = None) -> None:
        self.name = name
        self._work, self._beside = work, beside
        self._error: BaseException | None = None
        # It is no daemon, so that a process that ends finishes its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Returns whether the checkpoint has been written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the checkpoint has been written, and returns whether it has.

        Args:
            timeout: the seconds to wait at most; without limit if None. The writing itself has the group's time-out.

        Raises:
            CheckpointError: a rank failed; raised on every rank, once.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self) -> None:
        lower_thread_priority()
        finish_beside = self._start_beside()
        try:
            self._work()
        except BaseException as error:
            self._error = error
            sys.stderr.write(f"paceline: the checkpoint {self.name} was not saved: {error}\n")
        finally:
            finish_beside()
            del self._work, self._beside

    def _start_beside(self) -> Callable[[], None]:
        """Returns what waits for the work beside, or does it if there is no thread: other ranks wait for it."""
        if self._beside is None:
            return _nothing
        thread = threading.Thread(target=self._beside, name="paceline-copies")
        try:
            thread.start()
        except RuntimeError:
            return self._beside
        return thread.join


def _nothing() -> None:
    pass


class Background:
    """The checkpoint that this process is writing, and the memory for its copy."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._handle: SaveHandle | None = None

    def start(self, work: Callable[[], None], name: str, beside: Callable[[], None] | None = None) -> SaveHandle:
        """Has a thread do `work`, which writes the checkpoint of that name; see `SaveHandle`."""
        self._handle = SaveHandle(work, name, beside)
        return self._handle

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one.

        Raises:
            CheckpointError: it could not be written, and nobody has been told yet.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


BACKGROUND = Background()


def publish_on_one(root: Root, prepared: SavePlan, outcome: bytes, keep: int, talk: RankChannel) -> None:
    """Has rank 0 make the checkpoint visible on the disk that all ranks share.

    Args:
        outcome: what this rank has written, or why it could not.

    Raises:
        CheckpointError: a rank failed; raised on every rank.
    """
    if talk.rank > 0:
        talk.collect(outcome)
        decode_result(talk.announce(b""))
        return
    is_published = False
    try:
        verdict = encode_result(lambda: _published(root, prepared, talk.collect(outcome), talk.size), talk.me)
        is_published = verdict[:1] == b"+"
        decode_result(talk.announce(verdict))
    finally:
        if not is_published:
            root.abandon(prepared.draft)
    root.retire(keep)


def publish_on_each(
    root: Root, prepared: SavePlan, disks: Disks, outcome: bytes, keep: int, talks: tuple[RankChannel, RankChannel]
) -> None:
    """Has the first rank of each disk make the checkpoint visible there, once all have been told all parts.

    A checkpoint that becomes visible on some disks only does not count, since files of it are on none.

    Raises:
        CheckpointError: a rank failed; raised on every rank.
    """
    first, second = talks
    is_published = False
    try:
        everyone = first.collect(outcome)
        text = first.announce(encode_result(lambda: _together(everyone), first.me) if first.rank == 0 else b"")
        mine = encode_result(lambda: _published_here(root, prepared, disks, text, first.size), first.me)
        is_published = mine[:1] == b"+"
        answers = second.collect(mine)
        failed = [each for each in answers if each[:1] != b"+"]
        decode_result(second.announce(b"" if second.rank else [*failed, answers[0]][0]))
    finally:
        if not is_published:
            abandon(root, prepared.draft, disks, first.rank)
    if disks.is_first:
        root.retire(keep)


def _together(everyone: Sequence[bytes]) -> bytes:
    return json.dumps([decode_result(each).decode() for each in everyone]).encode()


def _published(root: Root, prepared: SavePlan, everyone: Sequence[bytes], size: int) -> bytes:
    parts, values = _parts_of([decode_result(each) for each in everyone])
    root.publish(prepared.draft, parts, values, world_size=size)
    return b""


def _published_here(root: Root, prepared: SavePlan, disks: Disks, text: bytes, size: int) -> bytes:
    parts, values = _parts_of([each.encode() for each in json.loads(decode_result(text))])
    if disks.is_first:
        here = [file for rank in disks.sharers(disks.rank) for file in parts[rank].files]
        root.publish(prepared.draft, parts, values, world_size=size, here=here)
    return b""


def _parts_of(everyone: Sequence[bytes]) -> tuple[list[RankPart], dict[str, Any]]:
    """Returns what all ranks wrote, and their values; where several have a value, that of the first one counts."""
    parts: list[RankPart] = []
    values: dict[str, Any] = {}
    for each in reversed(everyone):
        part, own = json.loads(each)
        parts.append(part_from_bytes(part.encode()))
        values |= own
    return parts[::-1], values


_SHOWN_EVERY_S = 5.0


def save(
    state: TrainingState,
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
    talk = channel_of(group)
    root = Root(path)
    prepared = plan_save(state, root, step, talk, None if shared else found_disks(root, talk))
    if asynchronous:
        return write_later(root, prepared, keep, talk)
    write(root, prepared, keep, talk)
    return None


def write_later(root: Root, prepared: SavePlan, keep: int, talk: GroupChannel | SingleRank) -> SaveHandle:
    """Copies what this rank has to write, and returns while a thread writes it."""
    return write_staged(root, staged(root, prepared, talk), keep, talk)


def staged(root: Root, prepared: SavePlan, talk: GroupChannel | SingleRank) -> SavePlan:
    """Returns what is to be written as it is now, in memory that nobody changes; every rank calls this.

    Raises:
        CheckpointError: a rank has no memory for it; raised on every rank.
    """
    copies: list[LocalRegion] = []

    def copy() -> bytes:
        copies.extend(BACKGROUND.staging.copied(prepared.held))
        return b""

    try:
        # No rank goes on before all have their copies: ranks may share the memory that the next step changes.
        for outcome in talk.exchange(encode_result(copy, talk.me)):
            decode_result(outcome)
    except BaseException:
        abandon(root, prepared.draft, prepared.disks, talk.rank)
        raise
    return replace(prepared, held=copies)


def write_staged(
    root: Root, prepared: SavePlan, keep: int, talk: GroupChannel | SingleRank, beside: Callable[[], None] | None = None
) -> SaveHandle:
    """Returns while a thread writes what does not change meanwhile; every rank calls this.

    Args:
        beside: is called in another thread; it raises nothing.
    """
    talks: list[RankChannel] = [talk, talk]
    if isinstance(talk, GroupChannel):
        token = prepared.draft.token
        talks = [
            background_channel(talk, each) for each in ([token] if prepared.disks is None else [token, f"{token}/seen"])
        ]
    return BACKGROUND.start(lambda: _write(root, prepared, keep, talks), prepared.draft.name, beside)


def write(root: Root, prepared: SavePlan, keep: int, talk: GroupChannel | SingleRank) -> None:
    """Writes this rank's part, and has the checkpoint made visible.

    Raises:
        CheckpointError: a rank failed; raised on every rank.
    """
    _write(root, prepared, keep, [talk, talk])


def _write(root: Root, prepared: SavePlan, keep: int, talks: Sequence[RankChannel]) -> None:
    part = encode_result(lambda: _written(root, prepared, talks[0]), talks[0].me)
    if prepared.disks is None:
        publish_on_one(root, prepared, part, keep, talks[0])
    else:
        publish_on_each(root, prepared, prepared.disks, part, keep, (talks[0], talks[1]))


def _written(root: Root, prepared: SavePlan, talk: RankChannel) -> bytes:
    shown = _Progress(f"{talk.me}: checkpoint {prepared.draft.name}")
    outgoing = [outgoing_of(each) for each in prepared.held]
    part = write_part(root.place, prepared.draft, talk.rank, outgoing, progress=shown)
    return json.dumps([part_to_bytes(part).decode(), prepared.values]).encode()


def outgoing_of(held: LocalRegion) -> WriteItem:
    """Returns what is written of a part that this rank holds."""
    return WriteItem(held.name, held.dtype, held.shape, held.region, lambda: memory_with(held.elements().cpu()))


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
