"""What ranks tell each other through the store before NCCL connects them: who they are, on which GPU, and NCCL's id."""

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
    """Ranks did not come; `missing` has their places among those that were to meet."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__()
        self.missing = tuple(missing)


class SharedGpuError(Exception):
    """Two ranks have one GPU; the message names them and the fix."""


@dataclass(frozen=True)
class Presence:
    """A rank that has come: its process, as other processes of its machine see it, and its GPU."""

    machine: str
    pid: int
    gpu: str
    device: str

    @staticmethod
    def here(gpu: str, device: str) -> Presence:
        """This process's, on the GPU that is known everywhere as `gpu` and here as `device`."""
        processes = os.stat("/proc/self/ns/pid").st_ino
        return Presence(f"{host_id()}/{processes}", os.getpid(), gpu, device)


@dataclass(frozen=True)
class Met:
    """All ranks, in the order of the communicator, and the id by which NCCL connects them."""

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
    """Waits for `members`, of which this is the one in place `at`; the first makes NCCL's id.

    Args:
        store: for this meeting alone.
        deadline: of `time.monotonic`.
        stopped: is asked while waiting whether to give up.

    Raises:
        AbsentError: not all have come.
        SharedGpuError: two of them, on all of them, unless PACELINE_NCCL_SHARED_GPU is set.
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
    """Before this rank gives up, and perhaps takes the store along: the others shall see why."""
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
    """Who has one GPU with another, and the fix."""
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
