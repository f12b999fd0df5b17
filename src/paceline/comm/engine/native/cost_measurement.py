"""The cost of a message on this network, which is measured when ranks of several hosts meet, or set by the user.

Measures what a message to another rank costs, by round trips within a time budget.

Measures the link of every pair of hosts when ranks meet, to find those that differ from the others.

The first ranks of the hosts do that in the rounds of a tournament (`comm/schedule/network.py`), both directions of a pair
one after another. What looks uneven is measured again, and of several times the shortest counts, since a host that was
busy for a moment looks slow, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from itertools import combinations

import torch

from paceline import _core
from paceline.comm.engine.api import KnownCosts
from paceline.comm.engine.channel import Messages, PendingMessage, Pieces
from paceline.comm.engine.codes import DTYPE_CODES
from paceline.comm.engine.formation import Formation
from paceline.comm.engine.native.bootstrap import Topology
from paceline.comm.engine.network_settings import (
    COSTS_VARIABLE,
    NETWORK_VARIABLE,
    UNMEASURED,
    parse_costs,
    read_network,
)
from paceline.comm.schedule.cost_model import CostModel, LinkCost
from paceline.comm.schedule.network import Network, NetworkLink, Pair, describe_differences, round_robin_rounds
from paceline.comm.schedule.synthesis import MOST_RANKS
from paceline.comm.schedule.tree_packing import MOST_HOSTS
from paceline.errors import RendezvousError, RendezvousTimeoutError

_SHORT_S = 0.02  # for short messages
_LONG_S = 0.1  # for long ones
_FAR_S = 0.0025
_LONG, _BULK = 64 << 10, 512 << 10
_TRIES = 3
_TIMEOUT_NS = 60_000_000_000
_LOOK_NS = 200_000_000  # a rank that waits for a message looks this often whether another has given up
_ALONE = 1  # as a number of bytes: no message follows the number


class Probe:
    """Exchanges messages with one rank."""

    def __init__(self, formation: Formation, topology: Topology, links: Messages, peer: int) -> None:
        self._formation = formation
        self._topology = topology
        self._links = links
        self._peer = peer

    def send(self, tensor: torch.Tensor) -> None:
        """Sends `tensor` and waits until the send is over."""
        self._pass(self._links.send, tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """Receives into `tensor` and waits until the receive is over."""
        self._pass(self._links.receive, tensor)

    def end(self) -> None:
        """Tells the rank that nothing is measured any more."""
        self.send(torch.tensor([0], device="cpu"))

    def _pass(self, call: Callable[[int, int, int, Pieces, int, bool], PendingMessage], tensor: torch.Tensor) -> None:
        pieces = [tensor.data_ptr(), tensor.nbytes]
        message = call(self._peer, 0, DTYPE_CODES[tensor.dtype], pieces, _TIMEOUT_NS, False)
        while not message.wait(_LOOK_NS):
            self._formation.look()
        if message.outcome() is not None:
            self._formation.await_news()
            raise RendezvousError(
                f"{self._topology.members[self._topology.rank]}: {self._topology.members[self._peer]} died, left or "
                "stopped while the speed of the connection to it was measured; look at its output"
            )


def is_far(alpha_s: float) -> bool:
    """Returns whether long messages would take too long to say much, so that a link's rate is not measured."""
    return alpha_s >= _FAR_S


def measure(probe: Probe) -> LinkCost:
    """Measures round trips within a time budget; of several the shortest counts, since a rank may be busy for a moment.

    Each round trip begins with a number that says how many bytes follow it, and the answer is empty. The number 0 (see
    `Probe.end`) ends the measurement. The first one does not count: the other rank may still be busy elsewhere.
    """

    def best_of(nbytes: int, most: int, budget_s: float) -> float:
        best, deadline = float("inf"), time.monotonic() + budget_s
        for _ in range(most):
            before = time.monotonic()
            probe.send(torch.tensor([nbytes], device="cpu"))
            if nbytes > _ALONE:
                probe.send(torch.zeros(nbytes, dtype=torch.uint8, device="cpu"))
            probe.receive(torch.empty(0, dtype=torch.uint8, device="cpu"))
            best = min(best, time.monotonic() - before)
            if time.monotonic() > deadline:
                break
        return best

    best_of(_ALONE, 1, 0.0)
    alpha_s = best_of(_ALONE, 10, _SHORT_S) / 2
    if is_far(alpha_s):
        return LinkCost(alpha_s, UNMEASURED.between_hosts.beta_s_per_byte)
    # A large message is offered before it is sent, so it takes two round trips. On a slow link shorter ones must do.
    nbytes, took_s = _LONG, best_of(_LONG, _TRIES, _LONG_S)
    if took_s < _LONG_S / 4:
        nbytes, took_s = _BULK, best_of(_BULK, _TRIES, _LONG_S)
    return LinkCost(alpha_s, max(1e-12, (took_s - 4 * alpha_s) / nbytes))


def answer(probe: Probe) -> None:
    """Answers the messages of `measure`, on the other rank."""
    nbytes = torch.empty(1, dtype=torch.int64, device="cpu")
    while True:
        probe.receive(nbytes)
        if int(nbytes) == 0:
            return
        if int(nbytes) > _ALONE:
            probe.receive(torch.empty(int(nbytes), dtype=torch.uint8, device="cpu"))
        probe.send(torch.empty(0, dtype=torch.uint8, device="cpu"))


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
    return describe_differences(
        n, {pair: NetworkLink(cost.alpha_s, 1 / cost.beta_s_per_byte) for pair, cost in found.items()}
    )


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
    for pairs in round_robin_rounds(len(leaders)):
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
