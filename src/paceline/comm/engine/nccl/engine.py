"""The nccl engine, which opens groups, each for one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.comm.engine.adapters.group_recorder import GroupRecorder
from paceline.comm.engine.api import EngineContext
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.nccl.call_stream import CallStream, CallWatch, StreamRanks
from paceline.comm.engine.nccl.channel import NcclChannel, NcclMessages
from paceline.comm.engine.nccl.device import CudaDevice, OpenDevice
from paceline.comm.engine.nccl.library import Library, LibraryMissingError, find
from paceline.comm.store.store import PrefixStore


def missing_piece() -> str | None:
    """Returns the first prerequisite that this machine lacks, with the fix, or None if the engine can be used."""
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA; install one with it (pytorch.org, Get Started), "
            "or use backend='paceline' with CPU tensors"
        )
    if torch.cuda.device_count() == 0:
        return (
            "torch sees no GPU; look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES, or use "
            "backend='paceline' with CPU tensors"
        )
    try:
        find()
    except LibraryMissingError as error:
        return str(error)
    return None


def start(context: EngineContext) -> NcclEngine:
    """Starts the engine; see `engine.api.EngineModule`."""
    return NcclEngine(context, find(), CudaDevice)


@dataclass(frozen=True)
class NcclGroup:
    """A group on a device; see `engine.api.OpenGroup`."""

    channel: NcclChannel
    messages: NcclMessages

    def leave(self) -> None:
        """Accepts no more calls; idempotent.

        Closing a communicator waits for the other ranks, which may close theirs in another order, so all groups leave
        before any of them is closed.
        """
        self.channel.leave()
        self.messages.leave()

    def record_as(self, group: int) -> None:
        """Records calls and messages; see `engine.channel.EngineChannel`."""
        self.channel.record_as(group)

    def abort(self) -> None:
        """Aborts the channel on this rank and accepts no more messages; see `CallStream.abort`."""
        self.channel.abort()
        self.messages.leave()

    def failure(self) -> int:
        """Returns the code of the channel's failure, or OK."""
        return self.channel.failure()

    def close(self) -> None:
        """Closes the channel and the messages; idempotent."""
        self.leave()
        self.channel.close()
        self.messages.close()


class NcclEngine:
    """Connects the ranks' GPUs until `close` is called; a group connects at its first call.

    Args:
        context: the ranks, their store and this rank.
        library: the NCCL library.
        open_device: a function from torch's device to the engine's `Device`.
    """

    name = "nccl"

    def __init__(self, context: EngineContext, library: Library, open_device: OpenDevice) -> None:
        self._context = context
        self._library = library
        self._open_device = open_device
        self._watch = CallWatch()
        self._groups: list[NcclGroup] = []
        self._opened: Counter[int] = Counter()
        self._closed = False

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The ranks of the default group and their processes."""
        return self._context.members

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> NcclGroup:
        """Opens a group; only its first call waits for the other ranks. See `engine.api.Engine`.

        Raises:
            ValueError: `algorithm` is given, although NCCL chooses its own.
        """
        if algorithm is not None:
            raise ValueError(
                f"the algorithm is {algorithm!r}, and nccl chooses its own; leave it out, or set NCCL_ALGO"
            )
        members = self._context.members
        own_device = self._open_device(torch.device("cuda") if device is None else device)
        index = self._opened[identity]  # all ranks open a group for their devices in the same order
        self._opened[identity] += 1
        store = PrefixStore(f"nccl/{identity}/{index}", self._context.store)
        rank = list(ranks).index(self._context.rank)

        def open_call_stream(group_ranks: Sequence[int], name: str) -> CallStream:
            stream_ranks = StreamRanks(
                tuple(members[ranks[member]] for member in group_ranks), tuple(group_ranks), group_ranks.index(rank)
            )
            calls = CallStream(self._library, own_device, PrefixStore(name, store), stream_ranks, lambda: self._closed)
            self._watch.add(calls)
            return calls

        recorder = GroupRecorder([members[member] for member in ranks], rank)
        calls = open_call_stream(range(len(ranks)), "all")
        channel = NcclChannel(self._library, calls, self._watch, rank, recorder)
        group = NcclGroup(channel, NcclMessages(rank, open_call_stream, self._watch, recorder))
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Closes every group and ends the watch; idempotent."""
        self._closed = True
        for group in self._groups:
            group.leave()
        for group in self._groups:
            group.close()
        self._groups.clear()
        self._watch.close()
