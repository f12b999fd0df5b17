"""`Engines`, which starts engines on demand, and `Devices`, which holds a process group's engine groups.

An engine group is the `OpenGroup` of one engine. A process group has one engine group per device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from paceline.comm.engine import api
from paceline.comm.engine.adapters.library_engine import exchange_members
from paceline.comm.engine.api import BackendChoice, Engine, EngineContext, OpenGroup, engines_for
from paceline.comm.engine.channel import OutcomeCode
from paceline.comm.engine.failures import RankIdentity
from paceline.comm.engine.native.engine import NativeEngine
from paceline.comm.engine.staged.channel import StagedGroup, announce_once
from paceline.comm.engine.two_level import open_two_levels
from paceline.comm.one_port.dialer import chosen_port
from paceline.comm.record.recorder import close_group
from paceline.comm.security.secret import chosen_level
from paceline.errors import RendezvousTimeoutError

Opener = Callable[[torch.device], OpenGroup]


class Devices:
    """The engine groups of one process group, one per device. The first call on an accelerator opens its group.

    Args:
        openers: the functions that open the group on other devices, by device type.
        record: a function that adds an open group and its device type to the recording, and returns the group's serial
            number.
        advice: the advice in error messages about tensors on a device without an opener; the default advice suggests an
            engine.
    """

    def __init__(
        self,
        on_cpu: OpenGroup,
        openers: Mapping[str, Opener],
        backend: str,
        record: Callable[[OpenGroup, str], int],
        advice: str = "",
    ) -> None:
        self._record = record
        self._recorded = [record(on_cpu, "cpu")]
        self._on_cpu = on_cpu
        self._openers = openers
        self._backend = backend
        self._advice = advice
        self._open: dict[torch.device, OpenGroup] = {}
        self._opening = threading.Lock()

    @property
    def types(self) -> frozenset[str]:
        """Returns the device types that have an engine."""
        return frozenset({"cpu", *self._openers})

    def of(self, tensors: Sequence[torch.Tensor], call: object) -> OpenGroup:
        """Returns the engine group for the device of `tensors`, or for the CPU if there are no tensors.

        `call` is the call's name for error messages, or an object that `str` converts to the name.
        """
        if all(tensor.is_cpu for tensor in tensors):
            return self._on_cpu
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device:
                raise TypeError(
                    f"{call} got tensors on {device} and {tensor.device}; all tensors of a call must be on "
                    "the same device"
                )
        with self._opening:
            if device not in self._open:
                self._open[device] = self._opener(device, call)(device)
                count = sum(other.type == device.type for other in self._open)  # the same on all ranks
                kind = device.type if count == 1 else f"{device.type} ({count})"
                self._recorded.append(self._record(self._open[device], kind))
            return self._open[device]

    def abort(self) -> None:
        """Aborts the calls on all devices; any thread may call this."""
        for opened in self._all():
            opened.abort()

    def failure(self) -> int:
        """Returns the `OutcomeCode` for a failure on any device, or OK."""
        return next(filter(None, (opened.failure() for opened in self._all())), OutcomeCode.OK)

    def _all(self) -> list[OpenGroup]:
        # The lock is not taken, because a thread that opens a group holds it while waiting for other ranks.
        return [self._on_cpu, *self._open.values()]

    def close(self) -> None:
        """Closes the engine groups of all devices and releases the openers; idempotent."""
        self._openers = {}
        self._on_cpu.close()
        for opened in self._open.values():
            opened.close()
        for serial in self._recorded:
            close_group(serial)

    def _opener(self, device: torch.device, call: object) -> Opener:
        opener = self._openers.get(device.type)
        if opener is None:
            fitting = engines_for(device.type)
            advice = self._advice or (
                f"choose one with backend='cpu:paceline,{device.type}:{fitting[0]}', or " if fitting else ""
            )
            raise TypeError(
                f"{call} got a tensor on {device}; the group's backend {self._backend!r} has no engine for it: "
                f"{advice}pass tensor.cpu()"
            )
        return opener


_AGREED = 1 << 62  # flag for identities chosen by agreement; all other identities are group counts
_FINDS_MEMBERS = _ENCRYPTS = "paceline"


class Engines:
    """Starts engines on demand, opens groups with them, and shuts them down in `close`.

    `context` does not contain the members yet. The engine `between_hosts` moves data between hosts if "paceline" is the
    engine for CPU tensors.
    """

    def __init__(self, context: EngineContext, backend: BackendChoice, between_hosts: str | None = None) -> None:
        self.backend = backend
        self.between_hosts = between_hosts
        self._context = context
        self._started: dict[str, Engine] = {}
        self._counted = 0
        self._counted_by_members: Counter[tuple[int, ...]] = Counter()
        self._staged: Counter[int] = Counter()  # for each group, the number of devices with staged tensors
        if _FINDS_MEMBERS not in backend.engines.values():
            members = exchange_members(context)
            self._context = dataclasses.replace(context, members=members)
        try:
            self.start(backend)
        except BaseException:
            self.close()
            raise
        if not self.members:
            self._context = dataclasses.replace(self._context, members=self._started[_FINDS_MEMBERS].members)

    @property
    def rank(self) -> int:
        """This process's rank in the default group."""
        return self._context.rank

    @property
    def members(self) -> tuple[RankIdentity, ...]:
        """The members of the default group."""
        return self._context.members

    def start(self, backend: BackendChoice) -> None:
        """Starts the engine for CPU tensors, and checks that the others, which are started when needed, can start.

        Every rank calls this.
        """
        for device_type, name in backend.engines.items():
            if device_type == "cpu":
                self._engine(name)
            else:
                api.require(name, self._context.rank)

    def count_group(self, ranks: Sequence[int]) -> int:
        """Returns the identity of the next group, derived from a counter that all ranks in the default group keep."""
        self._counted += 1
        return self._counted << 32 | zlib.crc32(repr([*ranks]).encode())

    def count_local_group(self, ranks: Sequence[int]) -> int:
        """Returns the identity of the next group of `ranks`, derived from a counter that only these ranks keep."""
        self._counted_by_members[tuple(ranks)] += 1
        return identity_named(f"{list(ranks)} {self._counted_by_members[tuple(ranks)]}")

    def openers(
        self,
        backend: BackendChoice,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int,
        algorithm: str | None = None,
    ) -> dict[str, Opener]:
        """Returns, for each device type, a function that opens the group of `ranks` on a device."""

        def open_on(name: str, device: torch.device, identity: int = identity) -> OpenGroup:
            engine = self._engine(name)
            if isinstance(engine, NativeEngine) and self.between_hosts and algorithm in (None, "hierarchical"):
                outside = self._engine(self.between_hosts)
                store, rank = self._context.store, self._context.rank
                return open_two_levels(engine, outside, store, rank, ranks, engine.hosts, timeout_s, identity)
            return engine.open_group(ranks, timeout_s, identity, algorithm, device)

        def open_staged(name: str, device: torch.device) -> OpenGroup:
            announce_once(device, backend.text, self.rank)
            self._staged[identity] += 1
            try:
                inner = open_on(name, torch.device("cpu"), staged_identity(identity, self._staged[identity]))
            except RendezvousTimeoutError as error:
                raise RendezvousTimeoutError(
                    f"rank {self.rank}: the first call of a group with tensors on {device} connects its ranks, but not "
                    f"all of them made this call with tensors on such a device: {error}"
                ) from error
            members = [self.members[rank] for rank in ranks]
            return StagedGroup(inner, device, members, list(ranks).index(self.rank))

        openers: dict[str, Opener] = {device: partial(open_on, name) for device, name in backend.engines.items()}
        openers |= {device: partial(open_staged, name) for device, name in api.staged_types(backend).items()}
        return openers

    def close(self) -> None:
        """Shuts down all engines; idempotent."""
        for engine in self._started.values():
            engine.close()
        self._started.clear()

    def _engine(self, name: str) -> Engine:
        if name not in self._started:
            require_permitted(name, self._context.rank, self.members)
            self._started[name] = api.start(name, self._context)
        return self._started[name]


def permitted(backend: BackendChoice, rank: int, members: Sequence[RankIdentity]) -> BackendChoice:
    """Returns `backend` without the engines that the job's security level or single port forbids for these members.

    If the program did not specify a backend, tensors on an accelerator whose engine is forbidden are staged through
    host memory. If it specified a forbidden engine, a ValueError is raised.
    """
    refused = []
    for device_type, name in backend.engines.items():
        try:
            require_permitted(name, rank, members)
        except ValueError:
            if not backend.is_default:
                raise
            refused.append(device_type)
    return backend.without(refused) if refused else backend


def require_permitted(engine: str, rank: int, members: Sequence[RankIdentity]) -> None:
    """Checks that the job's security level and single port permit an engine to connect the members."""
    hosts = sorted({member.host for member in members})
    if engine == _ENCRYPTS or len(hosts) == 1:
        return
    if chosen_level() == "encrypt":
        raise ValueError(
            f"rank {rank}: the security level is encrypt, and the engine {engine!r} sends tensors between the hosts "
            f"{', '.join(hosts)} without encryption; expected the engine 'paceline', which encrypts them. Use it for "
            "tensors between hosts, or choose --security auth and a network that you trust"
        )
    if chosen_port() is not None:
        raise ValueError(
            f"rank {rank}: the connections of this job use port {chosen_port()} only, and the engine {engine!r} would "
            f"connect the hosts {', '.join(hosts)} at ports of its own; expected the engine 'paceline'. Use it for "
            "tensors between hosts, or leave out --port (PACELINE_PORT) and open the other ports"
        )


def staged_identity(identity: int, index: int) -> int:
    """Returns the identity of the CPU group that stages tensors for the `index`-th device of the group `identity`."""
    return identity_named(f"staged {identity} {index}")


def identity_named(name: str) -> int:
    """Returns the identity for a group whose members have agreed on a unique name."""
    return agreed_identity(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


def agreed_identity(number: int) -> int:
    """Returns the identity for a group whose members have agreed on a `number` below 2^61."""
    return _AGREED | number
