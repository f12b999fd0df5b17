"""The networks between hosts: a switch of veth pairs at kernel speed, or the bridge, which tests can control.

On network n, host h has the interface ethn with the addresses 10.77.n.h+1 and fd77:0:0:n::h+1. The addresses are the
same in every run, because the networks of two runs are isolated from each other.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import IPv6Address

from hosts.bridge import Bridge, Port
from hosts.namespaces import Host, Namespace
from hosts.wire import Conditions


def ipv4(host: int, network: int = 0) -> str:
    return f"10.77.{network}.{host + 1}"


def ipv6(host: int, network: int = 0) -> str:
    return str(IPv6Address(f"fd77:0:0:{network}::{host + 1:x}"))


def mac(host: int, network: int = 0) -> str:
    return f"02:77:00:00:{network:02x}:{host + 1:02x}"


class Network:
    """Hosts h0, h1, ... on `networks` separate networks. `close` removes the networks.

    The bridge connects the hosts if `conditions` are given; otherwise, the switch does. `rate` limits the rate at which
    an interface sends. On the switch, it also limits the rate at which an interface receives.
    """

    def __init__(self, hosts: int, networks: int, mtu: int, rate: str | None, conditions: Conditions | None) -> None:
        numbers = range(networks)
        with ExitStack() as made:
            self.inside = [made.enter_context(Namespace()) for _ in range(hosts)]
            self.hosts = [Host(f"h{host}", namespace.path) for host, namespace in enumerate(self.inside)]
            self.bridge: Bridge | None = None
            if conditions:
                ports = [
                    Port(host, network, mac(host, network), here.network)
                    for host, here in enumerate(self.hosts)
                    for network in numbers
                ]
                self.bridge = made.enter_context(Bridge(ports, conditions))
            else:
                self._switch_inside = made.enter_context(Namespace())
                self._switch(self._switch_inside, networks, mtu, rate)
            for host, namespace in enumerate(self.inside):
                lines = ["link set lo up"]
                for network in numbers:
                    lines += _interface(host, network, hosts, mtu)
                if rate:
                    lines += [f"link set eth{network} gso_max_size {_segment(rate, mtu)}" for network in numbers]
                namespace.configure("ip", lines)
                if rate:
                    bounds = [_bound(f"eth{network}", rate, segment=_segment(rate, mtu)) for network in numbers]
                    namespace.configure("tc", bounds)
            self._made = made.pop_all()

    @property
    def conditions(self) -> Conditions:
        """Returns the conditions of the bridge."""
        return self._joined().conditions

    def change(self, **changes: object) -> None:
        """Changes some conditions of the bridge."""
        self._joined().set(replace(self.conditions, **changes))

    def cut(self, host: int, other: int) -> None:
        """Drops packets between two hosts in both directions, without a FIN, a RST or an ICMP error."""
        self.change(cut=self.conditions.cut | {(min(host, other), max(host, other))})

    def cut_host(self, host: int, port: int = 0) -> None:
        """Cuts a host off from all others; with `port`, drops only TCP connections to this port."""
        others = set(range(len(self.hosts))) - {host}
        pairs = {(min(host, other), max(host, other)) for other in others}
        self.change(cut=self.conditions.cut | pairs, port=port)

    def close_ports(self, *hosts: int, but: int = 0) -> None:
        """Drops other hosts' TCP connections to `hosts`, except connections to the port `but`.

        `hosts` can still connect to other hosts. As with most firewalls, packets are dropped without a response.
        """
        self.change(doors=self.conditions.doors | {(host, but) for host in hosts})

    def heal(self) -> None:
        """Undoes every cut."""
        self.change(cut=frozenset(), port=0)

    def _joined(self) -> Bridge:
        if self.bridge is None:
            raise ValueError(
                "these hosts are joined by a switch, which always delivers; ask for hosts(..., bridged=True)"
            )
        return self.bridge

    def _switch(self, switch: Namespace, networks: int, mtu: int, rate: str | None) -> None:
        bridges = [f"link add net{n} up type bridge stp_state 0 mcast_snooping 0" for n in range(networks)]
        switch.configure("ip", bridges)
        cables = [(host, network) for host in range(len(self.hosts)) for network in range(networks)]
        for host, namespace in enumerate(self.inside):
            pairs = [
                f"link add eth{n} type veth peer name h{host}n{n} mtu {mtu} netns {switch.path}"
                for n in range(networks)
            ]
            namespace.configure("ip", pairs)
        switch.configure("ip", [f"link set h{host}n{network} master net{network} up" for host, network in cables])
        if rate:
            segment = _segment(rate, mtu)
            switch.configure("tc", [_bound(f"h{host}n{network}", rate, segment=segment) for host, network in cables])

    def slow_down(self, host: int, rate: str) -> None:
        """Limits the rate at which a host sends, in a network that was created without a rate."""
        self.inside[host].configure("tc", [_bound("eth0", rate)])

    def bound(self, host: int, rate: str) -> None:
        """Limits the rates at which a host sends and receives, in a network that was created with a rate."""
        self.inside[host].configure("tc", [_bound("eth0", rate, "replace")])
        self._switch_inside.configure("tc", [_bound(f"h{host}n0", rate, "replace")])

    def part(self, hosts: list[int], rate: str) -> None:
        """Moves some hosts to a second switch; a link of this rate connects the two switches."""
        lines = ["link add other0 up type bridge stp_state 0 mcast_snooping 0"]
        lines += [f"link set h{host}n0 master other0" for host in hosts]
        lines += ["link add cable0 type veth peer name cable1"]
        lines += ["link set cable0 master net0 up", "link set cable1 master other0 up"]
        self._switch_inside.configure("ip", lines)
        self._switch_inside.configure("tc", [_bound("cable0", rate), _bound("cable1", rate)])

    def join(self, host: int, other: int, rate: str) -> None:
        """Connects two hosts with a link of this rate, which carries all traffic between them."""
        one, two = self.inside[host], self.inside[other]
        one.configure("ip", [f"link add own{other} type veth peer name own{host} netns {two.path}"])
        for inside, name, there in ((one, f"own{other}", other), (two, f"own{host}", host)):
            address = mac(there, 255)
            lines = [f"link set {name} address {mac(other if there == host else host, 255)} up"]
            lines += [f"route add {ipv4(there)}/32 dev {name}"]
            lines += [f"neigh add {ipv4(there)} lladdr {address} dev {name} nud permanent"]
            inside.configure("ip", lines)
            inside.configure("tc", [_bound(name, rate)])

    def close(self) -> None:
        self._made.close()


def _interface(host: int, network: int, hosts: int, mtu: int) -> list[str]:
    name = f"eth{network}"
    lines = [
        f"link set {name} address {mac(host, network)} mtu {mtu} up",
        f"addr add {ipv4(host, network)}/24 dev {name}",
        f"addr add {ipv6(host, network)}/64 dev {name} nodad",
    ]
    for other in set(range(hosts)) - {host}:
        # Permanent entries prevent "host unreachable" errors from ARP, so packets beyond a cut are lost silently, as
        # beyond a router.
        for address in (ipv4(other, network), ipv6(other, network)):
            lines.append(f"neigh add {address} lladdr {mac(other, network)} dev {name} nud permanent")
    return lines


_LONGEST_SEGMENT = 1 << 16  # the maximum number of bytes that TCP passes down at once


def _bytes_per_s(rate: str) -> float:
    parts = re.fullmatch(r"(\d+)([kmg])bit", rate)
    if parts is None:
        raise ValueError(f"rate={rate!r} must be like '100mbit' or '10gbit'")
    return int(parts[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[parts[2]] / 8


def _segment(rate: str, mtu: int) -> int:
    """Returns the maximum length of a TCP segment in bytes: 0.6 ms of data at this rate, but at least a few packets."""
    return min(max(int(_bytes_per_s(rate) * 0.0006), 4 * mtu), _LONGEST_SEGMENT)


def _bound(interface: str, rate: str, verb: str = "add", segment: int = _LONGEST_SEGMENT) -> str:
    """Returns a token bucket that holds 1 ms of data, but at least two TCP segments, with a queue for 20 ms of data.

    A large bucket makes a slow network faster than its rate, because the bucket fills during a pause and its content is
    then sent at once. A small bucket is slow, because tbf splits segments that are larger than the bucket into packets.
    At 10gbit, buckets of 40 kB reach 2.3 Gbit/s, 70 kB 6.8, 128 KiB 9.0 and 1.25 MB 9.4. At 1gbit, 16 kB reach 0.77,
    and 128 KiB reach 0.956, the maximum payload.
    """
    bytes_per_s = _bytes_per_s(rate)
    burst = max(int(bytes_per_s * 0.001), 2 * segment)
    limit = burst + int(bytes_per_s * 0.02) + 65536
    return f"qdisc {verb} dev {interface} root tbf rate {rate} burst {burst} limit {limit}"
