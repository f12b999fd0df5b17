"""`hosts(2, 2)(fn, *args)` runs a function on two hosts with two ranks each; hosts are network namespaces.

    hosts(2, 1, rate="1gbit")    joined by a switch of veth pairs
    hosts([2, 1], networks=2)    unequal hosts; eth0 and eth1 lead to separate networks
    hosts(2, 1, delay_ms=10)     joined by Paceline's bridge, which can also drop packets and cut hosts off

Each rank has the host name h0, h1, ..., its own loopback and abstract Unix sockets. Files, /dev/shm and process numbers
are shared, and a host's name is not in /etc/hosts.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Sequence

import pytest
from world import World, free_port, places

from hosts.namespaces import Namespace
from hosts.network import Network, ipv4
from hosts.wire import Conditions


class HostsWorld(World):
    """Ranks on hosts; with the bridge, the network between the hosts can be changed while they run."""

    def __init__(
        self, network: Network, ranks_of_hosts: Sequence[int], fn: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        self.network = network
        port = network.inside[0].run(free_port, ipv4(0))
        super().__init__(places(ranks_of_hosts, network.hosts), (ipv4(0), port), fn, args)

    def cut(self, host: int, other: int) -> None:
        self.network.cut(host, other)

    def cut_host(self, host: int) -> None:
        self.network.cut_host(host)

    def heal(self) -> None:
        self.network.heal()

    @property
    def delay_ms(self) -> float:
        """The one-way delay; the round trip takes twice as long."""
        return self.network.conditions.delay_ms

    @delay_ms.setter
    def delay_ms(self, delay_ms: float) -> None:
        self.network.change(delay_ms=delay_ms)

    @property
    def loss(self) -> float:
        """The probability that a packet is lost."""
        return self.network.conditions.loss

    @loss.setter
    def loss(self, loss: float) -> None:
        self.network.change(loss=loss)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.network.close()


class Hosts:
    """Runs functions of a test module on several hosts.

    `hosts` is the number of hosts with `per_host` ranks each, or a list with the number of ranks on each host. `rate`,
    such as "1gbit", limits the rate at which each interface sends, including headers. `delay_ms`, `loss` and `bridged`
    select the bridge; `seed` determines which packets are lost. The table lists the payload that one TCP stream carried
    on two cores, in Gbit/s. Headers leave 95.6% of the rate with packets of 1500 bytes, and 99.3% with `mtu=9000`.

        rate        switch     bridge
        none        20-40      8
        1gbit       0.956      0.956
        1gbit       0.992      0.993   mtu=9000
        10gbit      9.0-9.5    -
        10gbit      9.6-9.9    -       mtu=9000
        none        -          1.1     delay_ms=10: the kernel's tcp_wmem limits a round trip to 4 MB
        1gbit       -          0.95    delay_ms=10
        none        -          0.6     loss=0.001
    """

    def __init__(
        self,
        hosts: int | Sequence[int],
        per_host: int = 1,
        *,
        rate: str | None = None,
        networks: int = 1,
        bridged: bool = False,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
        mtu: int = 1500,
    ) -> None:
        self.ranks_of_hosts = [per_host] * hosts if isinstance(hosts, int) else list(hosts)
        self.rate = rate
        self.networks = networks
        self.mtu = mtu
        self.conditions = Conditions(delay_ms, loss, seed) if bridged or delay_ms or loss else None

    def start(self, fn: Callable[..., object], *args: object) -> HostsWorld:
        if self.conditions and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            pytest.skip("no /dev/net/tun: delays, losses and cuts need TAP devices")
        network = Network(len(self.ranks_of_hosts), self.networks, self.mtu, self.rate, self.conditions)
        try:
            return HostsWorld(network, self.ranks_of_hosts, fn, args)
        except BaseException:
            network.close()
            raise

    def __call__(self, fn: Callable[..., object], *args: object, timeout_s: float = 100) -> list[object]:
        with self.start(fn, *args) as world:
            return world.join(timeout_s)


def skip_where_not_permitted() -> None:
    if reason := _obstacle():
        pytest.skip(reason)


@functools.cache
def _obstacle() -> str | None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no `{tool}` (iproute2): hosts are network namespaces"
    try:
        with Namespace() as namespace:
            namespace.configure("ip", ["link add net0 type bridge", "link add eth0 type veth peer name h0n0"])
    except OSError as error:
        return f"network namespaces are not permitted here (they need root or CAP_SYS_ADMIN and CAP_NET_ADMIN): {error}"
    return None
