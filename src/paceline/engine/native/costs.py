"""The cost of a message on this network, which is measured when ranks of several hosts meet, or set by the user."""

from __future__ import annotations

import json
import os
import time
from dataclasses import astuple

from paceline import _core
from paceline.engine.algorithms import COSTS_VARIABLE, UNMEASURED, parse_costs
from paceline.engine.api import KnownCosts
from paceline.engine.channel import Messages
from paceline.engine.formation import Formation
from paceline.engine.native.pairs import are_few, differences, measure_pairs, recalled, remember
from paceline.engine.native.probing import Probe, answer, measure
from paceline.engine.native.topology import Topology
from paceline.engine.native.uneven import NETWORK_VARIABLE, read_network
from paceline.errors import RendezvousTimeoutError
from paceline.schedule.cost import CostModel, LinkCost
from paceline.schedule.network import Network
from paceline.schedule.pairwise import Pair

_KEY, _NETWORK_KEY, _PAIRS_KEY = _KEYS = ["engine/costs", "engine/network", "engine/pairs"]
_REDUCED = 1 << 20


def agree_on_costs(
    formation: Formation, topology: Topology, links: Messages, known: KnownCosts, timeout_s: float
) -> tuple[CostModel, Network | None]:
    """Returns the same model on all ranks: PACELINE_COSTS as set on rank 0, or else what rank 0 knows or measures.

    What was measured is added to `known`, on all ranks, so that the next group of these hosts forms sooner.

    With it comes the network, if PACELINE_NETWORK on rank 0 says that it is uneven (see `uneven.py`), or if no costs
    are given or known and the links between a few hosts are measured to be (see `pairs.py`).

    PACELINE_COSTS is JSON: {"within_host": [alpha, beta], "between_hosts": [alpha, beta], "gamma": gamma}, with alpha
    in seconds a message, beta and gamma in seconds a byte.

    Raises:
        ValueError: PACELINE_COSTS or PACELINE_NETWORK does not have its form.
        RendezvousError: a rank gave up or died.
        RendezvousTimeoutError: rank 0 did not publish the costs in time.
    """
    deadline = time.monotonic() + timeout_s
    if topology.rank == 0:
        model, described, pairs = _measure_all(formation, topology, links, known, deadline)
        network = read_network(described, model, topology.hosts)
        formation.store.set(_KEY, _format(model))
        formation.store.set(_PAIRS_KEY, json.dumps([[*pair, *astuple(cost)] for pair, cost in pairs.items()]))
        formation.store.set(_NETWORK_KEY, described)
    else:
        _answer_all(formation, topology, links, deadline)
        if formation.absent(_KEYS, deadline):
            raise RendezvousTimeoutError(
                f"{topology.members[topology.rank]}: {topology.members[0]} did not measure what messages cost within "
                f"{timeout_s:.0f} s; look at its output"
            )
        costs, described, found = (value.decode() for value in formation.store.multi_get(_KEYS))
        model, pairs = parse_costs(costs), {(one, other): LinkCost(*cost) for one, other, *cost in json.loads(found)}
        network = read_network(described, model, topology.hosts)
    known.models[_measured_ranks(topology)] = model
    remember(topology, known, pairs)
    return model, network


def _measure_all(
    formation: Formation, topology: Topology, links: Messages, known: KnownCosts, deadline: float
) -> tuple[CostModel, str, dict[Pair, LinkCost]]:
    """Returns the model, the network as PACELINE_NETWORK says it, and the links of pairs of hosts; for rank 0."""
    given, described = os.environ.get(COSTS_VARIABLE), os.environ.get(NETWORK_VARIABLE, "")
    probes = [Probe(formation, topology, links, peer) for peer in _partners(topology)]
    model = parse_costs(given) if given else known.models.get(_measured_ranks(topology))
    if model is None:
        *within_host, between_hosts = map(measure, probes)
        gamma = _core.time_reduction(_REDUCED) / _REDUCED
        within = within_host[0] if within_host else UNMEASURED.within_host
        model = CostModel(within, between_hosts, gamma)
    for probe in probes:
        probe.end()
    pairs = {} if given else recalled(topology, known)
    if are_few(topology):
        wanted = not (given or described or known.models)
        pairs |= measure_pairs(formation, topology, links, deadline, wanted)
    return model, described or differences(len(topology.hosts), pairs), pairs


def _answer_all(formation: Formation, topology: Topology, links: Messages, deadline: float) -> None:
    """Takes part in what rank 0 and the first ranks of all hosts measure."""
    if topology.rank in _partners(topology):
        answer(Probe(formation, topology, links, 0))
    if are_few(topology) and any(topology.rank == ranks[0] for ranks in topology.hosts):
        measure_pairs(formation, topology, links, deadline)


def _partners(topology: Topology) -> list[int]:
    """Returns the ranks with which rank 0 measures: another one of its host if there is one, and one of the next."""
    return [*topology.hosts[0][1:2], topology.hosts[1][0]]


def _measured_ranks(topology: Topology) -> tuple[str, ...]:
    """Returns a text for each of the hosts whose ranks the model is measured with: its name and how many they are."""
    return tuple(f"{topology.members[ranks[0]].host} {min(len(ranks), 2)}" for ranks in topology.hosts[:2])


def _format(model: CostModel) -> str:
    return json.dumps(
        {
            "within_host": astuple(model.within_host),
            "between_hosts": astuple(model.between_hosts),
            "gamma": model.gamma_s_per_byte,
        }
    )
