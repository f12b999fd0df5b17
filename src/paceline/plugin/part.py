"""A Paceline group as one of the backends of a process group: "cpu:paceline,cuda:nccl".

If a backend is itself a process group, PyTorch makes it the whole group. From release 2.14 on, Python can subclass
PyTorch's class `Backend`, and a group that has other backends too uses such a subclass.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import Backend

from paceline.group.eager import eager, eager_methods
from paceline.plugin.process_group import TorchProcessGroup

_CPU = torch.device("cpu")
_ALONE = "custom"  # the name of a process group whose one backend is not PyTorch's own


def has_others(options: Any) -> bool:
    """Returns whether the group that a backend is made for also has PyTorch's own backends, as far as PyTorch says."""
    whole = getattr(options, "process_group", None)
    return whole is not None and (bool(whole._device_types) or whole.name() != _ALONE)


@eager_methods
class BackendOfGroup(Backend):
    """Passes calls on CPU tensors to `group`."""

    supports_coalescing = False
    supports_splitting = False
    supports_abort_hooks = True

    def __init__(self, group: TorchProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:
        """Returns the name that torch's messages use."""
        return self.group.getBackendName()

    name = getBackendName

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of later calls."""
        self.group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it; see `TorchProcessGroup.monitored_barrier`."""
        self.group.monitored_barrier(opts.timeout, wait_all_ranks)

    def shutdown(self) -> None:
        """Ends the group for this rank; idempotent."""
        self.group.shutdown()

    def abort(self) -> None:
        """Ends the calls of all ranks on CPU tensors; see `Recovery.abort`."""
        self.group.abort()

    def get_error(self) -> Any:
        """Returns what the group of CPU tensors failed with; see `Recovery.get_error`."""
        return self.group.get_error()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Has `hook` run before the group of CPU tensors is given up; see `Recovery.register_abort_hook`."""
        self.group.register_abort_hook(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Removes the hook that was registered with that number."""
        self.group.unregister_abort_hook(hook_id)


def _passed_on(name: str) -> Callable[..., torch_dist.Work]:
    @eager
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
    """Returns `whole` if it is a Paceline group, or else the Paceline group for its CPU tensors; None without one."""
    if isinstance(whole, TorchProcessGroup):
        return whole
    if _CPU not in whole._device_types:
        return None
    backend = whole._get_backend(_CPU)
    return backend.group if isinstance(backend, BackendOfGroup) else None
