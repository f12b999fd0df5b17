"""The other ranks in a process group: their processes, their progress, and whether they are alive.

`exchange_peers` exchanges processes and devices through the store before the library connects the ranks. `RankProgress`
publishes each rank's latest calls in the store, so that a timeout error can list the missing ranks. `PeerWatch` polls
the processes on this machine, and looks up the exits of ranks on other machines in the store, because NCCL itself waits
forever for a dead rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections import deque
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
_COMPARISONS = 10
_RANKS_AT_FULL_RATE = 128  # with more ranks, each rank publishes less often, because all use one store
_NO_CALL: HeaderFields = (0, 0, 0, 0, -1, 0)


class RankProgress:
    """Publishes this rank's latest calls (up to `kept`), at most twice a second, and reads those of the other ranks.

    Args:
        store: a store for the exclusive use of this object.
        index: the index of this rank in the process group.
    """

    def __init__(self, store: Store, index: int, size: int, kept: int = 64) -> None:
        self._store = store
        self._index = index
        self._size = size
        self._calls: deque[HeaderFields] = deque(maxlen=kept)
        self._published = 0
        self._published_at = self._compared_at = time.monotonic()
        self._comparisons = 0  # the number of remaining comparisons
        self._interval_s = _PUBLISH_INTERVAL_S * max(1.0, size / _RANKS_AT_FULL_RATE)

    def arrive(self, call: HeaderFields) -> None:
        """Records a call made by this rank; `publish` publishes it later."""
        self._calls.append(call)

    @property
    def is_published(self) -> bool:
        """Whether this rank's latest call has been published."""
        return not self._calls or self._published == self._calls[-1][0]

    @property
    def is_compared(self) -> bool:
        """Whether `difference` has compared the latest operation and need not be called again before the next one."""
        return self.is_published and self._comparisons == 0

    def publish(self, at_once: bool = False) -> None:
        """Publishes the latest calls, at most once every half second unless `at_once` is true."""
        now = time.monotonic()
        if not self.is_published and (at_once or now - self._published_at > self._interval_s):
            calls = list(self._calls)
            self._published, self._published_at = calls[-1][0], now
            self._comparisons = _COMPARISONS
            with contextlib.suppress(StoreError):  # without a store, no other rank can read the calls
                self._store.set(str(self._index), json.dumps(calls))

    def missing(self, call: HeaderFields) -> list[int]:
        """Returns the indices of ranks that have not made `call`; waits one second for late ranks to publish it."""
        self.publish(at_once=True)
        time.sleep(2 * _PUBLISH_INTERVAL_S)
        return [index for index, (sequence, *_) in enumerate(self.latest()) if sequence < call[0]]

    def difference(self, at_once: bool = False) -> dict[int, HeaderFields]:
        """Returns this rank's and the next rank's calls at the first sequence number at which the two calls differ.

        The result maps the indices of the two ranks to their calls; it is empty if no published calls differ. Unless
        `at_once` is true, the store is polled as often as this rank publishes, and then a few times more until the
        other rank has published as many calls.
        """
        now = time.monotonic()
        if self._size == 1:
            self._comparisons = 0
            return {}
        if not at_once and (self._comparisons == 0 or now - self._compared_at < self._interval_s):
            return {}
        self._compared_at, self._comparisons = now, max(0, self._comparisons - 1)
        following = (self._index + 1) % self._size
        theirs = {call[0]: call for call in self._read(following)}
        if max(theirs, default=0) >= self._published:
            self._comparisons = 0
        for mine in tuple(self._calls):
            other = theirs.get(mine[0], mine)
            if other != mine:
                self.publish(at_once=True)  # so that other ranks detect the difference as well
                return {self._index: mine, following: other}
        return {}

    def latest(self) -> list[HeaderFields]:
        """Returns each rank's latest published call, by index."""
        return [(self._read(index) or [_NO_CALL])[-1] for index in range(self._size)]

    def _read(self, index: int) -> list[HeaderFields]:
        with contextlib.suppress(StoreError):
            if self._store.check([str(index)]):
                return [(a, b, c, d, e, f) for a, b, c, d, e, f in json.loads(self._store.get(str(index)))]
        return []


SHARED_GPU_VARIABLE = "PACELINE_NCCL_SHARED_GPU"
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_PARTING_S = 2.0


class AbsentError(Exception):
    """Ranks did not publish in time; `missing` contains their indices among the expected members."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__()
        self.missing = tuple(missing)


class SharedGpuError(Exception):
    """Two ranks use the same GPU; the message identifies them and describes the fix."""


@dataclass(frozen=True)
class DevicePeer:
    """A rank's device and process; other processes on the same machine can identify the process."""

    machine: str
    pid: int
    gpu: str
    device: str

    @staticmethod
    def here(gpu: str, device: str) -> DevicePeer:
        """Returns the calling process and its device; `gpu`, unless empty, identifies the device across processes."""
        processes = os.stat("/proc/self/ns/pid").st_ino
        return DevicePeer(f"{host_id()}/{processes}", os.getpid(), gpu, device)


def exchange_peers(
    store: Store,
    members: Sequence[RankIdentity],
    index: int,
    mine: DevicePeer,
    deadline: float,
    stopped: Callable[[], bool],
) -> tuple[DevicePeer, ...]:
    """Waits for all `members` and returns their processes and devices.

    Args:
        store: a store for the exclusive use of this exchange.
        index: the index of this rank in `members`.
        deadline: the value of `time.monotonic()` at which to give up.
        stopped: a function that is polled during the wait; the wait ends when it returns True.

    Raises:
        AbsentError: not all members published in time.
        SharedGpuError: two members use the same GPU, and PACELINE_NCCL_SHARED_GPU is not set; all members raise it.
    """
    store.set(f"joined/{index}", json.dumps(asdict(mine)))
    keys = [f"joined/{member}" for member in range(len(members))]
    _await(store, keys, deadline, stopped)
    peers = tuple(DevicePeer(**json.loads(answer)) for answer in store.multi_get(keys))
    shared = _describe_shared(members, peers)
    if shared is not None and not os.environ.get(SHARED_GPU_VARIABLE):
        _let_all_read(store, len(members))
        raise SharedGpuError(shared)
    return peers


def _let_all_read(store: Store, size: int) -> None:
    """Waits until all ranks have read the answers, because the store may shut down with a rank that gives up."""
    if store.add("read", 1) == size:
        store.set("all_read", b"")
    with contextlib.suppress(StoreError):
        store.wait(["all_read"], timedelta(seconds=_PARTING_S))


def _await(store: Store, keys: Sequence[str], deadline: float, stopped: Callable[[], bool]) -> None:
    pause_s = _PAUSE_S
    while not store.check(keys):
        if stopped() or time.monotonic() > deadline:
            raise AbsentError([index for index, key in enumerate(keys) if not store.check([key])])
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _describe_shared(members: Sequence[RankIdentity], peers: Sequence[DevicePeer]) -> str | None:
    """Returns a message about two ranks that share a GPU, including the fix, or None if no GPU is shared."""
    first: dict[str, int] = {}
    for index, peer in enumerate(peers):
        other = first.setdefault(peer.gpu, index)
        if other != index and peer.gpu:
            return (
                f"{members[other]} and {members[index]} both use one GPU ({peers[other].device} of the one and "
                f"{peer.device} of the other are {peer.gpu}), but NCCL supports only one rank per GPU. Call "
                "torch.cuda.set_device(LOCAL_RANK) before anything else uses a GPU, create tensors on device 'cuda' "
                "and not on 'cuda:0', and start no more ranks than there are GPUs"
            )
    return None


_REMOTE_INTERVAL_S = 5.0
_MOST_REMOTE = 64


class PeerWatch:
    """Watches the other ranks' processes.

    Args:
        index: the index of this rank in `peers`.
        has_exited: a function that returns True if, according to the store, the rank with the given index has exited.
            It is called every five seconds for a few of the ranks on other machines.
    """

    def __init__(self, peers: Sequence[DevicePeer], index: int, has_exited: Callable[[int], bool]) -> None:
        self._descriptors: dict[int, int] = {}  # pidfd: index of the peer
        self._processes: dict[int, ProcessIdentity] = {}  # by index, for processes without a pidfd
        self._gone: set[int] = set()
        self._poll = select.poll()  # must not be polled by two threads at once
        self._lock = threading.Lock()
        self._remote = [other for other, peer in enumerate(peers) if peer.machine != peers[index].machine]
        self._has_exited = has_exited
        self._checked_at = time.monotonic()
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
        """Returns the indices of the watched processes that have exited; any thread may call this."""
        with self._lock:
            ended = {descriptor for descriptor, _ in self._poll.poll(0)}
            self._gone.update(self._descriptors[descriptor] for descriptor in ended)
            self._gone.update(index for index, process in self._processes.items() if process.has_ended())
            checked = self._next_remote()
        exited: list[int] = []
        with contextlib.suppress(StoreError):
            exited.extend(index for index in checked if self._has_exited(index))
        with self._lock:
            self._gone.update(exited)
            return sorted(self._gone)

    def _next_remote(self) -> list[int]:
        """Returns the ranks on other machines that are due for a lookup. Each lookup takes one store request."""
        now = time.monotonic()
        if now - self._checked_at <= _REMOTE_INTERVAL_S:
            return []
        self._checked_at = now
        checked = self._remote[:_MOST_REMOTE]
        self._remote = self._remote[_MOST_REMOTE:] + checked
        return checked

    def close(self) -> None:
        """Stops watching; idempotent."""
        with self._lock:
            for descriptor in self._descriptors:
                self._poll.unregister(descriptor)
                os.close(descriptor)
            self._descriptors.clear()
