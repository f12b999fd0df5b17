"""Networks as `paceline plan` is told them: so many hosts of so many ranks, divided evenly among regions."""

from __future__ import annotations

from dataclasses import replace

from paceline.plan.calibration import CalibrationError, Links
from paceline.schedule.network import Group, Network


def network_of(links: Links, nodes: int, per_node: int, regions: int = 1) -> Network:
    """Returns the network of `nodes` hosts with `per_node` ranks each.

    Args:
        links: the links that were measured or given.
        nodes: the number of hosts.
        per_node: the number of ranks on each.
        regions: into how many groups the hosts are divided, each of which shares one link to the others.

    Raises:
        CalibrationError: a link that the network needs is not known.
        ValueError: a number is not positive, or there are more regions than hosts.
    """
    if nodes < 1 or per_node < 1 or not 1 <= regions <= nodes:
        raise ValueError(
            f"{nodes} nodes with {per_node} ranks each in {regions} regions are no network; every number must be at "
            "least 1, and each region needs a node"
        )
    if nodes > 1 and links.node is None:
        raise CalibrationError(
            "the calibration knows no link between hosts; give one, such as --links node=25gbit,0.05ms, or measure it "
            "with `paceline plan --measure --nnodes 2` on two machines"
        )
    if regions > 1 and links.region is None:
        raise CalibrationError("the link between regions is not known; give it, such as --links region=1gbit,20ms")
    hosts = tuple(tuple(range(host * per_node, (host + 1) * per_node)) for host in range(nodes))
    groups: tuple[Group, ...] = ()
    if regions > 1 and links.region is not None:
        members = [range(each * nodes // regions, (each + 1) * nodes // regions) for each in range(regions)]
        groups = tuple(Group(f"region {at}", tuple(each), links.region) for at, each in enumerate(members))
    return Network(
        hosts=hosts,
        within_host=links.within_host,
        node=links.node or links.within_host,
        groups=groups,
        gamma_s_per_byte=links.reduction_s_per_byte,
    )


def with_rate(links: Links, times: float) -> Links:
    """Returns the links with those of hosts and regions `times` as fast."""
    faster = {
        name: replace(link, bytes_per_s=link.bytes_per_s * times)
        for name, link in (("node", links.node), ("region", links.region))
        if link is not None
    }
    return Links(
        links.within_host,
        faster.get("node"),
        faster.get("region"),
        links.reduction_s_per_byte,
        links.host_calls,
        links.pairs,
    )
