"""Measures the link of every pair of hosts when ranks meet, to find those that differ from the others.

The first ranks of the hosts do that in the rounds of a tournament (`schedule/pairwise.py`), both directions of a pair
one after another. What looks uneven is measured again, and of several times the shortest counts, since a host that was
busy for a moment looks slow, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import combinations

from paceline.engine.api import KnownCosts
from paceline.engine.channel import Messages
from paceline.engine.formation import Formation
from paceline.engine.native.probing import Probe, answer, is_far, measure
from paceline.engine.native.topology import Topology
from paceline.errors import RendezvousTimeoutError
from paceline.schedule.cost import LinkCost
from paceline.schedule.network import Link
from paceline.schedule.pairwise import Pair, describe_differences, tournament
from paceline.schedule.synthesis.choosing import MOST_RANKS
from paceline.schedule.synthesis.trees import MOST_HOSTS

_KEY = "engine/pairs/pass"
_PASSES = 3


def are_few(topology: Topology) -> bool:
    """Returns whether there are several links to compare, and few enough hosts and ranks for schedules of their own."""
    return 2 < len(topology.hosts) <= MOST_HOSTS and len(topology.members) <= MOST_RANKS


def measure_pairs(
    formation: Formation, topology: Topology, links: Messages, deadline: float, wanted: bool | None = None
) -> dict[Pair, LinkCost]:
    """Returns what rank 0 learns of each pair of hosts; the first rank of every host calls this.

    Args:
        formation: the default group's formation.
        topology: the ranks and their hosts.
        links: passes messages between them.
        deadline: until when the others are waited for, in seconds of the monotonic clock.
        wanted: on rank 0, whether to measure at all.

    Raises:
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: a rank did not measure in time.
    """
    n, found = len(topology.hosts), dict[Pair, LinkCost]()
    host = next(number for number, ranks in enumerate(topology.hosts) if topology.rank in ranks)
    for number in range(_PASSES):
        key = f"{_KEY}/{number}"
        if topology.rank == 0:
            is_due = bool(wanted) if number == 0 else bool(differences(n, found))
            formation.store.set(key, str(int(is_due)))
        else:
            _await(formation, topology, [key], deadline)
            is_due = formation.store.get(key) == b"1"
        if not is_due:
            break
        mine = _play(formation, topology, links, host)
        formation.store.set(f"{key}/{host}", json.dumps([[*pair, *cost] for pair, cost in mine.items()]))
        if topology.rank == 0:
            keys = [f"{key}/{each}" for each in range(n)]
            _await(formation, topology, keys, deadline)
            for text in formation.store.multi_get(keys):
                for one, other, alpha_s, beta_s_per_byte in json.loads(text):
                    note(found, (one, other), LinkCost(alpha_s, beta_s_per_byte))
    return found


def differences(n: int, found: Mapping[Pair, LinkCost]) -> str:
    """Returns the differences between the links of n hosts as PACELINE_NETWORK says them, "" if there are none."""
    if not found:
        return ""
    return describe_differences(n, {pair: Link(cost.alpha_s, 1 / cost.beta_s_per_byte) for pair, cost in found.items()})


def recalled(topology: Topology, known: KnownCosts) -> dict[Pair, LinkCost]:
    """Returns what is known of the pairs of these hosts from before, by their numbers; nothing if one is missing."""
    names = _names(topology)
    pairs = {(a, b): (min(names[a], names[b]), max(names[a], names[b])) for a, b in combinations(range(len(names)), 2)}
    if not all(each in known.pairs for each in pairs.values()):
        return {}
    return {pair: known.pairs[each] for pair, each in pairs.items()}


def remember(topology: Topology, known: KnownCosts, found: Mapping[Pair, LinkCost]) -> None:
    """Keeps what was measured of the pairs of these hosts."""
    names = _names(topology)
    for (a, b), cost in found.items():
        known.pairs[min(names[a], names[b]), max(names[a], names[b])] = cost


def _names(topology: Topology) -> list[str]:
    return [topology.members[ranks[0]].host for ranks in topology.hosts]


def _play(formation: Formation, topology: Topology, links: Messages, host: int) -> dict[Pair, tuple[float, float]]:
    """Returns what this host measured to each other one, after all rounds."""
    mine = {}
    leaders = [ranks[0] for ranks in topology.hosts]
    for pairs in tournament(len(leaders)):
        for pair in pairs:
            if host not in pair:
                continue
            probe = Probe(formation, topology, links, leaders[pair[1] if host == pair[0] else pair[0]])
            if host == pair[1]:
                answer(probe)
            cost = measure(probe)
            probe.end()
            mine[pair] = cost.alpha_s, cost.beta_s_per_byte
            if host == pair[0]:
                answer(probe)
    return mine


def note(found: dict[Pair, LinkCost], pair: Pair, cost: LinkCost) -> None:
    """Notes the shortest times of a pair; a rate that was not measured does not count beside one that was."""
    before = found.get(pair, cost)
    if is_far(before.alpha_s) != is_far(cost.alpha_s):
        before = cost = min(before, cost, key=lambda each: each.alpha_s)
    found[pair] = LinkCost(min(before.alpha_s, cost.alpha_s), min(before.beta_s_per_byte, cost.beta_s_per_byte))


def _await(formation: Formation, topology: Topology, keys: list[str], deadline: float) -> None:
    waited_s = deadline - time.monotonic()
    if formation.absent(keys, deadline):
        raise RendezvousTimeoutError(
            f"{topology.members[topology.rank]}: not all hosts measured their links to each other within "
            f"{max(0.0, waited_s):.0f} s; look at the output of their first ranks"
        )
