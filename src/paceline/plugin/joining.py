"""Joins the ranks of a torch.distributed group over torch's store, which also holds a secret if the job has none."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.durations import to_seconds
from paceline.engine.api import EngineContext
from paceline.engine.failures import Member
from paceline.engine.formation import Formation
from paceline.engine.registry import choose
from paceline.errors import AuthenticationError
from paceline.group.default import World, borrow_world
from paceline.group.engines import Engines
from paceline.group.process_group import ProcessGroup
from paceline.plugin.identity import OTHER_DEVICES
from paceline.plugin.part import BackendOfGroup, has_others, part_of
from paceline.plugin.process_group import TorchProcessGroup
from paceline.plugin.store import BorrowedStore
from paceline.security.secret import job_secret

_SECRET_KEY = "paceline/secret"
_SECRET_VARIABLE = "PACELINE_SECRET"
_OWN = "own"  # published instead of a secret if the job has its own


def create(options: Any, pg_options: Any = None) -> TorchProcessGroup | BackendOfGroup:
    """Returns the process group that torch.distributed asks for, or a backend for one that has other backends too.

    Raises:
        ValueError: `pg_options` were given, which this backend does not have.
        RendezvousError, AuthenticationError: the ranks did not find each other.
        StoreTimeoutError: rank 0 did not arrive.
    """
    if has_others(options):
        return BackendOfGroup(_join(options))  # PyTorch passes the other backend's options to every backend
    if pg_options is not None:
        raise ValueError(f"the backend 'paceline' has no options; got {type(pg_options).__name__}")
    return _join(options)


def _join(options: Any) -> TorchProcessGroup:
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    store = BorrowedStore(options.store, timeout)
    timeout_s = to_seconds(timeout)
    backend = choose("paceline")
    with contextlib.ExitStack() as undo:
        with Formation(store, rank, size) as formation, _secret_of_group(store, rank):
            start = EngineContext(store, rank, size, timeout_s, formation, peer=os.environ.get("MASTER_ADDR"))
            engines = undo.enter_context(contextlib.closing(Engines(start, backend)))
            opener = engines.openers(backend, range(size), timeout_s, engines.count_group(range(size)))["cpu"]
            opened = opener(torch.device("cpu"))
        world_ranks = options.global_ranks_in_group or range(size)
        members = [Member(of, each.host, each.pid) for of, each in zip(world_ranks, engines.members, strict=True)]
        group = ProcessGroup(opened, members, rank, timeout, str(options.group_id), advice=OTHER_DEVICES)
        undo.callback(group.close)
        group.barrier()
        undo.pop_all()
    borrow_world(_default_world)
    return TorchProcessGroup(World(store, engines, group, timeout), options.store)


def _default_world() -> World | None:
    """Returns Paceline's view of torch's default group; None if that is not one of Paceline's."""
    whole = torch_dist.group.WORLD
    group = whole if whole is None or isinstance(whole, TorchProcessGroup) else part_of(whole)
    return None if group is None else group.world


@dataclass(frozen=True)
class _Options:
    """The attributes of torch's options object, which Python cannot create."""

    store: object
    group_rank: int
    group_size: int
    timeout: timedelta
    global_ranks_in_group: tuple[int, ...] = ()
    group_id: str = "alone"


def create_alone(
    store: Any, rank: int, world_size: int, timeout: timedelta, device: torch.device, options: dict[str, object]
) -> TorchProcessGroup:
    """Returns the process group that `torch.distributed._dist2.new_group` asks for, which torch does not register.

    Raises:
        ValueError: `device` is not the CPU, or `options` were given, which this backend does not have.
        RendezvousError, AuthenticationError, StoreTimeoutError: the ranks did not find each other.
    """
    if device.type != "cpu":
        raise ValueError(f"the backend 'paceline' takes CPU tensors; got the device {device}")
    if options:
        raise ValueError(f"the backend 'paceline' has no options; got {', '.join(options)}")
    return _join(_Options(store, rank, world_size, timeout))


@contextlib.contextmanager
def _secret_of_group(store: BorrowedStore, rank: int) -> Iterator[None]:
    """Shares a secret through torch's store if the job has none; that store trusts everybody who reaches it anyway."""
    mine = job_secret()
    if rank == 0:
        store.set(_SECRET_KEY, secrets.token_hex(32) if mine is None else _OWN)
    shared = store.get(_SECRET_KEY).decode()
    if (shared == _OWN) != (mine is not None):
        raise AuthenticationError(
            f"rank {rank} of the group has {'no' if mine is None else 'a'} secret of the job, and rank 0 has "
            f"{'one' if mine is None else 'none'}; give all processes the same {_SECRET_VARIABLE}, or none"
        )
    if mine is not None:
        yield
        return
    os.environ[_SECRET_VARIABLE] = shared  # only while the group forms, so that child processes do not inherit it
    try:
        yield
    finally:
        os.environ.pop(_SECRET_VARIABLE, None)
