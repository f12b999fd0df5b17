"""Creation of groups for torch.distributed, and `DeviceBackend` for combinations such as "cpu:paceline,cuda:nccl".

If a backend is itself a process group, PyTorch uses it as the entire group. For a combination of backends, the Paceline
group is therefore wrapped in a subclass of PyTorch's class `Backend`. Python code can subclass `Backend` in PyTorch
2.14 and later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import Backend

from paceline.comm.engine.api import choose, staged_types
from paceline.comm.group.default import World, set_fallback_world
from paceline.comm.group.eager import eager, eager_methods
from paceline.interop.torch_backend.process_group import TorchProcessGroup
from paceline.interop.torch_backend.rendezvous import GroupRendezvous, form_group
from paceline.interop.torch_backend.work import keep_works_of_reducers

_CPU = torch.device("cpu")
_ALONE = "custom"  # PyTorch's name for a process group with a single third-party backend


def create(options: Any, pg_options: Any = None) -> TorchProcessGroup | DeviceBackend:
    """Creates a process group for torch.distributed or, in a combination, the backend for its CPU tensors.

    A group with `enable_reconfigure` has no connections until `_reconfigure` is called.
    """
    is_mixed, is_open = has_other_backends(options), getattr(options, "enable_reconfigure", False)
    if is_mixed and is_open:
        raise ValueError(
            "a mixture of backends cannot be reconfigured: PyTorch does not support it, and nccl has not been run on a "
            "GPU with Paceline yet. Only pass enable_reconfigure=True for a group whose only backend is 'paceline'"
        )
    if pg_options is not None and not is_mixed:  # in a combination, every backend receives all options
        raise ValueError(f"the backend 'paceline' has no options; got {type(pg_options).__name__}")
    named = options.global_ranks_in_group or range(options.group_size)
    group = _form(options.store, options.group_rank, options.timeout, named, str(options.group_id), is_open)
    set_fallback_world(_default_world)
    return DeviceBackend(group) if is_mixed else group


def create_alone(
    store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device, options: dict[str, object]
) -> TorchProcessGroup:
    """Creates a process group for `torch.distributed._dist2.new_group`. torch does not register such groups."""
    if device.type != "cpu" and device.type not in staged_types(choose("paceline")):
        raise ValueError(
            f"the backend 'paceline' takes CPU tensors and those of this PyTorch's accelerator; got the device {device}"
        )
    if options:
        raise ValueError(f"the backend 'paceline' has no options; got {', '.join(options)}")
    return _form(store, rank, timeout, range(world_size), "alone", False)


def _form(
    store: Any, rank: int, timeout: timedelta, named: Sequence[int], name: str, is_open: bool
) -> TorchProcessGroup:
    keep_works_of_reducers()
    rendezvous = GroupRendezvous(store, rank, len(named), timeout, named, name)
    return TorchProcessGroup(rendezvous, None if is_open else form_group(rendezvous))


def _default_world() -> World | None:
    """Returns the Paceline group that implements torch's default group, or None if there is none."""
    whole = torch_dist.group.WORLD
    group = None if whole is None else paceline_group_of(whole)
    return None if group is None else group.world


def has_other_backends(options: Any) -> bool:
    """Returns True if the group to be created also uses other backends, according to `options`."""
    whole = getattr(options, "process_group", None)
    return whole is not None and (bool(whole._device_types) or whole.name() != _ALONE)


@eager_methods
class DeviceBackend(Backend):
    """A backend that forwards calls on CPU tensors to `group`."""

    supports_coalescing = False
    supports_splitting = False
    supports_abort_hooks = True

    def __init__(self, group: TorchProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:
        """Returns the name that torch uses for the backend in error messages."""
        return self.group.getBackendName()

    name = getBackendName

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks; see `TorchProcessGroup.monitored_barrier`."""
        self.group.monitored_barrier(opts.timeout, wait_all_ranks)


def _forwarded(name: str) -> Callable[..., Any]:
    @eager
    def call(self: DeviceBackend, *args: Any) -> Any:
        return getattr(self.group, name)(*args)

    return call


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall", "all_to_all_single"),
    *("barrier", "send", "recv", "recv_anysource", "set_timeout", "_set_default_timeout", "shutdown", "abort"),
    *("get_error", "register_abort_hook", "unregister_abort_hook"),
):
    setattr(DeviceBackend, _name, _forwarded(_name))


def paceline_group_of(whole: torch_dist.ProcessGroup) -> TorchProcessGroup | None:
    """Returns `whole` if it is a Paceline group, or else the Paceline group for its CPU tensors if there is one."""
    if isinstance(whole, TorchProcessGroup):
        return whole
    if _CPU not in whole._device_types:
        return None
    backend = whole._get_backend(_CPU)
    return backend.group if isinstance(backend, DeviceBackend) else None
