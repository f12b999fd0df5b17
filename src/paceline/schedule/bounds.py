"""What no all-reduce can beat on a network of equal hosts, and what the best known algorithms strive for."""

from __future__ import annotations

from paceline.schedule.cost_model import rounds
from paceline.schedule.network import Network


def least_all_reduce_s(network: Network, nbytes: int) -> float:
    """Returns a time below which no all-reduce ends, whatever its algorithm.

    Of H hosts, on average each sends 2 (H - 1) / H of the bytes at least (Patarasuk and Yuan 2009), and the last of
    them needs the latency of the way. The same is true of the ranks of one host.
    """
    n_hosts, per_host = len(network.hosts), len(network.hosts[0])
    members, link = (n_hosts, network.node) if n_hosts > 1 else (per_host, network.within_host)
    if members == 1:
        return 0.0
    return link.latency_s + _moving(members, nbytes, link.bytes_per_s)


def alpha_beta_s(network: Network, nbytes: int) -> float:
    """Returns the alpha-beta bound of an all-reduce on H hosts with L ranks each.

    ceil(log2 H) alpha + ceil(log2 L) alpha' + max(2 (H - 1) / H * nbytes * beta, 2 (L - 1) / L * nbytes * beta'), where
    alpha and beta are those between hosts, and alpha' and beta' those within one: what a rank knows reaches twice as
    many with each message, and no byte needs to be sent more often. No known algorithm attains both terms at once.
    """
    n_hosts, per_host = len(network.hosts), len(network.hosts[0])
    far, near = network.node, network.within_host
    waiting = rounds(n_hosts) * far.cost.alpha_s + rounds(per_host) * near.cost.alpha_s
    moving = max(_moving(n_hosts, nbytes, far.bytes_per_s), _moving(per_host, nbytes, near.bytes_per_s))
    return waiting + moving


def _moving(members: int, nbytes: int, bytes_per_s: float) -> float:
    return 2 * (members - 1) / members * nbytes / bytes_per_s
