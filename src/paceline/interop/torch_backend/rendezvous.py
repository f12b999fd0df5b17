"""The rendezvous of a torch.distributed group in torch's store, and adapters between torch's and Paceline's stores.

If the job has no secret, one is shared through the store.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import Store as TorchStore

from paceline.comm.engine.api import EngineContext, OpenGroup, choose
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.formation import Formation
from paceline.comm.group.default import World
from paceline.comm.group.engines import Engines, Opener, identity_named
from paceline.comm.group.process_group import ProcessGroup
from paceline.comm.one_port.dialer import chosen_port
from paceline.comm.record import recorder
from paceline.comm.security.secret import chosen_level, job_secret
from paceline.comm.store.store import PrefixStore, Store, StoreAnswer, StoreOp, StoreStatus
from paceline.durations import to_seconds
from paceline.errors import AuthenticationError, RendezvousTimeoutError

# The adapter polls, because torch's own `wait` prints a warning on each timeout and cannot be interrupted. The pause
# between polls increases with the time waited, so that polls are rare and waits are extended by at most a sixteenth.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _SHARE_OF_WAIT = 0.001, 0.25, 1 / 16


class StoreForTorch(TorchStore):
    """A torch.distributed store backed by a Paceline store.

    Torch's `PrefixStore` does not forward `list_keys` and the queue methods to stores written in Python.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    @property
    def timeout(self) -> timedelta:
        """The timeout for calls that wait."""
        return self._store.timeout

    def has_extended_api(self) -> bool:
        """Returns True, because `append`, `multi_get` and `multi_set` are available."""
        return True

    def clone(self) -> StoreForTorch:
        """Returns the store itself, which is thread-safe."""
        return self


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: StoreForTorch, *args: Any, **options: Any) -> Any:
        return getattr(self._store, name)(*args, **options)

    return call


for _name in (
    *(
        "set",
        "get",
        "add",
        "check",
        "compare_set",
        "append",
        "multi_get",
        "multi_set",
        "wait",
        "delete_key",
        "num_keys",
    ),
    *("list_keys", "queue_push", "queue_pop", "queue_len", "barrier", "set_timeout"),
):
    setattr(StoreForTorch, _name, _forwarded(_name))
for _name, _override in (("delete_key", "deleteKey"), ("num_keys", "getNumKeys")):
    setattr(StoreForTorch, _override, _forwarded(_name))  # the names under which torch's C++ code calls these methods


class StoreFromTorch(Store):
    """A Paceline store backed by a torch.distributed store. Supports everything that engines need except last wills."""

    def __init__(self, store: TorchStore, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._store = store

    def __repr__(self) -> str:
        return f"torch.distributed's {type(self._store).__name__}"

    def _apply(self, op: StoreOp, number: int, fields: list[bytes], timeout_s: float) -> StoreAnswer:
        names = [field.decode() for field in (fields[:1] if op is StoreOp.SET else fields)]
        if op is StoreOp.SET:
            self._store.set(names[0], fields[1].decode())
            return StoreStatus.OK, 0, []
        if op is StoreOp.LAST_WILL:
            return StoreStatus.OK, 0, []
        if op is StoreOp.CHECK:
            return StoreStatus.OK, int(self._store.check(names)), []
        if op not in (StoreOp.GET, StoreOp.WAIT, StoreOp.MULTI_GET):
            return StoreStatus.REFUSED, 0, [b"the engine does not need it"]
        if not self._wait_for(names, timeout_s) and (
            absent := [name for name in names if not self._store.check([name])]
        ):
            return StoreStatus.TIMED_OUT, 0, [name.encode() for name in absent]
        return StoreStatus.OK, 0, [] if op is StoreOp.WAIT else [self._store.get(name) for name in names]

    def _wait_for(self, names: list[str], timeout_s: float) -> bool:
        """Waits until all keys exist; returns False on timeout."""
        started_s = time.monotonic()
        while not self._store.check(names):
            waited_s = time.monotonic() - started_s
            if waited_s >= timeout_s:
                return False
            pause_s = min(max(_FIRST_PAUSE_S, waited_s * _SHARE_OF_WAIT), _LONGEST_PAUSE_S)
            time.sleep(min(pause_s, timeout_s - waited_s))
        return True


OTHER_DEVICES = (
    "create a second group, such as torch.distributed.new_group(backend='nccl'), for tensors on other devices (before "
    "release 2.14, PyTorch creates only one backend of a mixture such as 'cpu:paceline,cuda:nccl' if that backend is "
    "written in Python), or "
)
_SHORTEST_PATIENCE = timedelta(seconds=10)  # minimum time to wait, because processors may be busy at startup
_SECRET_KEY = "paceline/secret"
_SECRET_VARIABLE = "PACELINE_SECRET"
_OWN = "own"  # published instead of a new secret if the job already has a secret


@dataclass(frozen=True)
class GroupRendezvous:
    """The parameters of a group's rendezvous.

    Attributes:
        store: Torch's store, without keys from an earlier rendezvous.
        timeout: The timeout for calls on the group.
        named: The members' ranks in torch's default group, used in error messages.
        name: The group's name, used in error messages and to identify the group in recordings.
        occasion: A string that distinguishes the group from other groups with the same name and members. It is the same
            on all members.
    """

    store: Any
    rank: int
    size: int
    timeout: timedelta
    named: Sequence[int]
    name: str
    occasion: str = ""

    @property
    def identity(self) -> int:
        """The number that identifies the group in recordings, the same on all members."""
        return identity_named(f"{self.name} {list(self.named)} {self.occasion}")


def form_group(
    rendezvous: GroupRendezvous, patience: timedelta | None = None, expected: Sequence[RankIdentity] = ()
) -> World:
    """Waits for the other ranks and returns the connected group.

    Args:
        rendezvous: The parameters of the rendezvous.
        patience: The time to wait for the other ranks. Default: the timeout for calls on the group, but at least 10 s.
        expected: The ranks' processes, if known. The rendezvous fails as soon as one of these processes exits on this
            host.
    """
    rank, size, identity = rendezvous.rank, rendezvous.size, rendezvous.identity
    patience = patience or max(rendezvous.timeout, _SHORTEST_PATIENCE)
    # Torch numbers groups in the order of creation. If the ranks create groups in different orders, the ranks of two
    # groups with the same number must not connect to each other: they wait, and the launcher reports the deadlock.
    store = PrefixStore(str(identity), StoreFromTorch(rendezvous.store, patience))
    patience_s = to_seconds(patience)
    backend = choose("paceline")
    recorded = recorder.recorded_formation(rendezvous.name, identity, rank, rendezvous.named)
    with recorded, contextlib.ExitStack() as undo:
        with Formation(store, rank, size) as formation:
            formation.watch(lambda: next(filter(_has_ended, expected), None))
            with _secret_of_group(store, rank, formation, patience_s):
                start = EngineContext(store, rank, size, patience_s, formation, peer=os.environ.get("MASTER_ADDR"))
                engines = undo.enter_context(contextlib.closing(Engines(start, backend)))
                openers = engines.openers(backend, range(size), patience_s, engines.count_group(range(size)))
                opened = openers["cpu"](torch.device("cpu"))
                for device_type in openers.keys() - {"cpu"}:
                    openers[device_type] = partial(_open_checked, openers[device_type], rendezvous.name)
        members = [
            RankIdentity(named, member.host, member.pid, member.process)
            for named, member in zip(rendezvous.named, engines.members, strict=True)
        ]
        group = ProcessGroup(
            opened,
            members,
            rank,
            patience,
            rendezvous.name,
            openers=openers,
            advice=OTHER_DEVICES,
            identity=identity,
        )
        undo.callback(group.close)
        group.barrier()
        group.set_timeout(rendezvous.timeout)
        undo.pop_all()
    return World(store, engines, group, to_seconds(rendezvous.timeout))


def _open_checked(opener: Opener, group_name: str, device: torch.device) -> OpenGroup:
    require_own_device(group_name, device)
    return opener(device)


def require_own_device(group_name: str, device: torch.device) -> None:
    """Checks that the program did not request another backend for this type of device.

    Before PyTorch 2.14, this group is the only backend that PyTorch creates from a combination. Tensors for the other
    backends must not be staged through host memory instead.
    """
    world = torch_dist.distributed_c10d._world
    configs = [config for group, config in world.pg_backend_config.items() if world.pg_names.get(group) == group_name]
    requested = dict(part.split(":", 1) for config in configs for part in config.split(",") if ":" in part)
    backend = requested.get(device.type, "paceline")
    if backend != "paceline":
        raise RuntimeError(
            f"the group {group_name!r} was requested with {configs[0]!r}, but PyTorch {torch.__version__} did not "
            f"create {backend} for tensors on {device}: {OTHER_DEVICES}move the tensors to the CPU"
        )


def _has_ended(member: RankIdentity) -> bool:
    return member.process is not None and bool(member.process.has_ended())


@contextlib.contextmanager
def _secret_of_group(store: Store, rank: int, formation: Formation, patience_s: float) -> Iterator[None]:
    """Shares a secret through torch's store if the job has none. The store itself is never authenticated."""
    mine = job_secret()
    if mine is None and chosen_level() == "encrypt":
        raise AuthenticationError(
            f"rank {rank} of the group: the security level is encrypt and the job has no secret, and one received "
            "through torch's store, which is not encrypted, would protect nothing; start the job with `paceline run`, "
            f"or give all processes the same {_SECRET_VARIABLE}"
        )
    if mine is None and chosen_port() is not None:
        raise AuthenticationError(
            f"rank {rank} of the group: the processes of a machine need the job's secret to share its one port "
            f"({chosen_port()}), but the job has none; start the job with `paceline run`, or give all processes the "
            f"same {_SECRET_VARIABLE}"
        )
    if rank == 0:
        store.set(_SECRET_KEY, secrets.token_hex(32) if mine is None else _OWN)
    if formation.absent([_SECRET_KEY], time.monotonic() + patience_s):
        raise RendezvousTimeoutError(
            f"rank {rank} of the group waited {patience_s:.0f} s for rank 0, which did not arrive; look at its output"
        )
    shared = store.get(_SECRET_KEY).decode()
    if (shared == _OWN) != (mine is not None):
        raise AuthenticationError(
            f"rank {rank} of the group has {'no' if mine is None else 'a'} secret of the job, and rank 0 has "
            f"{'one' if mine is None else 'none'}; give all processes the same {_SECRET_VARIABLE}, or none"
        )
    if mine is not None:
        yield
        return
    os.environ[_SECRET_VARIABLE] = shared  # removed below, because child processes must not inherit the secret
    try:
        yield
    finally:
        os.environ.pop(_SECRET_VARIABLE, None)
