"""The part of a process group that torch.distributed needs besides collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import _world

from paceline.group.default import World

_CPU = torch.device("cpu")
OTHER_DEVICES = (
    "make a second group, such as torch.distributed.new_group(backend='nccl'), for tensors that are not on the CPU (of "
    "a mixture such as 'cpu:paceline,cuda:nccl' PyTorch makes no more than one backend before release 2.14, if that "
    "is written in Python), or "
)


class Identity(torch_dist.ProcessGroup):
    """Names, ranks and devices of a group. PyTorch keeps these in the group's backend; here the group is its own."""

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_tensor_alloc = False
    supports_time_estimate = False
    supports_reconfigure = False
    supports_window = False
    bound_device_id: torch.device | None = None

    def __init__(self, world: World, store: Any) -> None:
        group = world.group
        super().__init__(group.rank(), group.size())
        self._world = world
        self._group = group
        self._store = store
        self._rank, self._size = group.rank(), group.size()
        self._name = ""
        self._description = "undefined"

    def __repr__(self) -> str:
        return f"<paceline process group {self._name or 'default'}, rank {self._rank} of {self._size}>"

    def getBackendName(self) -> str:
        """Returns the name that torch's messages use."""
        return "paceline"

    name = getBackendName
    _get_backend_name = getBackendName

    @property
    def world(self) -> World | None:
        """Returns what Paceline's calls use while this is the default group; None after its end."""
        return vars(self).get("_world")

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks."""
        return self._size

    getRank = rank
    getSize = size

    def getGroupName(self) -> str:
        """Returns the name that torch has given the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """Returns the group's description."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def setGroupName(self, name: str) -> None:
        """Sets `group_name`."""
        self._name = name

    def setGroupDesc(self, description: str) -> None:
        """Sets `group_desc`."""
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def get_group_store(self) -> Any:
        """Returns the store over which the ranks met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """Returns no device until torch has registered the group.

        torch 2.15 attaches a recorder to new groups that report devices, and it supports C++ backends only.
        """
        return [_CPU] if self in _world.pg_map else []

    def _get_backend(self, device: torch.device) -> Identity:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"{self!r} has no backend for the device {device}; it takes CPU tensors: {OTHER_DEVICES}move them to it"
            )
        return self

    get_backend = _get_backend

    def _set_default_backend(self, backend_type: object) -> None:
        """Does nothing, since this is the group's only backend."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Does nothing, since the caller waits for each call."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing, since the core numbers the calls."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of later calls."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Ends the group for this rank; idempotent."""
        if "_group" not in vars(self):
            return
        self._world.close()
        del self._group, self._world, self._store  # meshes keep this object, and would keep the descriptors open

    abort = shutdown

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("_group", "_world", "_store"):
            raise ValueError(
                f"rank {self._rank}: {self!r} was destroyed (destroy_process_group); make a new one with "
                "init_process_group or new_group"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
