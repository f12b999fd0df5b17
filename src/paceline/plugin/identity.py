"""The part of a process group that torch.distributed needs besides collectives."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

import torch
import torch.distributed as torch_dist
from torch.distributed.distributed_c10d import _world

from paceline.engine.failures import Member
from paceline.errors import GroupAbortedError, RendezvousError
from paceline.group.default import World
from paceline.group.eager import eager_methods
from paceline.plugin.meeting import OTHER_DEVICES, Meeting
from paceline.wording import shown

_CPU = torch.device("cpu")


class Absence(Enum):
    """Why a group has no connections: it was ended or aborted, or its ranks have not met."""

    DESTROYED = "destroyed"
    ABORTED = "aborted"
    NOT_MET = "not met"


@eager_methods
class Identity(torch_dist.ProcessGroup):
    """Names, ranks and devices of a group. PyTorch keeps these in the group's backend; here the group is its own."""

    supports_splitting = False
    supports_coalescing = False
    supports_tensor_alloc = False
    supports_time_estimate = False
    supports_window = False
    bound_device_id: torch.device | None = None

    def __init__(self, meeting: Meeting, world: World | None) -> None:
        super().__init__(meeting.rank, meeting.size)
        self._store = meeting.store
        self._timeout = meeting.timeout
        self._rank, self._size, self._named = meeting.rank, meeting.size, meeting.named
        self._members: tuple[Member, ...] = ()  # of the latest group whose ranks have met
        self._absence = Absence.NOT_MET
        self._name = ""
        self._description = "undefined"
        self._backend = "paceline"
        if world is not None:
            self._adopt(meeting, world)

    def __repr__(self) -> str:
        return f"<paceline process group {self._name or 'default'}, rank {self._rank} of {self._size}>"

    def getBackendName(self) -> str:
        """Returns the name that torch's C++ uses, which takes a group by the name of gloo for an object of its own."""
        return "paceline"

    def name(self) -> str:
        """Returns the name of the backend as programs see it."""
        return self._backend

    _get_backend_name = name

    def stand_in_for(self, backend: str) -> None:
        """Gives the group the name of the backend whose place it takes, also in profiles."""
        self._backend = backend
        if (group := vars(self).get("_group")) is not None:
            group.profiled_as = backend

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
        self._name = _text(name)

    def setGroupDesc(self, description: str) -> None:
        """Sets `group_desc`."""
        self._description = _text(description)

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
        self._timeout = timeout
        if (group := vars(self).get("_group")) is not None:
            group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Ends the group for this rank; idempotent."""
        self._close(Absence.DESTROYED)
        vars(self).pop("_store", None)  # meshes keep this object, and would keep the descriptors open

    def _adopt(self, meeting: Meeting, world: World) -> None:
        """Makes the group of `world`, whose ranks have met, this group's connections."""
        self._rank, self._size, self._named = meeting.rank, meeting.size, meeting.named
        self._members = world.group.members
        self._world = world
        self._group = world.group
        self.stand_in_for(self._backend)

    def _close(self, why: Absence) -> None:
        """Ends the connections, if there are any; several threads may call this at once."""
        self._absence = why
        vars(self).pop("_group", None)
        world = vars(self).pop("_world", None)
        if world is not None:
            world.close()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("_group", "_world", "_store"):
            raise self._absent()
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _absent(self) -> Exception:
        """Returns the error of a call for which there are no connections."""
        me = f"rank {self._rank}: {self!r}"
        if self._absence is Absence.ABORTED:
            return GroupAbortedError(
                f"{me} was aborted by this process; go on with shrink_group, _reconfigure or a new group",
                rank=self._named[self._rank],
            )
        if self._absence is Absence.NOT_MET:
            return RendezvousError(
                f"{me} has no other ranks yet: it was created with enable_reconfigure=True, or its last _reconfigure "
                "failed. Pass torch.distributed._get_reconfigure_handle() of every rank to _reconfigure on all of them"
            )
        return ValueError(
            f"{me} was destroyed (destroy_process_group); make a new one with init_process_group or new_group"
        )


def _text(name: object) -> str:
    """Returns `name`, which messages show.

    Raises:
        TypeError: it is no string, as torch's own groups say.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name and the description of a group are strings, not {shown(name)}")
    return name
