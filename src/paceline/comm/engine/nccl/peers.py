"""Exchanges the ranks' processes, their GPUs and NCCL's id through the store, before NCCL connects the ranks.

Publishes each rank's latest call on a call stream in the store, so that a time-out can name the missing ranks.

Watches whether the ranks of this machine are alive, since NCCL itself waits for a dead rank forever.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from paceline.comm.engine.channel import HeaderFields
from paceline.comm.engine.failures import ProcessIdentity, RankIdentity
from paceline.comm.engine.formation import host_id
from paceline.comm.store.store import Store
from paceline.errors import StoreError
from paceline.linux import pidfd_open

_EVERY_S = 0.5
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class RankProgress:
    """Publishes this rank's latest call, at most twice a second, and reads the other ranks'."""

    def __init__(self, store: Store, at: int, size: int) -> None:
        self._store = store
        self._at = at
        self._size = size
        self._latest = _NO_CALL
        self._told = _NO_CALL
        self._told_at = time.monotonic()

    def arrive(self, call: HeaderFields) -> None:
        """Notes that this rank makes `call`; `tell` publishes it later."""
        self._latest = call

    @property
    def is_told(self) -> bool:
        """Whether this rank's latest call has been published."""
        return self._told == self._latest

    def tell(self, at_once: bool = False) -> None:
        """Publishes the latest call, unless it did so less than half a second ago and `at_once` is false."""
        now = time.monotonic()
        if not self.is_told and (at_once or now - self._told_at > _EVERY_S):
            self._told, self._told_at = self._latest, now
            with contextlib.suppress(StoreError):  # without a store, no rank is left to read it
                self._store.set(str(self._at), json.dumps(self._told))

    def missing(self, call: HeaderFields) -> list[int]:
        """Returns the places of ranks that have not made `call`; first gives late ranks one second to publish it."""
        self.tell(at_once=True)
        time.sleep(2 * _EVERY_S)
        return [place for place, (sequence, *_) in enumerate(self.latest()) if sequence < call[0]]

    def latest(self) -> list[HeaderFields]:
        """Returns each rank's latest published call, by place."""
        calls = [_NO_CALL] * self._size
        with contextlib.suppress(StoreError):
            for place in range(self._size):
                if self._store.check([str(place)]):
                    calls[place] = _parse(self._store.get(str(place)))
        return calls


def _parse(told: bytes) -> HeaderFields:
    sequence, operation, dtype, reduce_op, root, count = json.loads(told)
    return sequence, operation, dtype, reduce_op, root, count


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
class NcclPeer:
    """A rank that has come: its process, as other processes of its machine see it, and its GPU."""

    machine: str
    pid: int
    gpu: str
    device: str

    @staticmethod
    def here(gpu: str, device: str) -> NcclPeer:
        """Returns this process's presence; `gpu` identifies its GPU in all processes, `device` only in this one."""
        processes = os.stat("/proc/self/ns/pid").st_ino
        return NcclPeer(f"{host_id()}/{processes}", os.getpid(), gpu, device)


@dataclass(frozen=True)
class ExchangedPeers:
    """The result of a meeting: all ranks, in the order of the communicator, and the id by which NCCL connects them."""

    presences: tuple[NcclPeer, ...]
    unique_id: bytes


def exchange_peers(
    store: Store,
    members: Sequence[RankIdentity],
    at: int,
    mine: NcclPeer,
    make_unique_id: Callable[[], bytes],
    deadline: float,
    stopped: Callable[[], bool],
) -> ExchangedPeers:
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
    presences = tuple(NcclPeer(**json.loads(answer)) for answer in answers)
    shared = _say_shared(members, presences)
    if shared is not None and not os.environ.get(SHARED_GPU_VARIABLE):
        _let_all_read(store, len(members))
        raise SharedGpuError(shared)
    return ExchangedPeers(presences, unique_id)


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


def _say_shared(members: Sequence[RankIdentity], presences: Sequence[NcclPeer]) -> str | None:
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


class PeerWatch:
    """Watches the processes in `presences` that run on this machine, except the calling one, which is in place `at`."""

    def __init__(self, presences: Sequence[NcclPeer], at: int) -> None:
        self._places: dict[int, int] = {}
        self._looked_for: dict[int, ProcessIdentity] = {}  # where the kernel gives no descriptor, by place
        self._gone: set[int] = set()
        self._poll = select.poll()
        for place, presence in enumerate(presences):
            if place == at or presence.machine != presences[at].machine:
                continue
            try:
                descriptor = self._open(place, presence.pid)
            except ProcessLookupError:
                self._gone.add(place)
                continue
            if descriptor is None:
                continue
            self._places[descriptor] = place
            self._poll.register(descriptor, select.POLLIN)

    def _open(self, place: int, pid: int) -> int | None:
        try:
            return pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            self._looked_for[place] = ProcessIdentity.of(pid)
            return None

    def gone(self) -> list[int]:
        """Returns the places of the watched processes that have ended."""
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        self._gone.update(place for descriptor, place in tuple(self._places.items()) if descriptor in ended)
        self._gone.update(place for place, process in self._looked_for.items() if process.has_ended())
        return sorted(self._gone)

    def close(self) -> None:
        """Stops watching; idempotent."""
        for descriptor in self._places:
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
            os.close(descriptor)
        self._places.clear()
