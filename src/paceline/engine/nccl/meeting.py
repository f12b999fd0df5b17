"""Exchanges the ranks' processes, their GPUs and NCCL's id through the store, before NCCL connects the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from paceline.engine.failures import Member
from paceline.engine.introduction import host_id
from paceline.errors import StoreError
from paceline.store.base import Store

SHARED_GPU_VARIABLE = "PACELINE_NCCL_SHARED_GPU"
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_PARTING_S = 2.0


class AbsentError(Exception):
    """Ranks did not come; `missing` holds their places among the members that were to meet."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__()
        self.missing = tuple(missing)


class SharedGpuError(Exception):
    """Two ranks use the same GPU; the message names them and the fix."""


@dataclass(frozen=True)
class Presence:
    """A rank that has come: its process, as other processes of its machine see it, and its GPU."""

    machine: str
    pid: int
    gpu: str
    device: str

    @staticmethod
    def here(gpu: str, device: str) -> Presence:
        """Returns this process's presence; `gpu` identifies its GPU in all processes, `device` only in this one."""
        processes = os.stat("/proc/self/ns/pid").st_ino
        return Presence(f"{host_id()}/{processes}", os.getpid(), gpu, device)


@dataclass(frozen=True)
class Met:
    """The result of a meeting: all ranks, in the order of the communicator, and the id by which NCCL connects them."""

    presences: tuple[Presence, ...]
    unique_id: bytes


def meet(
    store: Store,
    members: Sequence[Member],
    at: int,
    mine: Presence,
    make_unique_id: Callable[[], bytes],
    deadline: float,
    stopped: Callable[[], bool],
) -> Met:
    """Waits for all `members` and returns what they published; the first member makes NCCL's id.

    Args:
        store: a store for this meeting alone.
        members: the ranks that meet, in the order of the communicator.
        at: the place of this rank among them.
        mine: this rank's process and GPU.
        make_unique_id: makes NCCL's id.
        deadline: the time of `time.monotonic` at which to give up.
        stopped: is asked while waiting whether to give up.

    Raises:
        AbsentError: not all members came in time.
        SharedGpuError: two members use the same GPU, and PACELINE_NCCL_SHARED_GPU is not set; all members raise it.
    """
    store.set(f"came/{at}", json.dumps(asdict(mine)))
    if at == 0:
        store.set("id", make_unique_id())
    keys = [f"came/{place}" for place in range(len(members))]
    _await(store, ["id", *keys], deadline, stopped)
    unique_id, *answers = store.multi_get(["id", *keys])
    presences = tuple(Presence(**json.loads(answer)) for answer in answers)
    shared = _say_shared(members, presences)
    if shared is not None and not os.environ.get(SHARED_GPU_VARIABLE):
        _let_all_read(store, len(members))
        raise SharedGpuError(shared)
    return Met(presences, unique_id)


def _let_all_read(store: Store, size: int) -> None:
    """Waits until all ranks have read the answers, since a rank that gives up may take the store with it."""
    if store.add("read", 1) == size:
        store.set("all_read", b"")
    with contextlib.suppress(StoreError):
        store.wait(["all_read"], timedelta(seconds=_PARTING_S))


def _await(store: Store, keys: Sequence[str], deadline: float, stopped: Callable[[], bool]) -> None:
    pause_s = _PAUSE_S
    while not store.check(keys):
        if stopped() or time.monotonic() > deadline:
            raise AbsentError([place for place, key in enumerate(keys[1:]) if not store.check([key])] or [0])
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _say_shared(members: Sequence[Member], presences: Sequence[Presence]) -> str | None:
    """Returns a message that names two ranks with the same GPU, and the fix; None if no GPU is shared."""
    first: dict[str, int] = {}
    for place, presence in enumerate(presences):
        other = first.setdefault(presence.gpu, place)
        if other != place:
            return (
                f"{members[other]} and {members[place]} both use one GPU ({presences[other].device} of the one and "
                f"{presence.device} of the other are {presence.gpu}), and NCCL takes one rank a GPU. Call "
                "torch.cuda.set_device(LOCAL_RANK) before anything else uses a GPU, make tensors on device 'cuda' and "
                "not on 'cuda:0', and start no more ranks than there are GPUs"
            )
    return None
