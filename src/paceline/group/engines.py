"""The engines that the groups of a process use; each starts when the first group needs it."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from paceline.engine import registry
from paceline.engine.adapters.members import exchange_members
from paceline.engine.api import Engine, EngineContext, OpenGroup
from paceline.engine.failures import Member
from paceline.engine.native.engine import NativeEngine
from paceline.engine.registry import Backend
from paceline.engine.two_level import open_two_levels
from paceline.group.devices import Opener
from paceline.one_port.choice import chosen_port
from paceline.security.levels import chosen_level

_AGREED = 1 << 62  # marks an identity that the members agreed on, unlike those that count groups
_FINDS_MEMBERS = _ENCRYPTS = "paceline"


class Engines:
    """Starts engines and opens groups with them, until `close` ends them.

    Args:
        context: what the engines are started with, without members.
        backend: the default group's backend.
        between_hosts: the engine for data between hosts, where "paceline" is the engine for CPU tensors.

    Raises:
        ValueError: an engine lacks a prerequisite.
    """

    def __init__(self, context: EngineContext, backend: Backend, between_hosts: str | None = None) -> None:
        self.backend = backend
        self.between_hosts = between_hosts
        self._context = context
        self._started: dict[str, Engine] = {}
        self._counted = 0
        self._counted_by_members: Counter[tuple[int, ...]] = Counter()
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
        """This rank."""
        return self._context.rank

    @property
    def members(self) -> tuple[Member, ...]:
        """The ranks of the default group."""
        return self._context.members

    def start(self, backend: Backend) -> None:
        """Starts the engines for CPU tensors, on every rank. The others start with the first tensor on their device.

        Raises:
            ValueError: an engine lacks a prerequisite, even one that would start later.
        """
        for device_type, name in backend.engines.items():
            if device_type == "cpu":
                self._engine(name)
            else:
                registry.require(name, self._context.rank)

    def count_group(self, ranks: Sequence[int]) -> int:
        """Returns the identity of the next group among those that every rank counts, member or not."""
        self._counted += 1
        return self._counted << 32 | zlib.crc32(repr([*ranks]).encode())

    def count_local_group(self, ranks: Sequence[int]) -> int:
        """Returns the identity of the next group of `ranks` among those that only their members count."""
        self._counted_by_members[tuple(ranks)] += 1
        named = f"{list(ranks)} {self._counted_by_members[tuple(ranks)]}"
        return agreed_identity(int.from_bytes(hashlib.sha256(named.encode()).digest()[:7], "big"))

    def openers(
        self, backend: Backend, ranks: Sequence[int], timeout_s: float, identity: int, algorithm: str | None = None
    ) -> dict[str, Opener]:
        """Returns the functions that open the group of `ranks` on a device, by the device's type."""

        def open_on(name: str, device: torch.device) -> OpenGroup:
            engine = self._engine(name)
            if isinstance(engine, NativeEngine) and self.between_hosts and algorithm in (None, "hierarchical"):
                outside = self._engine(self.between_hosts)
                store, rank = self._context.store, self._context.rank
                return open_two_levels(engine, outside, store, rank, ranks, engine.hosts, timeout_s, identity)
            return engine.open_group(ranks, timeout_s, identity, algorithm, device)

        return {device_type: partial(open_on, name) for device_type, name in backend.engines.items()}

    def close(self) -> None:
        """Ends all engines; idempotent."""
        for engine in self._started.values():
            engine.close()
        self._started.clear()

    def _engine(self, name: str) -> Engine:
        if name not in self._started:
            if name != _ENCRYPTS and chosen_level() == "encrypt":
                require_one_host(name, self._context.rank, self.members)
            if name != _ENCRYPTS and chosen_port() is not None:
                require_ports(name, self._context.rank, self.members)
            self._started[name] = registry.start(name, self._context)
        return self._started[name]


def require_one_host(engine: str, rank: int, members: Sequence[Member]) -> None:
    """Requires that an engine which does not encrypt connects the ranks of one host only.

    Raises:
        ValueError: there are several hosts.
    """
    hosts = sorted({member.host for member in members})
    if len(hosts) > 1:
        raise ValueError(
            f"rank {rank}: the security level is encrypt, and the engine {engine!r} sends tensors between the hosts "
            f"{', '.join(hosts)} without encryption; expected the engine 'paceline', which encrypts them. Use it for "
            "tensors between hosts, or choose --security auth and a network that you trust"
        )


def require_ports(engine: str, rank: int, members: Sequence[Member]) -> None:
    """Requires that an engine with ports of its own connects the ranks of one host only, in a job with one port.

    Raises:
        ValueError: there are several hosts.
    """
    hosts = sorted({member.host for member in members})
    if len(hosts) > 1:
        raise ValueError(
            f"rank {rank}: the connections of this job use port {chosen_port()} only, and the engine {engine!r} would "
            f"connect the hosts {', '.join(hosts)} at ports of its own; expected the engine 'paceline'. Use it for "
            "tensors between hosts, or leave out --port (PACELINE_PORT) and open the other ports"
        )


def agreed_identity(number: int) -> int:
    """Returns the identity of a group that only its members know; they agreed on `number`, which is below 2^61."""
    return _AGREED | number
