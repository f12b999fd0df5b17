"""A Paceline group as one of the backends of a process group: "cpu:paceline,cuda:nccl".

PyTorch hands the whole group to a backend that is a process group. Where it lets Python subclass its class `Backend`,
from release 2.14, a group that has other backends as well gets one of those.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import Backend

from paceline.plugin.process_group import TorchProcessGroup

_CPU = torch.device("cpu")
_ALONE = "custom"  # the name of a process group whose one backend is not PyTorch's own


def has_others(options: Any) -> bool:
    """Whether the process group that a backend is made for has backends of PyTorch's own, so far as PyTorch tells."""
    whole = getattr(options, "process_group", None)
    return whole is not None and (bool(whole._device_types) or whole.name() != _ALONE)


class BackendOfGroup(Backend):
    """Passes the calls on CPU tensors to `group`."""

    supports_coalescing = False
    supports_splitting = False

    def __init__(self, group: TorchProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:
        """The name that messages of torch use."""
        return self.group.name()

    name = getBackendName

    def set_timeout(self, timeout: timedelta) -> None:
        """How long later calls wait."""
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come, which all calls do."""
        self.group.barrier(opts).wait()

    def shutdown(self) -> None:
        """Ends the group for this rank; idempotent."""
        self.group.shutdown()

    abort = shutdown


def _passed_on(name: str) -> Callable[..., torch_dist.Work]:
    def call(self: BackendOfGroup, *args: Any) -> torch_dist.Work:
        work: torch_dist.Work = getattr(self.group, name)(*args)
        return work

    return call


for _name in (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
):
    setattr(BackendOfGroup, _name, _passed_on(_name))


def part_of(whole: torch_dist.ProcessGroup) -> TorchProcessGroup | None:
    """The Paceline group that takes the CPU tensors of a process group with several backends; None without one."""
    if _CPU not in whole._device_types:
        return None
    backend = whole._get_backend(_CPU)
    return backend.group if isinstance(backend, BackendOfGroup) else None
