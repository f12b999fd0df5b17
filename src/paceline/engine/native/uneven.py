"""Reads which links of the job's network differ from the others, as the user gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.schedule.cost import CostModel
from paceline.schedule.network import Group, Link, Network, parse_links

NETWORK_VARIABLE = "PACELINE_NETWORK"

_EXAMPLE = (
    '{"node": "1gbit,0.1ms", "nodes": {"3": "100mbit,0.1ms"}, "pairs": {"0-1": "100mbit,0.1ms"}, '
    '"groups": {"rack0": [[0, 1], "200mbit,1ms"]}}'
)


def read_network(text: str, model: CostModel, hosts: Sequence[Sequence[int]]) -> Network | None:
    """Returns the network that PACELINE_NETWORK describes; None if it is not set.

    It is JSON whose parts may be left out: `node` is the link of every host, otherwise what was measured; `nodes` are
    those of single hosts by their numbers, which count from 0 in the order of the ranks; `pairs` are links of two hosts
    of their own, both ways; and `groups` are racks or regions, each with its hosts and the uplink that they share. A
    link is spelt like `1gbit,0.1ms,loss=0.1%`.

    Raises:
        ValueError: the text does not have that form, or names hosts that there are not.
    """
    if not text:
        return None
    described = parse_network(text)
    try:
        network = Network.of_costs(model, tuple(map(tuple, hosts)))
        return replace(
            network,
            node=described.node or network.node,
            nodes=described.nodes,
            pairs=described.pairs,
            groups=described.groups,
        )
    except (ValueError, TypeError) as error:
        raise _wrong(text, error) from error


@dataclass(frozen=True)
class DescribedLinks:
    """The links that PACELINE_NETWORK describes, whichever hosts there are; see `read_network`."""

    node: Link | None
    nodes: Mapping[int, Link]
    pairs: Mapping[tuple[int, int], Link]
    groups: tuple[Group, ...]


def parse_network(text: str) -> DescribedLinks:
    """Parses what PACELINE_NETWORK says.

    Raises:
        ValueError: the text does not have the variable's form.
    """
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not set(data) <= {"node", "nodes", "pairs", "groups"}:
            raise ValueError("its parts are node, nodes, pairs and groups")
        return DescribedLinks(
            node=_link(data["node"]) if "node" in data else None,
            nodes={int(host): _link(link) for host, link in data.get("nodes", {}).items()},
            pairs=_pairs(data.get("pairs", {})),
            groups=tuple(
                Group(name, tuple(members), _link(uplink)) for name, (members, uplink) in data.get("groups", {}).items()
            ),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise _wrong(text, error) from error


def _wrong(text: str, error: Exception) -> ValueError:
    return ValueError(f"{NETWORK_VARIABLE} is {text!r}: {error}; it must be JSON like {_EXAMPLE}")


def _link(text: str) -> Link:
    return parse_links(f"link={text}")["link"]


def _pairs(described: Mapping[str, str]) -> dict[tuple[int, int], Link]:
    found = {}
    for name, text in described.items():
        one, _, other = name.partition("-")
        found[int(one), int(other)] = found[int(other), int(one)] = _link(text)
    return found
