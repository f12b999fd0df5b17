"""Makes the groups that torch.distributed asks for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.group.default import World, borrow_world
from paceline.plugin.meeting import Meeting, meet
from paceline.plugin.part import BackendOfGroup, has_others, part_of
from paceline.plugin.process_group import TorchProcessGroup
from paceline.plugin.works import keep_works_of_reducers


def create(options: Any, pg_options: Any = None) -> TorchProcessGroup | BackendOfGroup:
    """Returns the process group that torch.distributed asks for, or a backend for one that has other backends too.

    With `enable_reconfigure` the group has no connections yet; `_reconfigure` makes them.

    Raises:
        ValueError: `pg_options` were given, which this backend does not have, or a mixture is to be reconfigured.
        RendezvousError, AuthenticationError: the ranks did not find each other.
    """
    is_mixed, is_open = has_others(options), getattr(options, "enable_reconfigure", False)
    if is_mixed and is_open:
        raise ValueError(
            "a mixture of backends cannot be reconfigured: PyTorch does not support it, and nccl has not been run on a "
            "GPU with Paceline yet. Give enable_reconfigure=True to a group whose only backend is 'paceline'"
        )
    if pg_options is not None and not is_mixed:  # PyTorch passes the other backend's options to every backend
        raise ValueError(f"the backend 'paceline' has no options; got {type(pg_options).__name__}")
    named = options.global_ranks_in_group or range(options.group_size)
    group = _form(options.store, options.group_rank, options.timeout, named, str(options.group_id), is_open)
    borrow_world(_default_world)
    return BackendOfGroup(group) if is_mixed else group


def create_alone(
    store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device, options: dict[str, object]
) -> TorchProcessGroup:
    """Returns the process group that `torch.distributed._dist2.new_group` asks for, which torch does not register.

    Raises:
        ValueError: `device` is not the CPU, or `options` were given, which this backend does not have.
        RendezvousError, AuthenticationError: the ranks did not find each other.
    """
    if device.type != "cpu":
        raise ValueError(f"the backend 'paceline' takes CPU tensors; got the device {device}")
    if options:
        raise ValueError(f"the backend 'paceline' has no options; got {', '.join(options)}")
    return _form(store, rank, timeout, range(world_size), "alone", False)


def _form(
    store: Any, rank: int, timeout: timedelta, named: Sequence[int], name: str, is_open: bool
) -> TorchProcessGroup:
    keep_works_of_reducers()
    meeting = Meeting(store, rank, len(named), timeout, named, name)
    return TorchProcessGroup(meeting, None if is_open else meet(meeting))


def _default_world() -> World | None:
    """Returns Paceline's view of torch's default group; None if that is not one of Paceline's."""
    whole = torch_dist.group.WORLD
    group = None if whole is None else part_of(whole)
    return None if group is None else group.world
