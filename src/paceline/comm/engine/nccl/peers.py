"""The other ranks of a communicator: their processes, their progress, and whether they are alive.

`exchange_peers` exchanges processes, GPUs and NCCL's id through the store before NCCL connects the ranks.
`RankProgress` publishes each rank's latest call there, so that a time-out can name the missing ranks. `PeerWatch` polls
the processes of this machine, since NCCL itself waits for a dead rank forever.
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

_PUBLISH_INTERVAL_S = 0.5
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class RankProgress:
    """Publishes this rank's latest call, at most twice a second, and reads the other ranks'."""

    def __init__(self, store: Store, index: int, size: int) -> None:
        self._store = store
        self._index = index
        self._size = size
        self._latest = _NO_CALL
        self._published = _NO_CALL
        self._published_at = time.monotonic()

    def arrive(self, call: HeaderFields) -> None:
        """Notes that this rank makes `call`; `publish` publishes it later."""
        self._latest = call

    @property
    def is_published(self) -> bool:
        """Whether this rank's latest call has been published."""
        return self._published == self._latest

    def publish(self, at_once: bool = False) -> None:
        """Publishes the latest call; unless `at_once`, only half a second after the previous one."""
        now = time.monotonic()
        if not self.is_published and (at_once or now - self._published_at > _PUBLISH_INTERVAL_S):
            self._published, self._published_at = self._latest, now
            with contextlib.suppress(StoreError):  # without a store, no rank is left to read it
                self._store.set(str(self._index), json.dumps(self._published))

    def missing(self, call: HeaderFields) -> list[int]:
        """Returns the indices of ranks that have not made `call`, after giving late ranks a second to publish it."""
        self.publish(at_once=True)
        time.sleep(2 * _PUBLISH_INTERVAL_S)
        return [index for index, (sequence, *_) in enumerate(self.latest()) if sequence < call[0]]

    def latest(self) -> list[HeaderFields]:
        """Returns each rank's latest published call, by index."""
        calls = [_NO_CALL] * self._size
        with contextlib.suppress(StoreError):
            for index in range(self._size):
                if self._store.check([str(index)]):
                    sequence, operation, dtype, reduce_op, root, count = json.loads(self._store.get(str(index)))
                    calls[index] = sequence, operation, dtype, reduce_op, root, count
        return calls


SHARED_GPU_VARIABLE = "PACELINE_NCCL_SHARED_GPU"
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_PARTING_S = 2.0


class AbsentError(Exception):
    """Ranks did not publish in time; `missing` are their indices among the expected members."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__()
        self.missing = tuple(missing)


class SharedGpuError(Exception):
    """Two ranks use the same GPU; the message names them and the fix."""


@dataclass(frozen=True)
class NcclPeer:
    """A rank's process, identified for other processes of its machine, and its GPU."""

    machine: str
    pid: int
    gpu: str
    device: str

    @staticmethod
    def here(gpu: str, device: str) -> NcclPeer:
        """Returns the calling process; `gpu` identifies its GPU in all processes, `device` only in this one."""
        processes = os.stat("/proc/self/ns/pid").st_ino
        return NcclPeer(f"{host_id()}/{processes}", os.getpid(), gpu, device)


@dataclass(frozen=True)
class ExchangedPeers:
    """All ranks, in the order of the communicator, and the id by which NCCL connects them."""

    peers: tuple[NcclPeer, ...]
    unique_id: bytes


def exchange_peers(
    store: Store,
    members: Sequence[RankIdentity],
    index: int,
    mine: NcclPeer,
    make_unique_id: Callable[[], bytes],
    deadline: float,
    stopped: Callable[[], bool],
) -> ExchangedPeers:
    """Waits for all `members` and returns their processes and GPUs; the first member creates NCCL's id.

    Args:
        store: a store for this exchange alone.
        members: the ranks of the communicator, in order.
        index: the index of this rank among them.
        mine: this rank's process and GPU.
        make_unique_id: a function that creates NCCL's id.
        deadline: the time of `time.monotonic` at which to give up.
        stopped: a function that is called while waiting and returns whether to give up.

    Raises:
        AbsentError: not all members published in time.
        SharedGpuError: two members use the same GPU, and PACELINE_NCCL_SHARED_GPU is not set; all members raise it.
    """
    store.set(f"came/{index}", json.dumps(asdict(mine)))
    if index == 0:
        store.set("id", make_unique_id())
    keys = [f"came/{member}" for member in range(len(members))]
    _await(store, ["id", *keys], deadline, stopped)
    unique_id, *answers = store.multi_get(["id", *keys])
    peers = tuple(NcclPeer(**json.loads(answer)) for answer in answers)
    shared = _describe_shared(members, peers)
    if shared is not None and not os.environ.get(SHARED_GPU_VARIABLE):
        _let_all_read(store, len(members))
        raise SharedGpuError(shared)
    return ExchangedPeers(peers, unique_id)


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
            raise AbsentError([index for index, key in enumerate(keys[1:]) if not store.check([key])] or [0])
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _describe_shared(members: Sequence[RankIdentity], peers: Sequence[NcclPeer]) -> str | None:
    """Returns a message that names two ranks with the same GPU, and the fix; None if no GPU is shared."""
    first: dict[str, int] = {}
    for index, peer in enumerate(peers):
        other = first.setdefault(peer.gpu, index)
        if other != index:
            return (
                f"{members[other]} and {members[index]} both use one GPU ({peers[other].device} of the one and "
                f"{peer.device} of the other are {peer.gpu}), and NCCL takes one rank a GPU. Call "
                "torch.cuda.set_device(LOCAL_RANK) before anything else uses a GPU, make tensors on device 'cuda' and "
                "not on 'cuda:0', and start no more ranks than there are GPUs"
            )
    return None


class PeerWatch:
    """Watches the processes of `peers` that run on this machine, except the calling one, which has this `index`."""

    def __init__(self, peers: Sequence[NcclPeer], index: int) -> None:
        self._descriptors: dict[int, int] = {}  # pidfd: index of the peer
        self._processes: dict[int, ProcessIdentity] = {}  # by index, for processes without a pidfd
        self._gone: set[int] = set()
        self._poll = select.poll()
        for other, peer in enumerate(peers):
            if other == index or peer.machine != peers[index].machine:
                continue
            try:
                self._watch(other, peer.pid)
            except ProcessLookupError:
                self._gone.add(other)

    def _watch(self, index: int, pid: int) -> None:
        try:
            descriptor = pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError:
            self._processes[index] = ProcessIdentity.of(pid)
        else:
            self._descriptors[descriptor] = index
            self._poll.register(descriptor, select.POLLIN)

    def gone(self) -> list[int]:
        """Returns the indices of the watched processes that have ended."""
        ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        self._gone.update(index for descriptor, index in tuple(self._descriptors.items()) if descriptor in ended)
        self._gone.update(index for index, process in self._processes.items() if process.has_ended())
        return sorted(self._gone)

    def close(self) -> None:
        """Stops watching; idempotent."""
        for descriptor in self._descriptors:
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
            os.close(descriptor)
        self._descriptors.clear()
