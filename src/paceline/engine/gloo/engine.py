"""The gloo engine: torch's own ProcessGroupGloo, made directly, without torch.distributed's groups.

What gloo lacks (reduce-scatter, all-to-all, and reductions of some types) goes by schedule over its messages.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d as c10d

from paceline.engine.adapters.library_engine import LibraryEngine, LibraryGroup
from paceline.engine.addresses import VARIABLE, own_address
from paceline.engine.api import EngineContext
from paceline.engine.gloo.channel import GlooChannel
from paceline.engine.gloo.messages import GlooMessages
from paceline.engine.gloo.wire import SHORTEST
from paceline.errors import RendezvousTimeoutError
from paceline.routes import for_resolver
from paceline.store.base import Store
from paceline.wording import and_more

_MOST_NAMED = 8  # ranks in an error message

_THREADS = 2


def missing_piece() -> str | None:
    """Returns the fix if this torch lacks gloo, which nearly every torch has; None otherwise."""
    if c10d.is_gloo_available():
        return None
    return "this torch was built without gloo; install one from PyPI or pytorch.org"


def start(context: EngineContext) -> GlooEngine:
    """Starts the engine without any connection; each group opens its own."""
    return GlooEngine(context)


class _TorchStore(c10d.Store):
    """Paceline's store as gloo wants one."""

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Waits for a key."""
        return self._store.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number."""
        return self._store.add(self._prefix + key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self._store.check([self._prefix + key for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all."""
        self._store.wait([self._prefix + key for key in keys], timeout)


class GlooEngine(LibraryEngine):
    """Opens groups over gloo, each with a ProcessGroupGloo of its own."""

    name = "gloo"

    def open_group(
        self,
        ranks: Sequence[int],
        timeout_s: float,
        identity: int = 0,
        algorithm: str | None = None,
        device: torch.device | None = None,
    ) -> LibraryGroup:
        """Opens a group; see `engine.api.Engine`."""
        context = self._context
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_address(context))]
        options._threads = _THREADS
        deadline = time.monotonic() + timeout_s
        gathering = self._gather(ranks, timeout_s, identity, algorithm)
        rank, diagnosis = gathering.group_rank, gathering.diagnosis
        options._timeout = max(SHORTEST, timedelta(seconds=deadline - time.monotonic()))
        store = _TorchStore(context.store, f"gloo/{identity}/")
        try:
            group = c10d.ProcessGroupGloo(store, rank, len(ranks), options)
        except RuntimeError as error:
            raise RendezvousTimeoutError(
                f"{gathering.members[rank]}: gloo did not connect the ranks [{and_more(ranks, _MOST_NAMED)}] within "
                f"{timeout_s:.0f} s ({error}); check the route and the firewall between the hosts, or choose an "
                f"interface with {VARIABLE}"
            ) from error
        return self._keep(
            GlooChannel(group, store, diagnosis, rank, gathering.hosts, gathering.algorithm),
            GlooMessages(group, diagnosis, rank),
        )


def _address(context: EngineContext) -> str:
    """Gloo's connections are open to all who reach them, so on one host they stay on its loopback."""
    one_host = len({member.host for member in context.members}) == 1
    if one_host and not context.interface and _is_loopback(context.peer):
        return "127.0.0.1"
    return own_address(context.peer, context.interface)


def _is_loopback(peer: str | None) -> bool:
    if peer is None:
        return True
    address = socket.getaddrinfo(for_resolver(peer), None, type=socket.SOCK_STREAM)[0][4][0]
    return ipaddress.ip_address(str(address)).is_loopback
