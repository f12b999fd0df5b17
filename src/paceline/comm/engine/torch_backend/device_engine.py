"""The engine for tensors on accelerators, with a separate group for each device.

It uses `nccl` for CUDA and ROCm, and process groups from PyTorch or an extension for other accelerators.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import distributed_c10d as c10d

from paceline.comm.engine.adapters.device_streams import with_index
from paceline.comm.engine.adapters.group_recorder import GroupRecorder
from paceline.comm.engine.adapters.library_engine import announce_death, announce_leave
from paceline.comm.engine.api import EngineContext
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.torch_backend import process_groups
from paceline.comm.engine.torch_backend.collectives import StartedCall, TorchGroup
from paceline.comm.engine.torch_backend.device_calls import (
    CallStream,
    CallWatch,
    StartCall,
    StreamRanks,
    StreamSettings,
)
from paceline.comm.engine.torch_backend.device_channel import DeviceChannel, DeviceMessages, connect_all
from paceline.comm.store.store import PrefixStore

_CLOSING_S = 5.0  # the time for other ranks to shut down a process group whose calls are complete
_COLLECTIVES = "all"
_FLOAT8_SINCE = (2, 24)


def missing_piece(name: str) -> str | None:
    """Returns the first prerequisite that this machine lacks and the fix, or None if the engine can be used."""
    if name == "nccl":
        return _missing_for_nccl()
    if not process_groups.is_registered(name):
        return f"torch.distributed has no backend {name!r}; import the extension that registers it"
    for device_type in process_groups.device_types(name):
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            return None
    return f"torch sees no device for the backend {name!r} ({', '.join(process_groups.device_types(name)) or 'none'})"


def _missing_for_nccl() -> str | None:
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA or ROCm; install one with it (pytorch.org, Get "
            "Started), or use backend='paceline' with CPU tensors"
        )
    if not c10d.is_nccl_available():
        return f"this torch ({torch.__version__}) was built without NCCL; install one from pytorch.org"
    if torch.cuda.device_count() == 0:
        return (
            "torch sees no GPU; look at nvidia-smi, at the driver, and at CUDA_VISIBLE_DEVICES, or use "
            "backend='paceline' with CPU tensors"
        )
    return None


def start(name: str, context: EngineContext) -> DeviceEngine:
    """Starts the engine; see `engine.api.EngineModule`."""
    return DeviceEngine(name, context, functools.partial(process_groups.construct, name))


def identify(device: torch.device) -> str:
    """Returns a GPU's UUID, or "" for devices that processes may share."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True, eq=False)
class DeviceGroup:
    """A group on a device; see `engine.api.OpenGroup`."""

    calls: CallStream
    channel: DeviceChannel
    messages: DeviceMessages
    end: Callable[[DeviceGroup], None]

    def record_as(self, group: int) -> None:
        """Records calls and messages; see `engine.channel.EngineChannel`."""
        self.channel.record_as(group)

    def streams(self) -> list[CallStream]:
        """Returns the call streams for collectives and messages."""
        return [self.calls, *self.messages.streams()]

    def abort(self) -> None:
        """Aborts calls and messages on this rank; see `CallStream.abort`."""
        for calls in self.streams():
            calls.abort()

    def failure(self) -> int:
        """Returns the `OutcomeCode` for a failure of the channel, or OK."""
        return self.channel.failure()

    def close(self) -> None:
        """Closes the group after its calls are complete; idempotent."""
        self.end(self)


class DeviceEngine:
    """Connects the ranks' devices until `close` is called. The first call on a group connects the group's ranks.

    Args:
        name: the name of the engine, which is also the name of PyTorch's backend.
        context: the ranks, their store and this rank.
        construct: a function that constructs a process group; see `device_calls.ConstructGroup`.
    """

    def __init__(
        self,
        name: str,
        context: EngineContext,
        construct: Callable[[process_groups.TorchStore, int, int], process_groups.OwnedProcessGroup],
    ) -> None:
        self.name = name
        announce_death(context)
        self._context = context
        self._watch = CallWatch()
        self._groups: list[DeviceGroup] = []
        self._opened: Counter[int] = Counter()
        self._is_closing = False
        library = process_groups.version_of(name)
        self._settings = StreamSettings(
            construct,
            library,
            "NCCL_DEBUG=WARN has NCCL say more" if name == "nccl" else f"Look at the output of {library}",
            identify,
            context.store,
            lambda: self._is_closing,
        )

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
    ) -> DeviceGroup:
        """Opens a group; only its first call waits for the other ranks. See `engine.api.Engine`.

        Raises:
            ValueError: `algorithm` is given, although the library chooses its own.
        """
        if algorithm is not None:
            advice = ", or set NCCL_ALGO" if self.name == "nccl" else ""
            raise ValueError(f"the algorithm is {algorithm!r}, and {self.name} chooses its own; leave it out{advice}")
        members = self._context.members
        own_device = with_index(torch.device("cuda") if device is None else device)
        index = self._opened[identity]  # all ranks open the groups for their devices in the same order
        self._opened[identity] += 1
        store = PrefixStore(f"{self.name}/{identity}/{index}", self._context.store)
        rank = list(ranks).index(self._context.rank)

        def open_call_stream(group_ranks: Sequence[int], name: str, greet: StartCall) -> CallStream:
            stream_ranks = StreamRanks(
                tuple(members[ranks[member]] for member in group_ranks),
                tuple(group_ranks),
                group_ranks.index(rank),
                name != _COLLECTIVES,
            )
            calls = CallStream(self._settings, own_device, PrefixStore(name, store), stream_ranks, greet)
            self._watch.add(calls)
            return calls

        def greet(group: TorchGroup) -> StartedCall:
            return connect_all(group, own_device)

        recorder = GroupRecorder([members[member] for member in ranks], rank)
        calls = open_call_stream(range(len(ranks)), _COLLECTIVES, greet)
        channel = DeviceChannel(calls, self._watch, rank, self._settings.library, has_float8(own_device), recorder)
        group = DeviceGroup(calls, channel, DeviceMessages(rank, open_call_stream, self._watch, recorder), self._end)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Closes every group and stops the watch; idempotent."""
        self._is_closing = True
        self._end(*self._groups)
        self._watch.close()
        announce_leave(self._context)

    def _end(self, *groups: DeviceGroup) -> None:
        """Closes groups concurrently, because ranks may close their process groups in different orders."""
        groups = tuple(group for group in groups if group in self._groups)
        streams = [calls for group in groups for calls in group.streams()]
        self._groups = [group for group in self._groups if group not in groups]
        for calls in streams:
            calls.leave()
        for calls in streams:
            calls.drain()
        deadline = time.monotonic() + _CLOSING_S
        threads = [threading.Thread(target=calls.close, args=(deadline,), daemon=True) for calls in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for calls in streams:
            self._watch.remove(calls)
            calls.forget_peers()


def has_float8(device: torch.device) -> bool:
    """Returns whether the library and the device can reduce 8-bit floats (NCCL 2.24 or later, on sm90 or later)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.nccl.version()[:2] >= _FLOAT8_SINCE and torch.cuda.get_device_capability(device) >= (9, 0)
