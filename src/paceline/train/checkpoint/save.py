"""Saves checkpoints. Every rank writes its part, and rank 0 publishes the checkpoint once all parts are on disk.

With `asynchronous`, the state is copied first (`Staging`), and a thread writes the copy while training continues
(`SaveHandle`). A process writes one checkpoint at a time (`BACKGROUND`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from paceline import _core
from paceline.comm.engine.adapters.device_streams import AcceleratorEvent, accelerator_in_use, record_current
from paceline.comm.group.process_group import ProcessGroup
from paceline.durations import whole_number
from paceline.errors import CheckpointError
from paceline.train.checkpoint.captured_state import TrainingState, takes_state_and_path
from paceline.train.checkpoint.format.local_storage import ALIGNMENT
from paceline.train.checkpoint.format.manifest import (
    contribution_to_bytes,
    contributions_from_bytes,
    join_contributions,
)
from paceline.train.checkpoint.format.part_writer import WriteItem, in_files, write_part
from paceline.train.checkpoint.format.root import Root
from paceline.train.checkpoint.format.storage import ProgressPrinter
from paceline.train.checkpoint.host_disks import Disks, abandon, found_disks
from paceline.train.checkpoint.pytree import memory_with, type_of
from paceline.train.checkpoint.rank_channel import (
    CollectiveChannel,
    RankChannel,
    background_channels,
    channel_of,
    decode_result,
    encode_result,
    is_success,
    results_of_all,
)
from paceline.train.checkpoint.save_plan import SavePlan, plan_save
from paceline.train.checkpoint.shard_layout import LocalRegion
from paceline.train.elastic.process_priority import lower_thread_priority

_CHUNK_NBYTES = 16 << 20  # number of bytes that one thread copies at a time
_MOST_THREADS = 4  # more threads would not copy faster


@takes_state_and_path
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
    """Saves the state of a training loop as a checkpoint in the directory `path`; every rank must call this.

    Every rank writes an equal share of the state that all ranks have, such as a model's parameters. Each rank also
    writes its own part of divided state, such as ZeRO shards or the layers of a `Pipeline`. The checkpoint becomes
    visible atomically when all of it is on disk. Older checkpoints are removed only afterward, so a complete checkpoint
    always exists. Any number of ranks can load the checkpoint.

    Module buffers and loader positions are taken from the first rank. Other state that differs between ranks is saved
    for each rank, with a warning if the parameters of a module differ.

    Args:
        state: the objects, by name. They can be modules (plain, or wrapped in `DistributedDataParallel` or
            `LogicalShards`), optimizers, any other objects with `state_dict` and `load_state_dict`, tensors, plain
            values, and dicts of these.
        path: the directory. It is created if it does not exist.
        step: the index of the training step, which becomes part of the checkpoint's name, or None. Default: None.
        keep: the number of checkpoints to keep in the directory. Default: 1.
        group: the ranks that save, or None for the default group. A process without a group saves alone. Default: None.
        asynchronous: whether to return once the state has been copied. A low-priority thread then writes the copy, and
            the next save waits for it. Default: False.
        shared: whether all ranks share the disk. If False, each host stores the parts of its own ranks, and `load` with
            `shared=False` fetches missing parts from other hosts. Default: True.

    Returns:
        A handle with the methods `wait` and `done` if `asynchronous` is True, else None.

    Raises:
        CheckpointError: the state cannot be saved, or a rank could not write its part; raised on every rank.

    Example::

        paceline.save({"model": model, "optimizer": optimizer, "epoch": epoch}, "checkpoints", step=step)
    """
    BACKGROUND.finish()
    channel = channel_of(group)
    root = Root(path)
    plan = plan_save(state, root, step, channel, None if shared else found_disks(root, channel))
    if asynchronous:
        return write_staged(root, staged(root, plan, channel), keep, channel)
    write(root, plan, keep, channel)
    return None


def write(root: Root, plan: SavePlan, keep: int, channel: CollectiveChannel) -> None:
    """Writes this rank's part and publishes the checkpoint; every rank must call this."""
    _write(root, plan, keep, [channel, channel])


def staged(root: Root, plan: SavePlan, channel: CollectiveChannel) -> SavePlan:
    """Returns the plan with copies of the regions that this rank writes; every rank must call this."""
    copies: list[LocalRegion] = []
    try:
        # All ranks wait until every rank has its copies, because ranks may share memory that the next step changes.
        results_of_all(lambda: copies.extend(BACKGROUND.staging.copied(plan.held)), channel)
    except BaseException:
        abandon(root, plan.draft, plan.disks, channel.rank)
        raise
    return replace(plan, held=copies)


def write_staged(
    root: Root, plan: SavePlan, keep: int, channel: CollectiveChannel, beside: Callable[[], None] | None = None
) -> SaveHandle:
    """Starts a thread that writes a staged plan, and returns its handle; every rank must call this.

    Another thread runs `beside`, if given, at the same time. It must not raise an error.
    """
    token = plan.draft.token
    channels = background_channels(channel, *([token] if plan.disks is None else [token, f"{token}/seen"]))
    return BACKGROUND.start(lambda: _write(root, plan, keep, channels), plan.draft.name, beside)


def _write(root: Root, plan: SavePlan, keep: int, channels: Sequence[RankChannel]) -> None:
    first = channels[0]
    written = encode_result(lambda: _write_own_part(root, plan, first), first.me)
    if plan.disks is None:
        _publish_on_one(root, plan, written, keep, first)
    else:
        _publish_on_each(root, plan, plan.disks, written, keep, channels)


def _write_own_part(root: Root, plan: SavePlan, channel: RankChannel) -> bytes:
    progress = ProgressPrinter(f"paceline: {channel.me}: checkpoint {plan.draft.name}: wrote")
    items = [outgoing_of(held) for held in plan.held]
    part = write_part(root.storage, plan.draft, channel.rank, items, progress=progress)
    return contribution_to_bytes(part, plan.values)


def outgoing_of(held: LocalRegion) -> WriteItem:
    """Returns a region as an item for `write_part`."""
    return WriteItem(held.name, held.dtype, held.shape, held.region, lambda: memory_with(held.elements().cpu()))


def _publish_on_one(root: Root, plan: SavePlan, written: bytes, keep: int, channel: RankChannel) -> None:
    """Publishes the checkpoint on the disk that all ranks share. Rank 0 does this for all ranks."""
    if channel.rank > 0:
        channel.gather(written)
        decode_result(channel.broadcast(b""))
        return

    def publish() -> None:
        parts, values = contributions_from_bytes(_join(channel.gather(written)))
        root.publish(plan.draft, parts, values, world_size=channel.size)

    is_published = False
    try:
        verdict = encode_result(publish, channel.me)
        is_published = is_success(verdict)
        decode_result(channel.broadcast(verdict))
    finally:
        if not is_published:
            root.abandon(plan.draft)
    root.retire(keep)


def _publish_on_each(
    root: Root, plan: SavePlan, disks: Disks, written: bytes, keep: int, channels: Sequence[RankChannel]
) -> None:
    """Publishes the checkpoint on each disk once all ranks have written their parts.

    The first rank on each disk publishes the checkpoint there. A checkpoint that becomes visible on only some of the
    disks is incomplete and ignored.
    """
    first, second = channels
    is_published = False

    def publish() -> None:
        parts, values = contributions_from_bytes(decode_result(from_all))
        if disks.is_first:
            here = [file for rank in disks.sharers(disks.rank) for file in parts[rank].files]
            root.publish(plan.draft, parts, values, world_size=first.size, here=here)

    try:
        gathered = first.gather(written)
        from_all = first.broadcast(encode_result(lambda: _join(gathered), first.me) if first.rank == 0 else b"")
        mine = encode_result(publish, first.me)
        is_published = is_success(mine)
        answers = second.gather(mine)
        verdict = next((answer for answer in answers if not is_success(answer)), mine)
        decode_result(second.broadcast(b"" if second.rank else verdict))
    finally:
        if not is_published:
            abandon(root, plan.draft, disks, first.rank)
    if disks.is_first:
        root.retire(keep)


def _join(answers: Sequence[bytes]) -> bytes:
    return join_contributions([decode_result(answer) for answer in answers])


class SaveHandle:
    """A checkpoint that a thread is writing.

    Args:
        beside: a function that another thread runs at the same time, or None. It must not raise an error. `wait` waits
            for both functions.
    """

    def __init__(self, work: Callable[[], None], name: str, beside: Callable[[], None] | None = None) -> None:
        self.name = name
        self._work, self._beside = work, beside
        self._error: BaseException | None = None
        # The thread is not a daemon, so the process completes its last checkpoint before it exits.
        self._thread = threading.Thread(target=self._run, name="paceline-checkpoint")
        self._thread.start()

    def done(self) -> bool:
        """Returns True if the write has completed or failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the checkpoint has been written; returns False if `timeout` elapses first.

        Args:
            timeout: the maximum time to wait, in seconds, or None for no limit. The group's timeout applies to the
                write itself. Default: None.

        Raises:
            CheckpointError: a rank failed. Raised once on every rank.
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
            if finish_beside is not None:
                finish_beside()
            del self._work, self._beside

    def _start_beside(self) -> Callable[[], None] | None:
        if self._beside is None:
            return None
        thread = threading.Thread(target=self._beside, name="paceline-copies")
        try:
            thread.start()
        except RuntimeError:
            return self._beside  # must run even so, because other ranks wait for it
        return thread.join


class Staging:
    """Memory for copies, reused for later checkpoints because allocating it takes longer than the copy itself.

    Tensors on a device are copied asynchronously on the current streams, so later work on the device runs after the
    copies. Only the thread that writes the copies waits for the device.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: list[AcceleratorEvent] = []  # events recorded after the latest copies, one for each device

    def copied(self, held: Sequence[LocalRegion]) -> list[LocalRegion]:
        """Copies regions into this memory, overwriting earlier copies; returns the regions with the copied elements."""
        starts, total = _laid_out(held)
        for event in self._copied:
            event.wait()
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old memory first
            self._memory = _pinned_memory_of(total) if accelerator_in_use() else _memory_of(total)
        copies = [
            self._memory[start : start + region.nbytes].view(type_of(region.dtype))
            for region, start in zip(held, starts, strict=True)
        ]
        devices = _copy_all([(copy, region) for copy, region in zip(copies, held, strict=True)])
        self._copied = events = [record_current(device) for device in devices]
        return [
            replace(region, elements=partial(_once_passed, events, copy))
            for region, copy in zip(held, copies, strict=True)
        ]


def _once_passed(events: Sequence[AcceleratorEvent], copy: torch.Tensor) -> torch.Tensor:
    for event in events:
        event.wait()
    return copy.detach()


def _pinned_memory_of(nbytes: int) -> torch.Tensor:
    """Returns aligned page-locked memory for asynchronous copies, or ordinary memory if none can be locked."""
    try:
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # the size exceeds the memory that the device's driver can lock
        return _memory_of(nbytes)
    return memory[-memory.data_ptr() % ALIGNMENT :][:nbytes]


def _memory_of(nbytes: int) -> torch.Tensor:
    """Returns aligned memory, in huge pages if available, because disks accept larger writes from huge pages."""
    try:
        memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(
            f"there is not enough memory for a copy of the {nbytes:,} bytes that this rank writes ({error.strerror}); "
            "with asynchronous=False none is needed"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel may not support huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _laid_out(held: Sequence[LocalRegion]) -> tuple[list[int], int]:
    """Returns the offset of each copy and the total size. The layout matches the files, to allow direct writes."""
    starts: dict[int, int] = {}
    offset = 0
    for members in in_files(held):
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        for region in members:
            starts[id(region)] = offset
            offset += region.nbytes
    return [starts[id(region)] for region in held], offset


def _copy_all(pairs: Sequence[tuple[torch.Tensor, LocalRegion]]) -> list[torch.device]:
    """Copies the elements of the regions; returns the devices on which copies are still in progress."""
    devices: dict[torch.device, None] = {}
    threads = min(_MOST_THREADS, _cores_to_spare())
    is_small = sum(held.nbytes for _, held in pairs) < _CHUNK_NBYTES
    with ThreadPoolExecutor(max(1, threads), "paceline-copying") as pool:  # starts threads on demand
        works = []
        for copy, held in pairs:
            elements = held.elements()
            if not elements.is_cpu:
                devices[elements.device] = None
                copy.copy_(elements, non_blocking=True)
            elif threads < 2 or is_small:
                copy.copy_(elements)
            else:
                size = max(1, _CHUNK_NBYTES // max(1, elements.element_size()))
                works += [pool.submit(a.copy_, b) for a, b in zip(copy.split(size), elements.split(size), strict=True)]
        for work in works:
            work.result()
    return list(devices)


def _cores_to_spare() -> int:
    """Returns this rank's share of the usable cores. The ranks on a host have equal shares."""
    return _core.usable_cores() // (whole_number(os.environ.get("LOCAL_WORLD_SIZE", ""), least=1) or 1)


class Background:
    """This process's background save, and the memory for its copies."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._handle: SaveHandle | None = None

    def start(self, work: Callable[[], None], name: str, beside: Callable[[], None] | None = None) -> SaveHandle:
        """Starts a thread that writes a checkpoint; see `SaveHandle` for the arguments."""
        self._handle = SaveHandle(work, name, beside)
        return self._handle

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if any, and raises its error if that was not raised yet."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()


BACKGROUND = Background()
